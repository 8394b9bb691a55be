"""The process of one engine: loads it once, then does what its parent asks, a line of JSON each way.

Started by `engine.bench.workers` as `python -m engine.bench.child SPEC`, maybe by an interpreter that has neither torch
nor transformers, so it imports nothing but what the engine of its spec needs. Lines in: {"work": [[ids, n], ...],
"stream": bool}. Lines out: {"ready": true, ...} once, then {"seconds", "outputs", "times"} a line, or {"error"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from engine.bench.engines import make_engine

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    work_for_parent(lambda spec: make_engine(spec["engine"], spec["model"], spec["dtype"], spec["config"]), _do)


def work_for_parent(make: Callable[[dict[str, Any]], Any], do: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """The life of a child: makes its engine, which has a `version`, then does one order after another until its parent
    is gone."""
    _die_with_parent()
    answers = _private_stdout()
    try:
        start = time.perf_counter()
        engine = make(json.loads(sys.argv[1]))
        ready = {"ready": True, "load_s": time.perf_counter() - start, "version": engine.version}
    except BaseException:
        _answer(answers, {"error": traceback.format_exc()})
        raise
    _answer(answers, ready)
    for line in sys.stdin:
        try:
            _answer(answers, do(engine, json.loads(line)))
        except Exception:
            _answer(answers, {"error": traceback.format_exc()})
    os._exit(0)  # an engine's threads may not be daemons; its processes are in our group, which the parent ends


def _do(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    work = [(list(prompt), int(new_tokens)) for prompt, new_tokens in order["work"]]
    start = time.perf_counter()
    if order["stream"]:
        ((prompt, new_tokens),) = work
        tokens, stamps = engine.stream(prompt, new_tokens)
        return {
            "seconds": stamps[-1] - start if stamps else 0.0,
            "outputs": [tokens],
            "times": [stamp - start for stamp in stamps],
        }
    outputs = engine.run(work)
    return {"seconds": time.perf_counter() - start, "outputs": outputs, "times": []}


def _die_with_parent() -> None:
    """A stopped process cannot notice that its parent is gone, so the kernel is told to end it then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _private_stdout() -> TextIO:
    """Answers go where stdout went; whatever libraries print goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
