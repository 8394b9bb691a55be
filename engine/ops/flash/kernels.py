"""The flash kernels of several packages behind one call: attention of a step's rows over pages of K and V.

Made by `loading.py` from a package's module, called by `FlashOps`. What a version of a package can do is told by the
parameters of its functions. Knows no blocks' owners and no layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

from engine.ops.explicit import Scores

MOST_HEAD_DIM = 256
_SINKS = ("sinks", "s_aux", "learnable_sink")
_DISABLED = "FLASHATTENTION_DISABLE_"  # how FlashAttention 3 names what a build leaves out


class NotUsableError(Exception):
    """A kernel cannot be taken; the text says why, as the end of a sentence about it."""


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model's attention needs of a kernel.

    Attributes:
        features: as in `FlashKernel.features`.
        heads, kv_heads: of one layer in this process.
        page_size: tokens; None leaves it to the kernel.
        supports_flash: whether transformers says that the model's class runs with FlashAttention.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    features: frozenset[str] = frozenset()
    page_size: int | None = None
    supports_flash: bool = True


@dataclass(slots=True)
class FlashRows:
    """A step's rows as the kernels take them, for the layers of one group. Tensors are int32.

    Attributes:
        begins: [rows + 1], where each row's tokens begin in the packed order, and where the last one's end.
        lengths: [rows], tokens of each row in the cache, those of this step included.
        length_sums: [rows + 1], sums of `lengths` from 0 on.
        tables: [rows, width], the blocks of each row.
        most_tokens, most_length: no row has more; they may be bounds, where a recorded graph needs constants.
        is_decode: every row has one token, and the kernel for such steps may run.
    """

    begins: torch.Tensor
    lengths: torch.Tensor
    length_sums: torch.Tensor
    tables: torch.Tensor
    most_tokens: int
    most_length: int
    is_decode: bool = False


class FlashKernel(Protocol):
    """One package's attention.

    Attributes:
        implementation: the name that transformers has for it; None where it has none.
        package: names it for `loading.load`.
        title: names it in the log.
        page_multiple: pages must be a multiple of so many tokens.
        mixed_graphs: a recorded call serves later steps whose rows have other numbers of tokens.
        rows_apart: contexts of one-token rows are split between programs only in steps that have no other rows.
        features: of "window", "softcap", "sinks" and "float16" those that it computes.
        most_head_dim: no head may be larger.
    """

    implementation: str | None
    package: str
    title: str
    page_multiple: int
    mixed_graphs: bool
    rows_apart: bool
    features: frozenset[str]
    most_head_dim: int

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: FlashRows,
        window: int | None,
        rule: Scores,
    ) -> torch.Tensor:
        """Causal attention, each row's queries being its last tokens.

        Args:
            query: [tokens, heads, head_dim].
            keys: [blocks, page, kv_heads, head_dim], of any strides but the last; `values` likewise.
            window: tokens that a query sees, itself included; None sees all.

        Returns:
            [tokens, heads, head_dim].

        Raises:
            NotImplementedError: it lacks a feature.
        """
        ...


def attend_rows(
    kernel: FlashKernel,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Sequence[FlashRows],
    window: int | None,
    rule: Scores,
) -> torch.Tensor:
    """`FlashKernel.attend` of a step's rows: all at once, or one-token rows, which lie first, apart from the others."""
    if len(rows) == 1:
        return kernel.attend(query, keys, values, rows[0], window, rule)
    first = len(rows[0].lengths)
    queries = query[:first], query[first:]
    pairs = zip(queries, rows, strict=True)
    return torch.cat([kernel.attend(part, keys, values, own, window, rule) for part, own in pairs])


class _Kernel:
    """What the kernels have in common.

    Args:
        functions: all that may be called; a feature must be known to each of them.
    """

    def __init__(self, package: str, title: str, functions: list[Callable[..., Any]]) -> None:
        self.package, self.title = package, title
        self.most_head_dim = MOST_HEAD_DIM
        known = [set(inspect.signature(function).parameters) for function in functions]
        self._sinks = next((name for name in _SINKS if all(name in names for names in known)), None)
        options = {"window": "window_size", "softcap": "softcap", "sinks": self._sinks}
        features = {feature for feature, name in options.items() if all(name in names for names in known)}
        self.features = frozenset(features | {"float16"})

    def _options(self, window: int | None, rule: Scores) -> dict[str, Any]:
        wanted = {"window": window, "softcap": rule.softcap, "sinks": rule.sinks}
        for feature, value in wanted.items():
            if value is not None and feature not in self.features:
                raise NotImplementedError(
                    f"{self.title} computes no attention with {feature}, which the model was not known to need: load "
                    "it with attn_implementation='sdpa' and set auto_switch_to_flash=False"
                )
        options: dict[str, Any] = {}
        if window is not None:
            options["window_size"] = (window - 1, 0)  # both ends count, the query's own position does not
        if rule.softcap is not None:
            options["softcap"] = rule.softcap
        if rule.sinks is not None and self._sinks is not None:
            options[self._sinks] = rule.sinks.to(torch.bfloat16)
        return options


class FlashAttention2(_Kernel):
    """`flash_attn`: one call for mixed steps, another, which splits long contexts, for one-token rows.

    Raises:
        NotUsableError: the version has no block tables.
    """

    implementation: str | None = "flash_attention_2"
    page_multiple = 256
    mixed_graphs = False  # with one token in every row another kernel is launched
    rows_apart = True

    def __init__(self, module: ModuleType, package: str, title: str) -> None:
        self._varlen = _function(module, "flash_attn_varlen_func", "block_table")
        self._with_cache = _function(module, "flash_attn_with_kvcache", "block_table")
        super().__init__(package, title, [self._varlen, self._with_cache])

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: FlashRows,
        window: int | None,
        rule: Scores,
    ) -> torch.Tensor:
        """See `FlashKernel.attend`."""
        options = self._options(window, rule) | {"softmax_scale": rule.scaling, "causal": True}
        if rows.is_decode:
            out: torch.Tensor = self._with_cache(
                query[:, None], keys, values, cache_seqlens=rows.lengths, block_table=rows.tables, **options
            )
            return out[:, 0]
        out = self._varlen(
            query,
            keys,
            values,
            cu_seqlens_q=rows.begins,
            cu_seqlens_k=rows.length_sums,
            max_seqlen_q=rows.most_tokens,
            max_seqlen_k=rows.most_length,
            block_table=rows.tables,
            **options,
        )
        return out


class FlashAttention3(_Kernel):
    """`flash_attn_interface`: one call whatever the rows are, with pages of any size.

    Args:
        flags: what the build was made with, as its `flash_attn_config` says.

    Raises:
        NotUsableError: the version, or this build of it, has no packed rows over pages.
    """

    implementation: str | None = "flash_attention_3"
    page_multiple = 1
    mixed_graphs = True
    rows_apart = False

    def __init__(self, module: ModuleType, package: str, title: str, flags: Mapping[str, bool] | None = None) -> None:
        off = {name.removeprefix(_DISABLED) for name, is_off in (flags or {}).items() if is_off}
        for part in ("PAGEDKV", "VARLEN"):
            if part in off:
                raise NotUsableError(f"was built without {part}")
        self._with_cache = _function(module, "flash_attn_with_kvcache", "cu_seqlens_q")
        names = inspect.signature(self._with_cache).parameters
        self._table_name = "page_table" if "page_table" in names else "block_table"
        super().__init__(package, title, [self._with_cache])
        left_out = {"LOCAL": "window", "SOFTCAP": "softcap", "FP16": "float16"}
        self.features -= {feature for part, feature in left_out.items() if part in off}
        self.most_head_dim = max((dim for dim in (64, 96, 128, 192, 256) if f"HDIM{dim}" not in off), default=0)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: FlashRows,
        window: int | None,
        rule: Scores,
    ) -> torch.Tensor:
        """See `FlashKernel.attend`."""
        options = self._options(window, rule) | {"softmax_scale": rule.scaling, "causal": True}
        options |= {"cache_seqlens": rows.lengths, self._table_name: rows.tables}
        if rows.is_decode:
            out: torch.Tensor = self._with_cache(query[:, None], keys, values, **options)
            return out[:, 0]
        return self._with_cache(query, keys, values, cu_seqlens_q=rows.begins, max_seqlen_q=rows.most_tokens, **options)


class TorchVarlen(_Kernel):
    """`varlen_attn` of torch 2.12 and newer, which has FlashAttention 2 inside.

    Raises:
        NotUsableError: this torch has none with block tables.
    """

    implementation: str | None = None
    page_multiple = 256
    mixed_graphs = False
    rows_apart = True

    def __init__(self, module: ModuleType, package: str, title: str) -> None:
        self._varlen = _function(module, "varlen_attn", "block_table")
        super().__init__(package, title, [self._varlen])

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: FlashRows,
        window: int | None,
        rule: Scores,
    ) -> torch.Tensor:
        """See `FlashKernel.attend`."""
        self._options(window, rule)
        return self._varlen(
            query,
            keys,
            values,
            rows.begins,
            None,
            rows.most_tokens,
            rows.most_length,
            scale=rule.scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=rows.lengths,
            block_table=rows.tables,
        )


def _function(module: ModuleType, name: str, parameter: str) -> Callable[..., Any]:
    """A function of the module that takes this parameter; NotUsableError without."""
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise NotUsableError(f"has no {name}")
    if parameter not in inspect.signature(function).parameters:
        raise NotUsableError(f"is too old: its {name} takes no {parameter}")
    return function
