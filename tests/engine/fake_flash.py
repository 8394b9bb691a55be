"""Flash attention packages that are not there: their functions in plain torch, with the rules of the real ones.

What the real kernels refuse is an error here, and so is what they would silently do wrong. Numbers are computed in
float64, tile by tile as the kernels read memory: what lies in a tile beside something that is seen is multiplied by 0,
so NaN there comes through. One operator of torch does all of it, as a device's kernel would, so that recorders see one
launch. Versions differ by the parameters of their functions. Written after the signatures and checks of flash-attn
2.8, FlashAttention 3 and torch 2.13.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from engine.ops.flash import loading

TILE = 128


class RefusedError(RuntimeError):
    """What the real function would not take."""


def check(is_right: bool, text: str) -> None:
    if not is_right:
        raise RefusedError(text)


# The kernel


@torch.library.custom_op("convoy_tests::flash", mutates_args=())
def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    begins: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    most_tokens: int,
    most_length: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [tokens, heads, dim]; keys, values [blocks, page, kv_heads, dim]; tokens of row i begin at begins[i]."""
    _check_values(begins, lengths, len(query), most_tokens, most_length)
    out = torch.zeros(query.shape, dtype=torch.float64)
    starts = begins.tolist()
    for row, length in enumerate(lengths.tolist()):
        first, last = starts[row], starts[row + 1]
        if last == first or length == 0:
            continue
        count, page = last - first, keys.shape[1]
        base = 0 if left < 0 else max(0, length - count - left) // TILE * TILE
        end = min(-(-length // TILE) * TILE, tables.shape[1] * page)
        blocks = tables[row, base // page : -(-end // page)]
        needed = blocks[: -(-length // page) - base // page]
        check(bool(((needed >= 0) & (needed < len(keys))).all()), f"illegal memory access: blocks {needed.tolist()}")
        span = slice(base % page, end - base // page * page)
        blocks = blocks.clamp(0, len(keys) - 1).long()
        gathered = (part[blocks].flatten(0, 1)[span].double().transpose(0, 1) for part in (keys, values))
        group = query.shape[1] // keys.shape[2]
        key, value = (part.repeat_interleave(group, dim=0) for part in gathered)
        scores = query[first:last].double().transpose(0, 1) @ key.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        places = base + torch.arange(key.shape[1])
        diagonal = (length - count + torch.arange(count))[:, None]
        seen = (places < length).expand(count, -1)
        if causal or right >= 0:
            seen = seen & (places <= diagonal + (0 if causal else right))
        if left >= 0:
            seen = seen & (places >= diagonal - left)
        scores = scores.masked_fill(~seen, -torch.inf)  # keys are masked by selection, values are not
        extra = None if sinks is None else sinks.double()[:, None, None].expand(-1, count, 1)
        weights = (scores if extra is None else torch.cat((scores, extra), -1)).softmax(-1)[..., : len(places)]
        out[first:last] = (weights.masked_fill(~seen.any(-1)[:, None], 0) @ value).transpose(0, 1)
    return out.to(query.dtype)


def _check_tensors(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *others: torch.Tensor | None) -> None:
    check(query.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
    check(keys.dtype == values.dtype == query.dtype, "query, key and value must have the same dtype")
    for tensor in (query, keys, values):
        check(tensor.stride(-1) == 1, "the last dimension must be contiguous")
        check(tensor.device == query.device, "all tensors must be on one device")
    check(query.shape[-1] <= 256 and query.shape[-1] % 8 == 0, "head_size must be a multiple of 8, at most 256")
    check(query.shape[-2] % keys.shape[-2] == 0, "heads of K/V must divide heads of Q")
    check(
        keys.dim() == 4 and keys.shape == values.shape and keys.shape[-1] == query.shape[-1],
        "k_cache has a wrong shape",
    )
    for other in others:
        check(other is None or (other.dtype == torch.int32 and other.device == query.device), "must have dtype int32")
        check(other is None or other.stride(-1) == 1, "must have a contiguous last dimension")


def _check_values(begins: torch.Tensor, lengths: torch.Tensor, tokens: int, most_tokens: int, most_length: int) -> None:
    """Rules that the real kernels do not check: outside of them they drop tokens or read what is not theirs."""
    counts = begins.diff()
    check(int(begins[0]) == 0 and int(begins[-1]) == tokens and int(counts.min()) >= 0, "cu_seqlens_q is wrong")
    check(int(counts.max()) <= most_tokens, f"max_seqlen_q is {most_tokens}, a row has {int(counts.max())} tokens")
    check(int(lengths.min()) >= 0, "a row has a negative length")
    check(
        int(lengths.max()) <= most_length,
        f"a row of {int(lengths.max())} tokens does not fit max_seqlen_k or the table",
    )


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    begins: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    most_tokens: int,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    most_length: int | None = None,
) -> torch.Tensor:
    _check_tensors(query, keys, values, begins, lengths, tables)
    check(begins.is_contiguous() and lengths.is_contiguous(), "must be contiguous")
    check(begins.shape == (len(lengths) + 1,) and tables.shape[0] == len(lengths), "the rows differ in number")
    capacity = tables.shape[1] * keys.shape[1]
    most_length = capacity if most_length is None else min(most_length, capacity)
    check(softcap >= 0, "softcap must not be negative")
    if sinks is not None:
        check(sinks.dtype == torch.bfloat16 and sinks.shape == query.shape[1:2], "sinks must be bf16, one a head")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = window_size
    result: torch.Tensor = _flash(
        query,
        keys,
        values,
        begins,
        lengths,
        tables,
        scale,
        causal,
        left,
        right,
        softcap,
        most_tokens,
        most_length,
        sinks,
    )
    return result


def _append(
    keys: torch.Tensor,
    values: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    lengths: torch.Tensor,
    tables: torch.Tensor,
) -> torch.Tensor:
    """K and V [rows, tokens, kv_heads, dim] go behind `lengths` tokens of each row, in place; the new lengths."""
    rows, count = new[0].shape[:2]
    check(new[0].dtype == new[1].dtype == keys.dtype, "k and v must have the dtype of the cache")
    check(rows == len(lengths), "k and v must have a row for each query")
    for row, length in enumerate(lengths.tolist()):
        for token in range(count):
            block, place = divmod(length + token, keys.shape[1])
            check(block < tables.shape[1], "the cache is not large enough to hold the new values")
            for cache, part in zip((keys, values), new, strict=True):
                cache[int(tables[row, block]), place] = part[row, token]
    return lengths + count


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
    _check_tensors(q, k, v, cu_seqlens_k)
    check(cu_seqlens_k.shape == cu_seqlens_q.shape and cu_seqlens_k.is_contiguous(), "cu_seqlens_k has a wrong shape")
    lengths = cu_seqlens_k.diff()
    rows = len(cu_seqlens_q) - 1
    check(max_seqlen_q > 1 or len(q) == rows, "with max_seqlen_q of 1 every row must have one token")
    rest = softmax_scale, causal, window_size, softcap, None, max_seqlen_k
    return _attend(q, k, v, cu_seqlens_q, lengths, block_table, max_seqlen_q, *rest)


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
        lengths = _append(k_cache, v_cache, (k, v), lengths, table)
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
        lengths = _append(k_cache, v_cache, (k, v), lengths, table)
    if cu_seqlens_q is None:
        return _batched(q, k_cache, v_cache, lengths, table, softmax_scale, causal, window_size, softcap, sinks)
    check(q.dim() == 3, "q must be (total_q, nheads, headdim)")
    if max_seqlen_q is None:
        raise RefusedError("max_seqlen_q must be provided if cu_seqlens_q is provided")
    rest = softmax_scale, causal, window_size, softcap, sinks
    return _attend(q, k_cache, v_cache, cu_seqlens_q, lengths, table, max_seqlen_q, *rest)


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
    begins = torch.from_numpy(count * np.arange(rows + 1, dtype=np.int32))  # a kernel has no need of them
    return _attend(query.flatten(0, 1), keys, values, begins, lengths, table, count, *others).view(query.shape)


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
    return _attend(query, key, value, cu_seq_q, lengths, table, max_q, scale, causal, window_size, 0.0, None, max_k)


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
