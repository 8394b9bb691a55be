"""What structured output costs: tokens a second of an engine with and without it, and the time of its masks.

    python -m rayapp.bench.structured [--batch 32] [--tokens 96] [--rounds 3]

Runs the engine alone, in this process, on the bundled model or the folder given by --model. Both sides are greedy, with
EOS ignored, so that they generate the same number of tokens; rounds alternate, and the best of each counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from rayapp.models import BUNDLED_MODEL, resolve
from rayapp.structured import Compiler, GrammarConstraint

PEOPLE: dict[str, Any] = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "city": {"type": "string", "maxLength": 40},
            "role": {"enum": ["engineer", "designer", "manager", "analyst"]},
            "remote": {"type": "boolean"},
        },
        "required": ["name", "age", "city", "role", "remote"],
        "additionalProperties": False,
    },
}


class Timed:
    """A constraint that adds up what it is asked for."""

    def __init__(self, constraint: GrammarConstraint) -> None:
        self._constraint = constraint
        self.seconds = 0.0
        self.masks = 0

    def allowed(self, output_ids: Any) -> npt.NDArray[np.bool_]:
        begun = time.perf_counter()
        mask = self._constraint.allowed(output_ids)
        self.seconds += time.perf_counter() - begun
        self.masks += 1
        return mask


def measure(folder: str, batch: int, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens a second of both sides, and the time of a mask in microseconds, the best of each."""
    import engine
    from engine.config import ContinuousBatchingConfig
    from engine.model.loader import load_model
    from rayapp.text.tokenizer import Tokenizer

    model = load_model(resolve(folder), dtype="auto", device="cpu")
    tokenizer = Tokenizer.load(resolve(folder))
    compiler = Compiler(tokenizer, model.config.get_text_config().vocab_size, sorted(tokenizer.special_ids))
    prompts = [tokenizer.encode(f"A list of {i + 3} people in JSON:\n") for i in range(batch)]
    settings = ContinuousBatchingConfig(max_batch_tokens=512, max_requests_per_batch=batch, per_request_processors=True)
    manager = engine.init_continuous_batching(model, continuous_batching_config=settings)
    manager.warmup()
    manager.start()

    def run(constrained: bool) -> tuple[float, list[Timed]]:
        timed = []
        begun = time.perf_counter()
        ids = []
        for prompt in prompts:
            fields: dict[str, Any] = {}
            if constrained:
                timed.append(Timed(compiler.constraint({"kind": "json_schema", "value": PEOPLE})))
                fields["constraint"] = timed[-1]
            request = manager.add_request(prompt, max_new_tokens=tokens, ignore_eos=True, do_sample=False, **fields)
            ids.append(str(request))
        outputs = [manager.get_result(request_id) for request_id in ids]
        seconds = time.perf_counter() - begun
        generated = sum(len(output.generated_tokens) for output in outputs if output is not None)
        if generated != batch * tokens:
            raise RuntimeError(f"{generated} tokens were generated instead of {batch * tokens}")
        return generated / seconds, timed

    try:
        run(True), run(False)  # what is set up once
        free, bound, masks = 0.0, 0.0, []
        for _ in range(rounds):
            free = max(free, run(False)[0])
            rate, timed = run(True)
            bound = max(bound, rate)
            masks.append(sum(one.seconds for one in timed) / sum(one.masks for one in timed) * 1e6)
    finally:
        manager.stop()
    return {"free": free, "json_schema": bound, "mask_us": min(masks)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rayapp.bench.structured", description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found = measure(arguments.model, arguments.batch, arguments.tokens, arguments.rounds)
    step_us = arguments.batch * 1e6 / found["free"]
    share = arguments.batch * found["mask_us"] / step_us
    print(f"free text    {found['free']:8.1f} tokens/s")
    print(f"JSON schema  {found['json_schema']:8.1f} tokens/s  ({found['json_schema'] / found['free']:.1%})")
    print(f"a mask       {found['mask_us']:8.1f} µs          ({share:.1%} of a step of {step_us / 1000:.1f} ms)")


if __name__ == "__main__":
    main()
