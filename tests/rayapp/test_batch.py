"""The batch job: every line is answered once, in order, whatever is wrong with lines and whenever it is killed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.api.errors import ApiError
from rayapp.failures import EngineUnavailable
from tests.conftest import wait_limit
from tests.serving import ROOT, wait_until

if TYPE_CHECKING:
    from tests.rayapp.conftest import App

JOBS = ROOT / "cluster" / "jobs"
sys.path.insert(0, str(JOBS))
import batch  # noqa: E402
from checkpoint import Checkpoint  # noqa: E402

USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0}


def arguments(folder: Path, lines: list[Any], **options: Any) -> argparse.Namespace:
    source = folder / "in.jsonl"
    source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return argparse.Namespace(
        input=source, output=folder / "out.jsonl", model=None, concurrency=4, option=list(options.items())
    )


def answers(run: argparse.Namespace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.output.read_text().splitlines()]


def echo(line: dict[str, Any]) -> dict[str, Any]:
    return {"text": f"{line['prompt']}!", "finish_reason": "stop", "usage": USAGE}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PAUSES_S", (0.0, 0.0))


def test_answers_are_in_the_order_of_the_lines_with_their_ids(tmp_path: Path) -> None:
    run = arguments(tmp_path, [{"prompt": str(n), "id": f"n{n}"} for n in range(20)])
    later = threading.Event()

    def out_of_order(line: dict[str, Any]) -> dict[str, Any]:
        later.wait(30) if line["prompt"] == "0" else later.set()
        return echo(line)

    totals = batch.run(run, out_of_order)
    assert [(one["line"], one["id"], one["text"]) for one in answers(run)] == [
        (n + 1, f"n{n}", f"{n}!") for n in range(20)
    ]
    assert (totals.lines, totals.completion_tokens, totals.errors.total()) == (20, 40, 0)
    assert not run.output.with_name("out.jsonl.partial").exists()


def test_no_more_lines_are_in_work_than_allowed(tmp_path: Path) -> None:
    run = arguments(tmp_path, [{"prompt": str(n)} for n in range(40)])
    working, most, lock = 0, 0, threading.Lock()

    def slow(line: dict[str, Any]) -> dict[str, Any]:
        nonlocal working, most
        with lock:
            working += 1
            most = max(most, working)
        time.sleep(0.002)
        with lock:
            working -= 1
        return echo(line)

    batch.run(run, slow)
    assert 1 < most <= run.concurrency


def test_a_bad_line_is_its_own_answer_and_nobody_else_s(tmp_path: Path) -> None:
    lines = [
        {"prompt": "good"}, "{not json", "[1]", {"id": 7}, {"prompt": "a", "ids": [1]}, "", {"prompt": "refused"},
        {"prompt": "good too"},
    ]  # fmt: skip

    def picky(line: dict[str, Any]) -> dict[str, Any]:
        if line["prompt"] == "refused":
            raise ApiError(400, "too long")
        return echo(line)

    run = arguments(tmp_path, lines)
    totals = batch.run(run, picky)
    kinds = {one["line"]: one.get("error", {}).get("type") for one in answers(run)}
    assert kinds == {1: None, 2: "invalid_line", 3: "invalid_line", 4: "invalid_line", 5: "invalid_line",
                     7: "invalid_request_error", 8: None}  # fmt: skip
    assert "5 errors, 4 invalid_line, 1 invalid_request_error" in str(totals)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    run = arguments(tmp_path, [{"prompt": "a"}])
    run.input.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "b"}\n')
    batch.run(run, echo)
    assert [one.get("text") for one in answers(run)] == [None, "b!"]


def test_options_of_a_line_come_before_those_of_all(tmp_path: Path) -> None:
    run = arguments(tmp_path, [{"prompt": "a"}, {"prompt": "b", "seed": 2}], seed=1, max_tokens=3)
    seen: list[dict[str, Any]] = []
    batch.run(run, lambda line: seen.append(line) or echo(line))  # type: ignore[func-returns-value]
    assert sorted((one["prompt"], one["seed"], one["max_tokens"]) for one in seen) == [("a", 1, 3), ("b", 2, 3)]


def test_what_fails_for_the_moment_is_tried_again_now_and_by_the_next_run(tmp_path: Path) -> None:
    run = arguments(tmp_path, [{"prompt": str(n)} for n in range(6)])
    tries: Counter[str] = Counter()

    def flaky(line: dict[str, Any]) -> dict[str, Any]:
        tries[line["prompt"]] += 1
        if line["prompt"] == "2" and tries["2"] < 3:
            raise ApiError(429, "full")
        if line["prompt"] == "4" and tries["4"] <= 3:
            raise EngineUnavailable("gone")
        return echo(line)

    first = batch.run(run, flaky)
    assert (first.unfinished, tries["2"], tries["4"]) == (1, 3, 3)
    assert not run.output.exists()
    second = batch.run(run, flaky)
    assert (second.earlier, second.lines, second.unfinished) == (5, 1, 0)
    assert [one["text"] for one in answers(run)] == [f"{n}!" for n in range(6)]


def test_it_gives_up_where_nobody_answers(tmp_path: Path) -> None:
    run = arguments(tmp_path, [{"prompt": str(n)} for n in range(100)])

    def nobody(line: dict[str, Any]) -> dict[str, Any]:
        raise EngineUnavailable("no replica")

    with pytest.raises(RuntimeError, match="nobody answers: no replica"):
        batch.run(run, nobody)
    batch.run(run, echo)
    assert len(answers(run)) == 100


def test_another_batch_or_another_process_is_refused(tmp_path: Path) -> None:
    run = arguments(tmp_path, [{"prompt": "a"}])
    with Checkpoint(run.output, {"input": "x"}), pytest.raises(RuntimeError, match="another process"):
        batch.run(run, echo)
    with pytest.raises(RuntimeError, match="of another batch"):
        batch.run(run, echo)


@settings(max_examples=40)
@given(data=st.data())
def test_cut_off_anywhere_it_ends_as_if_it_had_not_been(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The partial file ends after any byte, as it may after a crash; several times."""
    count = data.draw(st.integers(1, 12), label="lines")
    run = arguments(tmp_path_factory.mktemp("batch"), [{"prompt": str(n), "id": n} for n in range(count)])
    partial = run.output.with_name("out.jsonl.partial")
    for _ in range(data.draw(st.integers(0, 3), label="crashes")):
        most = data.draw(st.integers(0, count), label="answered before the crash")
        begun = Counter[str]()

        def crash(line: dict[str, Any], most: int = most, begun: Counter[str] = begun) -> dict[str, Any]:
            begun["lines"] += 1
            if begun["lines"] > most:
                raise KeyboardInterrupt
            return echo(line)

        run.concurrency = 1
        try:
            batch.run(run, crash)
        except KeyboardInterrupt:
            size = partial.stat().st_size
            os.truncate(partial, data.draw(st.integers(0, size), label="bytes left"))
        else:
            break
    batch.run(run, echo)
    assert [(one["line"], one["id"], one["text"]) for one in answers(run)] == [
        (n + 1, n, f"{n}!") for n in range(count)
    ]


def test_killed_in_the_middle_it_goes_on_and_answers_each_line_once(tiny_app: App, tmp_path: Path) -> None:
    """`kill -9` of the real job against a real application: the second run does the rest, with the same tokens."""
    kinds: list[dict[str, Any]] = [
        {"prompt": "One, two", "id": "text"},
        {"messages": [{"role": "user", "content": "Hello"}], "id": "chat"},
        {"ids": [5, 6, 7], "model": "tiny", "id": "ids", "max_tokens": 5},
        {"prompt": "none", "max_tokens": -1, "id": "refused"},
    ]
    lines = [{**kinds[n % 4], "id": f"{kinds[n % 4]['id']}-{n}"} for n in range(80)]
    run = arguments(tmp_path, lines)
    partial = run.output.with_name("out.jsonl.partial")
    command = [sys.executable, str(JOBS / "batch.py"), str(run.input), str(run.output), "--app", tiny_app.name]
    command += [
        "--concurrency",
        "4",
        "--option",
        "max_tokens=16",
        "--option",
        "temperature=0",
        "--option",
        "ignore_eos=true",
    ]
    env = os.environ | {"RAY_ADDRESS": tiny_app.address, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

    first = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # Stopped as soon as some are done, so that it cannot be through before it is killed.
    wait_until(
        lambda: first.poll() is not None or (partial.exists() and partial.read_bytes().count(b"\n") > 5),
        90,
        every=0.002,
    )
    os.kill(first.pid, signal.SIGSTOP)
    before = partial.read_bytes().count(b"\n") - 1 if partial.exists() else 0
    children = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    output = first.communicate()[0]
    assert 5 <= before < len(lines), output
    assert not run.output.exists() and not children

    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=wait_limit(120))
    assert second.returncode == 0, second.stdout + second.stderr
    made = answers(run)
    assert [(one["line"], one["id"]) for one in made] == [(n + 1, line["id"]) for n, line in enumerate(lines)]
    assert f"{before} were done before" in second.stdout or f"{before - 1} were done before" in second.stdout
    assert all(("error" in one) == one["id"].startswith("refused") for one in made)
    same = {
        json.dumps([one.get("text"), one.get("token_ids")]) for one in made if one["id"].startswith(("text", "ids"))
    }
    assert len(same) == 2, "greedy answers to the same line are the same in both runs"
    assert all(len(one["token_ids"]) == 5 for one in made if one["id"].startswith("ids"))
