"""Operations of the benchmark shapes on H200s, compiled without a GPU: a diff of the counts shows the effect."""

import difflib
import os
import subprocess
import sys

import hlo_counts
import pytest

from megajax.tools.compile import verdict

ADVICE = "the counts have changed; if that is as it should be, run python dev/hlo_counts.py --write"


@pytest.mark.long
def test_the_compiled_steps_launch_what_is_written_down(compiled_steps):
    flags = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")  # those of the tests' virtual CPU devices
    environment = {name: value for name, value in os.environ.items() if name not in flags}
    command = [sys.executable, hlo_counts.__file__, *compiled_steps]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    written, now = hlo_counts.GOLDEN.read_text(), done.stdout
    difference = difflib.unified_diff(written.splitlines(), now.splitlines(), "written", "now", n=12, lineterm="")
    assert now == written, "\n".join([ADVICE, *difference])


def test_a_step_fits_if_its_memory_is_what_a_run_takes_of_an_h200_or_less():
    assert verdict(100 * 2**30, "h200") == "it fits: 100.0 GiB of the 128.6 GiB of an H200 that a run can use"
    assert verdict(129 * 2**30, "h200").startswith("it does not fit: it needs 129.0 GiB of the 128.6 GiB")
