"""What each tensor parallel process runs for test_tensor_parallel.py: checks, whose findings go to a file.

Started as a module with the folder of models and findings, and a time limit in seconds. It forks, so that torch and
transformers are imported once, which takes longer than all checks. Both processes run the same lines; where one must
differ from the other it looks at its rank.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DistributedConfig, PreTrainedModel

from engine import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    GenerationOutput,
    generate_batch,
    init_continuous_batching,
)
from engine.distributed.coordinator import Turn
from engine.distributed.tensor_parallel import TensorParallel
from engine.model.shadow import make_shadow, model_facts
from tests.conftest import wait_limit
from tests.harness import NO_EOS, config, core_of, tokens

RANK = 0
FOLDER = Path(sys.argv[1])

PROMPTS = [tokens(seed, 14 * seed) for seed in range(1, 6)]
GREEDY = tokens(9, 20)
POISON = [7, *tokens(10, 20), 499]
TIMEOUT_S = 4.0  # of the checks that outlast it


def load(name: str, **arguments: Any) -> PreTrainedModel:
    size = int(os.environ["WORLD_SIZE"])
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        FOLDER / name, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=size), **arguments
    )
    return model


@contextmanager
def running(model: PreTrainedModel, **fields: Any) -> Iterator[ContinuousBatchingManager]:
    manager = init_continuous_batching(model, NO_EOS, config(**fields))
    manager.start()
    yield manager
    manager.stop(hard_stop=True)
    manager.destroy()


def ended(manager: ContinuousBatchingManager, count: int = 1) -> dict[str, GenerationOutput]:
    """The next `count` terminal outputs, by id."""
    outputs: dict[str, GenerationOutput] = {}
    while len(outputs) < count:
        output = manager.get_result(timeout=wait_limit(90))
        assert output is not None, "nothing comes"
        if output.is_finished():
            outputs[output.request_id] = output
    return outputs


def told(run: Callable[[], Any]) -> str:
    """The error that `run` raises."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def uneven_heads(model: PreTrainedModel) -> str:
    three = load("three_kv_heads")
    return told(lambda: init_continuous_batching(three))


def device_map(model: PreTrainedModel) -> str:
    return told(lambda: load("tiny", device_map="cpu"))


def shadow(model: PreTrainedModel) -> dict[str, Any]:
    """The copy shares the shards, and calls its own modules only."""
    called: list[int] = []
    handles = [module.register_forward_hook(lambda module, *_: called.append(id(module))) for module in model.modules()]
    copied: Any = make_shadow(model)
    for handle in handles:
        handle.remove()
    originals = {id(module) for module in model.modules()}
    closures = [cell.cell_contents for m in copied.modules() for cell in getattr(m.forward, "__closure__", None) or ()]
    return {
        "kv_heads": model_facts(copied).num_kv_heads,
        "shared": all(a is b for a, b in zip(copied.parameters(), model.parameters(), strict=True)),
        "wrapped": len(closures),
        "originals": sum(id(content) in originals for content in closures),
    }


def one_call(model: PreTrainedModel) -> list[list[int]]:
    outputs = generate_batch(model, PROMPTS, NO_EOS, config(), max_new_tokens=8)
    return [output.generated_tokens for output in outputs.values()]


def experts(model: PreTrainedModel) -> list[list[int]]:
    """Another family: experts, norms of heads, the head tied to the embedding."""
    outputs = generate_batch(load("experts"), PROMPTS, NO_EOS, config(), max_new_tokens=4)
    return [output.generated_tokens for output in outputs.values()]


def few_blocks(model: PreTrainedModel) -> dict[str, Any]:
    """Prompts in chunks, preemption, sampled beside greedy; the processes were given different seeds and sizes."""
    fields = {"num_blocks": 12 + RANK, "max_batch_tokens": 32, "safety_margin": 0.0, "seed": 5 + RANK}
    with running(model, per_request_processors=True, **fields) as manager:
        for index, prompt in enumerate(PROMPTS):
            manager.add_request(prompt, f"request-{index}", max_new_tokens=16, do_sample=index % 2 == 1)
        outputs = ended(manager, len(PROMPTS))
        core = core_of(manager)
        return {
            "tokens": [outputs[f"request-{index}"].generated_tokens for index in range(len(PROMPTS))],
            "num_blocks": core.scheduler.cache.num_blocks,
            "max_requests": manager.settings.max_requests,
            "seed": manager.settings.seed,
            "preemptions": core.scheduler.num_preemptions,
            "steps": core.steps,
        }


def life(model: PreTrainedModel) -> dict[str, Any]:
    """Cancelled by the driver, stopped by the other, started again."""
    manager = init_continuous_batching(model, NO_EOS, config())
    manager.start()
    returned = manager.add_request(GREEDY, "long", max_new_tokens=200, streaming=True)
    first = manager.get_result(timeout=wait_limit(90))
    assert first is not None
    manager.cancel_request("long")
    cancelled = ended(manager)["long"]
    if RANK == 0:
        manager.warmup()  # of no effect while the engine runs: the other process would not answer
    manager.add_request(GREEDY, "kept", max_new_tokens=4)
    kept = ended(manager)["kept"]
    if RANK == 1:
        manager.stop()
    manager.join(timeout=wait_limit(30))
    stopped = not manager.is_running()
    manager.start()
    manager.add_request(GREEDY, "again", max_new_tokens=4)
    again = ended(manager)["again"]
    manager.stop()
    manager.destroy()
    return {
        "returned": returned,
        "cancelled": [cancelled.status.name, cancelled.generated_tokens],
        "kept": kept.generated_tokens,
        "stopped": stopped,
        "again": again.generated_tokens,
    }


def long_waits(model: PreTrainedModel) -> dict[str, Any]:
    """One engine idle and one paused for longer than the time limit; the model is used meanwhile.

    Before that one process pauses alone.
    """
    limit = wait_limit(TIMEOUT_S)
    with running(model, cpu_group_timeout=limit) as idle, running(model, cpu_group_timeout=limit) as paused:
        paused.add_request(GREEDY, "paused", max_new_tokens=80)
        steps = []
        if RANK == 1:
            with paused.pause():
                for wait_s in (0.0, 0.2):
                    time.sleep(wait_s)
                    steps.append(core_of(paused).steps)
        with paused.pause():
            logits = model(input_ids=torch.tensor([GREEDY])).logits
            time.sleep(1.3 * limit)
        idle.add_request(GREEDY, "idle", max_new_tokens=4)
        return {
            "steps": steps,
            "used": int(logits[0, -1].argmax()),
            "paused": ended(paused)["paused"].generated_tokens,
            "idle": ended(idle)["idle"].generated_tokens,
        }


def failing_request(model: PreTrainedModel) -> dict[str, Any]:
    """What one request causes on every process fails it alone."""

    def refuse(module: Any, args: tuple[torch.Tensor]) -> None:
        if 499 in args[0]:
            raise ValueError("poison")

    handle = model.get_input_embeddings().register_forward_pre_hook(refuse)
    with running(model) as manager:
        manager.add_request(POISON, "bad", max_new_tokens=4)
        manager.add_request(GREEDY, "good", max_new_tokens=4)
        outputs = ended(manager, 2)
    handle.remove()
    return {"bad": outputs["bad"].error, "good": outputs["good"].generated_tokens}


def unsendable_request(model: PreTrainedModel) -> dict[str, Any]:
    """What only one process can know of is refused there, and the engines go on."""

    class Local:
        def allowed(self, output_ids: list[int]) -> None:
            return None

    with running(model, per_request_processors=True) as manager:
        refused = told(lambda: manager.add_request(GREEDY, constraint=Local())) if RANK == 0 else ""
        manager.add_request(GREEDY, "good", max_new_tokens=4)
        return {"refused": refused, "good": ended(manager)["good"].generated_tokens}


def failing_process(model: PreTrainedModel) -> dict[str, Any]:
    """A step that fails on one process only ends the engines of all."""
    with running(model) as manager:
        if RANK == 1:

            def fail(*args: Any) -> None:
                raise MemoryError("too little here")

            core_of(manager).runner.sample = fail  # type: ignore[method-assign]
        manager.add_request(GREEDY, "lost", max_new_tokens=4)
        lost = ended(manager)["lost"]
        manager.join(timeout=wait_limit(30))
        return {
            "status": lost.status.name,
            "error": lost.error,
            "fatal": str(manager.fatal_error),
            "refused": told(lambda: manager.add_request(GREEDY)),
        }


def failing_build(model: PreTrainedModel) -> str:
    """What one process cannot do, none does."""
    coordinator = TensorParallel([0, 1], wait_limit(30))

    def make() -> None:
        if RANK == 1:
            raise MemoryError("too little here")

    return told(lambda: coordinator.together(make))


def late(model: PreTrainedModel) -> str:
    """A process that does not come."""
    coordinator = TensorParallel([0, 1], 0.5)
    error = told(lambda: coordinator.agree(Turn())) if RANK == 0 else "the late one"
    dist.barrier()
    coordinator.close()
    return error


def leaving(model: PreTrainedModel) -> str:
    """A process whose engine failed between steps."""
    coordinator = TensorParallel([0, 1], wait_limit(30))
    if RANK == 1:
        coordinator.leave(OSError("disk on fire"))
    return told(lambda: coordinator.agree(Turn()))


def killed(model: PreTrainedModel) -> dict[str, Any]:
    """One process is killed from outside while requests run."""
    with running(model, max_batch_tokens=8, cpu_group_timeout=wait_limit(60)) as manager:
        for index in range(3):
            manager.add_request(GREEDY, f"request-{index}", max_new_tokens=230, streaming=index == 0)
        manager.get_result(timeout=wait_limit(90))
        if RANK == 1:
            (FOLDER / "victim").write_text(str(os.getpid()))
        outputs = ended(manager, 3)
        manager.join(timeout=wait_limit(30))
        return {
            "errors": [output.error for output in outputs.values()],
            "fatal": f"{type(manager.fatal_error).__name__}: {manager.fatal_error}",
            "refused": told(lambda: manager.add_request(GREEDY)),
        }


CHECKS: list[Callable[[PreTrainedModel], Any]] = [
    uneven_heads,
    device_map,
    shadow,
    one_call,
    experts,
    few_blocks,
    life,
    long_waits,
    failing_request,
    unsendable_request,
    failing_process,
    failing_build,
    leaving,
    late,
    one_call,
    killed,  # the last: it leaves one process only
]


def main() -> None:
    global RANK
    RANK = 0 if os.fork() else 1
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    ContinuousBatchingConfig()  # sets NCCL's switch, before the processes connect
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/rendezvous", rank=RANK, world_size=2)
    model = load("tiny")
    findings: dict[str, Any] = {"rank": RANK, "nccl": os.environ.get("NCCL_GRAPH_MIXING_SUPPORT")}
    for check in CHECKS:
        started = time.monotonic()
        findings[check.__name__] = check(model)
        print(f"[{RANK}] {check.__name__}: {time.monotonic() - started:.2f} s", flush=True)
        (FOLDER / f"findings-{RANK}.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    main()
