"""The shared memory of the GPU that a kernel is traced for, which may be one that does not exist here."""

# KiB that a block of threads can have, by compute capability without the point (CUDA C++ Programming Guide)
LEAST, BLOCKS = 99, {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}


def shared_memory() -> int:
    """Bytes that a block can have; that of the smallest GPU since Ampere if it is not known."""
    from megajax.jax_internals import gpu_info

    try:
        capability = gpu_info.get_gpu_info().compute_capability
    except ValueError:  # no GPU, as for kernels that are interpreted
        capability = 0
    return BLOCKS.get(capability, LEAST) * 1024
