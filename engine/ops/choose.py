"""Chooses the operations for a device. Called when a model runner is made, with the cache that they will work on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.cpu.build import BuildError
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.eager_ops import EagerOps
from engine.ops.flash.choice import FLASH
from engine.ops.flash.fused import FlashTritonOps
from engine.ops.flash.kernels import FlashKernel
from engine.ops.flash.loading import load
from engine.ops.flash.ops import FlashOps
from engine.ops.interface import Ops
from engine.ops.torch_ops import TorchOps
from engine.ops.triton.triton_ops import TritonOps

logger = logging.getLogger(__name__)

# By the names that transformers gives them. The flash kernels are not here: settings choose them.
_PLAIN: dict[str, type[TorchOps]] = {"sdpa": TorchOps, "eager": EagerOps, "paged|eager": EagerOps}
ATTENTIONS = (*_PLAIN, *FLASH)


def make_ops(
    kv: KVTensors,
    groups: Sequence[LayerGroup] | None = None,
    *,
    attention: str = "sdpa",
    auto_switch: bool = True,
    flash_package: str | None = None,
) -> Ops:
    """The ops for the device on which the cache lies.

    Args:
        groups: which layers share a block table; None puts all in one group without a window.
        attention: the attention implementation that is asked for, one of `ATTENTIONS`.
        auto_switch: something faster on this device may be taken instead; a log line says so.
        flash_package: whose flash kernel is to run; None: none could be taken.

    Raises:
        ValueError: `attention` is none of them.
        NotUsableError: the package is not in this process.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention implementation {attention!r} is not known; these are: {', '.join(ATTENTIONS)}")
    if flash_package is not None:
        return over_flash(load(flash_package), kv, groups)
    is_flash = attention in FLASH
    if not auto_switch and not is_flash:
        return _PLAIN[attention](kv, groups)
    missing = f"there are no flash kernels for {kv.device.type}"
    try:
        ops = _fastest(kv, groups)
    except (BuildError, NotImplementedError) as error:
        # A missing compiler costs much speed and can be helped; on a GPU so does whatever is missing.
        costs_much = isinstance(error, BuildError) or kv.device.type == "cuda"
        level = logging.WARNING if is_flash or costs_much else logging.INFO
        kept = f"{attention} -> sdpa, since {missing}" if is_flash else f"{attention}, unchanged"
        logger.log(level, "attention: %s: %s", kept, error)
        plain = _PLAIN.get(attention, TorchOps)(kv, groups)
        plain.why_plain = str(error).partition("\n")[0]  # what the compiler says is in the log already
        return plain
    name = "the engine's Triton kernels" if isinstance(ops, TritonOps) else "the engine's compiled CPU kernel"
    if is_flash:
        logger.warning("attention: %s -> %s, since %s", attention, name, missing)
    else:
        logger.info("attention: %s -> %s, which is faster", attention, name)
    return ops


def over_flash(kernel: FlashKernel, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> Ops:
    """Operations that attend by a flash kernel. Where Triton runs, its kernels do all else."""
    try:
        fused = FlashTritonOps(kernel, kv, groups)
    except NotImplementedError as why:
        plain = FlashOps(kernel, kv, groups)
        plain.why_plain = f"it runs in {kernel.title} beside plain torch, since {why}"
        logger.info("attention: %s beside plain torch: %s", kernel.title, why)
        return plain
    logger.info("attention: %s beside the engine's Triton kernels", kernel.title)
    return fused


def _fastest(kv: KVTensors, groups: Sequence[LayerGroup] | None) -> Ops:
    """What beats plain torch on the cache's device.

    Raises:
        BuildError, NotImplementedError: nothing does; the text says why.
    """
    if kv.device.type != "cpu":
        return TritonOps(kv, groups)
    try:
        return CpuOps(kv, groups)
    except BuildError as error:
        raise BuildError(f"decoding on CPU is much slower without the compiled kernel: {error}") from error
