"""Which attention there is on the device, and what keeps the others away. Asked by the stages about attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.choose import over_flash
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.eager_ops import EagerOps
from engine.ops.flash.kernels import FlashKernel, NotUsableError
from engine.ops.flash.loading import SOURCES
from engine.ops.interface import Ops
from engine.ops.torch_ops import TorchOps
from engine.ops.triton import probe as probe_triton
from engine.ops.triton.triton_ops import TritonOps


@dataclass(frozen=True)
class Backend:
    """One implementation of `Ops`.

    Attributes:
        page_multiple: pages must be a multiple of so many tokens.
        lacks: of "window", "softcap", "float32" and "bfloat16" what it does not compute.
        fast: written to run at the speed of memory; plain torch is not.
    """

    name: str
    make: Callable[[KVTensors, Sequence[LayerGroup]], Ops]
    page_multiple: int = 1
    lacks: frozenset[str] = frozenset()
    fast: bool = True


def backends(device: torch.device) -> tuple[list[Backend], dict[str, str]]:
    """Those that can be tried on the device, the fast ones first; and by name why others cannot."""
    found, missing = _flash(device)
    if (why := probe_triton(device)) is None:
        # Its interpreter does not compute products in bfloat16 right.
        found.append(Backend("triton", TritonOps, lacks=frozenset({"bfloat16"} if device.type == "cpu" else ())))
    else:
        missing["triton"] = why
    if device.type == "cpu":
        found.append(Backend("cpu", CpuOps))
    return [*found, Backend("sdpa", TorchOps, fast=False), Backend("eager", EagerOps, fast=False)], missing


def _flash(device: torch.device) -> tuple[list[Backend], dict[str, str]]:
    """The flash kernels that need no download."""
    found, missing = [], {}
    for source in SOURCES:
        if source.downloads:
            continue
        try:
            if device.type not in source.devices:
                raise NotUsableError(f"runs on {' and '.join(source.devices)}, and this is {device.type}")
            if device.type == "cuda":
                capability, (least, before) = torch.cuda.get_device_capability(device), source.capabilities
                if not least <= capability < before:
                    raise NotUsableError(f"does not run on devices of compute capability {capability}")
            found.append(_flash_backend(source.load()))
        except NotUsableError as why:
            missing[source.package] = str(why)
    return found, missing


def _flash_backend(kernel: FlashKernel) -> Backend:
    lacks = ({"window", "softcap"} - kernel.features) | {"float32"}

    def make(kv: KVTensors, groups: Sequence[LayerGroup]) -> Ops:
        return over_flash(kernel, kv, groups)

    return Backend(kernel.package, make, kernel.page_multiple, frozenset(lacks))
