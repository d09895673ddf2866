"""Compiling for H200s: GPUs are whole hosts, mistakes are sentences, and the parts of the memory.

A compiled step's memory, worked by hand: tests/parallel/test_pipeline_memory.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from megajax.errors import InputError
from megajax.plan import compile


def test_gpus_to_compile_for_are_whole_hosts():
    assert [compile.hosts_of(n) for n in (1, 4, 8, 16, 512)] == [(1, 1), (1, 4), (1, 8), (2, 8), (64, 8)]
    with pytest.raises(InputError, match="--gpus=12 is not a whole number of hosts of 8: use 8 or 16."):
        compile.hosts_of(12)
    with pytest.raises(InputError, match="--gpus=0 is below 1."):
        compile.hosts_of(0)


def test_without_the_cuda_plugin_a_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(compile, "find_spec", lambda name: None if name.startswith("jax_plugins.") else name)
    with pytest.raises(InputError, match=r"needs jax's CUDA plugin, which is not installed: pip install"):
        compile.require_plugin()
    with pytest.raises(InputError, match=r"needs jax's CUDA plugin"):
        compile.h200_devices(1)


def test_a_run_takes_as_much_memory_as_the_description_of_an_h200_allows():
    assert compile.usable_bytes() == 0.92 * 150_109_880_320


def test_an_output_in_a_donated_buffer_counts_once():
    sizes = {"argument_size_in_bytes": 100, "output_size_in_bytes": 90, "alias_size_in_bytes": 80}
    plan = SimpleNamespace(**sizes, temp_size_in_bytes=7)
    executable: Any = SimpleNamespace(memory_analysis=lambda: plan)
    program: Any = None
    step = compile.CompiledStep(program, executable, 1.0, 2.0, 3.0)
    assert step.memory == {"argument": 100, "other output": 10, "temporary": 7, "whole": 117}
