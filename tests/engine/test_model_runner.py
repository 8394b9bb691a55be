"""The runner against the model's own forward pass: every architecture, any mix of rows, and what must not hurt it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import allocate
from engine.execution.model_runner import ModelRunner
from engine.model.shadow import make_shadow, model_facts
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.settings import Settings
from tests.models import build_tiny

PAGE = 16


def make_runner(model: PreTrainedModel, num_blocks: int = 120) -> ModelRunner:
    facts = model_facts(model)
    settings = Settings(
        page_size=PAGE,
        num_blocks=num_blocks,
        max_batch_tokens=64,
        max_requests=16,
        safety_margin=0.0,
        sharing=True,
        return_logprobs=False,
        per_request_processors=True,
        seed=0,
        scheduler_type="fifo",
        context_length=128,
        vocab_size=facts.vocab_size,
        kv_bytes_per_block=facts.kv_bytes_per_token * PAGE,
        device_type="cpu",
        groups=(LayerGroup(tuple(range(facts.num_layers))),),
    )
    return ModelRunner(make_shadow(model), settings)


class Rows:
    """Requests with blocks of their own, whose tokens are run in whatever pieces a test likes."""

    def __init__(self, runner: ModelRunner, vocab_size: int, lengths: list[int], blocks_each: int = 8) -> None:
        self.runner = runner
        generator = random.Random(0)
        self.requests = [
            Request(
                str(i),
                [generator.randrange(vocab_size) for _ in range(length)],
                length,
                SamplingParams(max_new_tokens=100),
            )
            for i, length in enumerate(lengths)
        ]
        blocks = generator.sample(range(1, len(lengths) * blocks_each + 1), len(lengths) * blocks_each)
        self.tables = [blocks[i * blocks_each : (i + 1) * blocks_each] for i in range(len(lengths))]

    def batch(self, counts: dict[int, int]) -> ScheduledBatch:
        batch = ScheduledBatch()
        for row, count in counts.items():
            request = self.requests[row]
            batch.starts.append(request.computed)
            request.computed += count
            if request.remaining == 0:
                batch.sampled.append(len(batch.requests))
            batch.requests.append(request)
            batch.counts.append(count)
            batch.block_tables.append([self.tables[row]])
        return batch

    def step(self, counts: dict[int, int]) -> dict[str, torch.Tensor]:
        """Runs so many tokens of each row and appends the most likely token to those that are complete.

        Returns the logits of these by request id.
        """
        pending = self.runner.launch(self.batch(counts))
        ids = [request.request_id for request in pending.requests]
        logits = dict(zip(ids, pending.logits.clone(), strict=True))
        self.runner.sample(pending)
        output = pending.result()
        for request, token in zip(pending.requests, output.token_ids, strict=True):
            assert token == logits[request.request_id].argmax().item()
            request.token_ids.append(token)
        return logits


def expected(model: PreTrainedModel, request: Request, upto: int) -> torch.Tensor:
    """Logits after the first `upto` tokens, from a plain forward without cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([request.token_ids[:upto]]), use_cache=False).logits[0, -1]


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "phi": {},
    "phi3": {"num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2},
    "smollm3": {"num_key_value_heads": 2},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}


def build(architecture: str, **fields: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **SIZES | fields)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_plain_forward(architecture: str) -> None:
    model = build(architecture, **ARCHITECTURES[architecture])
    rows = Rows(make_runner(model), 64, [1, 5, 16, 17, 40])
    steps = [{0: 1, 1: 3, 4: 20}, {1: 2, 0: 1, 2: 16, 4: 20}, {3: 17, 0: 1, 1: 1, 2: 1, 4: 1}]
    seen = 0
    for counts in steps + [dict.fromkeys(range(5), 1)] * 3:
        for request_id, logits in rows.step(counts).items():
            request = rows.requests[int(request_id)]
            torch.testing.assert_close(logits, expected(model, request, request.computed), rtol=1e-4, atol=1e-4)
            seen += 1
    assert seen == 25


def test_any_chunking_gives_the_same_tokens(tiny: PreTrainedModel) -> None:
    tokens = set()
    for sizes in ([40], [16, 16, 8], [1] * 40, [39, 1], [7, 9, 20, 4]):
        rows = Rows(make_runner(tiny), 512, [40])
        for size in sizes:
            rows.step({0: size})
        for _ in range(10):
            rows.step({0: 1})
        tokens.add(tuple(rows.requests[0].output_ids))
    assert len(tokens) == 1 and len(tokens.pop()) == 11


def test_bfloat16_is_as_close_to_float32_as_the_plain_forward() -> None:
    exact, model = build_tiny(), build_tiny().bfloat16()
    rows = Rows(make_runner(model), 512, [60, 30])
    rows.step({0: 50, 1: 20})
    for request_id, logits in rows.step({0: 10, 1: 10}).items():
        request = rows.requests[int(request_id)]
        truth = expected(exact, request, request.computed)
        plain = (expected(model, request, request.computed).float() - truth).abs().mean()
        assert (logits.float() - truth).abs().mean() < 1.5 * plain


def test_no_sampled_rows(tiny: PreTrainedModel) -> None:
    runner = make_runner(tiny)
    rows = Rows(runner, 512, [40])
    pending = runner.launch(rows.batch({0: 16}))
    assert pending.logits.shape == (0, 512)
    runner.sample(pending)
    assert pending.result().token_ids == []


def test_result_before_sample(tiny: PreTrainedModel) -> None:
    runner = make_runner(tiny)
    pending = runner.launch(Rows(runner, 512, [4]).batch({0: 4}))
    with pytest.raises(RuntimeError, match="before sample"):
        pending.result()


def test_masks_leave_only_what_they_allow(tiny: PreTrainedModel) -> None:
    runner = make_runner(tiny)
    pending = runner.launch(Rows(runner, 512, [4, 9]).batch({0: 4, 1: 9}))
    masks = torch.zeros(2, 512, dtype=torch.bool)
    masks[0, [7, 300]] = masks[1, 11] = True
    expected_first = 7 if pending.logits[0, 7] > pending.logits[0, 300] else 300
    runner.sample(pending, masks)
    assert pending.result().token_ids == [expected_first, 11]


def test_probe_and_warmup_leave_the_cache_alone(tiny: PreTrainedModel) -> None:
    runner = make_runner(tiny)
    rows = Rows(runner, 512, [40, 40])
    rows.step({0: 40})
    runner.probe()
    runner.warmup()
    for _ in range(3):
        logits = rows.step({0: 1})["0"]
        request = rows.requests[0]
        torch.testing.assert_close(logits, expected(tiny, request, request.computed), rtol=1e-4, atol=1e-4)


def test_a_forward_that_raises_leaves_the_runner_usable() -> None:
    model = build_tiny()
    failures: list[int] = []

    def fail(*_: Any) -> None:
        if failures:
            failures.pop()
            raise RuntimeError("broken on purpose")

    model.model.layers[2].register_forward_pre_hook(fail)
    runner = make_runner(model)
    rows = Rows(runner, 512, [20, 33])
    rows.step({0: 20})
    failures.append(1)
    with pytest.raises(RuntimeError, match="on purpose"):
        rows.step({0: 1, 1: 33})
    failures.append(1)
    with pytest.raises(RuntimeError, match="on purpose"):
        runner.probe()
    runner.probe()
    for request in rows.requests:
        request.computed = 0
    for request_id, logits in rows.step({0: 21, 1: 33}).items():
        request = rows.requests[int(request_id)]
        torch.testing.assert_close(logits, expected(model, request, request.computed), rtol=1e-4, atol=1e-4)


def test_scores_of_nan_are_reported_and_hurt_nobody_else() -> None:
    model = build_tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[511] = math.nan
    runner = make_runner(model)
    rows = Rows(runner, 511, [20, 33, 5])
    rows.requests[1].token_ids[3] = 511
    pending = runner.launch(rows.batch({0: 20, 1: 33, 2: 5}))
    runner.sample(pending)
    output = pending.result()
    assert list(output.errors) == [1] and "NaN" in output.errors[1]
    # The next owner of the blocks that hold NaN now.
    rows.tables[0], rows.requests[0].computed = rows.tables[1], 0
    logits = rows.step({0: 20})["0"]
    torch.testing.assert_close(logits, expected(model, rows.requests[0], 20), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("stablelm", {}, "keyword arguments"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "0 of 2 layers"),
        (
            "deepseek_v3",
            {
                "num_key_value_heads": 4,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "first_k_dense_replace": 2,
            },
            "K and V of every layer",
        ),
    ],
)
def test_architectures_that_cannot_run_are_refused_at_construction(
    architecture: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotImplementedError, match=named):
        make_runner(build(architecture, **fields))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_cache_takes_no_memory_before_it_is_used() -> None:
    before = resident_bytes()
    kv = allocate(4, 2**15, 2, PAGE, 64, torch.float32)
    assert sum(tensor.nbytes for tensor in kv.keys + kv.values) > 2**30
    assert resident_bytes() - before < 2**26
    kv.keys[3][2**14, 1, 2, 3] = 1.0
    assert kv.keys[3].sum() == 1.0
