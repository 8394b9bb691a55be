"""Flash attention packages that are not there: their functions, with the rules of the real ones, and their modules.

Versions differ by the parameters of their functions. Written after the signatures and checks of flash-attn 2.8,
FlashAttention 3 and torch 2.13. All of them attend by the kernel of `fake_flash_kernel.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.ops.flash import loading
from tests.engine.fake_flash_kernel import RefusedError, append, attend, check, check_tensors

# flash-attn 2


def _varlen_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    check(q.dim() == 3, "q must be (total_q, nheads, headdim)")
    if block_table is None:
        raise NotImplementedError("this fake has pages alone")
    check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    check_tensors(q, k, v, cu_seqlens_k)
    check(cu_seqlens_k.shape == cu_seqlens_q.shape and cu_seqlens_k.is_contiguous(), "cu_seqlens_k has a wrong shape")
    lengths = cu_seqlens_k.diff()
    rows = len(cu_seqlens_q) - 1
    check(max_seqlen_q > 1 or len(q) == rows, "with max_seqlen_q of 1 every row must have one token")
    rest = softmax_scale, causal, window_size, softcap, None, max_seqlen_k
    return attend(q, k, v, cu_seqlens_q, lengths, block_table, max_seqlen_q, *rest)


def _with_cache_2(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    check(k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    check(0 <= num_splits <= 128, "num_splits > 128 not supported")
    lengths, table = _cache_arguments(q, cache_seqlens, block_table)
    if k is not None and v is not None:
        lengths = append(k_cache, v_cache, (k, v), lengths, table)
    return _batched(q, k_cache, v_cache, lengths, table, softmax_scale, causal, window_size, softcap)


# FlashAttention 3


def _with_cache_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    check(0 <= num_splits <= 256, "num_splits > 256 not supported")
    lengths, table = _cache_arguments(q, cache_seqlens, page_table)
    if k is not None and v is not None:
        lengths = append(k_cache, v_cache, (k, v), lengths, table)
    if cu_seqlens_q is None:
        return _batched(q, k_cache, v_cache, lengths, table, softmax_scale, causal, window_size, softcap, sinks)
    check(q.dim() == 3, "q must be (total_q, nheads, headdim)")
    if max_seqlen_q is None:
        raise RefusedError("max_seqlen_q must be provided if cu_seqlens_q is provided")
    rest = softmax_scale, causal, window_size, softcap, sinks
    return attend(q, k_cache, v_cache, cu_seqlens_q, lengths, table, max_seqlen_q, *rest)


def _cache_arguments(
    query: torch.Tensor, lengths: torch.Tensor | None, table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if lengths is None or table is None:
        raise NotImplementedError("this fake has pages alone")
    check(lengths.dtype == torch.int32, "cache_seqlens must have dtype int32")
    check(table.dtype == torch.int32 and table.dim() == 2, "the block table must be int32 (rows, blocks)")
    capacity = table.shape[1]
    check(capacity > 0, "the block table is empty")
    return lengths, table


def _batched(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, *rest: Any
) -> torch.Tensor:
    check(query.dim() == 4, "q must be (batch_size, seqlen, nheads, headdim)")
    rows, count = query.shape[:2]
    check(len(lengths) == rows, "cache_seqlens must have one number for each query")
    table, *others = rest
    return attend(query.flatten(0, 1), keys, values, None, lengths, table, count, *others).view(query.shape)


# torch


def _varlen_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    check(enable_gqa or query.shape[1] == key.shape[2], "set enable_gqa=True for GQA")
    check(key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    lengths, table = _cache_arguments(query, seqused_k, block_table)
    causal = window_size == (-1, 0)
    check(max_q > 1 or len(query) == len(lengths), "with max_q of 1 every row must have one token")
    return attend(query, key, value, cu_seq_q, lengths, table, max_q, scale, causal, window_size, 0.0, None, max_k)


# Modules


def without(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The function of a version that does not know these parameters."""

    @functools.wraps(function)
    def older(*args: Any, **kwargs: Any) -> Any:
        unknown = [name for name in names if name in kwargs]
        if unknown:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown[0]!r}")
        return function(*args, **kwargs)

    parameters = inspect.signature(function).parameters
    kept = [parameter for name, parameter in parameters.items() if name not in names]
    older.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return older


def flash_attn(version: str = "2.8.3", lacks: Iterable[str] = ()) -> ModuleType:
    """The module of the package flash-attn."""
    module = ModuleType("flash_attn")
    module.__version__ = version  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = without(_varlen_2, *lacks)  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = without(_with_cache_2, *lacks)  # type: ignore[attr-defined]
    return module


def flash_attn_interface(lacks: Iterable[str] = ("sinks",), prefix: str = "") -> ModuleType:
    """The module of the package flash-attn-3."""
    module = ModuleType(f"{prefix}flash_attn_interface")
    module.flash_attn_with_kvcache = without(_with_cache_3, *lacks)  # type: ignore[attr-defined]
    return module


def flash_attn_config(*disabled: str, prefix: str = "") -> ModuleType:
    """What a build of flash-attn-3 says of itself."""
    module = ModuleType(f"{prefix}flash_attn_config")
    names = ("PAGEDKV", "VARLEN", "LOCAL", "SOFTCAP", "FP16", *(f"HDIM{dim}" for dim in (64, 96, 128, 192, 256)))
    flags = {f"FLASHATTENTION_DISABLE_{name}": name in disabled for name in names}
    module.CONFIG = {"build_flags": flags}  # type: ignore[attr-defined]
    return module


def torch_varlen(lacks: Iterable[str] = ()) -> ModuleType:
    """The module torch.nn.attention.varlen."""
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = without(_varlen_torch, *lacks)  # type: ignore[attr-defined]
    return module


MODULES = (
    "flash_attn",
    "flash_attn_interface",
    "flash_attn_config",
    "flash_attn_3",
    "flash_attn_3.flash_attn_interface",
    "flash_attn_3.flash_attn_config",
    "torch.nn.attention.varlen",
    "kernels",
)


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Makes these the only flash packages that there are, and the CPU a device that they run on."""
    found: dict[str, ModuleType] = {module.__name__: module for module in modules}
    for module in modules:
        parent = module.__name__.rpartition(".")[0]
        if parent in MODULES:
            found[parent] = ModuleType(parent)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, found.get(name))
    monkeypatch.setattr(loading, "SOURCES", tuple(_on_cpu(source) for source in loading.SOURCES))


def _on_cpu(source: loading.Source) -> loading.Source:
    return dataclasses.replace(source, devices=(*source.devices, "cpu"))
