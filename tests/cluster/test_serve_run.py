"""`serve run` with a configuration file like the shipped one, as an operator sees it: a process of its own, talked to
by HTTP, by another process and by a submitted job, and ended by Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.conftest import wait_limit
from tests.models import CHAIN_NEWLINES, CHAIN_THERE, COUNT, COUNT_IDS, ref
from tests.serving import BIN, ROOT, ServeRun, dashboard_url, wait_until

STOP_LIMIT_S = 20
CHAIN_ANSWER = [11527, CHAIN_NEWLINES, 198, 253, 216, 28]  # to CHAIN_THERE, by the fixture `served`
OPENING = "You are a patient assistant who answers in few words and never repeats the question. " * 12


class OtherProcess:
    """A Python process that is connected to the server's Ray and does what it is asked over pipes."""

    CODE = """
import json, sys, ray
ray.init(log_to_driver=False)
from ray import serve
from rayapp.client import Client
client, engines = Client(), serve.get_deployment_handle("EngineReplica-tiny", "convoy")
for line in sys.stdin:
    print("answer", json.dumps(eval(line)), flush=True)
"""

    def __init__(self, server: ServeRun) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", self.CODE],
            env=server.env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, expression: str) -> Any:
        """The value of an expression over `client` and `engines`."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        print(expression, file=pipe_in, flush=True)
        for line in pipe_out:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("the other process ended")

    def served(self) -> dict[str, int]:
        """Requests that each replica has ended."""
        reports = self.ask("engines.broadcast('health', 5.0).results()")
        return {report["replica"]: report["served"] for report in reports}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def server(served: ServeRun) -> ServeRun:
    return served


@pytest.fixture(scope="module")
def other(server: ServeRun) -> Iterator[OtherProcess]:
    process = OtherProcess(server)
    yield process
    process.close()


def test_the_terminal_shows_what_runs_and_where(server: ServeRun) -> None:
    wait_until(lambda: "Convoy is ready" in server.log.read_text(), 10)
    log = server.log.read_text()
    assert f"{server.url}/v1 serves smol, tiny, chain" in log
    assert re.search(r"Convoy \S+: tiny in float32 on cpu, 1 threads", log)
    assert "KV cache: 16,384 tokens" in log
    assert "maximum concurrency: 4.00 requests of 4,096 tokens" in log
    assert "engine.num_blocks=1024" in log


def test_openai_client_checks_every_answer_strictly(server: ServeRun) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True) as client:
        assert [model.id for model in client.models.list()] == ["smol", "tiny", "chain"]
        whole = client.chat.completions.create(model="tiny", messages=messages, n=4, max_tokens=8, seed=1)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        stream = client.chat.completions.create(model="tiny", messages=messages, n=4, max_tokens=8, seed=1, stream=True)
        texts = dict.fromkeys(range(4), "")
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert list(texts.values()) == [choice.message.content for choice in whole.choices]
        many = client.completions.create(model="tiny", prompt=["One", "Two", "Three"], n=2, max_tokens=4)
        assert [choice.index for choice in many.choices] == list(range(6))


def test_three_models_answer_side_by_side(
    server: ServeRun, tiny_http: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Each with its own tokens, twelve requests at once; a fourth model is nobody's."""
    tiny_text = smol_tokenizer.decode(ref(tiny_http, smol_tokenizer(COUNT)["input_ids"], 16))
    cases: list[tuple[str, str | list[int], str]] = [
        ("smol", COUNT, smol_tokenizer.decode(COUNT_IDS)),
        ("tiny", COUNT, tiny_text),
        ("chain", [CHAIN_THERE], smol_tokenizer.decode(CHAIN_ANSWER)),
    ]

    def ask(case: tuple[str, str | list[int], str]) -> str:
        body = {"model": case[0], "prompt": case[1], "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=wait_limit(60)).raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, cases * 4))
    assert [text.rstrip("\ufffd") for text in texts] == [text.rstrip("\ufffd") for *_, text in cases * 4]
    body = {"model": "fourth", "prompt": "x"}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 404
    health = httpx.get(f"{server.url}/health").json()["models"]
    assert {name: one["state"] for name, one in health.items()} == dict.fromkeys(("smol", "tiny", "chain"), "ready")


def test_O40_turns_reach_one_replica_from_http_another_process_and_a_job(server: ServeRun, other: OtherProcess) -> None:
    """Two conversations at home on different replicas: turn 1 by HTTP, turn 2 by a process, turn 3 by a job."""
    homes: dict[str, str] = {}
    number = 0
    while len(homes) < 2:
        assert number < 30, "every conversation went to the same replica"
        opening = f"{number}: {OPENING}"
        number += 1
        used, text = _complete(server, other, opening)
        if used not in homes.values():
            homes[opening + text] = used
    for text, home in homes.items():
        before = other.served()
        other.ask(f"client.generate({text + ' Go on.'!r}, model='tiny', max_tokens=4)")
        assert _used(before, other.served()) == home
    ids = [7, *range(200, 340)]
    home_of_ids, _ = _complete(server, other, ids)

    before = other.served()
    third = [argument for text in homes for argument in ("--prompt", f"{text} Go on. And on.")]
    lines = _submit(server, [*third, "--ids", json.dumps(ids)])
    after = other.served()
    expected = {replica: 1 + (replica == home_of_ids) for replica in homes.values()}
    assert {replica: after[replica] - before[replica] for replica in after} == expected
    assert lines[2]["replica"] == home_of_ids
    assert len(lines[2]["token_ids"]) == 4
    # Each turn finds the ones before it in the cache of the replica that it reaches.
    cached = [lines[0]["usage"]["cached_tokens"], lines[1]["usage"]["cached_tokens"], lines[2]["cached_tokens"]]
    assert min(cached) >= 128


def _complete(server: ServeRun, other: OtherProcess, prompt: str | list[int]) -> tuple[str, str]:
    """The replica that served a completion over HTTP, and its text."""
    before = other.served()
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=wait_limit(30)).raise_for_status()
    return _used(before, other.served()), answer.json()["choices"][0]["text"]


def _used(before: dict[str, int], after: dict[str, int]) -> str:
    (replica,) = (replica for replica in after if after[replica] > before[replica])
    return replica


def _submit(server: ServeRun, arguments: list[str]) -> list[dict[str, Any]]:
    """What cluster/jobs/generate.py printed as a job."""
    script = [sys.executable, str(ROOT / "cluster/jobs/generate.py"), "--model", "tiny", "--max-tokens", "4"]
    command = [str(BIN / "ray"), "job", "submit", "--address", dashboard_url(server), "--", *script, *arguments]
    done = subprocess.run(command, env=server.env, cwd=ROOT, capture_output=True, text=True, timeout=wait_limit(120))
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.ends_server
def test_zz_ctrl_c_ends_everything_within_seconds(server: ServeRun) -> None:
    """Also while an answer is streamed, which breaks off. The last test of this file: it ends the server."""
    body = {"model": "tiny", "prompt": OPENING, "max_tokens": 3900, "stream": True}
    rest: list[str] = []
    with (
        httpx.Client(timeout=wait_limit(60)) as http,
        http.stream("POST", f"{server.url}/v1/completions", json=body) as r,
    ):
        lines = r.iter_lines()
        next(lines)
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.RemoteProtocolError):
            deque(map(rest.append, (line for line in lines if line)))
        assert server.process.wait(wait_limit(STOP_LIMIT_S)) == 0
    print(f"ended {time.monotonic() - started:.1f} s after Ctrl-C")
    assert "[DONE]" not in rest[-1]
    wait_until(lambda: not server.processes(), STOP_LIMIT_S)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
