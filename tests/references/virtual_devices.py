"""The environment of eight virtual CPU devices whose programs compile in a third of the time; set before jax."""

import os

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # XLA's older emitters of fused loops compile a train step in about half the time of its new ones.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    # By default LLVM compiles a program in up to 32 parts: its common functions again in each.
    "--xla_cpu_parallel_codegen_split_count=1",
)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)),
    # LLVM's optimisations take longer than the few steps that they would speed up; the HLO is the same without them.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # NumPy's threads wait in a loop for small products: two thirds of the CPU time of tests with many of them.
    "OPENBLAS_NUM_THREADS": "1",
    "NPROC": "32",  # as megajax.runtime.threads_of
}
