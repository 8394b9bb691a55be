"""Requests of every kind and their whole answers, for tests that disturb the replicas meanwhile.

An answer is compared with that of the same request left alone: everything a client sees but for ids, times and what
was cached.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from rayapp.client import Client
from tests.conftest import wait_limit
from tests.rayapp.conftest import App
from tests.rayapp.constraints import Grammar

Answer = dict[str, Any]


@dataclass
class Ask:
    """One request. `times` are those of its events (`time.monotonic`), `answer` what it came to."""

    kind: str
    prompt: str
    tokens: int
    times: list[float] = field(default_factory=list)

    def run(self, app: App) -> Answer:
        """The whole answer; an AssertionError when it is none."""
        self.times.clear()
        if self.kind in ("penalties", "grammar"):
            return self._ids(app)
        body = {"model": "tiny", "prompt": self.prompt, "max_tokens": self.tokens} | BODIES[self.kind]
        if not body.get("stream"):
            answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=wait_limit(240))
            assert answer.status_code == 200, answer.text
            choices = {one["index"]: [one["text"], one["finish_reason"]] for one in answer.json()["choices"]}
            return {"choices": choices, "completion_tokens": answer.json()["usage"]["completion_tokens"]}
        return self._stream(app, body)

    def _stream(self, app: App, body: dict[str, Any]) -> Answer:
        choices: dict[int, list[Any]] = {index: ["", None] for index in range(body.get("n", 1))}
        data, usage = "", None
        with (
            httpx.Client(timeout=wait_limit(240)) as http,
            http.stream("POST", f"{app.url}/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                assert data != "[DONE]", "something comes after the end"
                self.times.append(time.monotonic())
                data = line[6:]
                if data == "[DONE]":
                    continue
                event = json.loads(data)
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    so_far = choices[choice["index"]]
                    assert so_far[1] is None, "a choice goes on after its end"
                    so_far[0] += choice["text"]
                    so_far[1] = choice["finish_reason"]
        assert data == "[DONE]"
        assert usage is not None
        return {"choices": choices, "completion_tokens": usage["completion_tokens"]}

    def _ids(self, app: App) -> Answer:
        sampling = {"do_sample": True, "temperature": 0.9, "seed": 11, "max_new_tokens": self.tokens}
        if self.kind == "penalties":
            sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
            sampling |= {"no_repeat_ngram_size": 3, "min_new_tokens": 5}
        else:
            sampling["constraint"] = Grammar()
        ids = [ord(letter) for letter in self.prompt]
        answer = Client(app.name, max_migrations=20).generate_ids("tiny", ids, **sampling)
        return {key: answer[key] for key in ("token_ids", "finish_reason", "prompt_tokens")}


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, **STREAM},
    "choices": {"n": 3, "temperature": 1, "seed": 7, **STREAM},
    "stop": {"temperature": 0.8, "seed": 5, "stop": ["e a", "in the", "\n\n"], **STREAM},
    "whole": {"temperature": 0},
}
KINDS = (*BODIES, "penalties", "grammar")


def mixed(count: int, seed: int = 0, tokens: tuple[int, int] = (30, 120)) -> list[Ask]:
    """Requests of all kinds in turn, with prompts short and long, some of them sharing a beginning."""
    rng = random.Random(seed)
    shared = "Everybody knows this beginning, and it is long enough to have a home. " * 10
    asks = []
    for number in range(count):
        prompt = f"{number}: once upon a time" if rng.random() < 0.5 else f"{shared}{number}"
        asks.append(Ask(KINDS[number % len(KINDS)], prompt, rng.randint(*tokens)))
    return asks
