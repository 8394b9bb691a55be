"""From what callers submit to checked `Request`s, or an error that says what to change.

Used by the manager, in the caller's thread. Knows the settings and the generation config; nothing of threads,
delivery or scheduling.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import threading
import time
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from engine.outputs import GenerationOutput
from engine.request import FinishReason, Request, RequestStatus
from engine.sampling.params import SamplingParams, sibling_params
from engine.sampling.random import derive_seed
from engine.sampling.resolve import make_params, num_return_sequences
from engine.settings import Settings

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig


class Intake:
    """Makes the requests of one engine.

    Args:
        settings: limits and seed of the engine.
        generation_config: in force for every request, already merged.
        is_taken: whether a name that could be given to a request is in use.
    """

    def __init__(
        self, settings: Settings, generation_config: GenerationConfig, is_taken: Callable[[str], bool] | None = None
    ) -> None:
        self._settings = settings
        self.generation_config = generation_config
        self._is_taken = is_taken or (lambda name: False)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._arrivals = itertools.count()

    def with_config(self, generation_config: GenerationConfig) -> Intake:
        """An intake that goes on with another generation config."""
        other = copy.copy(self)
        other.generation_config = generation_config
        return other

    def check(
        self,
        *,
        num_return_sequences: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> None:
        """Raise what would be raised for these arguments whatever the prompt."""
        self.num_sequences(num_return_sequences)
        _integer(priority, "priority")
        check_timeout("timeout_s", timeout_s)
        _salt(cache_salt)
        self.params(sampling)

    def name(self) -> str:
        """A name for a request that comes without."""
        with self._lock:
            names = (f"req_{number}" for number in self._numbers)
            return next(name for name in names if not self._is_taken(name))

    def batch(
        self, inputs: Sequence[Sequence[int] | torch.Tensor], **arguments: Any
    ) -> tuple[list[list[Request]], dict[str, GenerationOutput | None]]:
        """Requests for those of the inputs that can be served; arguments as for `family`.

        Returns:
            Those requests in the order they should run in, and an entry for every sequence in the order of the inputs:
            None, or the FAILED output of one that was refused.
        """
        further = self.num_sequences(arguments.get("num_return_sequences")) - 1
        families: list[list[Request]] = []
        entries: dict[str, GenerationOutput | None] = {}
        for ids in inputs:
            name = self.name()
            names = [name, *(_child(name, index) for index in range(further))]
            try:
                families.append(self.family(name, ids, **arguments))
                entries.update(dict.fromkeys(names))
            except ValueError as error:
                entries.update((each, refused_output(each, ids, error)) for each in names)
        return self.in_queue_order(families), entries

    def family(
        self,
        request_id: str | None,
        input_ids: Sequence[int] | torch.Tensor,
        *,
        num_return_sequences: int | None = None,
        output_ids: Sequence[int] = (),
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **sampling: Any,
    ) -> list[Request]:
        """A request and its further sequences: the same prompt, each with a seed of its own. Raises as `request`.

        Args:
            num_return_sequences: of them all; None takes the generation config's.
        """
        count = self.num_sequences(num_return_sequences)
        _boolean(streaming, "streaming")
        _boolean(record_timestamps, "record_timestamps")
        first = self.request(
            self.name() if request_id is None else request_id,
            input_ids,
            sampling,
            output_ids=output_ids,
            cache_salt=cache_salt,
            priority=priority,
            timeout_s=timeout_s,
            streaming=streaming,
            record_timestamps=record_timestamps,
        )
        return [first, *(self._sibling(first, index) for index in range(1, count))]

    def num_sequences(self, asked: int | None = None) -> int:
        """Sequences of one request: as asked, else the generation config's. Raises ValueError for what is no count."""
        return num_return_sequences(self.generation_config, {"num_return_sequences": asked})

    def request(
        self,
        request_id: str,
        input_ids: Sequence[int] | torch.Tensor,
        sampling: dict[str, Any],
        *,
        output_ids: Sequence[int] | torch.Tensor = (),
        cache_salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Request:
        """A request that can be served, the last in the order of arrival.

        Args:
            sampling: arguments for `make_params`.
            timeout_s: seconds from now until the request must have ended; None is for ever.
            **fields: further fields of `Request`.

        Raises:
            ValueError: a value is out of range, or the request can never fit.
            TypeError: an unknown sampling argument, or an id that is no string.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r}; it must be a string")
        prompt = _token_ids(input_ids, "input_ids", self._settings.vocab_size)
        output = _token_ids(output_ids, "output_ids", self._settings.vocab_size)
        check_timeout("timeout_s", timeout_s)
        self._check_length(len(prompt), len(prompt) + len(output))
        arrival = next(self._arrivals)
        params = self.params(sampling, len(prompt), arrival)
        if len(output) >= params.max_new_tokens:
            raise ValueError(
                f"output_ids has {len(output)} tokens already and max_new_tokens is {params.max_new_tokens}"
            )
        now = time.perf_counter()
        return Request(
            request_id,
            prompt + output,
            len(prompt),
            params,
            arrival=arrival,
            priority=_integer(priority, "priority"),
            created_time=now,
            deadline=math.inf if timeout_s is None else now + timeout_s,
            salt=_salt(cache_salt),
            **fields,
        )

    def _sibling(self, first: Request, index: int) -> Request:
        return Request(
            _child(first.request_id, index - 1),
            list(first.token_ids),
            first.num_prompt_tokens,
            sibling_params(first.params, index),
            arrival=next(self._arrivals),
            priority=first.priority,
            created_time=first.created_time,
            deadline=first.deadline,
            salt=first.salt,
            streaming=first.streaming,
            record_timestamps=first.record_timestamps,
        )

    def params(self, sampling: dict[str, Any], num_prompt_tokens: int = 1, arrival: int = 0) -> SamplingParams:
        """Sampling parameters for a prompt of this length. Raises as `request`."""
        return make_params(
            self.generation_config,
            per_request=sampling,
            per_request_processors=self._settings.per_request_processors,
            num_prompt_tokens=num_prompt_tokens,
            context_room=self._settings.context_length - num_prompt_tokens,
            vocab_size=self._settings.vocab_size,
            default_seed=derive_seed(self._settings.seed, arrival),
            logprobs=self._settings.return_logprobs,
        )

    def in_queue_order(self, families: list[list[Request]]) -> list[list[Request]]:
        """Requests submitted together, each with its further sequences, in the order they should run in.

        With prefix sharing that is sorted by tokens, so that equal prefixes meet in the cache; `arrival` is renumbered.
        """
        if not self._settings.sharing:
            return families
        arrivals = sorted(request.arrival for family in families for request in family)
        ordered = sorted(families, key=lambda family: family[0].token_ids)
        for request, arrival in zip(itertools.chain(*ordered), arrivals, strict=True):
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
            groups = f", shared by {len(settings.groups)} groups of layers" if len(settings.groups) > 1 else ""
            raise ValueError(
                f"the request has {known} tokens and the whole KV cache holds {settings.cache_tokens} "
                f"({settings.num_blocks} blocks of {settings.page_size}{groups}): shorten it by "
                f"{known - settings.cache_tokens}, or raise num_blocks"
            )


def refused_output(request_id: str, input_ids: Sequence[int] | torch.Tensor, error: Exception) -> GenerationOutput:
    """The FAILED output of an input that `Intake.request` refused with `error`."""
    prompt = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    request = Request(request_id, prompt, len(prompt), SamplingParams(max_new_tokens=1))
    request.status, request.finish_reason = RequestStatus.FAILED, FinishReason.ERROR
    request.error = f"{type(error).__name__}: {error}"
    return GenerationOutput(request)


def check_timeout(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is None or a number of seconds of at least 0."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ValueError(f"{name} is {value!r}: it must be a number of seconds of at least 0, or None for no limit")


def _child(request_id: str, index: int) -> str:
    """Id of a further sequence of a request, as transformers names them."""
    return f"{request_id}__child#{index}"


def _salt(value: Any) -> bytes:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"cache_salt is {value!r}: it must be a string or None")
    return (value or "").encode("utf-8", "surrogatepass")


def _boolean(value: Any, name: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be True or False")


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}: it must be an integer")
    return int(value)


def _token_ids(ids: Sequence[int] | torch.Tensor, name: str, vocab_size: int) -> list[int]:
    """Token ids as a new list of ints. Raises ValueError for anything but a flat sequence of ids below `vocab_size`."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
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
