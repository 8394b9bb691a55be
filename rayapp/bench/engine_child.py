"""The process of the engine alone: the very engine that a replica runs, asked without Ray and without streams.

Started by `split.py` as `python -m rayapp.bench.engine_child SPEC`; orders and answers are lines of JSON (see
`engine.bench.child`). Times are the engine's own stamps of each token.
"""

from __future__ import annotations

import asyncio
from typing import Any

from engine.bench.child import work_for_parent
from rayapp.bench.closed_loop import Answer, closed_loop
from rayapp.config import ModelConfig
from rayapp.loading import load_engine


class InProcess:
    """The engine of a model's configuration."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import engine

        self.version = engine.__version__
        self._manager, _ = load_engine(ModelConfig.model_validate(spec["config"]))

    async def ask(self, prompt: list[int], new_tokens: int) -> Answer:
        """See `rayapp.bench.closed_loop.Ask`."""
        output = await self._manager.generate(
            prompt, max_new_tokens=new_tokens, do_sample=False, ignore_eos=True, record_timestamps=True
        )
        times = output.timestamps
        if output.error is not None or not times:
            raise RuntimeError(f"the engine failed: {output.error}")
        return Answer(times[0] - output.created_time, times[-1] - output.created_time, len(times))

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        """One turn."""
        return asyncio.run(closed_loop(self.ask, order["prompts"], order["new_tokens"], order["concurrency"])).as_dict()


if __name__ == "__main__":
    work_for_parent(InProcess, InProcess.do)
