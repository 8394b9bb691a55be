"""What the processors of one request keep of its tokens, brought up to date by the tokens that are new.

Made on first use by the edits of the step that samples and kept on the request; everything in it follows from
the request's parameters and `token_ids`, so that a request without it (migrated, restarted) makes the same one.
Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine.sampling.params import SamplingParams

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
_FEW = 16  # tokens up to which each is put in its place; from there on all are sorted


class TokenCounts:
    """The distinct tokens from position `start` on, ascending, and how often each comes.

    In this order a row's logits are read and written from one end to the other: several times as fast.
    """

    def __init__(self, start: int) -> None:
        self._read = start
        self._size = 0
        self._ids: Ids = np.empty(0, np.int64)
        self._counts: Values = np.empty(0)

    def update(self, token_ids: list[int]) -> None:
        new = token_ids[self._read :]
        self._read += len(new)
        if len(new) > _FEW:
            self._merge(new)
        else:
            for token in new:
                self._count(token)

    @property
    def ids(self) -> Ids:
        """Views that hold until the next update; `counts` is in the same order."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Values:
        return self._counts[: self._size]

    def _merge(self, token_ids: list[int]) -> None:
        ids, places, counts = np.unique(
            np.concatenate((self.ids, as_ids(token_ids))), return_inverse=True, return_counts=True
        )
        total = counts.astype(np.float64)
        total[places[: self._size]] += self.counts - 1
        self._ids, self._counts, self._size = ids, total, len(ids)

    def _count(self, token: int) -> None:
        size, at = self._size, int(self.ids.searchsorted(token))
        if at == size or self._ids[at] != token:
            if size == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty(size + 64, np.int64)))
                self._counts = np.concatenate((self._counts, np.empty(size + 64)))
            self._ids[at + 1 : size + 1] = self._ids[at:size]
            self._counts[at + 1 : size + 1] = self._counts[at:size]
            self._ids[at], self._counts[at] = token, 0
            self._size += 1
        self._counts[at] += 1


class Ngrams:
    """Which tokens have followed each run of `size - 1` tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._read = size - 1
        self._following: dict[tuple[int, ...], set[int]] = {}

    def update(self, token_ids: list[int]) -> None:
        for end in range(self._read, len(token_ids)):
            run = tuple(token_ids[end + 1 - self._size : end])
            self._following.setdefault(run, set()).add(token_ids[end])
        self._read = max(self._read, len(token_ids))

    def repeating(self, token_ids: list[int]) -> Ids:
        """Tokens that would make the last run come twice."""
        run = tuple(token_ids[max(0, len(token_ids) + 1 - self._size) :])
        return np.fromiter(self._following.get(run, ()), np.int64)


class Sequences:
    """Token sequences and the bias of completing each."""

    def __init__(self, biases: Iterable[tuple[tuple[int, ...], float]]) -> None:
        self._single: dict[int, float] = {}
        self._longer: dict[int, dict[tuple[int, ...], list[tuple[int, float]]]] = {}
        for ids, bias in dict(biases).items():
            if len(ids) == 1:
                self._single[ids[0]] = bias
            else:
                beginnings = self._longer.setdefault(len(ids) - 1, {})
                beginnings.setdefault(ids[:-1], []).append((ids[-1], bias))
        self._always = _arrays(self._single)

    def completing(self, token_ids: list[int]) -> tuple[Ids, Values]:
        """Tokens that complete a sequence now, each once, and their biases."""
        found: list[tuple[int, float]] = []
        for length, beginnings in self._longer.items():
            if length <= len(token_ids):
                found += beginnings.get(tuple(token_ids[-length:]), ())
        if not found:
            return self._always
        biases = dict(self._single)
        for token, bias in found:
            biases[token] = biases.get(token, 0.0) + bias
        return _arrays(biases)


class History:
    """The state of one request's processors; None where the request does not use one.

    Attributes:
        seen: tokens of prompt and output, for the repetition penalty.
        generated: tokens of the output, for the frequency and presence penalties.
        ngrams: of prompt and output.
        bad_words, biased: sequences that may be completed.
        logit_bias: token ids and biases.
        allowed: the only ids that can be chosen, ascending.
    """

    __slots__ = ("allowed", "bad_words", "biased", "generated", "logit_bias", "ngrams", "seen")

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        penalised = params.frequency_penalty != 0 or params.presence_penalty != 0
        self.seen = TokenCounts(0) if params.repetition_penalty != 1.0 else None
        self.generated = TokenCounts(num_prompt_tokens) if penalised else None
        self.ngrams = Ngrams(params.no_repeat_ngram_size) if params.no_repeat_ngram_size else None
        never = float("-inf")
        self.bad_words = Sequences((ids, never) for ids in params.bad_words_ids) if params.bad_words_ids else None
        self.biased = Sequences(params.sequence_bias) if params.sequence_bias else None
        self.logit_bias = _arrays(dict(params.logit_bias)) if params.logit_bias else None
        self.allowed = None if params.allowed_token_ids is None else np.unique(as_ids(params.allowed_token_ids))

    def update(self, token_ids: list[int]) -> None:
        """Take in the tokens that are new since the last call; the list must have only grown."""
        for part in (self.seen, self.generated, self.ngrams):
            if part is not None:
                part.update(token_ids)


def _arrays(biases: dict[int, float]) -> tuple[Ids, Values]:
    return np.array(list(biases), np.int64), np.array(list(biases.values()), np.float64)


def as_ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, np.int64)
