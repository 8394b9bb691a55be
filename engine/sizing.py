"""How many bytes things take, and what fits into a memory budget: step sizes, cache blocks, blocks kept on the host.

Called when settings are resolved. Pure arithmetic over the model's facts; knows no config and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.cache.groups import LayerGroup

if TYPE_CHECKING:
    from engine.facts import ModelFacts

GIB = 1 << 30
MIN_BATCH_TOKENS = 256
DEFAULT_REQUESTS = 1024
RESERVED_BLOCKS = 2  # the null block, which is never written, and the trash block, which padding writes to
STAGINGS = 2  # places on the device where blocks are put together that go to the host or come from it
MAX_HOST_BLOCKS = 65536  # each costs host memory for its bookkeeping from the start


@dataclass(frozen=True)
class StepSize:
    """What one step may hold, and the bytes that it takes.

    Attributes:
        tokens: computed in one step.
        requests: rows of logits.
        max_blocks: width of the block table of replayed decode-only steps.
        replayed: steps are recorded and replayed, which takes buffers that stay.
    """

    tokens: int
    requests: int
    max_blocks: int = 0
    replayed: bool = False

    def bytes(self, facts: ModelFacts) -> int:
        """Of activations, logits and, where steps are replayed, the buffers that stay."""
        return self.tokens * token_bytes(facts) + self.requests * row_bytes(facts) + self.buffer_bytes(facts)

    def buffer_bytes(self, facts: ModelFacts) -> int:
        """Of what stays where steps are replayed: their input, and logits of mixed and of decode-only ones."""
        if not self.replayed:
            return 0
        inputs = 16 * self.tokens + 8 * self.requests * (2 + self.max_blocks)
        return inputs + 2 * self.requests * facts.vocab_size * facts.dtype_bytes


def token_bytes(facts: ModelFacts) -> int:
    """Step memory of one token: hidden states, projections and the gated MLP, some 16 vectors of the model's width."""
    return 16 * facts.num_heads * facts.head_dim * facts.dtype_bytes


def row_bytes(facts: ModelFacts) -> int:
    """Step memory of one row of logits: as the model gives them, as float32, and two float32 copies in sampling."""
    return facts.vocab_size * (facts.dtype_bytes + 12)


def block_bytes(facts: ModelFacts, groups: Sequence[LayerGroup], page_size: int) -> int:
    """One block: a page of K and V in each layer of one group. Groups share the memory, so the largest counts."""
    layers = max(len(group.layers) for group in groups)
    return layers * page_size * 2 * facts.num_kv_heads * facts.head_dim * facts.dtype_bytes


def default_batch_tokens(wanted: int, facts: ModelFacts, budget: int | None) -> int:
    """`wanted`, cut so that a step's tokens take an eighth of the budget at most; not below 256."""
    if budget is None:
        return wanted
    return max(MIN_BATCH_TOKENS, min(wanted, budget // 8 // token_bytes(facts)))


def default_requests(hinted: int, facts: ModelFacts, budget: int | None) -> int:
    """`hinted`, or 1024, at most 1024, cut so that the logits take an eighth of the budget at most."""
    count = min(hinted or DEFAULT_REQUESTS, DEFAULT_REQUESTS)
    return count if budget is None else max(1, min(count, budget // 8 // row_bytes(facts)))


def default_decode_tokens(requests: int, facts: ModelFacts, budget: int | None) -> int | None:
    """Tokens of a row for whose partial results, of all rows together, a 32nd of the budget has room.

    Each 256 tokens have one float32 vector of every head, and two numbers more.
    """
    if budget is None:
        return None
    return max(1, budget * 256 // (32 * requests * facts.num_heads * (facts.head_dim + 2) * 4))


def staging_blocks(num_blocks: int, host_slots: int) -> int:
    """Blocks of each staging place beside a cache of so many: a 64th of it in both together, at least one in each."""
    return max(1, min(host_slots, num_blocks // (64 * STAGINGS)))


def fit_blocks(
    wanted: int | None, most: int | None, page_size: int, size: int, step: int, budget: int, *, offloads: bool = False
) -> int:
    """Blocks of `size` bytes that fit beside `step` bytes: as many as `wanted`, else all, but not more than `most`.

    Args:
        offloads: blocks may be kept on the host, so that there are staging places.

    Raises:
        MemoryError: not even one fits, or not `wanted`; the text has the numbers.
    """

    def beside(blocks: int) -> int:
        """Blocks that there are besides."""
        return RESERVED_BLOCKS + (STAGINGS * staging_blocks(blocks + RESERVED_BLOCKS, blocks) if offloads else 0)

    room = (budget - step) // size
    fitting = room - beside(room)
    least = 1 if wanted is None else wanted
    if least > fitting:
        needed = step + (least + beside(least)) * size
        raise MemoryError(
            f"{least} blocks of {page_size} tokens and the buffers of a step take {needed / GIB:.2f} GiB "
            f"({step / GIB:.2f} GiB for the buffers), {(needed - budget) / GIB:.2f} more than the budget of "
            f"{budget / GIB:.2f} GiB: lower num_blocks, max_batch_tokens or max_requests_per_batch, or raise "
            "max_memory_percent"
        )
    if wanted is not None:
        return wanted
    return fitting if most is None else min(fitting, most)
