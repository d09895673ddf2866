"""Lets megatron-core run without a GPU: the device "cuda" is the CPU, streams do nothing. Import it before megatron."""

# pyright: reportMissingImports=false
import contextlib
import os
import warnings

import torch
from torch.overrides import TorchFunctionMode

for name, text in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, text)
os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
warnings.filterwarnings("ignore")
torch.set_num_threads(1)  # tiny models: threads only wait for each other
CPU = torch.device("cpu")


def _is_cuda(device) -> bool:
    number = isinstance(device, int) and not isinstance(device, bool)
    return number or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))


class OnCpu(TorchFunctionMode):
    """Replaces the device cuda by the CPU in every function of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if getattr(func, "__name__", "") == "to" and len(args) > 1 and not isinstance(args[1], int):
            args = (args[0], CPU if _is_cuda(args[1]) else args[1], *args[2:])
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:  # clip_grad_by_total_norm_fp32 asserts a type of torch.cuda
            return out.replace("torch.", "torch.cuda.")
        return out


class Stream:
    """A stream or an event: everything happens at once."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_stream(self, *_):
        pass

    wait_event = synchronize = record = wait_stream

    def record_event(self, *_):
        return Stream()


def _nothing():
    """A function of its own each time: torch's compiler keeps a table of them."""
    return lambda *_, **__: None


def _install() -> TorchFunctionMode:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_call"):
        setattr(cuda, name, _nothing())
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    cuda.current_stream = lambda *_: Stream()
    cuda.default_stream = lambda *_: Stream()
    cuda.Stream = cuda.Event = Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    for kind in ("FloatTensor", "IntTensor", "LongTensor", "DoubleTensor", "BoolTensor", "ByteTensor"):
        setattr(cuda, kind, getattr(torch, kind))
    mode = OnCpu()
    mode.__enter__()
    return mode


MODE = _install()
