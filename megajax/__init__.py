"""megajax: pre-training of large language models in JAX on any mesh of GPUs.

    import megajax

    config = megajax.load_config("configs/quickstart.yaml", ["run.steps=50"])
    trainer = megajax.Trainer(config)     # or the parts: build_mesh, TrainProgram
    trainer.run()
    weights = megajax.load_weights(config.run.dir)  # from the newest checkpoint: names → NumPy arrays

Names are imported at their first use: a config's XLA flags can be set before jax is, and a process that needs neither
starts fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megajax.errors import ConfigError, InputError, UserError
from megajax.version import VERSION as __version__

if TYPE_CHECKING:
    from megajax.checkpoint.weights import load_weights
    from megajax.config import Config, load_config
    from megajax.inference.load import from_hf, load_run
    from megajax.mesh import build_mesh
    from megajax.model import Transformer
    from megajax.training.hooks import Hook, RunView
    from megajax.training.loop import Trainer
    from megajax.training.step import TrainProgram, TrainState

_LAZY = {
    "Config": "megajax.config",
    "load_config": "megajax.config",
    "Hook": "megajax.training.hooks",
    "RunView": "megajax.training.hooks",
    "Trainer": "megajax.training.loop",
    "TrainProgram": "megajax.training.step",
    "TrainState": "megajax.training.step",
    "Transformer": "megajax.model",
    "build_mesh": "megajax.mesh",
    "from_hf": "megajax.inference.load",
    "load_run": "megajax.inference.load",
    "load_weights": "megajax.checkpoint.weights",
}

__all__ = [
    "Config",
    "ConfigError",
    "Hook",
    "InputError",
    "RunView",
    "TrainProgram",
    "TrainState",
    "Trainer",
    "Transformer",
    "UserError",
    "__version__",
    "build_mesh",
    "from_hf",
    "load_config",
    "load_run",
    "load_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'megajax' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
