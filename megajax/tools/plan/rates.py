"""The speeds of GPUs and links, for the estimate of a step's time.

Rates are those that large operations reach, not data sheets' peaks. H200's come from docs/performance.md and
docs/records/log.md. The others are an H200's, scaled by the ratio of the data sheets' peaks, unless this package has a
file DEVICE_rates.json of `megajax preflight --rates`. Such a file of the user's replaces them; the constants of
`step_time` were fitted to measured steps and stay.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from megajax import json_files
from megajax.errors import InputError, file_reader, shown
from megajax.files import is_number, replace_text
from megajax.kernel_choice import Hardware

GIB = 2**30
HOST = 8  # GPUs, unless a plan has other hosts
NOTES = "measured"  # the key of a file of rates with the device, the date and the rest that is no rate


@dataclass(frozen=True)
class Rates:
    """One kind of GPU. Rates are per GPU and second, bandwidths in one direction."""

    name: str
    memory_gib: float  # that a run can use
    peak_flops: float  # dense BF16, of the data sheet, for MFU
    bf16_flops: float  # of a matmul whose dimensions are large
    fp8_flops: float
    bf16_half_rate: float  # smallest dimension at which a matmul reaches half of `bf16_flops`
    fp8_half_rate: float
    attention_flops: tuple[tuple[int, float], ...]  # forward and backward, by width of a head, for long sequences
    attention_half_rate: float  # tokens at which attention reaches half of its rate
    memory_bytes: float
    link_bytes: float  # between the GPUs of a host, copies
    nccl_bytes: float  # the same, gathers and reductions by NCCL
    network_bytes: float  # between hosts, for each GPU
    hosts_of: int  # GPUs of a host
    fp32_flops: float  # of a matmul in full FP32, not TF32
    capability: str = "9.0"  # of CUDA
    origin: str = "measured"  # of the rates

    @property
    def hardware(self) -> Hardware:
        """What the choice of kernels asks of these GPUs."""
        return Hardware("gpu", self.capability)

    @property
    def in_fp32(self) -> Self:
        """The same GPUs for steps in FP32 (`precision.compute`): its rate is in the place of BF16's."""
        return replace(self, bf16_flops=self.fp32_flops)

    def matmul_flops(self, smallest: float, fp8: bool) -> float:
        """The rate of matmuls whose smallest dimension, of tokens or of the weight, has this size."""
        rate, half = (self.fp8_flops, self.fp8_half_rate) if fp8 else (self.bf16_flops, self.bf16_half_rate)
        return rate * smallest / (smallest + half)

    def attention(self, width: int, length: int) -> float:
        """The rate of attention with heads of this width (queries; values may be narrower) over `length` tokens."""
        rate = min(self.attention_flops, key=lambda entry: abs(entry[0] - width))[1]
        return rate * length / (length + self.attention_half_rate)

    def group_bytes(self, between_hosts: bool, stride: int) -> float:
        """The bandwidth of a GPU in a collective over GPUs that are `stride` apart.

        A group on several hosts uses the network cards of all its GPUs in a host.
        """
        if not between_hosts:
            return self.link_bytes
        return min(self.link_bytes, self.network_bytes * max(1, self.hosts_of // stride))

    def with_links(self, hosts_of: int | None, network_gbps: float | None) -> Self:
        """The same GPUs in other hosts; `network_gbps` is a network card's rate in Gbit/s, one card per GPU."""
        network = self.network_bytes if network_gbps is None else NETWORK_SHARE * network_gbps * 1e9 / 8
        return replace(self, hosts_of=hosts_of or self.hosts_of, network_bytes=network)


LARGEST = 1e30  # of a rate; its square is a float too
KEYS = [field.name for field in fields(Rates) if field.name not in ("origin", "capability")]  # of a file of rates
NETWORK_SHARE = 0.8  # of a card's rate that collectives reach; not measured

BF16_SHARE = 720 / 989  # of the data sheet's peak that matmuls in BF16 reach, and that FP32 is assumed to reach

H200 = Rates(
    name="H200",
    memory_gib=128.6,
    peak_flops=989e12,
    bf16_flops=720e12,
    fp8_flops=1440e12,
    bf16_half_rate=50.0,
    fp8_half_rate=190.0,
    attention_flops=((64, 430e12), (128, 436e12), (192, 454e12), (256, 413e12)),
    attention_half_rate=1160.0,
    memory_bytes=4.2e12,
    link_bytes=350e9,
    nccl_bytes=240e9,
    network_bytes=NETWORK_SHARE * 400e9 / 8,
    hosts_of=HOST,
    fp32_flops=BF16_SHARE * 67e12,
)


def _scaled(
    name: str, capability: str, memory_gib: float, flops: float, fp32: float, memory: float, links: float
) -> Rates:
    """A GPU by the ratios of its data sheet to an H200's; `fp32` are the data sheet's FP32 TFLOP/s."""
    return replace(
        H200,
        name=name,
        capability=capability,
        origin="an H200's, scaled by data sheets",
        memory_gib=memory_gib,
        peak_flops=H200.peak_flops * flops,
        bf16_flops=H200.bf16_flops * flops,
        fp8_flops=H200.fp8_flops * flops,
        fp32_flops=BF16_SHARE * fp32 * 1e12,
        attention_flops=tuple((width, rate * flops) for width, rate in H200.attention_flops),
        memory_bytes=H200.memory_bytes * memory,
        link_bytes=H200.link_bytes * links,
        nccl_bytes=H200.nccl_bytes * links,
    )


SCALED = {  # by the names in DEVICE_NAMES
    "h200": H200,
    "h100": _scaled("H100", "9.0", 73.2, 1.0, 67, 3.35 / 4.8, 1.0),
    "a100": replace(
        _scaled("A100", "8.0", 73.6, 312 / 989, 19.5, 2.039 / 4.8, 600 / 900), fp8_flops=H200.bf16_flops * 312 / 989
    ),
    # Without NVLink: a collective has PCIe's 25 GB/s.
    "l40s": _scaled("L40S", "8.9", 41.4, 362 / 989, 91.6, 0.864 / 4.8, 25 / 350),
    "b200": _scaled("B200", "10.0", 164.0, 2250 / 989, 75, 8.0 / 4.8, 2.0),
}


def hosts_of(gpus: int, size: int = HOST) -> tuple[int, int]:
    """(hosts, GPUs per host) of GPUs in hosts of `size`. Raises InputError if they are not a whole number of hosts."""
    if gpus < 1:
        raise InputError(f"--gpus={gpus} is below 1: give 1 or more.")
    if gpus > size and gpus % size:
        near = gpus // size * size
        raise InputError(f"--gpus={gpus} is not a whole number of hosts of {size}: use {near} or {near + size}.")
    return -(-gpus // size), min(gpus, size)


def rates_of(name: str) -> Rates:
    """The rates of a device by its name. Raises InputError for an unknown one."""
    given = name.lower()
    if given not in DEVICES:
        near = [known for known in DEVICES if known in given] or difflib.get_close_matches(given, DEVICES, 1)
        meant = f"did you mean {near[0]}? The devices are" if near else "use"
        raise InputError(f"--device={name} is not known: {meant} {', '.join(DEVICES)}.")
    return DEVICES[given]


def rates_of_kind(device_kind: str) -> Rates | None:
    """The rates of a device by the name that jax has for it; None if there are none."""
    return next((rates for name, rates in DEVICES.items() if name.upper() in device_kind.upper()), None)


@file_reader("path")
def read_rates(path: Path, device: Rates) -> Rates:
    """The device's rates, with those of a JSON file in place of its own.

    Keys are the fields of Rates; `attention_flops` is an object from the width of a head to the rate; NOTES is not
    read. Raises InputError with the file and the key.
    """
    found = json_files.read(path, dict[str, Any], 'give a JSON file of rates, such as {"bf16_flops": 7e14}')
    known, values = KEYS, {}
    found.pop(NOTES, None)
    for key, value in found.items():
        if key not in known:
            raise InputError(f"{path}: {shown(key)} is no rate: use {', '.join(known)}.")
        if key == "name":
            if not isinstance(value, str):
                raise InputError(f"{path}: name={shown(value)} is no text: write a name in quotes.")
            values[key] = value
        elif key == "attention_flops":
            if not isinstance(value, dict) or not value or not all(map(is_number, value)):
                raise InputError(f'{path}: {key} maps widths of heads to rates: write {{"128": 4.9e14}}.')
            values[key] = tuple((int(width), _positive(path, f"{key}.{width}", rate)) for width, rate in value.items())
        else:
            values[key] = _positive(path, key, value)
    if values.get("hosts_of", 1) % 1:
        raise InputError(f"{path}: hosts_of={values['hosts_of']:g} is no whole number of GPUs.")
    return replace(device, origin=f"those of {path}", **values)


def write_rates(path: Path, rates: Rates, notes: Mapping[str, Any]) -> None:
    """Write a file that `read_rates` reads, with all fields and the notes."""
    values = {key: value for key, value in asdict(rates).items() if key in KEYS}
    values["attention_flops"] = {str(width): rate for width, rate in rates.attention_flops}
    replace_text(path, json.dumps(values | {NOTES: notes}, indent=2) + "\n")


def _positive(path: Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
        raise InputError(f"{path}: {key}={shown(value)} is no positive number.")
    return value


def _shipped(name: str) -> Rates:
    """The rates of a device: of its file in this package, else scaled."""
    file = Path(__file__).with_name(f"{name}_rates.json")
    if not file.is_file():
        return SCALED[name]
    return replace(read_rates(file, SCALED[name]), name=SCALED[name].name, origin="measured")


DEVICES = {name: _shipped(name) for name in SCALED}
