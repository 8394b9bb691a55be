"""A `Service` whose generations are scripted, for tests of the HTTP app without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayapp.api.service import Chunk, SamplingFields, ServedModel
from rayapp.api.settings import RequestSettings
from rayapp.text.template import ChatTemplate
from rayapp.text.tokenizer import Tokenizer

Script = Callable[["Call"], AsyncIterator[Chunk]]

CONTEXT = 256


@dataclass
class Call:
    """One generation that the app asked for."""

    model: str
    prompt_ids: list[int]
    sampling: SamplingFields
    stop: list[str]
    index: int
    ended: bool = False
    closed_early: bool = False


async def echo(call: Call) -> AsyncIterator[Chunk]:
    """Says which prompt and choice it is, in three pieces with an empty one between."""
    text = [f"<{len(call.prompt_ids)}", "", f".{call.index}>"]
    for number, piece in enumerate(text, 1):
        await asyncio.sleep(0)
        last = number == len(text)
        yield Chunk(piece, [7], ("length" if call.index else "stop") if last else None, number, len(call.prompt_ids), 4)


@dataclass
class ScriptedService:
    """The Service the endpoints see; every generation runs `script`."""

    models: dict[str, ServedModel]
    script: Script = echo
    calls: list[Call] = field(default_factory=list)
    healthy: bool = True
    settings: RequestSettings = field(default_factory=RequestSettings)

    async def generate(
        self, model: str, prompt_ids: list[int], sampling: SamplingFields, stop: list[str], index: int
    ) -> AsyncGenerator[Chunk, None]:
        call = Call(model, prompt_ids, sampling, stop, index)
        self.calls.append(call)
        try:
            async for chunk in self.script(call):
                yield chunk
                call.ended = chunk.finish_reason is not None
        finally:
            call.closed_early = not call.ended
            call.ended = True

    async def metrics(self) -> bytes | None:
        return None

    async def health(self) -> tuple[bool, dict[str, Any]]:
        return self.healthy, {"models": {"smol": {"replicas": int(self.healthy), "running": 0, "waiting": 0}}}


def scripted_models(folder: Path) -> dict[str, ServedModel]:
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.of(tokenizer)
    defaults = {"temperature": 0.7, "top_k": 50}
    return {
        "smol": ServedModel("smol", 1700000000, tokenizer, template, CONTEXT),
        "org/warm": ServedModel("org/warm", 1700000001, tokenizer, None, CONTEXT, defaults),
        "picky": ServedModel("picky", 1, tokenizer, ChatTemplate(tokenizer, "{{ raise_exception('no') }}"), CONTEXT),
    }
