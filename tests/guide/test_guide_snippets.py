"""Every code block of the guide, in the guide's spelling and in ours, with the tokens that plain transformers gives.

What a block is changed by, and why, is SUBSTITUTIONS in blocks.py; run with -s to see the table. The test of block `x`
is `test_x`, or a row of `SETTINGS`; those on models and processes are in test_guide_models.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import RequestStatus
from engine.execution.kv_tensors import HostKV
from tests.conftest import wait_limit
from tests.guide import test_guide_models as models
from tests.guide.blocks import BLOCKS, SUBSTITUTIONS, Reader, fitted
from tests.harness import collect, tokens
from tests.models import SMOL_VOCAB


@pytest.fixture(autouse=True)
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What the engine has warned of since this was last asked."""
    caplog.set_level(logging.WARNING, "engine")

    def told() -> str:
        lines = [record.getMessage() for record in caplog.records if record.name.startswith("engine")]
        caplog.clear()
        return "\n".join(lines)

    return told


def test_every_block_has_a_test() -> None:
    assert len(BLOCKS) == 32
    assert BLOCKS.keys() - SETTINGS.keys() <= {name.removeprefix("test_") for name in (*globals(), *vars(models))}


def test_every_substitution_is_used() -> None:
    used = dict.fromkeys(SUBSTITUTIONS, 0)
    for name in BLOCKS:
        code = BLOCKS[name]
        for each in SUBSTITUTIONS:
            if each.block in (None, name):
                used[each] += code.count(each.old)
                code = code.replace(each.old, each.new)
        assert code == fitted(name)
    for each, count in used.items():
        print(f"{count} x {each.old!r} -> {each.new!r}" + f" in {each.block}" * bool(each.block) + f": {each.why}")
    assert [each.old for each, count in used.items() if not count] == []


# Generating


def test_generate_batch(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    reader.run("generate_batch")
    reader.check_all()
    printed = [f"[req_{i}] {reader.text(reader.expected(prompt, 8))}\n" for i, prompt in enumerate(reader["inputs"])]
    assert capsys.readouterr().out == "".join(printed)


def test_context_manager(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    reader.run("context_manager")
    up, cat, history = reader["inputs"]
    lines = [
        f"[{name}] {reader.text(reader.expected(prompt, n))}\n"
        for name, prompt, n in (("long", history, 24), ("short_0", up, 6), ("short_1", cat, 6))
    ]
    # In which order is a matter of time; test_guide_promises.py has who leaves when, by steps.
    assert capsys.readouterr().out in map("".join, itertools.permutations(lines))
    with pytest.raises(RuntimeError, match="destroyed"):
        reader["manager"].start()


# The manager


def test_init(reader: Reader) -> None:
    reader.run("init")
    manager = reader["manager"]
    assert manager.is_running()
    name = manager.add_request(reader["input_ids"])
    reader.check(*collect(manager, [name]), reader["input_ids"], 8)


def one_active_one_queued(reader: Reader, n: int) -> Any:
    """A manager that runs one request at a time, and has two."""
    manager = reader.start(max_requests_per_batch=1)
    manager.add_request(reader["inputs"][0], "active", max_new_tokens=n, streaming=True)
    manager.add_request(reader["inputs"][1], "queued", max_new_tokens=n)
    assert manager.get_result("active", timeout=wait_limit(30)) is not None
    return manager


def test_stop(reader: Reader, warned: Callable[[], str]) -> None:
    manager = one_active_one_queued(reader, 20)
    reader.run("stop")
    assert not manager.is_running()
    for output, prompt in zip(collect(manager, ["active", "queued"]), reader["inputs"], strict=False):
        reader.check(output, prompt, 20)
    assert warned() == ""
    for submit in (manager.add_request, lambda ids: manager.add_requests([ids])):
        assert submit(reader["input_ids"]) is None
        assert "refused" in warned()
    manager.start()
    reader.check(*collect(manager, [manager.add_request(reader["input_ids"])]), reader["input_ids"], 8)


def test_hard_stop(reader: Reader) -> None:
    manager = one_active_one_queued(reader, 3000)
    reader.run("hard_stop")
    assert not manager.is_running()
    for output in collect(manager, ["active", "queued"]):
        assert output.status == RequestStatus.FAILED
        assert output.error is not None and output.error.startswith("RuntimeError")
    assert manager.add_request(reader["input_ids"]) is None


def test_destroy(reader: Reader) -> None:
    manager = one_active_one_queued(reader, 20)
    reader.run("destroy")
    assert not manager.is_running()
    for output, prompt in zip(collect(manager, ["active", "queued"]), reader["inputs"], strict=False):
        reader.check(output, prompt, 20)
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_add_request(reader: Reader) -> None:
    manager = reader.start()
    reader.run("add_request")
    own_name = manager.add_request(input_ids=reader["inputs"][1])
    outputs = collect(manager, ["my_request", own_name])
    for output, prompt in zip(outputs, reader["inputs"], strict=False):
        reader.check(output, prompt, 8)
    assert outputs[0].request_id == "my_request" != own_name


def test_add_requests(reader: Reader) -> None:
    prefix = tokens(1, 32, SMOL_VOCAB)
    inputs = [prefix + tokens(2, 5, SMOL_VOCAB), tokens(3, 9, SMOL_VOCAB), prefix + tokens(4, 3, SMOL_VOCAB)]
    reader.define(inputs=inputs)
    manager = reader.start(page_size=16)
    reader.run("add_requests")
    outputs = list(manager)
    for output in outputs:
        reader.check(output, output.prompt_ids, 8)
    assert sorted(output.prompt_ids for output in outputs) == sorted(inputs)
    assert sorted(output.cached_tokens for output in outputs) == [0, 0, 32]


def test_cancel_request(reader: Reader) -> None:
    manager = reader.start()
    manager.add_request(reader["inputs"][0], "my_request", max_new_tokens=3000, streaming=True)
    manager.add_request(reader["inputs"][1], "other", max_new_tokens=40)
    first = manager.get_result("my_request", timeout=wait_limit(30))
    reader.run("cancel_request")
    cancelled, other = collect(manager, ["my_request", "other"])
    assert cancelled.status == RequestStatus.CANCELLED and cancelled.error is None
    assert cancelled.generated_tokens[: first.num_generated_tokens] == first.generated_tokens
    assert 0 < cancelled.num_generated_tokens < 3000
    reader.check(other, reader["inputs"][1], 40)


def test_per_request_sampling(reader: Reader) -> None:
    ids_a, ids_b, ids_c = reader["inputs"]
    reader.define(inputs_a=ids_a, inputs_b=ids_b)
    settings_a, settings_b = {"temperature": 0.9, "top_p": 0.95}, {"temperature": 0.1, "top_k": 10}
    reader.do(
        "generation_config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=0.7, eos_token_id=-1)"
    )
    runs = []
    for _ in range(2):
        reader.run("per_request_sampling")
        manager = reader["manager"]
        named = [
            manager.add_request(ids_a, seed=5, **settings_a),
            manager.add_request(ids_c, do_sample=False),
            manager.add_request(ids_b, seed=6, **settings_b),
        ]
        outputs = {output.request_id: output for output in manager}
        seeded_a, greedy, seeded_b = (outputs.pop(name) for name in named)
        runs.append([output.generated_tokens for _, output in sorted(outputs.items())])
        reader.check(greedy, ids_c, 8)
        manager.stop()
        manager.destroy()
    assert runs[0] == runs[1] != [[], []], "the same seed of the config gives the same tokens"
    for output, ids, settings in ((seeded_a, ids_a, settings_a), (seeded_b, ids_b, settings_b)):
        reader.define(settings=settings)
        reader.do("generation_config = GenerationConfig(max_new_tokens=8, do_sample=True, eos_token_id=-1, **settings)")
        alone = reader.start()
        (same,) = collect(alone, [alone.add_request(ids, seed=5 if ids is ids_a else 6)])
        assert output.generated_tokens == same.generated_tokens
        alone.destroy()


def test_iterate(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    manager = reader.start()
    for n, prompt in enumerate(reader["inputs"]):
        manager.add_request(prompt, max_new_tokens=5 * (n + 1))
    reader.run("iterate")
    lines = [reader.text(reader.expected(prompt, 5 * (n + 1))) + "\n" for n, prompt in enumerate(reader["inputs"])]
    assert capsys.readouterr().out in map("".join, itertools.permutations(lines))


def test_get_result(reader: Reader) -> None:
    manager = reader.start()
    manager.add_request(reader["inputs"][1], "first", max_new_tokens=1)
    manager.add_request(reader["inputs"][2], "third", max_new_tokens=30)
    manager.add_request(reader["inputs"][0], "my_request", max_new_tokens=12)
    reader.run("get_result")
    reader.check(reader["result"], reader["inputs"][0], 12)
    with pytest.raises(KeyError):  # the block's first call has taken it
        manager.get_result("first")
    reader.check(manager.get_result("third"), reader["inputs"][2], 30)


def test_streaming(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    reader.start()
    reader.run("streaming")
    expected = reader.expected(reader["input_ids"], 8)
    assert capsys.readouterr().out == "".join(reader.text([token]) for token in expected)
    reader.check(reader["chunk"], reader["input_ids"], 8)


# The configuration


def test_config(reader: Reader) -> None:
    reader.run("config")
    reader.check_all()


# Blocks that set one thing: what the engine then runs with, and the parts of its warnings.
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "page_size": ({"page_size": 128}, ()),
    "max_batch_tokens": ({"max_batch_tokens": 16384}, ()),
    "max_requests_per_batch": ({"max_requests": 256}, ()),
    "safety_margin": ({"safety_margin": 0.15}, ()),
    "block_sharing": ({"sharing": True}, ()),
    "no_decode_fast_path": ({"max_blocks_per_request": 0}, ()),
    # Needs a GPU: on CPU there are no graphs to record, and no kernel that reads block tables of a fixed width.
    "cuda_graph": ({"graphs": (False, False)}, ("CUDA graphs were asked for and are off", "cpu")),
    "padding_intervals": ({"graphs": (False, False)}, ("CUDA graphs were asked for and are off", "cpu")),
    "async_batching": ({"graphs": (False, False), "async_batching": False}, ("use_async_batching=True is off",)),
    "decode_fast_path": ({"max_blocks_per_request": 0}, ("max_blocks_per_request",)),
    "cpu_group_timeout": ({"cpu_group_timeout": 600.0}, ()),
}


@pytest.mark.parametrize("block", SETTINGS)
def test_settings(reader: Reader, warned: Callable[[], str], block: str) -> None:
    values, parts = SETTINGS[block]
    reader.run(block)
    reader.generate()
    reader.check_all()
    text = warned()
    assert [part for part in parts if part not in text] == [] and bool(parts) == bool(text), text
    settings = reader.settings()
    assert {name: getattr(settings, name) for name in values} == values


def test_block_sharing_shares(reader: Reader) -> None:
    reader.run("block_sharing")
    prefix = tokens(1, 70, SMOL_VOCAB)
    reader.define(inputs=[prefix + tokens(n, 5, SMOL_VOCAB) for n in range(2, 5)])
    outputs = reader.generate()
    reader.check_all()
    assert sorted(output.cached_tokens for output in outputs.values()) == [0, 64, 64]


def test_logprobs(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    reader.run("logprobs")
    reader.check_all()
    lines = []
    for prompt, output in zip(reader["inputs"], reader["outputs"].values(), strict=True):
        known = output.generated_tokens
        with torch.inference_mode():
            logits = reader.original(torch.tensor([prompt + known])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[torch.arange(len(known)), known]
        torch.testing.assert_close(torch.tensor(output.logprobs), wanted, rtol=0, atol=1e-4)
        lines += [
            f"{reader['tokenizer'].decode([token])} | logprob: {logprob}\n"
            for token, logprob in zip(known, output.logprobs, strict=True)
        ]
    assert capsys.readouterr().out == "".join(lines)


@pytest.mark.parametrize(("level", "mode", "dynamic"), [(1, "default", True), (3, "max-autotune-no-cudagraphs", False)])
def test_compile_level(reader: Reader, monkeypatch: pytest.MonkeyPatch, level: int, mode: str, dynamic: bool) -> None:
    """What torch is asked to do; it does it in the test below."""
    asked: list[dict[str, Any]] = []

    def compile(model: Any, **arguments: Any) -> Any:
        asked.append(arguments)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    reader.run("compile_level")
    reader.define(cb_config=dataclasses.replace(reader["cb_config"], default_compile_level=level))
    reader.generate()
    reader.check_all()
    assert [(each["mode"], each["dynamic"]) for each in asked] == [(mode, dynamic)]


@pytest.mark.slow  # the compiler takes its time
def test_compile_level_compiles(reader: Reader) -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    reader.run("compile_level")
    reader.generate()
    reader.check_all()
    assert counters["stats"]["unique_graphs"] > 0


def test_cpu_offload(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {"to_host": 0, "from_host": 0}
    run = HostKV.run

    def counting(host: HostKV, copies: Any) -> None:
        for name in copied:
            copied[name] += len(getattr(copies, name))
        run(host, copies)

    monkeypatch.setattr(HostKV, "run", counting)
    reader.run("cpu_offload")
    reader.define(inputs=[tokens(n, 30 + n, SMOL_VOCAB) for n in range(6)])
    reader.do("generation_config = GenerationConfig(max_new_tokens=40, eos_token_id=-1)")
    reader.generate()
    reader.check_all(40)
    assert copied["to_host"] and copied["from_host"], "nothing left the device, so this shows less than it should"
