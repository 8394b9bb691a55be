"""The handle on an engine's process: start it, give it work, check what comes back, keep it still in between.

Only one worker computes at a time. Between its turns a worker's whole process group is stopped, since several engines
spin while they wait. Used by the measurements; knows no workload.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.bench import host
from engine.bench.workloads import Work

_ROOT = Path(__file__).resolve().parents[2]
_CHILD = ("-m", "engine.bench.child")
_SETTLE_S = 0.05  # what an engine still does after its answer is not carried into its next turn
_EXIT_S = 10.0


class BenchError(RuntimeError):
    """A measurement that counts for nothing; the text says which engine did what."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine to start and how.

    Attributes:
        engine: a key of `engine.bench.engines.ENGINES`.
        model: folder or file of the weights.
        dtype: "bfloat16" or "float32".
        config: settings in the engine's own terms.
        python: the interpreter that has the engine's packages.
        child: arguments of that interpreter that start the engine's process.
    """

    engine: str
    model: str
    dtype: str = "bfloat16"
    config: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    child: tuple[str, ...] = _CHILD


@dataclass(frozen=True)
class Turn:
    """What one run gave.

    Attributes:
        seconds: from submission to the last token.
        outputs: generated ids of each request.
        times: of a stream: seconds from submission to each token.
        cpu_seconds: processor time of the engine's processes, spinning included.
        neighbours: share of the machine's processor time that went to anything else meanwhile, in [0, 1].
    """

    seconds: float
    outputs: list[list[int]]
    times: list[float]
    cpu_seconds: float
    neighbours: float


class Worker:
    """An engine in a process group of its own. Use as a context manager; it is started at once and stands still.

    Raises:
        BenchError: the process ended or failed; the text has the end of what it wrote to stderr.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.name = spec.engine
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        argument = {"engine": spec.engine, "model": spec.model, "dtype": spec.dtype, "config": spec.config}
        self._process = subprocess.Popen(
            [spec.python, *spec.child, json.dumps(argument)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
        try:
            ready = self._receive()
            self.version, self.load_s = str(ready["version"]), float(ready["load_s"])
            self._stop()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Sequence[Work]) -> Turn:
        """All requests at once. Raises BenchError, also when an output has not exactly the length asked for."""
        return self._turn(work, stream=False)

    def stream(self, work: Work) -> Turn:
        """One request, its tokens stamped as they come. Raises BenchError as `run`."""
        return self._turn([work], stream=True)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer of a child of another kind to an order of its own, as it is. Raises BenchError."""
        self._signal(signal.SIGCONT)
        self._send(order)
        answer = self._receive()
        self._stop()
        return answer

    def close(self) -> None:
        """Ends the process and whatever it started."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def _turn(self, work: Sequence[Work], stream: bool) -> Turn:
        self._signal(signal.SIGCONT)
        before = host.busy_seconds(), host.group_seconds(self._process.pid), time.perf_counter()
        self._send({"work": work, "stream": stream})
        answer = self._receive()
        busy, own, wall = host.busy_seconds(), host.group_seconds(self._process.pid), time.perf_counter()
        self._stop()
        outputs: list[list[int]] = answer["outputs"]
        _check_lengths(self.name, work, outputs)
        busy, own, wall = busy - before[0], own - before[1], wall - before[2]
        share = min(1.0, max(0.0, (busy - own) / (wall * host.cores())))
        return Turn(answer["seconds"], outputs, answer["times"], own, share)

    def _send(self, order: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except OSError as error:
            raise BenchError(f"{self.name}: its process ended.\n{self._tail()}") from error

    def _receive(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise BenchError(f"{self.name}: its process ended without an answer.\n{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name} failed:\n{answer['error']}\n{self._tail()}")
        return answer

    def _stop(self) -> None:
        time.sleep(_SETTLE_S)
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        """To the group, which a new session's leader leads; one that is gone is noticed when it does not answer."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]


@contextlib.contextmanager
def started(specs: Sequence[EngineSpec]) -> Iterator[list[Worker]]:
    """The workers, loaded one after the other and each warmed by one short stream; all are ended at the end."""
    with contextlib.ExitStack() as stack:
        workers = []
        for spec in specs:
            print(f"loading {spec.engine} ...", file=sys.stderr, flush=True)
            worker = stack.enter_context(Worker(spec))
            worker.stream(Work(list(range(100, 132)), 16))
            workers.append(worker)
        yield workers


def _environment() -> dict[str, str]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _check_lengths(name: str, work: Sequence[Work], outputs: list[list[int]]) -> None:
    found, wanted = [len(tokens) for tokens in outputs], [item.new_tokens for item in work]
    if len(found) != len(wanted):
        raise BenchError(f"{name} answered {len(found)} of {len(wanted)} requests")
    wrong = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    if wrong:
        i = wrong[0]
        raise BenchError(
            f"{name} generated {found[i]} tokens instead of {wanted[i]} for request {i}, and a wrong number for "
            f"{len(wrong)} of {len(wanted)} requests"
        )
