"""From what callers submit to checked `Request`s, or an error that says what to change.

Used by the manager, in the caller's thread. Knows the settings and the generation config; nothing of threads,
delivery or scheduling.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.outputs import GenerationOutput
from engine.request import FinishReason, Request, RequestStatus
from engine.sampling.params import SamplingParams
from engine.sampling.random import derive_seed
from engine.sampling.resolve import make_params
from engine.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig


class Intake:
    """Makes the requests of one engine.

    Args:
        settings: limits and seed of the engine.
        generation_config: in force for every request, already merged.
    """

    def __init__(self, settings: Settings, generation_config: GenerationConfig) -> None:
        self._settings = settings
        self._generation_config = generation_config
        self._arrivals = itertools.count()

    def request(
        self,
        request_id: str,
        input_ids: Sequence[int] | torch.Tensor,
        sampling: dict[str, Any],
        *,
        output_ids: Sequence[int] | torch.Tensor = (),
        cache_salt: str | None = None,
        **fields: Any,
    ) -> Request:
        """A request that can be served, the last in the order of arrival.

        Args:
            sampling: arguments for `make_params`.
            **fields: further fields of `Request`.

        Raises:
            ValueError: a value is out of range, or the request can never fit.
            TypeError: an unknown sampling argument, or an id that is no string.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r}; it must be a string")
        prompt = _token_ids(input_ids, "input_ids", self._settings.vocab_size)
        output = _token_ids(output_ids, "output_ids", self._settings.vocab_size)
        self._check_length(len(prompt), len(prompt) + len(output))
        arrival = next(self._arrivals)
        params = self.params(sampling, len(prompt), arrival)
        if len(output) >= params.max_new_tokens:
            raise ValueError(
                f"output_ids has {len(output)} tokens already and max_new_tokens is {params.max_new_tokens}"
            )
        return Request(
            request_id,
            prompt + output,
            len(prompt),
            params,
            arrival=arrival,
            salt=(cache_salt or "").encode(),
            **fields,
        )

    def params(self, sampling: dict[str, Any], num_prompt_tokens: int = 1, arrival: int = 0) -> SamplingParams:
        """Sampling parameters for a prompt of this length. Raises as `request`."""
        return make_params(
            self._generation_config,
            per_request=sampling,
            per_request_processors=self._settings.per_request_processors,
            num_prompt_tokens=num_prompt_tokens,
            context_room=self._settings.context_length - num_prompt_tokens,
            vocab_size=self._settings.vocab_size,
            default_seed=derive_seed(self._settings.seed, arrival),
            logprobs=self._settings.return_logprobs,
        )

    def in_queue_order(self, requests: list[Request]) -> list[Request]:
        """Requests submitted together, in the order they should run in.

        With prefix sharing that is sorted by tokens, so that equal prefixes meet in the cache; `arrival` is renumbered.
        """
        if not self._settings.sharing:
            return requests
        arrivals = [request.arrival for request in requests]
        ordered = sorted(requests, key=lambda request: request.token_ids)
        for request, arrival in zip(ordered, arrivals, strict=True):
            request.arrival = arrival
        return ordered

    def _check_length(self, prompt: int, known: int) -> None:
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token id, for example the model's bos_token_id")
        settings = self._settings
        excess = known + 1 - settings.context_length
        if excess > 0:
            raise ValueError(
                f"the request has {known} tokens and the model's context holds {settings.context_length}, one of "
                f"them to be generated: shorten it by {excess}"
            )
        if known > settings.cache_tokens:
            raise ValueError(
                f"the request has {known} tokens and the whole KV cache holds {settings.cache_tokens} "
                f"({settings.num_blocks} blocks of {settings.page_size}): shorten it by "
                f"{known - settings.cache_tokens}, or raise num_blocks"
            )


def refused_output(request_id: str, input_ids: Sequence[int] | torch.Tensor, error: Exception) -> GenerationOutput:
    """The FAILED output of an input that `Intake.request` refused with `error`."""
    prompt = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    request = Request(request_id, prompt, len(prompt), SamplingParams(max_new_tokens=1))
    request.status, request.finish_reason = RequestStatus.FAILED, FinishReason.ERROR
    request.error = f"{type(error).__name__}: {error}"
    return GenerationOutput(request)


def _token_ids(ids: Sequence[int] | torch.Tensor, name: str, vocab_size: int) -> list[int]:
    """Token ids as a new list of ints. Raises ValueError for anything but a flat sequence of ids below `vocab_size`."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} is {type(ids).__name__}; expected a flat sequence of integers")
    checked = []
    for position, value in enumerate(values):
        try:
            token = operator.index(value)
        except TypeError:
            token = None
        if token is None or isinstance(value, bool):
            raise ValueError(f"{name}[{position}] is {value!r:.40}; expected a flat sequence of integers")
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}[{position}] is {token}; the model's token ids go from 0 to {vocab_size - 1}")
        checked.append(token)
    return checked
