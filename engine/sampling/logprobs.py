"""Log-probabilities of chosen tokens, of the most likely ones beside them, and of prompts.

The sampler plans `LogprobRows` and fills `StepLogprobs`; the model runner calls `prompt_logprobs`. Values are float32.
Tokens that cannot be chosen have no log-probability and are left out of the lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.request import TokenLogprobs
from engine.sampling.processors import Choice, most_likely

_NEVER = float("-inf")
_PROMPT_ROWS = 64  # positions of a prompt at once: bounds the float32 copies of their logits


@dataclass(slots=True)
class LogprobRows:
    """Rows of one step that ask for log-probabilities of the same scores.

    Attributes:
        rows: rows of the batch.
        counts: how many of the most likely tokens each of them asks for.
    """

    rows: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, row: int, count: int) -> None:
        self.rows.append(row)
        self.counts.append(count)

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(slots=True)
class _Top:
    asked: LogprobRows
    ids: torch.Tensor
    values: torch.Tensor


class StepLogprobs:
    """What one step's rows asked for, on the device.

    Attributes:
        chosen: float32 [num_rows], of each row's token; 0 where nothing was added.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.chosen = torch.zeros(num_rows, device=device)
        self._top: list[_Top] = []

    def add(self, asked: LogprobRows, scores: torch.Tensor, tokens: torch.Tensor) -> None:
        """Rows that chose tokens int64 [n] and whose probabilities are the softmax of scores float [n, vocab]."""
        values = scores.log_softmax(-1)
        self.chosen[asked.rows] = values.gather(1, tokens[:, None]).squeeze(1)
        if count := max(asked.counts):
            # Ranked by score: two scores may round to the same log-probability.
            ids = most_likely(scores, count)[1]
            self._top.append(_Top(asked, ids, values.gather(1, ids)))

    def add_choice(self, asked: LogprobRows, at: list[int], scores: torch.Tensor, choice: Choice) -> None:
        """Rows that drew from `scores` float32 [n, vocab]; those that ask are the rows `at` of it."""
        kept_scores, log_total = scores[at], choice.log_total[at][:, None]
        chosen = kept_scores.gather(1, choice.tokens[at][:, None])
        self.chosen[asked.rows] = (chosen.double() - log_total).float().squeeze(1)
        if count := max(asked.counts):
            values, ids = most_likely(kept_scores, count)
            values = (values.double() - log_total).float()
            dropped = torch.arange(values.shape[1], device=values.device) >= choice.kept[at][:, None]
            self._top.append(_Top(asked, ids, values.masked_fill_(dropped, _NEVER)))

    def top_lists(self) -> dict[int, list[tuple[int, float]]]:
        """By row, the most likely tokens, most likely first, ties by id. Waits for the device."""
        return {
            row: listed[:count]
            for top in self._top
            for row, count, listed in zip(top.asked.rows, top.asked.counts, _lists(top.ids, top.values), strict=True)
        }


def prompt_logprobs(logits: torch.Tensor, next_ids: torch.Tensor, k: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens under the model's own scores at the positions before them.

    Args:
        logits: floating [n, vocab], at n positions of a prompt; left as they are.
        next_ids: int64 [n], the token after each position.
        k: how many of the most likely tokens to list with each.
    """
    found: list[TokenLogprobs] = []
    for block, ids in zip(logits.split(_PROMPT_ROWS), next_ids.to(logits.device).split(_PROMPT_ROWS), strict=True):
        block = block.float()
        values = block.log_softmax(-1)
        chosen = values.gather(1, ids[:, None]).squeeze(1).tolist()
        lists: list[list[tuple[int, float]]] = [[] for _ in chosen]
        if k:
            top = most_likely(block, k)[1]
            lists = _lists(top, values.gather(1, top))
        found += [TokenLogprobs(*pair) for pair in zip(chosen, lists, strict=True)]
    return found


def _lists(ids: torch.Tensor, values: torch.Tensor) -> list[list[tuple[int, float]]]:
    return [
        [(token, value) for token, value in zip(*row, strict=True) if value > _NEVER]
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
