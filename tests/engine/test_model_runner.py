"""The runner against the model's own forward pass: every architecture, any mix of rows, and what must not hurt it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from engine.cache.groups import LayerGroup
from engine.cache.host_tier import BlockCopies
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution.kv_tensors import HostKV, allocate
from engine.execution.model_runner import ModelRunner, Pending, _on_device
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler
from tests.engine.rows import PAGE, Rows, expected, make_runner
from tests.engine.tables import set_tables
from tests.harness import tokens
from tests.models import build_random, build_tiny, ref

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
    own = plain = 0.0
    for counts in [{0: 10, 1: 10}] + [{0: 1, 1: 1}] * 15:
        for request_id, logits in rows.step(counts).items():
            request = rows.requests[int(request_id)]
            truth = expected(exact, request, request.computed)
            own += (logits.float() - truth).abs().mean().item()
            plain += (expected(model, request, request.computed).float() - truth).abs().mean().item()
    assert own < 1.1 * plain


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


def test_warmup_on_cpu_runs_small_steps_alone(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A largest one computes as long as a prompt does, and sets nothing up that the others would not."""
    runner, sizes = make_runner(tiny), []
    monkeypatch.setattr(runner, "_dry_run", sizes.append)
    runner.warmup()
    assert len(sizes) > 1 and max(sizes) <= 16 and sizes[-1] == 1


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
        ("bloom", {"n_head": 4, "n_layer": 2}, "0 of 2 layers|position_ids"),
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


class TestCarriedTokens:
    """Rows that begin with a token which the step before is still sampling."""

    def test_it_comes_from_the_step_before(self, tiny: PreTrainedModel) -> None:
        runner = make_runner(tiny)
        rows = Rows(runner, 512, [20, 9, 5])
        first = runner.launch(rows.batch({0: 20, 1: 9}))
        runner.sample(first)
        second = runner.launch(rows.batch({2: 5, 1: 1, 0: 1}), first)
        rows.finish(first)
        logits = {request.request_id: row for request, row in zip(second.requests, second.logits, strict=True)}
        for row in rows.requests:
            torch.testing.assert_close(logits[row.request_id], expected(tiny, row, row.computed), rtol=1e-4, atol=1e-4)

    def test_nobody_samples_it(self, tiny: PreTrainedModel) -> None:
        runner = make_runner(tiny)
        rows = Rows(runner, 512, [20, 9])
        first = runner.launch(rows.batch({0: 20}))
        with pytest.raises(RuntimeError, match="was not sampled"):
            runner.launch(rows.batch({0: 1}), first)
        runner.sample(first)
        rows.requests[0].computed = 20
        with pytest.raises(RuntimeError, match="'0' is not known and no step is sampling it"):
            runner.launch(rows.batch({0: 1}))
        rows.requests[0].computed = 20
        with pytest.raises(RuntimeError, match="'1' is not known and no step is sampling it"):
            runner.launch(rows.batch({1: 10}), first)
        with pytest.raises(RuntimeError, match="beyond its tokens"):
            runner.launch(rows.batch({0: 2}), first)
        rows.finish(first)
        rows.requests[0].computed = 20
        logits = rows.step({0: 1})["0"]
        torch.testing.assert_close(logits, expected(tiny, rows.requests[0], 21), rtol=1e-4, atol=1e-4)


class TestPromptLogprobs:
    def scored(self, model: PreTrainedModel, prompt: list[int], k: int) -> list[tuple[float, list[int]]]:
        """Of every prompt token but the first: its log-probability, and the k likely ones."""
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        return [
            (logits[i, token].item(), logits[i].topk(k).indices.tolist() if k else [])
            for i, token in enumerate(prompt[1:])
        ]

    def test_in_chunks_beside_other_rows(self, tiny: PreTrainedModel) -> None:
        runner = make_runner(tiny)
        rows = Rows(runner, 512, [21, 9, 12])
        rows.requests[0].params = SamplingParams(max_new_tokens=9, prompt_logprobs=3)
        rows.requests[2].params = SamplingParams(max_new_tokens=9, prompt_logprobs=0)
        rows.step({1: 9})
        for counts in ({0: 7, 1: 1, 2: 12}, {1: 1, 0: 1}, {0: 12, 1: 1}, {1: 1, 0: 1}):
            starts = [rows.requests[row].computed for row in counts]
            batch = rows.batch(counts)
            pending = runner.launch(batch)
            assert len(pending.logits) == len(batch.sampled)
            runner.sample(pending)
            output = pending.result()
            for row, found in output.prompt_logprobs.items():
                batch.requests[row].add_prompt_logprobs(starts[row] + 1, found)
            for request, token in zip(pending.requests, output.token_ids, strict=True):
                assert token == expected(tiny, request, len(request.token_ids)).argmax().item()
                request.token_ids.append(token)
        for row, k in ((0, 3), (2, 0)):
            request = rows.requests[row]
            truth = self.scored(tiny, request.prompt_ids, k)
            assert len(request.prompt_logprobs) == len(truth) == request.num_prompt_tokens - 1
            for found, (logprob, ids) in zip(request.prompt_logprobs, truth, strict=True):
                assert found.logprob == pytest.approx(logprob, abs=1e-3)
                assert [token for token, _ in found.top] == ids
        assert not rows.requests[1].prompt_logprobs

    def test_result_before_sample(self, tiny: PreTrainedModel) -> None:
        runner = make_runner(tiny)
        rows = Rows(runner, 512, [21])
        rows.requests[0].params = SamplingParams(max_new_tokens=9, prompt_logprobs=3)
        pending = runner.launch(rows.batch({0: 7}))
        with pytest.raises(RuntimeError, match="before sample"):
            pending.result()


class TestHostCopies:
    """Blocks that leave the device and come back."""

    def test_a_request_goes_on_from_blocks_that_were_away(self, tiny: PreTrainedModel) -> None:
        runner = make_runner(tiny, host_slots=10)
        rows = Rows(runner, 512, [40, 60])
        rows.step({0: 40})
        away = rows.tables[0][0][:3]
        batch = rows.batch({1: 60})
        batch.copies = BlockCopies(to_host=[(away[0], 7), (away[1], 0), (away[2], 9)])
        set_tables(batch, [[away + rows.tables[1][0]]])  # which the other request takes over at once
        runner.launch(batch)
        rows.tables[0][0][:3] = rows.tables[1][0][:3]
        batch = rows.batch({0: 1})
        batch.copies = BlockCopies(from_host=list(zip([7, 0, 9], rows.tables[0][0], strict=False)))
        pending = runner.launch(batch)
        request = rows.requests[0]
        torch.testing.assert_close(pending.logits[0], expected(tiny, request, 41), rtol=1e-4, atol=1e-4)

    def test_a_slot_is_emptied_after_it_was_filled(self) -> None:
        kv = allocate(2, 6, 2, 4, 8, torch.float32, trash=True)
        for number, tensor in enumerate([*kv.keys, *kv.values]):
            tensor[1:] = torch.arange(1, 8).view(-1, 1, 1, 1) + 10.0 * number
        before = [tensor.clone() for tensor in [*kv.keys, *kv.values]]
        HostKV(kv, 3).run(BlockCopies(to_host=[(2, 0), (3, 1)], from_host=[(1, 2), (0, 5)]))
        for old, new in zip(before, [*kv.keys, *kv.values], strict=True):
            assert torch.equal(new[2], old[3]) and torch.equal(new[5], old[2])
            for block in (0, 1, 3, 4, 6, 7):
                assert torch.equal(new[block], old[block])

    def test_nothing_to_copy(self) -> None:
        HostKV(allocate(1, 2, 1, 4, 8, torch.float32), 3).run(BlockCopies())

    def test_a_host_without_slots(self, tiny: PreTrainedModel) -> None:
        runner = make_runner(tiny)
        batch = Rows(runner, 512, [4]).batch({0: 4})
        batch.copies = BlockCopies(to_host=[(1, 0)])
        with pytest.raises(RuntimeError, match="the host, which keeps none"):
            runner.launch(batch)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_an_engine_that_offloads(hybrid: bool, overlap: bool, tiny: PreTrainedModel) -> None:
    """Scheduler, cache and core on top: what leaves the device comes back as it was."""
    model = gemma() if hybrid else tiny
    groups = (LayerGroup((0, 2), 20), LayerGroup((1, 3))) if hybrid else (LayerGroup((0, 1, 2, 3)),)
    num_blocks = 18 if hybrid else 9
    runner = make_runner(model, groups=groups, num_blocks=num_blocks, host_slots=40)
    cache = KVCache(num_blocks, PAGE, groups, max_step_tokens=32, host_slots=40)
    scheduler = Scheduler(cache, max_batch_tokens=32, max_requests=6, safety_margin=0.0)
    core = EngineCore(scheduler, runner, overlap=overlap)
    prompts = [tokens(i, length, 64) for i, length in enumerate([40, 50, 33, 60, 21, 45, 38, 52])]
    requests = [
        Request(str(i), list(prompt), len(prompt), SamplingParams(max_new_tokens=20), arrival=i)
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        core.add(request)
    copied = [0, 0]
    launch = runner.launch

    def counting(batch: ScheduledBatch, previous: Pending | None = None) -> Pending:
        if batch.copies is not None:
            copied[0] += len(batch.copies.to_host)
            copied[1] += len(batch.copies.from_host)
        return launch(batch, previous)

    runner.launch = counting  # type: ignore[method-assign]
    for _ in range(500):
        if not core.has_work:
            break
        core.step()
        cache.check_integrity(list(scheduler.live()))
    assert min(copied) > 0 and scheduler.num_preemptions > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == ref(model, prompt, 20)


def gemma() -> PreTrainedModel:
    config = Gemma2Config(
        **SIZES | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 20}
    )
    return build_random(Gemma2ForCausalLM, config)


def test_layer_groups_with_a_table_each() -> None:
    model = gemma()
    groups = (LayerGroup((0, 2), 20), LayerGroup((1, 3)))
    runner = make_runner(model, groups=groups)
    rows = Rows(runner, 64, [50, 7, 23], num_groups=2)
    for counts in ({0: 30, 1: 7}, {0: 20, 1: 1, 2: 23}, *[{0: 1, 2: 1, 1: 1}] * 4):
        for request_id, logits in rows.step(counts).items():
            request = rows.requests[int(request_id)]
            torch.testing.assert_close(logits, expected(model, request, request.computed), rtol=1e-3, atol=1e-3)
        row = rows.requests[0]
        behind = max(0, row.computed - 20 + 1) // PAGE
        rows.tables[0][0][:behind] = [0] * behind  # what lies behind the window is given back


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_cache_takes_no_memory_before_it_is_used() -> None:
    before = resident_bytes()
    kv = allocate(4, 2**15, 2, PAGE, 64, torch.float32)
    assert sum(tensor.nbytes for tensor in kv.keys + kv.values) > 2**30
    host = HostKV(kv, 2**15)
    assert resident_bytes() - before < 2**26
    host.run(BlockCopies(to_host=[(1, 2**14)]))
    assert resident_bytes() - before < 2**26


def test_blocks_that_are_allocated() -> None:
    assert allocate(1, 5, 1, 4, 8, torch.float32).num_blocks_allocated == 6
    kv = allocate(1, 5, 1, 4, 8, torch.float32, trash=True)
    assert kv.num_blocks_allocated == 7
    assert not any(tensor.any() for tensor in kv.keys + kv.values)


def test_on_cuda_everything_runs_with_the_models_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current device is the first one, and streams, events and Triton's kernels are of the current one."""
    current: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Runner:
        _device = torch.device("cuda", 1)

        @_on_device
        def run(self, value: int) -> tuple[int, list[torch.device]]:
            return value, list(current)

    monkeypatch.setattr(torch.cuda, "device", enter)
    assert Runner().run(3) == (3, [torch.device("cuda", 1)]) and not current
    Runner._device = torch.device("cpu")
    assert Runner().run(3) == (3, [])
    for name in ("launch", "sample", "probe", "warmup", "refresh_weights"):
        method = vars(ModelRunner)[name]
        assert method.__code__ is Runner.run.__code__, name
