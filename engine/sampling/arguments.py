"""Sampling arguments by name: what values each takes and the form they have in `SamplingParams`.

Used by resolve.py for the arguments of requests and for the settings of generation configs alike. Every error is a
ValueError whose text begins with the argument's name. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from engine.sampling.constraint import TokenConstraint
from engine.sampling.params import MAX_TOP_LOGPROBS

MAX_LOGIT_BIAS = 100.0  # as in the OpenAI API
_MAX_SEQUENCES = 4096  # of one request: they are made at once, in the caller's thread

# (name, value, size of the vocabulary or None when it is not known) -> the value in its normal form
Argument = Callable[[str, Any, int | None], Any]


def _integer(low: int | None, high: int | None = None) -> Argument:
    expected = "an integer"
    if low is not None:
        expected += f" >= {low}" if high is None else f" between {low} and {high}"

    def read(name: str, value: Any, vocab_size: int | None) -> int:
        if not _is_int(value) or (low is not None and value < low) or (high is not None and value > high):
            raise ValueError(f"{name} is {value!r}: it must be {expected}")
        return int(value)

    return read


def _number(accepts: Callable[[float], bool], expected: str) -> Argument:
    def read(name: str, value: Any, vocab_size: int | None) -> float:
        try:
            number = float(value) if _is_number(value) else math.nan
        except OverflowError:  # an integer beyond every float
            number = math.inf
        if not accepts(number):
            raise ValueError(f"{name} is {value!r:.40}: it must be a number {expected}")
        return number

    return read


def _boolean(name: str, value: Any, vocab_size: int | None) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be True or False")
    return value


def _token(name: str, value: Any, vocab_size: int | None) -> int:
    if not _is_int(value):
        raise ValueError(f"{name} is {value!r}: it must be a token id")
    _check_range(name, [int(value)], vocab_size)
    return int(value)


def _tokens(name: str, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    """From an id, a sequence or a tensor; each id once."""
    ids = _ids(name, value)
    _check_range(name, ids, vocab_size)
    return ids


def _some_tokens(name: str, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    ids = _tokens(name, value, vocab_size)
    if not ids:
        raise ValueError(f"{name} is empty: nothing could be generated")
    return ids


def _eos(name: str, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    """Negative ids mean "off" and are left out."""
    ids = tuple(token for token in _ids(name, value) if token >= 0)
    _check_range(name, ids, vocab_size)
    return ids


def _sequences(name: str, value: Any, vocab_size: int | None) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r}: it must be a list of lists of token ids")
    return tuple(_sequence(name, each, vocab_size) for each in value)


def _biased_sequences(name: str, value: Any, vocab_size: int | None) -> tuple[tuple[tuple[int, ...], float], ...]:
    """From {(ids, ...): bias} or a list of [[ids, ...], bias], the two forms of transformers."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise ValueError(f"{name} is {value!r}: it must be a list of [[token ids], bias]")
    return tuple(
        (_sequence(name, ids, vocab_size), _bias(name, list(ids), bias, lambda x: x < math.inf, "below infinity"))
        for ids, bias in pairs
    )


def _logit_bias(name: str, value: Any, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping) or not all(_is_int(token) for token in value):
        raise ValueError(f"{name} is {value!r}: it must map token ids to biases")
    _check_range(name, [int(token) for token in value], vocab_size)
    limit, expected = MAX_LOGIT_BIAS, f"between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}"
    return tuple(
        (int(token), _bias(name, token, bias, lambda x: -limit <= x <= limit, expected))
        for token, bias in value.items()
    )


def _constraint(name: str, value: Any, vocab_size: int | None) -> TokenConstraint:
    if not isinstance(value, TokenConstraint):
        raise ValueError(f"{name} is {value!r}: it must have the method allowed(output_ids) of TokenConstraint")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    value = value.tolist() if hasattr(value, "tolist") else value
    values = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    if not all(_is_int(each) for each in values):
        raise ValueError(f"{name} is {value!r}: it must be a token id or a list of token ids")
    return tuple(dict.fromkeys(int(each) for each in values))


def _sequence(name: str, value: Any, vocab_size: int | None) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value or not all(_is_int(each) for each in value):
        raise ValueError(f"{name} holds {value!r}: it must be a list of one or more token ids")
    ids = tuple(int(each) for each in value)
    _check_range(name, ids, vocab_size)
    return ids


def _bias(name: str, what: Any, value: Any, accepts: Callable[[float], bool], expected: str) -> float:
    if not _is_number(value) or not accepts(float(value)):
        raise ValueError(f"{name} gives {what} the bias {value!r}: it must be a number {expected}")
    return float(value)


def _check_range(name: str, ids: tuple[int, ...] | list[int], vocab_size: int | None) -> None:
    for token in ids:
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            last = "" if vocab_size is None else f" to {vocab_size - 1}"
            raise ValueError(f"{name} holds {token}; the model's token ids go from 0{last}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


_FINITE = _number(math.isfinite, "that is finite")

# What a request may always bring,
FREE_ARGUMENTS: dict[str, Argument] = {
    "max_new_tokens": _integer(1),
    "min_new_tokens": _integer(0),
    "min_length": _integer(0),
    "seed": _integer(None),
    "eos_token_id": _eos,
    "ignore_eos": _boolean,
    "stop_token_ids": _tokens,
    "num_return_sequences": _integer(1, _MAX_SEQUENCES),
    "logprobs": _boolean,
    "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "raw_logprobs": _boolean,
    "prompt_logprobs": _integer(0, MAX_TOP_LOGPROBS),
}
# what turns sampling on, and with it temperature, top-k, ...
WARPERS: dict[str, Argument] = {
    "do_sample": _boolean,
    "temperature": _number(lambda x: 0 <= x < math.inf, ">= 0 and finite; 0 takes the most likely token"),
    "top_k": _integer(0),
    "top_p": _number(lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": _number(lambda x: 0 <= x <= 1, "between 0 and 1"),
}
# and what edits the logits whether sampled or not. The last two need `per_request_processors`.
EDITS: dict[str, Argument] = {
    "sequence_bias": _biased_sequences,
    "repetition_penalty": _number(lambda x: 0 < x < math.inf, "above 0; 1 turns it off"),
    "no_repeat_ngram_size": _integer(0),
    "bad_words_ids": _sequences,
    "forced_bos_token_id": _token,
    "forced_eos_token_id": _tokens,
    "suppress_tokens": _tokens,
    "begin_suppress_tokens": _tokens,
    "frequency_penalty": _FINITE,
    "presence_penalty": _FINITE,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _some_tokens,
    "constraint": _constraint,
}
ARGUMENTS: dict[str, Argument] = FREE_ARGUMENTS | WARPERS | EDITS

CONFIG_ONLY: dict[str, Argument] = {"max_length": _integer(1)}
