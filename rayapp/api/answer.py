"""Runs the generations of a plan and answers with them, whole or streamed.

The one path of all generation endpoints; what an answer looks like is told by a `Shape`. Knows nothing of how
the plan came about.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from rayapp.api.choices import Choice, Indexed, first_of_each, merge, while_connected
from rayapp.api.errors import ApiError
from rayapp.api.resolve import Plan
from rayapp.api.service import Chunk, Service
from rayapp.api.streaming import EventStream, json_response


class Shape(Protocol):
    """One answer in the form of one endpoint, as OpenAI has it. A stream is made of whole events."""

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""

    def opening(self, usage: dict[str, Any] | None) -> Iterable[bytes]:
        """What a stream begins with; `usage` as for `piece`."""

    def piece(self, index: int, chunk: Chunk, usage: dict[str, Any] | None) -> Iterable[bytes]:
        """What a choice has to say next, its end included; `usage` so far, where the request asks for it."""

    def closing(self, usage: dict[str, Any]) -> Iterable[bytes]:
        """What a stream that went well ends with."""

    def failure(self, error: ApiError) -> bytes:
        """What a stream that fails breaks off with."""


async def answer(service: Service, plan: Plan, shape: Shape, request: Request) -> Response:
    """The response to a request, once nothing can be refused any more.

    Raises:
        ApiError: a generation was refused, or failed before the answer began.
        ClientGone: the client hung up.
    """
    # A choice's random stream follows from its number within its prompt, so that a prompt in a list is answered
    # as it would be alone.
    streams = [
        service.generate(plan.model, prompt, sampling, plan.stop, choice)
        for prompt, sampling in zip(plan.prompts, plan.sampling, strict=True)
        for choice in range(plan.n)
    ]
    merged = merge([_prompt_only(stream) for stream in streams] if plan.prompt_only else streams)
    if not plan.stream:
        whole = shape.whole(*await while_connected(request.receive, _collect(merged, plan)))
        return json_response(whole)
    try:
        begun = await while_connected(request.receive, first_of_each(merged, plan.num_choices))
    except BaseException:
        await merged.aclose()
        raise
    return EventStream(_events(begun, merged, plan, shape), shape.failure)


async def _prompt_only(stream: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """As though nothing had been generated: the engine makes one token at least."""
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            ends = None if chunk.finish_reason is None else "length"
            yield replace(chunk, text="", token_ids=[], completion_tokens=0, finish_reason=ends)


async def _collect(merged: Indexed, plan: Plan) -> tuple[list[Choice], dict[str, Any]]:
    choices = _choices(plan)
    async with aclosing(merged) as chunks:
        async for index, chunk in chunks:
            choices[index].add(chunk)
    return choices, usage_of(plan, choices)


async def _events(
    begun: list[tuple[int, Chunk]], merged: Indexed, plan: Plan, shape: Shape
) -> AsyncGenerator[bytes, None]:
    counts = _choices(plan)
    async with aclosing(merged) as rest:
        for event in shape.opening(usage_of(plan, counts) if plan.running_usage else None):
            yield event
        async for index, chunk in _chain(begun, rest):
            counts[index].count(chunk)
            usage = usage_of(plan, counts) if plan.running_usage else None
            for event in shape.piece(index, chunk, usage):
                yield event
    for event in shape.closing(usage_of(plan, counts)):
        yield event


def _choices(plan: Plan) -> list[Choice]:
    counter = plan.reply.counter
    return [Choice(reasoning=None if counter is None else counter()) for _ in range(plan.num_choices)]


async def _chain(begun: list[tuple[int, Chunk]], rest: Indexed) -> Indexed:
    for one in begun:
        yield one
    async for one in rest:
        yield one


def usage_of(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Each prompt counts once, every completion counts. Cached is what no choice of a prompt had to compute."""
    prompt_tokens = sum(len(prompt) for prompt in plan.prompts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    reasoning_tokens = sum(choice.reasoning.tokens for choice in choices if choice.reasoning is not None)
    of_prompt = [choices[start : start + plan.n] for start in range(0, len(choices), plan.n)]
    cached_tokens = sum(min(choice.cached_tokens for choice in group) for group in of_prompt)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
