"""Attention written out, for what torch's fused kernels do not compute, and as the reference.

Called by the ops. Knows no cache: it gets the keys that its queries may see.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scores(NamedTuple):
    """How products of queries and keys become weights; see `Ops.attend`."""

    scaling: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def explicit_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, rule: Scores
) -> torch.Tensor:
    """Attention of every head with the KV head of its group, softmax in float32.

    Args:
        query: [rows, heads, tokens, head_dim].
        keys: [rows, kv_heads, length, head_dim] in the dtype of `query`; `values` likewise.
        bias: 0 or -inf, broadcastable to [rows, heads, tokens, length].

    Returns:
        As `query`.
    """
    rows, heads, tokens, dim = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    grouped = query.reshape(rows, kv_heads, -1, dim)
    scores = (grouped @ keys.transpose(-1, -2)).float().view(rows, heads, tokens, length)
    scores *= dim**-0.5 if rule.scaling is None else rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if bias is not None:
        scores += bias
    if rule.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = rule.sinks.float()[:, None, None]
        peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = (scores - peak).exp_()
        weights /= weights.sum(-1, keepdim=True) + (sinks - peak).exp_()
    return (weights.to(values.dtype).view(rows, kv_heads, -1, length) @ values).view(query.shape)
