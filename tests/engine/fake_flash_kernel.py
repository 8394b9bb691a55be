"""The kernel of the flash packages that are not there (`fake_flash.py`): packed rows over pages, in plain torch.

What the real kernels refuse is an error here, and so is what they would silently do wrong. Numbers are computed in
float64, tile by tile as the kernels read memory: what lies in a tile beside something that is seen is multiplied by 0,
so NaN there comes through. One operator of torch does all of it, as a device's kernel would, so that recorders see one
launch.
"""

from __future__ import annotations

import torch

TILE = 128


class RefusedError(RuntimeError):
    """What the real function would not take."""


def check(is_right: bool, text: str) -> None:
    if not is_right:
        raise RefusedError(text)


@torch.library.custom_op("convoy_tests::flash", mutates_args=())
def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    begins: torch.Tensor | None,
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
    """query [tokens, heads, dim]; keys, values [blocks, page, kv_heads, dim]; tokens of row i begin at begins[i].

    Without `begins` every row has `most_tokens`.
    """
    if begins is None:
        begins = most_tokens * torch.arange(len(lengths) + 1)
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


@_flash.register_fake
def _(query: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def check_tensors(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *others: torch.Tensor | None) -> None:
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


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    begins: torch.Tensor | None,
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
    check_tensors(query, keys, values, begins, lengths, tables)
    check((begins is None or begins.is_contiguous()) and lengths.is_contiguous(), "must be contiguous")
    check(begins is None or begins.shape == (len(lengths) + 1,), "the rows differ in number")
    check(tables.shape[0] == len(lengths), "the rows differ in number")
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


def append(
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
