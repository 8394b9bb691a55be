"""The device under test: what it is, how long calls take on it, and the best that it was seen to do.

Used by the stages. Where there is no CUDA device they run on CPU, with sizes of their own.
"""

from __future__ import annotations

import gc
import importlib.util
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from engine.gpu_check.floors import Limits
from engine.gpu_check.stages import Progress, SkipStage

_PACKAGES = ("torch", "transformers", "triton", "numpy", "flash-attn", "flash-attn-3", "kernels", "nvidia-cuda-runtime")
_MODULES = ("flash_attn", "flash_attn_interface", "kernels", "ray", "pydantic", "fastapi")
_COPY_BYTES = {True: 64 << 20, False: 4 << 30}  # small or not
_GEMM = {True: 512, False: 8192}


@dataclass
class Bench:
    """Where and how large.

    Attributes:
        small: tiny sizes, for a run that shows that the stages run.
        limits: filled by the first stage.
    """

    device: torch.device
    small: bool
    limits: Limits = field(default_factory=Limits)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def need_cuda(self, what: str) -> None:
        """Raises SkipStage on another device."""
        if not self.is_cuda:
            raise SkipStage(f"{what} needs a CUDA device, and this is {self.device.type}")

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def best_seconds(self, call: Callable[[], object], *, calls: int = 10, rounds: int = 5) -> float:
        """Of one call: the best round of `calls` one after another. What the first call sets up is not counted."""
        call()
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        if time.perf_counter() - begin > 0.5:
            calls, rounds = 1, 2
        best = float("inf")
        for _ in range(1 if self.small else rounds):
            self.wait()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            self.wait()
            best = min(best, (time.perf_counter() - begin) / calls)
        return best

    def free(self) -> bool:
        """Gives memory back; whether the device still answers."""
        gc.collect()
        try:
            if self.is_cuda:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True


def describe(bench: Bench) -> dict[str, Any]:
    """Versions and the device, for the report."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": versions,
        "modules": {name: importlib.util.find_spec(name) is not None for name in _MODULES},
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "device": platform.processor() or platform.machine(),
    }
    if bench.is_cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        free, total = torch.cuda.mem_get_info(bench.device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(total / 2**30, 1),
            "free_gib": round(free / 2**30, 1),
        }
    return found


@torch.inference_mode()
def probe(bench: Bench, progress: Progress) -> None:
    """The rates that all shares are of."""
    with progress.case("device"):
        progress.add("device", **describe(bench))
    bandwidth = gemm = None
    with progress.case("copy"):
        bandwidth = _copy_rate(bench)
        progress.add("copy", bytes_per_s=bandwidth)
    bench.limits = Limits(bandwidth, gemm)
    with progress.case("matrix product"):
        size = _GEMM[bench.small]
        left, right = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
        gemm = 2 * size**3 / bench.best_seconds(lambda: left @ right)
        progress.add("matrix product", flop_per_s=gemm, size=size, dtype="bfloat16")
    bench.limits = Limits(bandwidth, gemm)


def _copy_rate(bench: Bench) -> float:
    """Bytes a second, those read and those written."""
    size = _COPY_BYTES[bench.small]
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / bench.best_seconds(lambda: target.copy_(source))
