"""The asyncio side of the manager: one request awaited, or its outputs as they come.

A base class of `ContinuousBatchingManager`. Any number of event loops may use one manager; each gets its outputs by
one wake-up a step. Knows nothing of the engine thread but that it calls receivers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.delivery import Receiver
from engine.intake import Intake
from engine.loop import EngineLoop, describe_error
from engine.outputs import GenerationOutput
from engine.waiting_room import QUEUE_TIMEOUT_S

if TYPE_CHECKING:
    import torch


class AsyncRequests:
    """`generate` and `stream` of a manager."""

    _intake: Intake
    _loop: EngineLoop

    async def generate(
        self, input_ids: Sequence[int] | torch.Tensor, request_id: str | None = None, **arguments: Any
    ) -> GenerationOutput:
        """The terminal output of one request. Arguments, and what is raised, as for `add_request`.

        Cancelling the task cancels the request.

        Raises:
            RuntimeError: the manager is stopping or stopped, or the engine failed before it took the request.
            ValueError: several sequences are asked for: take them from `stream`.
        """
        if self._intake.num_sequences(arguments.get("num_return_sequences")) > 1:
            raise ValueError("generate() gives one output: set num_return_sequences=1, or use stream()")
        async for output in self._outputs(input_ids, request_id, streaming=False, **arguments):
            last = output
        return last

    def stream(
        self, input_ids: Sequence[int] | torch.Tensor, request_id: str | None = None, **arguments: Any
    ) -> AsyncIterator[GenerationOutput]:
        """Outputs of one request, one a token, up to the terminal one of each of its sequences.

        Arguments, and what is raised, as for `generate`, from the first iteration on, which submits. An output costs
        the same however long the text is: take its new tokens with `tokens_since`. Cancelling the task, or closing the
        iterator, cancels the request.
        """
        return self._outputs(input_ids, request_id, streaming=True, **arguments)

    async def _outputs(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        request_id: str | None,
        *,
        queue_timeout: float | None = QUEUE_TIMEOUT_S,
        **arguments: Any,
    ) -> AsyncIterator[GenerationOutput]:
        loop = self._loop
        if self._refuses():
            raise RuntimeError("the manager is stopped or stopping and takes no requests")
        family = self._intake.family(request_id, input_ids, **arguments)
        outputs: asyncio.Queue[GenerationOutput] = asyncio.Queue()  # holds an output a token at most
        receiver: Receiver = (outputs.put_nowait, asyncio.get_running_loop())
        entered = not loop.room.limit or await loop.room.enter_async(len(family), queue_timeout)
        if not entered or not loop.submit_entered(family, receiver):
            cause = describe_error(loop.fatal_error) or "the manager was stopped"
            raise RuntimeError(f"the request was not taken: {cause}")
        pending = {request.request_id for request in family}
        try:
            while pending:
                output = await outputs.get()
                if output.is_finished():
                    pending.remove(output.request_id)
                yield output
        finally:
            if pending:
                loop.cancel(family[0].request_id)

    def _refuses(self) -> bool:
        """True when the session is over; the manager says when that is."""
        raise NotImplementedError
