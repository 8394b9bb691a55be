"""Decode steps of transformers' own continuous batching, on the same models, prompts and device. A stage a model."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.gpu_check.device import Bench
from engine.gpu_check.floors import share
from engine.gpu_check.models import build, costs_of
from engine.gpu_check.stages import Progress
from engine.gpu_check.steps import Sizes

_DECODED = 24  # tokens for which all requests decode together
_ESTIMATE = 10.0  # seconds below which no case is begun


def peer(bench: Bench, progress: Progress, name: str) -> None:
    """Rows like those of `steps`, by the time stamps of tokens."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    sizes = Sizes.of(bench.small)
    model = build(name, bench.device, bench.small)
    costs = costs_of(model)
    taken: dict[int, float] = {}
    for batch in sizes.batches:
        case = f"batch {batch}"
        if not progress.has_time(case, 0 if bench.small else needed(batch, taken)):
            return
        begin = time.monotonic()
        with progress.case(case):
            new_tokens = _DECODED + -(-batch * sizes.context // sizes.step_tokens)
            blocks = batch * -(-(sizes.context + new_tokens) // sizes.page) + 1
            wanted: dict[str, Any] = {
                "page_size": sizes.page,
                "num_blocks": max(blocks, 8),
                "max_batch_tokens": sizes.step_tokens,
                "allow_block_sharing": False,
                "auto_switch_to_flash": importlib.util.find_spec("flash_attn") is not None,
            }
            known = inspect.signature(ContinuousBatchingConfig).parameters
            outputs = model.generate_batch(
                [random.Random(i).choices(range(model.config.vocab_size), k=sizes.context) for i in range(batch)],
                generation_config=GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, do_sample=False),
                continuous_batching_config=ContinuousBatchingConfig(
                    **{key: value for key, value in wanted.items() if key in known}
                ),
                record_timestamps=True,
                progress_bar=False,
            )
            stamps = [output.timestamps for output in outputs.values()]
            if len(stamps) != batch or not all(stamps):
                raise RuntimeError(f"{len(outputs)} of {batch} requests came back with time stamps")
            seconds = statistics.median(together(stamps))
            tokens = sizes.context + new_tokens / 2
            floor = costs.decode_seconds(bench.limits, batch, tokens)
            progress.add(case, batch=batch, context=tokens, step_ms=1e3 * seconds, share=share(floor, seconds))
        bench.free()
        taken[batch] = time.monotonic() - begin


def needed(batch: int, taken: Mapping[int, float]) -> float:
    """Seconds for a case of so many requests at least, from what smaller ones took, by batch.

    Without a flash kernel every query of a prompt is compared with the keys of all requests.
    """
    return max([_ESTIMATE, *(seconds * batch / before for before, seconds in taken.items())])


def together(stamps: Sequence[Sequence[float]]) -> list[float]:
    """Seconds between tokens while all requests decode: after the last one's first token, before any one's last.

    Raises:
        RuntimeError: they never do.
    """
    first, last = max(each[0] for each in stamps), min(each[-1] for each in stamps)
    own: Any = max(stamps, key=lambda each: each[0])
    times = [stamp for stamp in own if first <= stamp <= last]
    if len(times) < 2:
        raise RuntimeError("the requests never decode all together: raise the tokens that they generate")
    return [later - earlier for earlier, later in itertools.pairwise(times)]
