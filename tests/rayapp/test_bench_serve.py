"""The serving benchmark against a small server that streams known tokens: what it reports is what happened."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayapp.bench.__main__ import main as command
from rayapp.bench.client import Outcome, Target, connect, send
from rayapp.bench.datasets import Turn
from rayapp.bench.load import NOT_SENT, run_load
from rayapp.bench.serve import main
from tests.rayapp.streaming_server import FAULTS, PIECE, StreamingServer


@pytest.fixture
def server() -> Iterator[StreamingServer]:
    with StreamingServer() as running:
        yield running


def bench(server: StreamingServer, folder: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    """The result file of one run of the command."""
    saving = ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json"]
    assert main(["--base-url", server.url, *saving, *flags]) == status
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def prompts_file(folder: Path, *rows: dict[str, Any]) -> list[str]:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", str(len(rows))]
    return [*flags, "--disable-shuffle"]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_totals_are_the_servers(
    server: StreamingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    server.tokens_per_piece = 2
    result = bench(
        server, tmp_path, "--backend", backend, "--num-prompts", "6", "--random-input-len", "9",
        "--random-output-len", "8", "--metric-percentiles", "50,99.5", "--num-warmups", "2",
    )  # fmt: skip
    assert (result["completed"], result["failed"], result["error_counts"]) == (6, 0, {})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (54, 48)
    assert result["total_cached_tokens"] == 12
    assert result["output_throughput"] == pytest.approx(48 / result["duration"])
    assert result["total_token_throughput"] == pytest.approx(102 / result["duration"])
    assert result["input_lens"] == [9] * 6 and result["output_lens"] == [8] * 6
    assert [len(gaps) for gaps in result["itls"]] == [3] * 6  # four pieces of two tokens
    assert result["generated_texts"] == [4 * PIECE] * 6
    for one in zip(result["ttfts"], result["itls"], result["latencies"], strict=True):
        assert one[0] + sum(one[1]) <= one[2]
    assert result["model_id"] == "steady" and result["request_goodput"] is None
    assert len(server.bodies) == 9  # with the test request and two for warmth
    assert len({str(body) for body in server.bodies}) == 9  # nothing is measured that the server may have cached
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in server.bodies)
    shown = capsys.readouterr().out
    for line in (
        "Successful requests:                     6", "Total generated tokens:                  48",
        "P99.5 TTFT (ms):", "Median E2EL (ms):", "Peak concurrent requests:", "Mean ITL (ms):",
    ):  # fmt: skip
        assert line in shown


def test_every_request_is_under_way_at_once_without_a_limit(server: StreamingServer, tmp_path: Path) -> None:
    """The server answers nobody before all are there: one that waited for an answer first would hang."""
    server.gather = 1 + 40
    result = bench(server, tmp_path, "--num-prompts", "40", "--random-input-len", "2", "--random-output-len", "2")
    assert result["completed"] == 40 == result["max_concurrent_requests"] == server.most


def test_no_more_requests_than_the_limit(server: StreamingServer, tmp_path: Path) -> None:
    flags = ["--num-prompts", "30", "--random-input-len", "2", "--random-output-len", "20", "--max-concurrency", "3"]
    result = bench(server, tmp_path, *flags, "--request-rate", "2000", "--burstiness", "0.5")
    assert result["completed"] == 30
    assert server.most <= 3 and result["max_concurrent_requests"] <= 3
    assert max(result["queue_times"]) >= 0 and result["request_rate"] == 2000


def test_failures_are_counted_with_their_reasons(
    server: StreamingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": prompt, "output_tokens": 3} for prompt in ["fine", *FAULTS, "busy", "fine"]]
    result = bench(server, tmp_path, *prompts_file(tmp_path, *rows))
    assert result["error_counts"] == {
        "HTTP 503: no room left": 2,
        "error event: it broke": 1,
        "the stream ended without [DONE]": 1,
        "the answer has no choices": 1,
    }
    assert (result["completed"], result["failed"]) == (3, 5)
    # Of an answer without usage the pieces count, its end without text not.
    assert result["answers_without_usage"] == 1 and result["total_output_tokens"] == 9
    shown = capsys.readouterr().out
    assert "Failed requests:                         5" in shown
    assert "Failed 2 times: HTTP 503: no room left" in shown and "1 answers came without usage" in shown


def test_a_server_that_cannot_answer_is_an_error(server: StreamingServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", server.url, "--model", "busy", "--num-prompts", "1"]) == 1
    assert "HTTP 503: no room left" in capsys.readouterr().err
    assert main(["--base-url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 1
    assert "is the server up?" in capsys.readouterr().err


def test_a_connection_that_cannot_be_made_is_a_failed_request() -> None:
    async def run() -> Outcome:
        async with connect() as session:
            return await send(session, Target("http://127.0.0.1:9/v1/completions", "m"), "a", 1)

    outcome = asyncio.run(run())
    assert outcome.error is not None and "Cannot connect" in outcome.error


def test_a_turn_waits_for_the_answer_and_says_it_again(server: StreamingServer, tmp_path: Path) -> None:
    flags = ["--num-prompts", "3", "--num-turns", "3", "--random-input-len", "4", "--random-output-len", "2"]
    result = bench(server, tmp_path, "--dataset-name", "multi-turn", "--backend", "openai-chat", *flags)
    assert result["completed"] == 9
    assert result["input_lens"] == [4, 4 + 2 + 4, 4 + 2 + 4 + 2 + 4] * 3
    last = [body["messages"] for body in server.bodies if len(body["messages"]) == 5]
    assert len(last) == 3
    for messages in last:
        assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
        assert messages[1]["content"] == 2 * PIECE
        before = [body["messages"] for body in server.bodies if body["messages"] == messages[:3]]
        assert len(before) == 1  # the same words, once, a turn earlier
    for i in range(0, 9, 3):
        starts, ends = result["start_times"][i : i + 3], result["latencies"][i : i + 3]
        assert all(starts[j] + ends[j] <= starts[j + 1] for j in range(2))


def test_completions_of_several_turns_go_on_with_the_text(server: StreamingServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, *prompts_file(tmp_path, {"turns": ["one", "two"], "output_tokens": 2}))
    assert result["completed"] == 2
    assert [body["prompt"] for body in server.bodies[1:]] == ["one", "one" + 2 * PIECE + "two"]


def test_turns_after_a_failure_are_failures(server: StreamingServer, tmp_path: Path) -> None:
    rows = [{"turns": ["fine", "fine"], "output_tokens": 2}, {"turns": ["cut", "fine", "fine"], "output_tokens": 2}]
    result = bench(server, tmp_path, *prompts_file(tmp_path, *rows), "--backend", "openai-chat")
    assert (result["completed"], result["failed"]) == (2, 3)
    assert result["error_counts"] == {"the stream ended without [DONE]": 1, NOT_SENT: 2}


def test_what_every_request_carries(server: StreamingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    result = bench(
        server, tmp_path, "--num-prompts", "1", "--random-input-len", "2", "--random-output-len", "2", "--header",
        "x-tenant=blue", "--temperature", "0", "--top-k", "4", "--extra-body", '{"priority": 2}', "--metadata", "a=b",
        "--served-model-name", "other",
    )  # fmt: skip
    body = server.bodies[-1]
    assert (body["temperature"], body["top_k"], body["priority"], body["model"]) == (0, 4, 2, "other")
    assert server.headers[-1]["authorization"] == "Bearer secret" and server.headers[-1]["x-tenant"] == "blue"
    assert result["a"] == "b" and "secret" not in json.dumps(result)


def test_result_files(server: StreamingServer, tmp_path: Path) -> None:
    flags = ["--base-url", server.url, "--num-prompts", "1", "--random-input-len", "1", "--random-output-len", "1"]
    saving = ["--append-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "all.json"]
    assert main([*flags, *saving]) == main([*flags, *saving]) == 0
    lines = (tmp_path / "new" / "all.json").read_text().splitlines()
    assert len(lines) == 2 and all("ttfts" not in json.loads(line) for line in lines)
    assert main([*flags, "--save-result", "--result-dir", str(tmp_path), "--label", "x"]) == 0
    assert [path.name[:8] for path in tmp_path.glob("*.json")] == ["x-infqps"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--goodput", "itl:3"], "ttft, tpot, e2el"),
        (["--goodput", "ttft"], "NAME:MILLISECONDS"),
        (["--percentile-metrics", "ttft,speed"], "speed"),
        (["--metric-percentiles", "101"], "within 0 and 100"),
        (["--request-rate", "0"], "must be positive"),
        (["--max-concurrency", "0"], "must be positive"),
        (["--dataset-path", "x"], "takes no --dataset-path"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--token-ids"], "need a tokenizer"),
        (["--random-range-ratio", "1"], "in [0, 1)"),
        (["--header", "novalue"], "KEY=VALUE"),
        (["--extra-body", "[]"], "JSON object"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert says in capsys.readouterr().err


def test_a_client_without_time_to_spare_is_told_of() -> None:
    """Each request holds the event loop up for longer than the limit, so the lag is there on every machine."""

    async def hog(prompt: Any, max_tokens: int) -> Outcome:
        start = time.perf_counter()
        while time.perf_counter() < start + 0.1:
            pass
        await asyncio.sleep(0)
        return Outcome(start=start, end=time.perf_counter())

    times = [0.02 * i for i in range(10)]
    run = asyncio.run(run_load([(Turn("a", 1),)] * 10, hog, times))
    warnings = " ".join(run.strain.warnings())
    assert "event loop ran up to" in warnings and "later than planned" in warnings


def test_peers_take_turns_without_serve(
    server: StreamingServer, tmp_path: Path, smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--split",
        "--model",
        str(smol_path),
        "--layers",
        "",
        "--compare-url",
        f"a={server.url}",
        f"b={server.url}/",
    ]
    sizes = ["--concurrency", "2", "--reps", "2", "--random-input-len", "5", "--random-output-len", "3"]
    assert command([*flags, *sizes, "--save-result", "--result-dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "split.json").read_text())["rows"]
    assert [(row["layer"], len(row["turns"]), row["of_engine"]) for row in rows] == [("a", 2, None), ("b", 2, None)]
    assert [len(body["prompt"]) for body in server.bodies] == [5] * (2 * 2 + 2 * 2 * 4)
    assert "| 2 | a |" in capsys.readouterr().out
    assert command([*flags[:5], "--compare-url", "http=http://x"]) == 2
    assert "that of a layer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["--help"], "--request-rate"), (["--split", "--help"], "--compare-url"), (["routing", "--help"], "--policies")],
)
def test_commands_of_the_package(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(argv)
    assert ended.value.code == 0 and says in capsys.readouterr().out
