"""Generates answers to a file of prompts, from inside the cluster; stopped or killed, it goes on where it was.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 -- \\
        python cluster/jobs/batch.py prompts.jsonl answers.jsonl --option max_tokens=256 --concurrency 64

A line is a JSON object with `prompt` (text to continue), `messages` (a chat to answer) or `ids` (token ids, answered
with token ids), perhaps an `id`, and options of the HTTP API for this line alone: max_tokens, temperature, seed, ...
Answers are in the order of the lines:

    {"line": 1, "id": ..., "text": ..., "finish_reason": ..., "usage": {...}}
    {"line": 2, "id": ..., "error": {"type": ..., "message": ...}}

While it runs they are in answers.jsonl.partial, and the same command reads there what is done. Errors of a line are its
answer; those of the moment (nobody there, all full) are tried again, here and by the next run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from checkpoint import Checkpoint
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rayapp.api.errors import ApiError
from rayapp.client import DEFAULT_APP, Client
from rayapp.failures import EngineUnavailable, InvalidRequest, Overloaded

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 20.0)  # before each new try of a line
BUSY = (408, 429, 502, 503, 504)
REPORT_INTERVAL_S = 10.0
KINDS = ("prompt", "messages", "ids")
# Options of the HTTP API as the engine takes them with token ids.
ENGINE_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
ENGINE_OPTIONS = {"temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "stop_token_ids"}

Answer = dict[str, Any]


class InvalidLine(ValueError):
    """A line that asks for nothing that can be done."""


@dataclass
class Totals:
    """What has been done by this process."""

    earlier: int
    started: float = field(default_factory=time.monotonic)
    lines: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, answer: Answer) -> None:
        self.lines += 1
        if "error" in answer:
            self.errors[answer["error"]["type"]] += 1
            self.unfinished += bool(answer.get("retry"))
        else:
            self.prompt_tokens += answer["usage"]["prompt_tokens"]
            self.completion_tokens += answer["usage"]["completion_tokens"]

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        text = f"{self.lines} lines in {seconds:.1f} s"
        if self.earlier:
            text += f", {self.earlier} were done before"
        text += (
            f"; {self.prompt_tokens} prompt tokens, {self.completion_tokens} generated "
            f"({self.completion_tokens / max(seconds, 1e-9):.1f} a second); {self.errors.total()} errors"
        )
        return text + "".join(f", {count} {name}" for name, count in self.errors.most_common())


def run(arguments: argparse.Namespace, answer: Callable[[dict[str, Any]], Answer]) -> Totals:
    """Answer every line of the input that is not answered yet.

    Args:
        answer: of one parsed line with the options of all lines filled in. Raises what makes the line's error.
    """
    options = dict(arguments.option)
    count, digest = fingerprint(arguments.input)
    header = {"input": digest, "model": arguments.model, "options": options}
    with Checkpoint(arguments.output, header) as checkpoint:
        totals, in_vain = Totals(earlier=len(checkpoint.done)), 0
        todo = ((number, text) for number, text in lines(arguments.input) if number not in checkpoint.done)
        with progress(count, totals) as advance, ThreadPoolExecutor(arguments.concurrency) as pool:
            for number, result in bounded(pool, todo, lambda text: tried(text, options, answer), arguments.concurrency):
                checkpoint.add(number, result)
                totals.add(result)
                advance()
                in_vain = in_vain + 1 if result.get("retry") else 0
                if in_vain >= 3 * arguments.concurrency:
                    raise RuntimeError(
                        f"nobody answers: {result['error']['message']}; run the same command again later"
                    )
        if not totals.unfinished:
            checkpoint.finish()
    return totals


def bounded(
    pool: ThreadPoolExecutor, todo: Iterator[tuple[int, bytes]], work: Callable[[bytes], Answer], most: int
) -> Iterator[tuple[int, Answer]]:
    """Results as they come, with at most `most` in work and none read ahead."""
    running: dict[Future[Answer], int] = {}
    more = True
    try:
        while more or running:
            while more and len(running) < most:
                number, text = next(todo, (0, b""))
                more = number > 0
                if more:
                    running[pool.submit(work, text)] = number
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
    finally:
        for future in running:
            future.cancel()


def tried(text: bytes, options: dict[str, Any], answer: Callable[[dict[str, Any]], Answer]) -> Answer:
    """The answer to one line of text, or its error. Never raises for what a line or the cluster may do."""
    name: Any = None
    failure: Answer = {}
    for pause in (*PAUSES_S, None):
        try:
            line = parsed(text)
            name = line.pop("id", None)
            return {"id": name, **answer(options | line)}
        except Exception as error:
            kind, retry = classified(error)
            failure = {"id": name, "error": {"type": kind, "message": str(error)}} | ({"retry": True} if retry else {})
            if not retry or pause is None:
                break
            time.sleep(pause)
    return failure


def classified(error: Exception) -> tuple[str, bool]:
    """What kind of error it is, and whether the same line may succeed at another time."""
    if isinstance(error, InvalidLine):
        return "invalid_line", False
    if isinstance(error, InvalidRequest):
        return "invalid_request_error", False
    if isinstance(error, ApiError):
        return error.type, error.status in BUSY
    if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
        return type(error.cause).__name__, False  # a fault of the application
    return type(error).__name__, isinstance(error, (EngineUnavailable, Overloaded, RayServeException, RayError))


def parsed(text: bytes) -> dict[str, Any]:
    """One line.

    Raises:
        InvalidLine: it is no JSON object, or does not say what to answer, or says so twice.
    """
    try:
        line = json.loads(text)
    except ValueError as error:
        raise InvalidLine(f"not JSON: {error}") from None
    if not isinstance(line, dict):
        raise InvalidLine("not a JSON object")
    if sum(kind in line for kind in KINDS) != 1:
        raise InvalidLine(f"exactly one of {', '.join(KINDS)} is needed")
    return line


class Caller:
    """Answers lines through the handles of an application."""

    def __init__(self, app: str, model: str) -> None:
        self._client = Client(app)
        self._model = model

    def __call__(self, line: dict[str, Any]) -> Answer:
        fields = {key: value for key, value in line.items() if key not in KINDS}
        model = fields.pop("model", self._model)
        if "ids" in line:
            return self._ids(model, line["ids"], fields)
        if model:
            fields["model"] = model
        return self._client.generate(line.get("prompt", line.get("messages")), **fields)

    def _ids(self, model: str | None, ids: Any, fields: dict[str, Any]) -> Answer:
        if not model:
            raise InvalidLine("token ids need a model: use --model, or `model` in the line")
        if unknown := fields.keys() - ENGINE_OPTIONS - ENGINE_NAMES.keys():
            raise InvalidLine(f"not for token ids: {', '.join(sorted(unknown))}")
        if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
            raise InvalidLine("ids must be a list of whole numbers")
        sampling = {ENGINE_NAMES.get(key, key): value for key, value in fields.items()}
        sampling["do_sample"] = bool(sampling.get("temperature"))
        if not sampling["do_sample"]:
            sampling.pop("temperature", None)
        made = self._client.generate_ids(model, ids, **sampling)
        usage = {
            "prompt_tokens": made["prompt_tokens"],
            "completion_tokens": len(made["token_ids"]),
            "cached_tokens": made["cached_tokens"],
        }
        return {"token_ids": made["token_ids"], "finish_reason": made["finish_reason"], "usage": usage}


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers, from 1, and texts of the lines that are not empty."""
    with file.open("rb") as stream:
        for number, text in enumerate(stream, 1):
            if text.strip():
                yield number, text


def fingerprint(file: Path) -> tuple[int, str]:
    """Number of lines that are not empty, and a hash of the file."""
    digest, count = hashlib.sha256(), 0
    with file.open("rb") as stream:
        for text in stream:
            digest.update(text)
            count += bool(text.strip())
    return count, digest.hexdigest()


@contextmanager
def progress(count: int, totals: Totals) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, elsewhere a line of text now and then. Yields what is called for each answer."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(), disable=not sys.stdout.isatty(),
    )  # fmt: skip
    task = bar.add_task("answering", total=count, completed=totals.earlier, rate="")
    said = time.monotonic()

    def advance() -> None:
        nonlocal said
        seconds = max(time.monotonic() - totals.started, 1e-9)
        rate = f"{totals.completion_tokens / seconds:.0f} tokens/s, {totals.errors.total()} errors"
        bar.update(task, advance=1, rate=rate)
        if bar.disable and time.monotonic() - said > REPORT_INTERVAL_S:
            said = time.monotonic()
            print(f"{totals.earlier + totals.lines} of {count} lines, {rate}", flush=True)

    with bar:
        yield advance


def option(text: str) -> tuple[str, Any]:
    """`name=value`; the value as JSON where it is that, else as text."""
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> int:
    """Reads the command line, connects to the cluster of the job, runs, sums up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="JSON lines")
    parser.add_argument("output", type=Path, help="where the answers go")
    parser.add_argument("--app", default=DEFAULT_APP, help="name of the Serve application (%(default)s)")
    parser.add_argument("--model", help="served model; may be left out where there is one and no ids")
    parser.add_argument("--concurrency", type=int, default=32, help="lines in work at a time (%(default)s)")
    parser.add_argument("--option", type=option, action="append", default=[], help="name=value for all lines")
    arguments = parser.parse_args()
    ray.init(log_to_driver=False)
    try:
        totals = run(arguments, Caller(arguments.app, arguments.model))
    except (RuntimeError, OSError, RayServeException) as error:
        print(f"batch: {error}", file=sys.stderr)
        return 2
    print(totals)
    if totals.unfinished:
        print(f"{totals.unfinished} lines could not be tried; run the same command again when there is room")
        return 1
    print(f"answers: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
