"""That the fake flash kernels are no laxer than the real ones: what they refuse, what they let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine import fake_flash
from tests.engine.fake_flash_kernel import RefusedError

FA2, FA3, TORCH = fake_flash.flash_attn(), fake_flash.flash_attn_interface(), fake_flash.torch_varlen()
PAGE, BLOCKS, HEADS, KV_HEADS, DIM = 256, 4, 4, 2, 16


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def pages(**change: Any) -> torch.Tensor:
    sizes = {"blocks": BLOCKS, "page": PAGE, "heads": KV_HEADS, "dim": DIM} | change
    return torch.randn(*sizes.values(), generator=torch.Generator().manual_seed(0)).half()


def queries(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).half()


def varlen_2(**change: Any) -> torch.Tensor:
    """Two rows, of 3 and 2 tokens, with contexts of 300 and 2."""
    arguments = {
        "q": queries(5, HEADS, DIM),
        "k": pages(),
        "v": pages(),
        "cu_seqlens_q": int32(0, 3, 5),
        "cu_seqlens_k": int32(0, 300, 302),
        "max_seqlen_q": 3,
        "max_seqlen_k": 300,
        "causal": True,
        "block_table": int32(1, 2, 3, 0).view(2, 2),
    }
    return FA2.flash_attn_varlen_func(**arguments | change)  # type: ignore[no-any-return]


def cached_2(**change: Any) -> torch.Tensor:
    arguments = {
        "q": queries(2, 1, HEADS, DIM),
        "k_cache": pages(),
        "v_cache": pages(),
        "cache_seqlens": int32(300, 2),
        "block_table": int32(1, 2, 3, 0).view(2, 2),
        "causal": True,
    }
    return FA2.flash_attn_with_kvcache(**arguments | change)  # type: ignore[no-any-return]


def cached_3(**change: Any) -> torch.Tensor:
    arguments = {
        "q": queries(5, HEADS, DIM),
        "k_cache": pages(page=7),
        "v_cache": pages(page=7),
        "cache_seqlens": int32(10, 2),
        "page_table": int32(1, 2, 3, 0).view(2, 2),
        "cu_seqlens_q": int32(0, 3, 5),
        "max_seqlen_q": 3,
        "causal": True,
    }
    return FA3.flash_attn_with_kvcache(**arguments | change)  # type: ignore[no-any-return]


def varlen_torch(**change: Any) -> torch.Tensor:
    arguments = {
        "query": queries(5, HEADS, DIM),
        "key": pages(),
        "value": pages(),
        "cu_seq_q": int32(0, 3, 5),
        "cu_seq_k": None,
        "max_q": 3,
        "max_k": 300,
        "window_size": (-1, 0),
        "enable_gqa": True,
        "seqused_k": int32(300, 2),
        "block_table": int32(1, 2, 3, 0).view(2, 2),
    }
    return TORCH.varlen_attn(**arguments | change)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("call", "change", "text"),
    [
        (varlen_2, {"q": queries(5, HEADS, DIM).float()}, "fp16 and bf16"),
        (varlen_2, {"k": pages().bfloat16()}, "same dtype"),
        (varlen_2, {"k": pages(page=128), "v": pages(page=128)}, "divisible by 256"),
        (varlen_2, {"k": pages(heads=3), "v": pages(heads=3)}, "heads of K/V"),
        (varlen_2, {"q": queries(5, HEADS, 20), "k": pages(dim=20), "v": pages(dim=20)}, "multiple of 8"),
        (varlen_2, {"q": queries(5, HEADS, 264), "k": pages(dim=264), "v": pages(dim=264)}, "at most 256"),
        (varlen_2, {"q": queries(5, DIM, HEADS).transpose(1, 2)}, "last dimension must be contiguous"),
        (varlen_2, {"cu_seqlens_q": torch.tensor([0, 3, 5])}, "int32"),
        (varlen_2, {"cu_seqlens_k": torch.tensor([0, 300, 302])}, "int32"),
        (varlen_2, {"block_table": torch.tensor([[1, 2], [3, 0]])}, "int32"),
        (varlen_2, {"max_seqlen_q": 2}, "max_seqlen_q is 2, a row has 3"),
        (varlen_2, {"max_seqlen_q": 1}, "every row must have one token"),
        (varlen_2, {"max_seqlen_k": 299}, "max_seqlen_k"),
        (varlen_2, {"cu_seqlens_q": int32(0, 3, 4)}, "cu_seqlens_q is wrong"),
        (varlen_2, {"block_table": int32(1, 9, 3, 0).view(2, 2)}, "illegal memory access"),
        (varlen_2, {"block_table": int32(1, 3).view(2, 1)}, "the table"),
        (cached_2, {"cache_seqlens": torch.tensor([300, 2])}, "cache_seqlens must have dtype int32"),
        (cached_2, {"k_cache": pages(page=128), "v_cache": pages(page=128)}, "divisible by 256"),
        (cached_2, {"q": queries(2, HEADS, DIM)}, "batch_size, seqlen"),
        (cached_2, {"q": queries(3, 1, HEADS, DIM)}, "one number for each query"),
        (cached_2, {"num_splits": 129}, "num_splits"),
        (cached_3, {"max_seqlen_q": None}, "max_seqlen_q must be provided"),
        (cached_3, {"max_seqlen_q": 2}, "a row has 3 tokens"),
        (cached_3, {"page_table": int32(1, 3).view(2, 1)}, "does not fit"),
        (cached_3, {"cache_seqlens": int32(10, 2, 3)}, "differ in number"),
        (varlen_torch, {"enable_gqa": False}, "enable_gqa"),
        (varlen_torch, {"key": pages(page=128), "value": pages(page=128)}, "divisible by 256"),
        (varlen_torch, {"max_k": 299}, "max_seqlen_k"),
    ],
)
def test_what_real_kernels_do_not_take(call: Callable[..., torch.Tensor], change: dict[str, Any], text: str) -> None:
    assert call().isfinite().all()
    with pytest.raises(RefusedError, match=text):
        call(**change)


def test_rows_are_aligned_at_their_end() -> None:
    """Of a row with 3 queries the first does not see the last two keys; the window counts both of its ends."""
    k, v = pages(), pages()
    whole = varlen_2(k=k, v=v)
    k[2, 298 - PAGE], v[2, 298 - PAGE] = 5, 5
    changed = (varlen_2(k=k, v=v) != whole).flatten(1).any(1)
    assert changed.tolist() == [False, True, True, False, False]
    for left, seen in ((1, [False, True, True]), (0, [False, True, False])):
        windows = [varlen_2(k=each, v=each, window_size=(left, 0)) for each in (pages(), k)]
        assert (windows[0] != windows[1]).flatten(1).any(1)[:3].tolist() == seen


@pytest.mark.parametrize("cached", [cached_2, cached_3])
def test_given_keys_and_values_are_appended_in_place(cached: Callable[..., torch.Tensor]) -> None:
    """Behind `cache_seqlens` tokens, which is then the length before."""
    k, v = queries(2, 1, KV_HEADS, DIM), queries(2, 1, KV_HEADS, DIM) + 1
    ours, theirs = (pages(), pages()), (pages(), pages())
    for row, (block, place) in enumerate([(2, 300 - PAGE), (3, 2)]):
        ours[0][block, place], ours[1][block, place] = k[row, 0], v[row, 0]
    common: dict[str, Any] = {"q": queries(2, 1, HEADS, DIM)}
    if cached is cached_3:
        common |= {"cu_seqlens_q": None}
    expected = cached(**common, k_cache=ours[0], v_cache=ours[1], cache_seqlens=int32(301, 3))
    out = cached(**common, k_cache=theirs[0], v_cache=theirs[1], cache_seqlens=int32(300, 2), k=k, v=v)
    assert torch.equal(out, expected)
    assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])


def test_what_lies_beside_the_context_in_its_tile_is_multiplied_by_0() -> None:
    """As kernels do that read whole tiles: so a cache must not hold NaN there."""
    v = pages()
    v[2, 302 - PAGE] = float("nan")
    assert varlen_2(v=v).isnan().flatten(1).any(1).tolist() == [True, True, True, False, False]
    v = pages()
    v[2, -1] = float("nan")  # in another tile
    assert varlen_2(v=v).isfinite().all()


def test_rows_without_tokens_and_without_a_context() -> None:
    out = cached_3(q=queries(3, HEADS, DIM), cu_seqlens_q=int32(0, 3, 3), cache_seqlens=int32(10, 0))
    assert torch.equal(out, cached_3()[:3])
    assert not cached_3(cache_seqlens=int32(10, 0))[3:].any()
