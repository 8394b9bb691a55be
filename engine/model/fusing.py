"""Whether a model runs fused: by the kernels of its device in the place of its own forward.

Called by the model runner when it is built. Says in one log line which way the model runs, and why.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from engine.model.families import NotFusedError
from engine.model.gpu_layer import GpuDecoder
from engine.model.layer import FusedDecoder
from engine.model.recognition import describe
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.interface import Ops, PlainOps
from engine.ops.triton.triton_ops import TritonOps
from engine.settings import Settings

logger = logging.getLogger(__name__)

_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse(model: nn.Module, ops: Ops, settings: Settings) -> FusedDecoder | GpuDecoder | None:
    """The model in the kernels of its device, through the cache of `ops`; None where its own forward must run.

    Args:
        model: what `make_shadow` returned.

    Raises:
        NotImplementedError: weights are to be kept in 8 bits, and the model cannot run fused.
    """
    try:
        if not isinstance(ops, CpuOps | TritonOps):
            why = ops.why_plain if isinstance(ops, PlainOps) else "other operations were given"
            raise NotFusedError(f"its attention does not run in the engine's compiled kernels ({why})")
        if settings.mixed_compile is not None or settings.decode_compile is not None:
            raise NotFusedError("it is to be compiled")
        fused = _on_cpu(model, ops, settings) if isinstance(ops, CpuOps) else _on_gpu(model, ops, settings)
    except NotFusedError as reason:
        if settings.weight_quantization is not None:
            raise NotImplementedError(
                f"weight_quantization={settings.weight_quantization!r} needs a model that runs fused, and this one "
                f"does not: {reason}"
            ) from None
        if settings.release_weights:
            logger.info("release_weights=True has no effect: the model computes with its weights as they are")
        logger.info("model: runs by transformers' own forward: %s", reason)
        return None
    logger.info("model: runs fused, as %s", fused.family)
    return fused


def _on_cpu(model: nn.Module, ops: CpuOps, settings: Settings) -> FusedDecoder:
    return FusedDecoder(
        describe(model),
        ops,
        settings.max_batch_tokens,
        settings.max_requests,
        settings.context_length,
        quantize=settings.weight_quantization is not None,
        release=settings.release_weights,
    )


def _on_gpu(model: nn.Module, ops: TritonOps, settings: Settings) -> GpuDecoder:
    if settings.weight_quantization is not None:
        raise NotFusedError("the kernels for 8 bits are for CPU")
    decoder = describe(model, _GPU_DTYPES)
    return GpuDecoder(decoder, ops, settings.context_length, own=settings.release_weights)
