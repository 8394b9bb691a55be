"""Runs the generations of a plan and answers with them, whole or streamed.

The one path of both generation endpoints; what an answer looks like is told by a `Shape`. Knows nothing of how
the plan came about.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from rayapp.api.choices import Choice, Indexed, first_of_each, merge, while_connected
from rayapp.api.resolve import Plan
from rayapp.api.service import Chunk, Service
from rayapp.api.streaming import DONE, EventStream, event, to_json


class Shape(Protocol):
    """The objects of one endpoint, as OpenAI has them. An answer's objects share id, created and model."""

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream begins with; None where it begins with text."""

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """New text of a choice, or its end."""

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last object of a stream whose client asked for usage."""


async def answer(service: Service, plan: Plan, shape: Shape, request: Request) -> Response:
    """The response to a request, once nothing can be refused any more.

    Raises:
        ApiError: a generation was refused, or failed before the answer began.
        ClientGone: the client hung up.
    """
    # A choice's random stream follows from its number within its prompt, so that a prompt in a list is answered
    # as it would be alone.
    merged = merge(
        [
            service.generate(plan.model, prompt, sampling, plan.stop, choice)
            for prompt, sampling in zip(plan.prompts, plan.sampling, strict=True)
            for choice in range(plan.n)
        ]
    )
    if not plan.stream:
        whole = shape.whole(*await while_connected(request.receive, _collect(merged, plan)))
        return Response(to_json(whole), media_type="application/json")
    try:
        begun = await while_connected(request.receive, first_of_each(merged, plan.num_choices))
    except BaseException:
        await merged.aclose()
        raise
    return EventStream(_events(begun, merged, plan, shape))


async def _collect(merged: Indexed, plan: Plan) -> tuple[list[Choice], dict[str, Any]]:
    choices = [Choice() for _ in range(plan.num_choices)]
    async with aclosing(merged) as chunks:
        async for index, chunk in chunks:
            choices[index].add(chunk)
    return choices, usage_of(plan, choices)


async def _events(
    begun: list[tuple[int, Chunk]], merged: Indexed, plan: Plan, shape: Shape
) -> AsyncGenerator[bytes, None]:
    choices = [Choice() for _ in range(plan.num_choices)]
    asks_usage = {"usage": None} if plan.include_usage else {}
    async with aclosing(merged) as rest:
        for index in range(plan.num_choices):
            if (opening := shape.opening(index)) is not None:
                yield event(opening | asks_usage)
        async for index, chunk in _chain(begun, rest):
            choices[index].add(chunk)
            if chunk.text:
                yield event(shape.piece(index, chunk.text, None) | asks_usage)
            if chunk.finish_reason is not None:
                yield event(shape.piece(index, "", chunk.finish_reason) | asks_usage)
    if plan.include_usage:
        yield event(shape.closing(usage_of(plan, choices)))
    yield DONE


async def _chain(begun: list[tuple[int, Chunk]], rest: Indexed) -> Indexed:
    for one in begun:
        yield one
    async for one in rest:
        yield one


def usage_of(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Each prompt counts once, every completion counts. Cached is what no choice of a prompt had to compute."""
    prompt_tokens = sum(len(prompt) for prompt in plan.prompts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    of_prompt = [choices[start : start + plan.n] for start in range(0, len(choices), plan.n)]
    cached_tokens = sum(min(choice.cached_tokens for choice in group) for group in of_prompt)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
