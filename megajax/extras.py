"""Packages that only some runs need: the extras of pyproject.toml, and the sentence if one is missing."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megajax.errors import InputError, UserError

# extra: (its package, the module that is imported)
EXTRAS = {
    "eval": ("lm-eval", "lm_eval"),
    "linear-attention": ("jax-linear-attention", "jla"),
    "gcs": ("gcsfs", "gcsfs"),
    "mlflow": ("mlflow", "mlflow"),
    "nvml": ("nvidia-ml-py", "pynvml"),
    "parquet": ("pyarrow", "pyarrow"),
    "remote": ("fsspec", "fsspec"),
    "s3": ("s3fs", "s3fs"),
    "te": ("NVIDIA Transformer Engine", "transformer_engine"),
    "vision": ("Pillow", "PIL"),
    "wandb": ("wandb", "wandb"),
}


def require(extra: str, needed_by: str, otherwise: str = "", error: type[UserError] = InputError) -> Any:
    """The module of an extra. If it cannot be imported, an `error` that begins with `needed_by`.

    `otherwise` is another way out, such as "set KEY=VALUE".
    """
    with loading(extra, needed_by, otherwise, error):
        return importlib.import_module(EXTRAS[extra][1])


@contextmanager
def loading(extra: str, needed_by: str, otherwise: str = "", error: type[UserError] = InputError) -> Iterator[None]:
    """Around imports of parts of an extra's module: what `require` says of one that fails."""
    package, module = EXTRAS[extra]
    other = f", or {otherwise}" if otherwise else ""
    try:
        yield
    except (ImportError, OSError, RuntimeError, AssertionError) as problem:  # a library of the system may be missing
        if isinstance(problem, ModuleNotFoundError) and (problem.name or "").partition(".")[0] == module:
            cure = f"pip install 'megajax[{extra}]'{other}"
            raise error(f"{needed_by} needs {package}, which is not installed: {cure}.") from None
        reason = str(problem).strip().rstrip(".")
        raise error(f"{needed_by} cannot load {package} ({reason}): repair its installation{other}.") from problem
