"""Eight virtual CPU devices for every test, set before jax starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# LLVM's optimisations take longer than the tests they would speed up; the HLO is the same without them.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
