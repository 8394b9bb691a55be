"""The process that `startup.py` measures: starts an engine the way users do, and prints one line of JSON.

Loads nothing heavy itself: what it imports, and when, is what is measured. Linux only.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

_PROMPT = [1, 2, 3]


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    report = _time(asked) if asked["what"] == "time" else _memory(asked)
    print(json.dumps(report))


def _time(asked: dict[str, Any]) -> dict[str, Any]:
    marks: list[dict[str, Any]] = []

    def mark(name: str) -> None:
        marks.append({"name": name, "wall_s": _age(), "cpu_s": time.process_time()})

    mark("Python")
    from engine.ops.cpu import prebuild

    prebuild.start()  # as the serving actor does
    import torch  # noqa: F401

    mark("torch")
    from engine import init_continuous_batching
    from engine.model.loader import load_model

    mark("engine's names")
    model = load_model(asked["model"], asked["dtype"])
    mark("transformers and the weights")
    manager = init_continuous_batching(model)
    manager.warmup()
    mark("engine: modules, cache, warm-up")
    manager.start()
    manager.add_request(_PROMPT, max_new_tokens=1, eos_token_id=-1)
    output = manager.get_result()
    assert output is not None and len(output.generated_tokens) == 1, output
    mark("first token")
    manager.destroy()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    load_model(asked["model"], asked["dtype"])
    reload_s = time.perf_counter() - started
    return {"marks": marks, "compiler_cpu_s": children.ru_utime + children.ru_stime, "reload_s": reload_s}


def _memory(asked: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine import ContinuousBatchingConfig, generate, init_continuous_batching  # noqa: F401
    from engine.execution import model_runner  # noqa: F401
    from engine.model.loader import load_model

    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(asked["model"]))]  # imports the model's class
    imports = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    model = load_model(asked["model"], asked["dtype"])
    peak_loading = _status("VmHWM") - imports
    weights = sum(parameter.nbytes for parameter in model.parameters())
    config = ContinuousBatchingConfig(max_requests_per_batch=asked["requests"], release_weights=True)
    manager = init_continuous_batching(model, continuous_batching_config=config)
    manager.warmup()
    manager.start()
    half = asked["tokens"] // 2
    prompts = [[1 + (7 * row + place) % 1000 for place in range(half)] for row in range(asked["requests"])]
    manager.add_requests(prompts, max_new_tokens=asked["tokens"] - half, eos_token_id=-1)
    outputs = list(manager)
    assert all(len(output.generated_tokens) == asked["tokens"] - half for output in outputs), outputs
    settings = manager.settings
    blocks = asked["requests"] * -(-asked["tokens"] // settings.page_size)
    return {
        "imports": imports,
        "weights": weights,
        "touched_cache": blocks * settings.kv_bytes_per_block,
        "peak_loading": peak_loading,
        "peak_serving": _status("VmHWM") - imports,
    }


def _age() -> float:
    """Seconds since this process was started, to a clock tick (10 ms)."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _status(field: str) -> int:
    """Bytes that /proc/self/status gives."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


if __name__ == "__main__":
    main()
