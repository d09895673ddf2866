"""Programs compiled for H200s, which need no GPU; their texts are kept from run to run, as other compiled programs are.

jax's own cache leaves out programs of devices that do not exist. What a text depends on is in its name, so a changed
program, compiler or flag never uses an old one.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path

import jax

OPTIONS = {"xla_gpu_autotune_level": "0"}  # the same operations, compiled sooner
FLAGS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")


def text_of(lowered: jax.stages.Lowered, options: Mapping[str, str] = OPTIONS) -> str:
    """The compiled text of what was lowered inside `no_gpu_needed`, where it is called too."""
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not kept:
        return _compiled(lowered, options)
    compilers = sorted(f"{each.name} {each.version}" for each in distributions() if each.name.startswith("jax"))
    target = (files("megajax.plan") / "h200_target_config.pbtxt").read_text()
    flags = [os.environ.get(name) for name in FLAGS]
    decides = [lowered.as_text(debug_info=True), compilers, dict(options), flags, target]
    path = Path(kept) / "h200" / f"{hashlib.sha256(json.dumps(decides).encode()).hexdigest()}.txt.gz"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(gzip.compress(_compiled(lowered, options).encode(), 1))
        partial.rename(path)
    return gzip.decompress(path.read_bytes()).decode()


def _compiled(lowered: jax.stages.Lowered, options: Mapping[str, str]) -> str:
    text = lowered.compile(dict(options)).as_text()
    assert text
    return text
