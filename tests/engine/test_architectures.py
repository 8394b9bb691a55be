"""Every architecture through the paged cache against its own plain forward pass, in pieces of any size.

Block tables are kept by hand: blocks behind a window are taken away and filled with NaN, and so is all memory that
nobody has written to.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import allocate
from engine.execution.model_runner import ModelRunner
from engine.model.shadow import make_shadow, model_facts
from engine.ops import make_ops
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.settings import Settings
from tests.architectures import ARCHITECTURES, VISION, VOCAB, WINDOW, build
from tests.engine.tables import set_tables

NUM_BLOCKS = 200


def make_runner(
    model: PreTrainedModel, page: int = 8, attention: str = "sdpa", auto_switch: bool = True
) -> tuple[ModelRunner, Settings, list[torch.Tensor]]:
    """A runner, its settings, and the tensors of its cache, which hold NaN."""
    facts = model_facts(model)
    groups = tuple(
        LayerGroup(tuple(layer for layer, other in enumerate(facts.windows) if other == window), window)
        for window in sorted(set(facts.windows), key=str)
    )
    settings = Settings(
        page_size=page,
        num_blocks=NUM_BLOCKS,
        max_batch_tokens=64,
        max_requests=16,
        safety_margin=0.0,
        sharing=True,
        return_logprobs=False,
        per_request_processors=True,
        seed=0,
        scheduler_type="fifo",
        context_length=facts.context_length or 256,
        vocab_size=facts.vocab_size,
        kv_bytes_per_block=facts.kv_bytes_per_token * page,
        device_type="cpu",
        groups=groups,
    )
    size = max(len(group.layers) for group in groups)
    kv = allocate(size, NUM_BLOCKS, facts.num_kv_heads, page, facts.head_dim, model.dtype)
    ops = make_ops(kv, groups, attention=attention, auto_switch=auto_switch)
    tensors = [*kv.keys, *kv.values]
    for tensor in tensors:
        tensor[1:] = math.nan
    return ModelRunner(make_shadow(model), settings, ops=ops), settings, tensors


class Rows:
    """Requests whose tokens are run in whatever pieces a test likes; the logits of each sampled position are kept."""

    def __init__(self, model: PreTrainedModel, lengths: list[int], **options: Any) -> None:
        self.model = model
        self.runner, self.settings, self.tensors = make_runner(model, **options)
        generator = random.Random(0)
        self.requests = [
            Request(
                str(row),
                [generator.randrange(VOCAB) for _ in range(length)],
                length,
                SamplingParams(max_new_tokens=100),
            )
            for row, length in enumerate(lengths)
        ]
        self.free = list(range(1, NUM_BLOCKS + 1))
        generator.shuffle(self.free)
        self.tables: list[list[list[int]]] = [[[] for _ in self.settings.groups] for _ in lengths]
        self.logits: list[list[tuple[int, torch.Tensor]]] = [[] for _ in lengths]

    def step(self, counts: dict[int, int]) -> None:
        """Runs so many tokens of each row and appends the most likely token to those that are complete."""
        batch = ScheduledBatch()
        for row, count in counts.items():
            request = self.requests[row]
            self.provide(row, count)
            batch.starts.append(request.computed)
            request.computed += count
            if request.remaining == 0:
                batch.sampled.append(len(batch.requests))
            batch.requests.append(request)
            batch.counts.append(count)
        set_tables(batch, [self.tables[row] for row in counts])
        pending = self.runner.launch(batch)
        for request, logits in zip(pending.requests, pending.logits, strict=True):
            self.logits[int(request.request_id)].append((request.computed - 1, logits.clone()))
            request.token_ids.append(int(logits.argmax()))

    def provide(self, row: int, count: int) -> None:
        """Takes the blocks behind the windows away and gives those that are missing."""
        page, start = self.settings.page_size, self.requests[row].computed
        for table, group in zip(self.tables[row], self.settings.groups, strict=True):
            behind = 0 if group.window is None else max(0, start - group.window + 1) // page
            for index in range(min(behind, len(table))):
                if table[index]:
                    for tensor in self.tensors:
                        tensor[table[index]] = math.nan
                    self.free.insert(0, table[index])
                    table[index] = 0
            while len(table) * page < start + count:
                table.append(self.free.pop(0))

    def check(self) -> int:
        """Compares what was kept with one plain forward pass of each sequence; returns how much it was."""
        for request, kept in zip(self.requests, self.logits, strict=True):
            with torch.no_grad():
                expected = self.model(input_ids=torch.tensor([request.token_ids]), use_cache=False).logits[0]
            limit = 5e-5 * expected.abs().max()  # some architectures have logits of 50
            for position, logits in kept:
                assert (logits - expected[position]).abs().max() < limit, f"position {position} of {request.request_id}"
        assert not any(tensor[0].any() for tensor in self.tensors)
        return sum(map(len, self.logits))


def run_in_pieces(rows: Rows, seed: int, steps: int) -> None:
    """Steps of random rows: pieces of up to 1.5 windows of those that have tokens left, one token of the others."""
    generator = random.Random(seed)
    for _ in range(steps):
        some = [row for row in range(len(rows.requests)) if generator.random() < 0.8] or [0]
        rows.step({row: min(generator.randint(1, 24), rows.requests[row].remaining) for row in some})


LENGTHS = [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 40, 60]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_the_plain_forward(name: str) -> None:
    rows = Rows(ARCHITECTURES[name](), LENGTHS)
    run_in_pieces(rows, seed=1, steps=26)
    assert rows.check() > 100
    assert min(request.computed for request in rows.requests) > WINDOW
    assert max(request.computed for request in rows.requests) > 4 * WINDOW


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "cohere2"])
def test_logits_with_every_backend(name: str, attention: str) -> None:
    rows = Rows(ARCHITECTURES[name](), LENGTHS, attention=attention, auto_switch=False)
    run_in_pieces(rows, seed=2, steps=14)
    assert rows.check() > 40


@pytest.mark.parametrize("page", [4, 5, 16, 64])
def test_windows_at_any_page_size(page: int) -> None:
    rows = Rows(ARCHITECTURES["gemma2"](), LENGTHS, page=page)
    run_in_pieces(rows, seed=3, steps=14)
    assert rows.check() > 40


@pytest.mark.parametrize("pieces", [[60], [WINDOW] * 3 + [12], [WINDOW - 1, 1, WINDOW + 1, 27], [1] * 60])
def test_pieces_at_window_borders(pieces: list[int]) -> None:
    """A prompt in one piece, in pieces that end at, before and behind a window's border, and token by token."""
    rows = Rows(ARCHITECTURES["gpt_oss"](), [60])
    for count in [*pieces, 1, 1, 1]:
        rows.step({0: count})
    assert rows.check() == 4


@pytest.mark.parametrize("name", VISION)
def test_text_through_models_that_also_see(name: str) -> None:
    rows = Rows(VISION[name](), LENGTHS)
    run_in_pieces(rows, seed=4, steps=12)
    assert rows.check() > 30


MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 4,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("stablelm", {}, "StableLmAttention does not hand the forward's keyword arguments"),
        ("nemotron", {}, "NemotronAttention does not hand the forward's keyword arguments"),
        ("gpt_neox_japanese", {}, "0 of 4 layers"),
        ("deepseek_v3", MLA, "K of 4 heads x 16 and V of 4 x 8; K and V of every layer"),
        ("mimo_v2_flash", {"head_dim": 16, "v_head_dim": 16, "n_routed_experts": 2}, "K of 4 heads x 16.* must be 2 x"),
        ("bert", {}, "BertSelfAttention lets tokens see later ones"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "Gemma3Attention lets tokens see later ones"),
        ("doge", {}, "DogeAttention makes an attention mask of its own"),
        ("diffllama", {}, "layer 1 should; every layer must run once and in order"),
        (
            "hrm_text",
            {"num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 16},
            "every layer must run once and in order",
        ),
        (
            "mistral",
            {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer 0 of MistralAttention has sliding_window=16, but None",
        ),
    ],
)
def test_what_cannot_run_is_refused_at_construction(model_type: str, fields: dict[str, Any], named: str) -> None:
    model = build(model_type, **fields)
    with pytest.raises(NotImplementedError, match=named):
        make_runner(model)
