"""The descriptions of GPUs that XLA compiles for: an H200's, dumped from one, with the figures of another's data sheet.

Where XLA's own costs decide (fusions, its Triton matmuls), they are an H200's. Which kernels fit, their shared memory
and the instructions are the GPU's own.
"""

import re
from functools import cache
from importlib.resources import files

from megajax.runtime import MEMORY_FRACTION
from megajax.tools.plan.rates import GIB, H200, rates_of

# As XLA's description names them; from NVIDIA's data sheets and CUDA's programming guide.
AMPERE = {
    "core_count": 108,
    "shared_memory_per_core": 167936,
    "shared_memory_per_block_optin": 166912,
    "l2_cache_size": 41943040,
    "fpus_per_core": 64,
}
ADA = {
    "core_count": 142,
    "shared_memory_per_core": 102400,
    "shared_memory_per_block_optin": 101376,
    "l2_cache_size": 100663296,
    "threads_per_core_limit": 1536,
}
BLACKWELL = {"core_count": 148, "l2_cache_size": 132644864}
# By the names of `rates`: jax's name (it does not know an L40S, which is an L40 with other clocks), and what differs
CHIPS: dict[str, tuple[str, dict[str, int]]] = {
    "H100": ("NVIDIA H100", {"l2_cache_size": 52428800}),
    "A100": ("NVIDIA A100", AMPERE),
    "L40S": ("NVIDIA L40", ADA),
    "B200": ("NVIDIA B200", BLACKWELL),
}


def usable_bytes(device: str) -> float:
    """Bytes of a device's memory that a run can use: a compiled step that needs more does not fit."""
    match = re.search(r"device_memory_size: (\d+)", target(device))
    assert match
    return float(MEMORY_FRACTION) * int(match[1])


@cache
def target(device: str) -> str:
    """The description of a device for XLA's compiler. Raises InputError for an unknown one."""
    text = files("megajax.tools.plan").joinpath("h200_target_config.pbtxt").read_text(encoding="utf-8")
    rates = rates_of(device)
    if rates is H200:
        return text
    name, figures = CHIPS[rates.name]
    major, minor = rates.capability.split(".")
    bandwidth = re.search(r"memory_bandwidth: (\d+)", text)
    assert bandwidth
    figures = figures | {
        "device_memory_size": int(rates.memory_gib * GIB / float(MEMORY_FRACTION)),
        "memory_bandwidth": int(int(bandwidth[1]) * rates.memory_bytes / H200.memory_bytes),
    }
    for key, value in figures.items():
        text, count = re.subn(rf"\b{key}: \d+", f"{key}: {value}", text)
        assert count == 1, key
    # Only Hopper and Blackwell have instructions of one generation alone ("9.0a").
    accelerated = "\n    feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    version = f"cuda_compute_capability {{\n    major: {major}\n    minor: {minor}{accelerated}\n  }}"
    text = re.sub(r"cuda_compute_capability \{.*?\}", version, text, flags=re.DOTALL)
    text = text.replace("9.0a", f"{rates.capability}a" if accelerated else rates.capability)
    return text.replace("NVIDIA H200", name)
