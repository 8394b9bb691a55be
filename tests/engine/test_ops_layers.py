"""The kernels between a layer's products against the modules of transformers, at any width and number of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine.ops.cpu.layers import HeadNorms, gather_op, norm_op, rotate_op
from engine.ops.cpu.library import Op, Step, Tape

DTYPES = (torch.float32, torch.bfloat16)
EPSILON = 1e-5
UNTOUCHED = 77.0
SPARE = 3  # rows behind those of the step


def run(op: Op, tokens: int, kept: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> None:
    keep = torch.empty(0, dtype=torch.int64) if kept is None else kept
    places = torch.zeros(tokens, dtype=torch.int64) if positions is None else positions
    step = Step(tokens=tokens, kept=len(keep), keep=keep.data_ptr(), positions=places.data_ptr())
    Tape([op]).run(step, threads=2)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To rounding: of fp32 sums, and of what is stored."""
    bits = 5e-6 if found.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.float(), expected.float(), rtol=bits, atol=2 * bits)


@given(
    rows=st.integers(0, 70),
    width=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from((LlamaRMSNorm, GemmaRMSNorm, None)),
    adds=st.booleans(),
    kept=st.booleans(),
)
def test_norms(rows: int, width: int, dtype: torch.dtype, kind: type | None, adds: bool, kept: bool) -> None:
    x, added = random(1, rows + SPARE, width), random(2, rows + SPARE, width)
    norm, other = (None, None) if kind is None else (kind(width, eps=EPSILON), kind(width, eps=EPSILON))
    offset = 1 if kind is GemmaRMSNorm else 0
    after = random(4, width)
    expected = x.clone()
    with torch.no_grad():
        if norm is not None:
            norm.weight.copy_(random(3, width))
            other.weight.copy_(after - offset)
        if adds:
            added_norm = other or LlamaRMSNorm(width, eps=EPSILON)
            if other is None:
                added_norm.weight.copy_(after)
            expected[:rows] += added_norm(added[:rows])
        result = expected if norm is None else norm(expected)
    out = torch.full((rows + SPARE, width), UNTOUCHED, dtype=dtype)
    op = norm_op(
        x,
        out,
        weight=None if norm is None else norm.weight.detach() + offset,
        epsilon=EPSILON,
        added=added if adds else None,
        added_weight=after if adds else None,
        kept=kept,
    )
    run(op, tokens=0 if kept else rows, kept=torch.zeros(rows, dtype=torch.int64) if kept else None)
    assert_close(x, expected)
    assert_close(out[:rows], result[:rows])
    assert (out[rows:] == UNTOUCHED).all()


@given(
    rows=st.integers(0, 40),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    dim=st.integers(1, 20).map(lambda half: 2 * half),
    turned=st.floats(0, 1),
    norms=st.sampled_from(("none", "each", "whole")),
    dtype=st.sampled_from(DTYPES),
)
def test_rotation(
    rows: int, heads: int, kv_heads: int, dim: int, turned: float, norms: str, dtype: torch.dtype
) -> None:
    pairs = int(turned * dim) // 2
    qkv = random(1, rows + SPARE, (heads + 2 * kv_heads) * dim).to(dtype)
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(2))
    table = torch.stack([random(3, 50, pairs).cos(), random(3, 50, pairs).sin()], dim=1)
    query, key, rest = qkv.clone().split((heads * dim, kv_heads * dim, kv_heads * dim), dim=1)
    expected = [part.float()[:rows].view(rows, count, dim) for part, count in ((query, heads), (key, kv_heads))]
    weights = None
    if norms != "none":
        kind = Olmo2RMSNorm if norms == "whole" else Qwen3RMSNorm
        widths = (heads * dim, kv_heads * dim) if norms == "whole" else (dim, dim)
        modules = [kind(width, EPSILON) for width in widths]
        with torch.no_grad():
            for seed, module in enumerate(modules):
                module.weight.copy_(random(seed + 4, *module.weight.shape))
            expected = [
                module(part.reshape(-1, width)).view(part.shape)
                for module, part, width in zip(modules, expected, widths, strict=True)
            ]
        weights = HeadNorms(modules[0].weight.detach(), modules[1].weight.detach(), EPSILON)
    cos, sin = (table[positions, i].repeat(1, 2) for i in range(2))
    expected = list(apply_rotary_pos_emb(*expected, cos, sin, unsqueeze_dim=1)) if pairs else expected
    op = rotate_op(qkv, heads, kv_heads, dim, table=table.contiguous() if pairs else None, norms=weights)
    before = qkv.clone()
    run(op, tokens=rows, positions=positions)
    found = qkv[:rows].split((heads * dim, kv_heads * dim, kv_heads * dim), dim=1)
    for part, wanted in zip(found, expected, strict=False):
        bits = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(part.float(), wanted.flatten(1), rtol=bits, atol=bits * 10)
    assert torch.equal(found[2], rest[:rows])
    assert torch.equal(qkv[rows:], before[rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    x, weight = random(1, 300, 96), random(2, 96)
    whole = torch.empty(300, 96, dtype=dtype)
    run(norm_op(x, whole, weight=weight, epsilon=EPSILON), tokens=300)
    for row in (0, 7, 299):
        alone = torch.empty(1, 96, dtype=dtype)
        run(norm_op(x[row : row + 1], alone, weight=weight, epsilon=EPSILON), tokens=1)
        assert torch.equal(alone[0], whole[row])


@given(kept=st.lists(st.integers(0, 19), max_size=40), dtype=st.sampled_from(DTYPES))
def test_gathering(kept: list[int], dtype: torch.dtype) -> None:
    source, keep = random(1, 20, 7).to(dtype), torch.tensor(kept, dtype=torch.int64)
    target = torch.full((len(kept) + SPARE, 7), UNTOUCHED, dtype=dtype)
    run(gather_op(source, target), tokens=20, kept=keep)
    assert torch.equal(target[: len(kept)], source[keep])
    assert (target[len(kept) :] == UNTOUCHED).all()


def test_what_does_not_fit_is_refused() -> None:
    x, out = torch.zeros(4, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="one width"):
        norm_op(x, out, weight=torch.zeros(9), epsilon=EPSILON)
    with pytest.raises(ValueError, match="float32"):
        norm_op(x, out, weight=torch.zeros(8, dtype=torch.bfloat16), epsilon=EPSILON)
    with pytest.raises(ValueError, match="one width"):
        norm_op(x, out, weight=None, epsilon=EPSILON, added=x)
    with pytest.raises(ValueError, match="contiguous"):
        norm_op(torch.zeros(8, 4).T, out, weight=None, epsilon=EPSILON)
    with pytest.raises(ValueError, match="not torch.float16"):
        norm_op(x, out.half(), weight=None, epsilon=EPSILON)
    with pytest.raises(ValueError, match="do not fit"):
        rotate_op(x, 2, 1, 4)
    with pytest.raises(ValueError, match="do not fit"):
        rotate_op(x, 1, 1, 4, table=torch.zeros(5, 2, 3))
    with pytest.raises(ValueError, match="do not fit"):
        rotate_op(x, 1, 1, 4, norms=HeadNorms(torch.ones(4), torch.ones(8), EPSILON))
    with pytest.raises(ValueError, match="do not fit"):
        gather_op(x, torch.zeros(4, 9))
