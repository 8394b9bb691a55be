"""What the benchmark asks: conversations of one or more turns, made from a seed or read from a file.

Called by the command lines of `rayapp.bench`. Knows lengths and prompts, nothing of servers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rayapp.text.tokenizer import Tokenizer

WORD_STARTS = ("Ġ", "▁")  # how tokenizers write the space before a word
# One token each in the vocabularies in use; for prompts without a tokenizer.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
COMMON_WORDS = _COMMON.split()

Prompt = str | list[int]


@dataclass(frozen=True)
class Turn:
    """What the user says, text or token ids, and how many tokens the answer may have."""

    prompt: Prompt
    output_tokens: int


Conversation = tuple[Turn, ...]


class Vocabulary:
    """Random prompts of a given length.

    Args:
        tokenizer: whose words a text has, so that it has the asked number of tokens; None takes common words.
        token_ids: prompts are ids instead of text, which needs a tokenizer.

    Raises:
        ValueError: ids without a tokenizer.
    """

    def __init__(self, rng: np.random.Generator, tokenizer: Tokenizer | None = None, token_ids: bool = False) -> None:
        if token_ids and tokenizer is None:
            raise ValueError("prompts of token ids need a tokenizer, which says what ids there are")
        self._rng = rng
        self._ids = _plain_ids(tokenizer) if token_ids and tokenizer is not None else None
        self._words = _words(tokenizer) if self._ids is None else []

    def prompt(self, length: int) -> Prompt:
        """So many tokens, drawn at random."""
        if self._ids is not None:
            return [self._ids[i] for i in self._rng.integers(len(self._ids), size=length)]
        return "".join(" " + self._words[i] for i in self._rng.integers(len(self._words), size=length))


@lru_cache(maxsize=2)
def _words(tokenizer: Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return COMMON_WORDS
    tokens = tokenizer.backend.get_vocab()
    words = sorted(token[1:] for token in tokens if token.startswith(WORD_STARTS) and _is_word(token[1:]))
    return words if len(words) >= len(COMMON_WORDS) else COMMON_WORDS


def _is_word(text: str) -> bool:
    return len(text) > 1 and text.isascii() and text.isalpha() and text.islower()


@lru_cache(maxsize=2)
def _plain_ids(tokenizer: Tokenizer) -> list[int]:
    return [token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_ids]


def random_requests(
    count: int,
    words: Vocabulary,
    rng: np.random.Generator,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    turns: int = 1,
) -> list[Conversation]:
    """Prompts of random tokens, all behind one prefix.

    Args:
        input_len, output_len: of each turn, without the prefix; each drawn from length * (1 +- range_ratio).
        turns: of each conversation.

    Raises:
        ValueError: a length is not positive, or the ratio not in [0, 1).
    """
    if min(count, input_len, output_len, turns) < 1 or prefix_len < 0 or not 0 <= range_ratio < 1:
        raise ValueError("numbers and lengths must be positive, and --random-range-ratio in [0, 1)")
    prefix = words.prompt(prefix_len) if prefix_len else None

    def turn(first: bool) -> Turn:
        prompt = words.prompt(_length(rng, input_len, range_ratio))
        return Turn(_joined(prefix, prompt) if first else prompt, _length(rng, output_len, range_ratio))

    return [tuple(turn(first=i == 0) for i in range(turns)) for _ in range(count)]


def prefix_repetition(
    count: int,
    words: Vocabulary,
    rng: np.random.Generator,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
) -> list[Conversation]:
    """Each prompt is one of a few prefixes with an end of its own; as many of each prefix, in random order.

    Raises:
        ValueError: a number is not positive.
    """
    if min(count, prefix_len, suffix_len, num_prefixes, output_len) < 1:
        raise ValueError("numbers and lengths must be positive")
    prefixes = [words.prompt(prefix_len) for _ in range(num_prefixes)]
    order = rng.permutation(np.arange(count) % num_prefixes)
    return [(Turn(_joined(prefixes[i], words.prompt(suffix_len)), output_len),) for i in order]


def read_custom(path: Path, output_len: int) -> list[Conversation]:
    """JSON lines: {"prompt": text or ids} or {"turns": [text, ...]}, perhaps with "output_tokens".

    Raises:
        ValueError: a line is something else; the text names it.
    """
    conversations: list[Conversation] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts = row["turns"] if "turns" in row else [row["prompt"]]
            length = int(row.get("output_tokens", output_len))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not an object with prompt or turns ({error!r})") from None
        if not prompts or length < 1:
            raise ValueError(f"{path}, line {number}: it has no turns, or output_tokens below 1")
        conversations.append(tuple(Turn(prompt, length) for prompt in prompts))
    return conversations


def read_sharegpt(path: Path, output_len: int | None, tokenizer: Tokenizer | None) -> list[Conversation]:
    """The first question of each conversation of a ShareGPT file.

    Args:
        output_len: of every answer; None takes the length of the recorded one: in tokens, or without a tokenizer 4/3
            of its words.

    Raises:
        ValueError: the file is not a list of {"conversations": [{"value": ...}, ...]}.
    """
    try:
        rows = [row["conversations"] for row in json.loads(path.read_text(encoding="utf-8"))]
        pairs = [(str(row[0]["value"]), str(row[1]["value"])) for row in rows if len(row) >= 2]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a ShareGPT file: {error!r}") from None

    def length(answer: str) -> int:
        if output_len is not None:
            return output_len
        return max(1, len(tokenizer.encode(answer)) if tokenizer else math.ceil(len(answer.split()) * 4 / 3))

    return [(Turn(question, length(answer)),) for question, answer in pairs]


def sampled(
    conversations: Sequence[Conversation],
    count: int,
    rng: np.random.Generator,
    *,
    shuffle: bool = True,
    oversample: bool = True,
) -> list[Conversation]:
    """So many of a file's conversations; one that has fewer is used again, unless it must not be.

    Raises:
        ValueError: there are none.
    """
    if not conversations:
        raise ValueError("the data set has no requests")
    order: list[Any] = list(rng.permutation(len(conversations))) if shuffle else list(range(len(conversations)))
    if oversample:
        order = [order[i % len(order)] for i in range(count)]
    return [conversations[i] for i in order[:count]]


def _length(rng: np.random.Generator, mean: int, ratio: float) -> int:
    return int(rng.integers(max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio)) + 1))


def _joined(first: Prompt | None, second: Prompt) -> Prompt:
    return second if first is None else first + second  # type: ignore[operator]  # both are of one vocabulary
