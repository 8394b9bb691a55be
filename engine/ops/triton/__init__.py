"""Operations of GPUs in Triton, which compiles them on first use: nothing has to be built or installed beside torch.

`probe` and `probe_cache` tell whether they can run; all else is loaded by who uses it, since machines without Triton
import this.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.sampling.kernels import SamplingKernels

_LEAST_CAPABILITY = (8, 0)  # bfloat16 in the tensor cores
_LEAST_VERSION = (3, 6)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_DIM = 256


def probe_cache(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot run on a device, on a cache of this dtype with such heads; None: they can."""
    if (why := probe(device)) is not None:
        return why
    if dtype not in _DTYPES:
        return f"there is no Triton kernel for {dtype}"
    if head_dim > _MOST_DIM:
        return f"the Triton kernels are for heads of up to {_MOST_DIM}, not {head_dim}"
    return None


def probe(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None: they can.

    Triton's interpreter (`TRITON_INTERPRET=1` in the environment) runs them on CPU, for tests.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < _LEAST_VERSION:
        return f"Triton is {triton.__version__}, and {'.'.join(map(str, _LEAST_VERSION))} is needed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu":
        return _try_out(device) if interpreted else "Triton has no kernels for CPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the Triton kernels are for CUDA, not for {device.type if torch.version.hip is None else 'ROCm'}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, there = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, capability))
        return f"the Triton kernels need compute capability {least}, and {device} has {there}"
    return _try_out(device)


def sampling_kernels(device: torch.device) -> SamplingKernels | None:
    """The sampler's kernels for a CUDA device; None: they do not run there."""
    if device.type != "cuda" or probe(device) is not None:
        return None
    from engine.ops.triton import sampling

    return sampling


@cache
@torch.inference_mode()
def _try_out(device: torch.device) -> str | None:
    """Runs a small kernel: that Triton finds no C compiler, or no folder to write to, is seen at the first launch."""
    from engine.ops.triton.norms import rms_norm

    x, weight = torch.linspace(-1, 2, 64, device=device).view(2, 32), torch.ones(32, device=device)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            out = rms_norm(x, weight, 1e-6)
        is_right = torch.allclose(out, torch.nn.functional.rms_norm(x, (32,), weight, 1e-6), atol=1e-3)
    except Exception as error:  # whatever compilers and drivers raise
        return f"Triton was tried and failed: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
    return None if is_right else "Triton was tried and gave other numbers than torch"
