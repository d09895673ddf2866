import sys
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.errors import ConfigError
from megajax.kernel_choice import Kernels
from megajax.ops import fp8, fp8_kernels, fp8_reference, transformer_engine

X = np.ones((32, 16), jnp.bfloat16)  # NumPy's: jax would compile while tests are collected
Q = X.astype(jnp.float8_e4m3fn)
SCALE = np.float32(1)
CALLS = {
    "cast_transpose": (X, SCALE, jnp.float8_e4m3fn),
    "gated_cast_transpose": ("swiglu", X, SCALE, jnp.float8_e4m3fn),
    "gated_backward_cast_transpose": ("swiglu", X, X[:, :8], SCALE, jnp.float8_e5m2),
    "matmul": (Q, Q, SCALE, jnp.bfloat16),
}


@pytest.fixture
def forget(monkeypatch):
    """Transformer Engine as if it had not been imported, before the test and after it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    transformer_engine._te.cache_clear()
    yield
    transformer_engine._te.cache_clear()


def call(name):
    return getattr(transformer_engine, name)(*CALLS[name])


def test_each_implementation_has_its_module_and_those_without_one_quantise_in_their_matmuls():
    modules = {"reference": fp8_reference, "pallas": fp8_kernels, "transformer_engine": transformer_engine}
    for name in get_args(fp8.Implementation):
        assert Kernels(fp8=name).save_fp8 == (name in modules), name
        if name in modules:
            assert fp8.kernels(name) is modules[name]
            assert all(hasattr(modules[name], function) for function in CALLS)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CALLS)
def test_a_missing_transformer_engine_is_a_sentence_that_names_the_key_and_both_ways_out(forget, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # import raises ModuleNotFoundError
    with pytest.raises(ConfigError) as raised:
        call(name)
    assert str(raised.value) == (
        "precision.fp8.backend=transformer_engine needs NVIDIA Transformer Engine, which is not installed: "
        "pip install 'megajax[te]', or use precision.fp8.backend=xla."
    )


@pytest.mark.parametrize(
    "line, reason",
    [
        (
            'raise OSError("libcuda.so.1: cannot open shared object file.")',
            "libcuda.so.1: cannot open shared object file",
        ),
        ("import no_such_module_of_its_own", "No module named 'no_such_module_of_its_own'"),
    ],
)
def test_one_that_does_not_load_is_a_sentence_with_the_reason(forget, monkeypatch, tmp_path, line, reason):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        call("cast_transpose")
    assert str(raised.value) == (
        f"precision.fp8.backend=transformer_engine cannot load NVIDIA Transformer Engine ({reason}): repair its "
        "installation, or use precision.fp8.backend=xla."
    )
