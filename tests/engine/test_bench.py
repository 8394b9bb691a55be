"""The benchmark's own logic: workloads, bounds, what counts as a result, reports. No test depends on a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from engine.bench import __main__ as command_line
from engine.bench import host, limits, measure, prompts, replay, report
from engine.bench.chart import chart
from engine.bench.limits import Costs, Limits, Needs, needs
from engine.bench.measure import Plan
from engine.bench.workers import BenchError, EngineSpec, Worker, started
from engine.bench.workloads import DESCRIPTIONS, REAL, SYNTHETIC, Work, build, shared_prompt
from tests.serving import wait_until

VOCAB = 49152
HASHES = {
    "single": "5a03447d9a276e69",
    "decode": "85ddf186b490984f",
    "mixed": "e857311497436051",
    "prefix": "64b76c4ccdb1dce0",
    "prefill": "43cf799d45920fae",
    "long": "92fb6e91728fdd6d",
}


# Workloads


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_workloads_never_change(name: str) -> None:
    work = build(name, 100, VOCAB)
    assert hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16] == HASHES[name]
    assert all(100 <= token < VOCAB - 100 for item in work for token in item.prompt)


def letters(messages: Sequence[prompts.Message]) -> list[int]:
    return [ord(letter) for message in messages for letter in message["content"]]


@pytest.mark.parametrize("name", REAL)
def test_real_workloads_are_the_same_for_a_seed_and_fresh_for_another(name: str) -> None:
    first, again, other = (build(name, seed, VOCAB, letters) for seed in (1, 1, 2))
    assert first == again
    assert len(first) == int(DESCRIPTIONS[name].split()[0])
    texts = {tuple(item.prompt) for item in first}
    assert len(texts) == len(first) and not texts & {tuple(item.prompt) for item in other}


def test_summaries_share_their_instructions_within_a_seed_only() -> None:
    first, other = (["".join(map(chr, w.prompt)) for w in build("summarise", seed, VOCAB, letters)] for seed in (1, 2))
    assert len({text[:1000] for text in first}) == 1
    assert first[0][:32] != other[0][:32]


def test_wrong_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="single, decode"):
        build("typo", 0, VOCAB)
    with pytest.raises(ValueError, match="tokenizer"):
        build("chat", 0, VOCAB)
    with pytest.raises(ValueError, match="200"):
        build("single", 0, 200)


def test_prompts_that_are_sent_twice_differ_by_seed_and_length() -> None:
    assert shared_prompt(1, 64, VOCAB) == shared_prompt(1, 64, VOCAB)
    assert shared_prompt(1, 64, VOCAB) != shared_prompt(2, 64, VOCAB)
    assert shared_prompt(1, 32, VOCAB) != shared_prompt(1, 64, VOCAB)[:32]


# Bounds

COSTS = Costs(
    linears=(((8, 4), 6), ((4, 16), 2)),
    head=100,
    weight_bytes=1000.0,
    kv_bytes=24,
    attention_flops=40,
    windows=(None, 3),
)


def test_costs_are_those_of_the_model(tiny: PreTrainedModel, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path)
    costs = Costs.of(tmp_path, "bfloat16")
    head = 512 * 64
    layers = 4 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128)
    assert (costs.head, costs.layers) == (head, layers)
    assert costs.weight_bytes == 2 * (head + layers)
    assert costs.kv_bytes == 2 * 4 * 2 * 16 * 2
    assert costs.attention_flops == 4 * 4 * 16 and costs.windows == (None,) * 4
    assert Costs.of(tmp_path, "float32", weight_bits=4).weight_bytes == (head + layers) / 2


def test_needs_of_one_request_by_hand() -> None:
    found = needs([Work([1, 2, 3], 2)], COSTS)
    # Queries at 0..3 (the second new token is not fed back) see 1 + 2 + 3 + 4 keys, and 1 + 2 + 3 + 3 in the window.
    attention = 40 * (10 + 9)
    assert found.flops == 2 * (8 * 4 * 6 + 4 * 16 * 2) * 4 + 2 * 100 * 2 + attention
    # Two steps read the weights; the second one 4 tokens, of which the layer with a window needs 3 / 5 at least.
    assert found.bytes == pytest.approx(2 * 1000 + 4 * 24 * (1 + 3 / 5) / 2)


def brute_needs(work: Sequence[Work], costs: Costs) -> Needs:
    """Token by token: each is identified by everything before it."""
    computed: set[tuple[int, ...]] = set()
    flops, own = 0.0, itertools.count(-1, -1)
    contexts = []
    for item in work:
        new = [next(own) for _ in range(item.new_tokens)]  # ids that nobody else has
        text = (*item.prompt, *new)
        contexts.append(text)
        for end in range(1, len(text)):
            if text[:end] not in computed:
                computed.add(text[:end])
                flops += 2 * costs.layers
                flops += sum(costs.attention_flops * min(end, window or end) for window in costs.windows)
        flops += 2 * costs.head * item.new_tokens
    steps = max(item.new_tokens for item in work)
    read = 0
    for step in range(1, steps):
        live = [(item, text) for item, text in zip(work, contexts, strict=True) if item.new_tokens > step]
        read += len({text[:end] for item, text in live for end in range(1, len(item.prompt) + step + 1)})
    return Needs(flops, steps * costs.weight_bytes + read * costs.kv_bytes)


requests = st.builds(Work, st.lists(st.integers(1, 2), min_size=1, max_size=6), st.integers(1, 5))


@given(st.lists(requests, min_size=1, max_size=6))
def test_needs_are_those_counted_token_by_token(work: list[Work]) -> None:
    full = Costs(COSTS.linears, 100, 1000.0, 24, 40, (None, None))
    found, expected = needs(work, full), brute_needs(work, full)
    assert found.flops == pytest.approx(expected.flops)
    assert found.bytes == pytest.approx(expected.bytes)


def test_the_bound_takes_the_best_rate() -> None:
    rates = Limits({"slow": 10.0, "fast": 100.0}, bandwidth=50.0)
    assert rates.seconds(Needs(flops=1000.0, bytes=100.0)) == (10.0, 2.0)


def test_rates_are_measured_at_the_models_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def prepare(weight: Any) -> Callable[[], object]:
        shapes.append(tuple(weight.shape))
        return lambda: None

    monkeypatch.setattr(limits, "GEMMS", {"one": prepare, "absent": lambda weight: None})
    monkeypatch.setattr(limits, "_STREAM_BYTES", 2**20)
    found = limits.measure(COSTS)
    assert shapes == [(8, 4), (4, 16)]
    assert list(found.gemm) == ["one"] and found.flops > 0 and found.bandwidth > 0


def test_every_matrix_multiplication_computes() -> None:
    import torch

    for prepare in limits.GEMMS.values():
        call = prepare(torch.randn(32, 64))
        if call is not None:
            assert call().shape == (limits._ROWS, 32)  # type: ignore[attr-defined]


# Workers

FAKE = """
import json, sys
mode = json.loads(sys.argv[1])["config"]["mode"]
if mode == "broken":
    print("no such engine", file=sys.stderr)
    sys.exit(3)
print(json.dumps({"ready": True, "load_s": 0.5, "version": "1.2"}), flush=True)
for line in sys.stdin:
    work = json.loads(line)["work"]
    if mode == "dies":
        sys.exit("out of memory")
    if mode == "raises":
        answer = {"error": "ValueError: five"}
    else:
        outputs = [[1] * n for _, n in work]
        if mode == "short":
            outputs[1:] = [tokens[:-1] for tokens in outputs[1:]]
        if mode == "fewer":
            outputs = outputs[:-1]
        times = [0.5 * (i + 1) for i in range(work[0][1])]
        answer = {"seconds": times[-1], "outputs": outputs, "times": times}
    print(json.dumps(answer), flush=True)
"""
WORK = [Work([1, 2], 3), Work([3], 4), Work([4], 2)]


@pytest.fixture
def fake(tmp_path: Path) -> Callable[[str], EngineSpec]:
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))
    return lambda mode, name="fake": EngineSpec(name, "none", config={"mode": mode}, child=(str(script),))  # type: ignore[misc]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_stands_still_between_its_turns_and_is_gone_at_the_end(fake: Callable[[str], EngineSpec]) -> None:
    with Worker(fake("right")) as worker:
        pid = worker._process.pid
        wait_until(lambda: state(pid) == "T")
        assert (worker.version, worker.load_s) == ("1.2", 0.5)
        turn = worker.run(WORK)
        assert [len(tokens) for tokens in turn.outputs] == [3, 4, 2] and 0 <= turn.neighbours <= 1
        wait_until(lambda: state(pid) == "T")
        assert worker.stream(WORK[0]).times == [0.5, 1.0, 1.5]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("short", "fake generated 3 tokens instead of 4 for request 1, and a wrong number for 2 of 3 requests"),
        ("fewer", "fake answered 2 of 3 requests"),
        ("raises", "fake failed:\nValueError: five"),
        ("dies", "fake: its process ended without an answer.\nout of memory"),
    ],
)
def test_what_counts_for_nothing_is_an_error(fake: Callable[[str], EngineSpec], mode: str, message: str) -> None:
    with Worker(fake(mode)) as worker, pytest.raises(BenchError, match=message):
        worker.run(WORK)


def test_an_engine_that_does_not_start_says_why(fake: Callable[[str], EngineSpec]) -> None:
    with pytest.raises(BenchError, match="no such engine"):
        Worker(fake("broken"))


def test_a_peer_that_died_while_it_stood_still_is_noticed(fake: Callable[[str], EngineSpec]) -> None:
    with Worker(fake("right")) as worker:
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        with pytest.raises(BenchError, match="ended"):
            worker.run(WORK)


def test_engines_take_turns(fake: Callable[[str], EngineSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []
    run = Worker.run

    def noted(worker: Worker, work: Sequence[Work]) -> Any:
        order.append((worker.name, work[0].prompt[0]))
        return run(worker, work)

    monkeypatch.setattr(Worker, "run", noted)
    with started([fake("right", "convoy"), fake("right", "peer")]) as workers:  # type: ignore[call-arg]
        rows = measure.throughput(workers, ["decode"], Plan(reps=2, seed=5, vocab_size=VOCAB))
    first, second = (build("decode", seed, VOCAB)[0].prompt[0] for seed in (5, 6))
    assert order == [("convoy", first), ("peer", first), ("convoy", second), ("peer", second)]
    assert [row["engine"] for row in rows] == ["convoy", "peer"]
    assert rows[0]["ratio"] == 1.0 and rows[1]["ratio"] is None
    assert rows[0]["out_per_s"] == 8192 / 64


def test_latency_and_prefix_rows(fake: Callable[[str], EngineSpec]) -> None:
    plan = Plan(reps=2, seed=5, vocab_size=VOCAB)
    with started([fake("right", "convoy")]) as workers:  # type: ignore[call-arg]
        (row,) = measure.latency(workers, plan)
        (cold,) = measure.prefix(workers, plan, lengths=[16])
    assert (row["first_token_ms"], row["between_p50_ms"], row["between_p99_ms"]) == (500, 500, 500)
    assert row["tokens_per_s"] == 2 and row["ratio"] is None
    assert (cold["tokens"], cold["cold_ms"], cold["hit_ms"], cold["speedup"]) == (16, 500, 500, 1)


def test_equal_tokens() -> None:
    assert measure.equal_share([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75
    with pytest.raises(BenchError):
        measure.equal_share([[1, 2]], [[1]])


def test_the_childs_process_needs_no_torch() -> None:
    import subprocess

    check = "import sys, engine.bench.child; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[2], timeout=60).returncode == 0


# Reports

SPREAD = {"min": 1.0, "median": 2.0, "max": 4.0}
ROW: dict[str, Any] = {
    "workload": "decode",
    "engine": "convoy",
    "seconds": SPREAD,
    "cpu_seconds": 3.5,
    "tokens_in": 2048,
    "tokens_out": 8192,
    "out_per_s": 4096.0,
    "total_per_s": 5120.0,
    "ratio": 1.5,
    "bound_s": {"operations": 1.0, "bytes": 0.5},
    "share": 0.5,
    "neighbours": 0.02,
}
PEER = ROW | {"engine": "transformers", "out_per_s": 2048.0, "ratio": None}


def test_table_is_aligned_and_leaves_out_what_is_not_known() -> None:
    header, ours, theirs = report.table("throughput", [ROW, PEER]).splitlines()
    columns = "workload,engine,min s,median s,max s,cpu s,out tok/s,all tok/s,x best peer,bound: compute s,memory s,"
    assert re.split("  +", header) == (columns + "reached,used by others").split(",")
    cells = "decode convoy 1.00 2.00 4.00 3.50 4,096.0 5,120.0 1.50 1.00 0.50 50% 2%"
    assert ours.split() == cells.split()
    assert len(theirs) == len(ours) == len(header)
    assert header.index("engine") == ours.index("convoy") == theirs.index("transformers")


def test_chart_has_a_bar_a_row_in_proportion() -> None:
    prefill = ROW | {"workload": "prefill", "tokens_in": 8192, "tokens_out": 4, "ratio": None}
    root = ElementTree.fromstring(chart([ROW, PEER, prefill], "a <title> & more", "below"))
    name = "{http://www.w3.org/2000/svg}"
    bars = [r for r in root.iter(f"{name}rect") if float(r.get("height", 0)) == 16]
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths[0] == pytest.approx(2 * widths[1]) and widths[2] == widths[0]  # a scale of its own
    texts = [text.text for text in root.iter(f"{name}text")]
    assert {"decode", "prefill", "4,096 tok/s (1.50x)", "2,048 tok/s", "5,120 prompt tok/s", "below"} <= set(texts)
    assert root.findtext(f"{name}title") == "a <title> & more"
    assert max(float(t.get("y", 0)) for t in root.iter(f"{name}text")) < float(root.get("height", 0))


def test_processor_flags_that_matter() -> None:
    first = "model name\t: AMD EPYC\ncpu family\t: 26\nmodel\t\t: 2\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
    text = first + "\nmodel name\t: another\nflags\t: sve\n"
    assert host._processor(text) == ("AMD EPYC (family 26, model 2)", ["avx2", "avx512f", "avx512_bf16"])
    assert host._processor("") == ("", [])


# The command


def specs_of(*arguments: str) -> list[EngineSpec]:
    return command_line.engine_specs(command_line._parser().parse_args(["throughput", "--model", "m", *arguments]))


def test_engines_of_the_command_line() -> None:
    ours, theirs, openvino = specs_of(
        *("--compare", "transformers", "openvino", "--openvino-python", "/ov/python", "--openvino-model", "m.gguf"),
        *(
            "--engine-config",
            '{"page_size": 16}',
            "--peer-config",
            "openvino",
            '{"cache_size": 2}',
            "--dtype",
            "float32",
        ),
    )
    assert ours == EngineSpec("convoy", "m", "float32", {"page_size": 16})
    assert theirs == EngineSpec("transformers", "m", "float32")
    assert openvino == EngineSpec("openvino", "m.gguf", "float32", {"cache_size": 2}, "/ov/python")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "vllm"], "--vllm-python"),
        (["--compare", "openvino", "--openvino-python", "p"], "--openvino-model"),
        (["--peer-config", "vllm", "{}"], "not among --compare"),
    ],
)
def test_peers_that_cannot_be_started_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specs_of(*arguments)
    assert command_line.main(["throughput", "--model", "m", *arguments]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "--model /nowhere: a folder with config.json"),
        (["--json", "/nowhere/figures.json"], "--json /nowhere/figures.json: there is no such folder"),
        (["--engine-config", '{"pagesize": 3}'], "did you mean 'page_size'"),
        (["--compare", "vllm", "--vllm-python", "/nowhere/python"], "there is no such program"),
    ],
)
def test_what_does_not_exist_is_found_before_anything_is_measured(
    arguments: list[str], message: str, tiny_http_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["latency", "--model", str(tiny_http_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_steps_of_no_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["step", "--rows", "0"])
    assert "must be positive" in capsys.readouterr().err


def test_steps_that_a_gpu_would_replay() -> None:
    assert replay.measure(3, 4) > 0


@pytest.mark.parametrize("section", command_line._ALONE)
def test_sections_with_a_command_line_of_their_own(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        command_line.main([section, "--help"])
    assert exit.value.code == 0
    assert f"usage: python -m engine.bench {section}" in capsys.readouterr().out


def short(*arguments: Any) -> list[Work]:
    """The beginning of a workload."""
    return [Work(item.prompt, min(item.new_tokens, 8)) for item in build(*arguments)[:5]]


@pytest.mark.slow
def test_the_whole_command_against_transformers(
    tiny_http_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(limits, "_STREAM_BYTES", 2**20)
    monkeypatch.setattr(command_line, "_STEP", ["--rows", "2", "--context", "20", "--waiting", "3", "--rounds", "1"])
    monkeypatch.setattr(measure, "build", short)
    figures, picture = tmp_path / "figures.json", tmp_path / "chart.svg"
    options = ["--dtype", "float32", "--reps", "1", "--compare", "transformers", "--workloads", "single", "chat"]
    files = ["--json", str(figures), "--chart", str(picture)]
    status = command_line.main(["all", "--model", str(tiny_http_path), *options, *files])
    printed = capfd.readouterr().out
    assert status == 0
    assert printed.splitlines()[-1].split()[:3] == ["2", "20", "3"]
    result = json.loads(figures.read_text())
    assert [(row["workload"], row["engine"]) for row in result["throughput"]] == list(
        itertools.product(["single", "chat"], ["convoy", "transformers"])
    )
    assert [row["tokens_out"] for row in result["throughput"]] == [8, 8, 40, 40]
    assert all(row["equal_tokens"] == 1.0 for row in result["throughput"])
    assert all(row["share"] > 0 for row in result["throughput"])
    assert [len(result[section]) for section in ("latency", "prefix")] == [2, 4]
    assert result["host"]["command"].startswith("python -m engine.bench all --model")
    assert set(result["engines"]) == {"convoy", "transformers"}
    for section in ("throughput", "latency", "prefix"):
        assert report.table(section, result[section]) in printed
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_templates_are_used_where_there_are_any(tiny_http_path: Path) -> None:
    encode = command_line._encoder(str(tiny_http_path))
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(tiny_http_path).decode(encode([{"role": "user", "content": "Hello"}]))
    assert text.count("<|im_start|>") >= 2 and "Hello" in text
