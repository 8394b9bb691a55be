"""Which flash kernel a model's attention runs in, if any, and what kept better ones from being taken.

Called when settings are resolved: the choice says which pages the cache may have. A kernel is taken once it has given,
on the device, the numbers that plain torch gives.
"""

from __future__ import annotations

import logging

import torch

from engine.ops.flash import loading
from engine.ops.flash.kernels import AttentionNeeds, FlashKernel, NotUsableError
from engine.ops.flash.loading import Source
from engine.ops.flash.trial import try_out

logger = logging.getLogger(__name__)

FLASH = ("flash_attention_2", "flash_attention_3")
_KEPT = ("paged|eager",)  # asked for as it is


class PageSizeError(NotUsableError):
    """The kernel cannot read pages of the size that was asked for."""


def choose_flash(asked: str, auto_switch: bool, needs: AttentionNeeds) -> FlashKernel | None:
    """The kernel to run with, None for none; logs which one, and why none that is better.

    Args:
        asked: the attention implementation that the model was loaded with. One by name of FlashAttention comes first
            in any case; others are replaced with `auto_switch`.
    """
    by_name = asked in FLASH
    if not by_name and (not auto_switch or asked in _KEPT):
        return None
    sources = [source for source in _in_order(asked) if needs.device.type in source.devices]
    if not sources:
        return None
    if not by_name and not needs.supports_flash:
        logger.info("attention: %s, unchanged: this class of model does not support FlashAttention", asked)
        return None
    level = logging.WARNING if by_name else logging.INFO
    if (beyond := _beyond_all(needs)) is not None:
        logger.log(level, "attention: no FlashAttention for %s: it %s", asked, beyond)
        return None
    refused: list[str] = []
    for source in sources:
        try:
            kernel = _usable(source, needs)
        except NotUsableError as why:
            refused.append(f"{source.title} ({source.package}) {why}")
            level = logging.WARNING if isinstance(why, PageSizeError) else level
            continue
        better = f"; not taken: {'; '.join(refused)}" if refused else ""
        # The guide promises a warning where a model is switched.
        level = logging.INFO if kernel.implementation == asked else logging.WARNING
        logger.log(level, "attention: %s -> %s%s", asked, kernel.title, better)
        return kernel
    logger.log(level, "attention: no FlashAttention for %s: %s", asked, "; ".join(refused))
    return None


def _in_order(asked: str) -> list[Source]:
    """Those of the implementation that is asked for, then the others that need no download, the best one first."""
    named = [source for source in loading.SOURCES if source.implementation == asked]
    return named + [source for source in loading.SOURCES if source not in named and not source.downloads]


def _beyond_all(needs: AttentionNeeds) -> str | None:
    """What keeps any kernel from being taken."""
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, and the model is in {needs.dtype}"
    if needs.head_dim % 8:
        return f"needs heads of a multiple of 8 numbers, and the model's have {needs.head_dim}"
    return None


def _usable(source: Source, needs: AttentionNeeds) -> FlashKernel:
    """The kernel, tried; raises NotUsableError."""
    if needs.device.type == "cuda":
        capability, (least, before) = torch.cuda.get_device_capability(needs.device), source.capabilities
        if not least <= capability < before:
            raise NotUsableError(f"does not run on devices of compute capability {capability[0]}.{capability[1]}")
    kernel = source.load()
    if needs.head_dim > kernel.most_head_dim:
        raise NotUsableError(
            f"has heads of {kernel.most_head_dim} numbers at most, and the model's have {needs.head_dim}"
        )
    missing = needs.features - kernel.features
    if needs.dtype == torch.float16 and "float16" not in kernel.features:
        missing |= {"float16"}
    if missing:
        raise NotUsableError(f"does not compute {' and '.join(sorted(missing))}, which the model needs")
    multiple = kernel.page_multiple
    if needs.page_size is not None and needs.page_size % multiple:
        below, above = needs.page_size // multiple * multiple, -(-needs.page_size // multiple) * multiple
        raise PageSizeError(
            f"reads pages of a multiple of {multiple} tokens, and page_size is {needs.page_size}: set it to "
            f"{f'{below} or ' if below else ''}{above}, or leave it out"
        )
    try_out(kernel, needs)
    return kernel
