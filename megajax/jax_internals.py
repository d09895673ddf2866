"""Names of jax and jaxlib that are not public, and the reason for each. No other file imports any.

The version in brackets is the one with which a name was last tried.
"""

from typing import Any

# A program of CPUs has the host's hash in its name in the cache; there is no option without it. [0.11.2]
from jax._src import cache_key as cache_key

# Whether a file of the cache can be read: jax warns of a damaged one for ever. [0.11.2]
from jax._src import compilation_cache as compilation_cache

# The coordinator's client: `jax.distributed` has no functions for its key-value store and barriers. [0.11.2]
from jax._src import distributed as distributed

# For dumps that are compared: the places of the sources in a program. [0.11.2]
from jax._src import source_info_util as source_info_util

# Whether jax has looked for its devices, which no public function tells without looking for them; and the name of a
# platform without a device, for programs that are compiled for GPUs elsewhere. [0.11.2]
from jax._src import xla_bridge as xla_bridge

# cuDNN's attention: `jax.nn.dot_product_attention` gives no log-sum-exp, and takes none for the gradients. [0.11.2]
from jax._src.cudnn import fused_attention_stablehlo as fused_attention_stablehlo

# Whether transfers between memories are dropped from a program that is compiled without a GPU. [0.11.2]
from jax._src.interpreters import pxla as pxla

# The versions of CUDA and cuDNN that jax runs with, for the record of a measurement. [0.11.2]
from jax._src.lib import cuda_versions as cuda_versions

# The compute capability of the GPU that a kernel is compiled for, which may not exist. [0.11.2]
from jax._src.pallas.triton import gpu_info as gpu_info

# `jax.extend` may change without notice. A traced function's equations: weight gradients are deferred by them, and
# costs are counted from them; a primitive stands for a kernel there. [0.11.2]
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun

# The makers of the coordinator's client and service: `jax.distributed.initialize` has no options for the address to
# which a client connects, and for errors instead of the end of the process. [0.11.2]
from jaxlib import _jax  # type: ignore[attr-defined]

# MLIR's own objects, in which arguments of a program get a memory, and programs are compared. [0.11.2]
from jaxlib.mlir import ir as ir

native: Any = _jax
