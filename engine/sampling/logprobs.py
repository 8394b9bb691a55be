"""Log-probabilities of chosen tokens, of the most likely ones beside them, and of prompts.

The sampler plans `LogprobRows` and fills `StepLogprobs`; the model runner calls `prompt_logprobs`, or `score_prompt`
where it reads later. Values are float32. Tokens that cannot be chosen have none and are left out of the lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.request import TokenLogprobs
from engine.sampling.processors import Choice, drop_below
from engine.sampling.scores import Scores, Workspace
from engine.sampling.search import most_likely
from engine.sampling.sending import send

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

    def array(self) -> npt.NDArray[np.int64]:
        """The rows, int64 [n]."""
        return np.array(self.rows, np.int64)

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
        chosen: float32 [rows of the step], of each row's token; what nothing is added to stays as it is given.
    """

    def __init__(self, chosen: torch.Tensor) -> None:
        self.chosen = chosen
        self._top: list[_Top] = []

    def add(self, asked: LogprobRows, rows: torch.Tensor, scores: Scores, tokens: torch.Tensor) -> None:
        """Rows that chose tokens int64 [n] and whose probabilities are the softmax of the logits of `scores`.

        Args:
            rows: those of `asked` on the device, int64 [n].
        """
        ids, count = tokens[:, None], max(asked.counts)
        if count:
            # Ranked by score: two scores may round to the same log-probability.
            ids = torch.cat((ids, most_likely(scores, count)[1]), dim=1)
        values = _log_softmax_at(scores, ids)
        self.chosen.index_copy_(0, rows, values[:, 0])
        if count:
            self._top.append(_Top(asked, ids[:, 1:], values[:, 1:]))

    def add_choice(
        self, asked: LogprobRows, rows: torch.Tensor, at: torch.Tensor, scores: Scores, choice: Choice
    ) -> None:
        """Rows that drew from n rows of `scores`; those that ask are the rows `at` of it, int64 on the device."""
        log_total = choice.log_total[at][:, None]
        least = None if choice.least is None else choice.least[at]
        scores = scores.narrowed(at)
        chosen = _of_kept(scores.at(choice.tokens[at][:, None]), least)
        self.chosen.index_copy_(0, rows, (chosen.double() - log_total).float().squeeze(1))
        if count := max(asked.counts):
            values, ids = most_likely(scores, count)
            values = (_of_kept(values, least).double() - log_total).float()
            dropped = torch.arange(values.shape[1], device=values.device) >= choice.kept[at][:, None]
            self._top.append(_Top(asked, ids, values.masked_fill_(dropped, _NEVER)))

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> StepLogprobs:
        """The same of copies of its tensors."""
        other = StepLogprobs(copy(self.chosen))
        other._top = [_Top(top.asked, copy(top.ids), copy(top.values)) for top in self._top]
        return other

    def top_lists(self) -> dict[int, list[tuple[int, float]]]:
        """By row, the most likely tokens, most likely first, ties by id. Waits for the device."""
        return {
            row: listed[:count]
            for top in self._top
            for row, count, listed in zip(top.asked.rows, top.asked.counts, _lists(top.ids, top.values), strict=True)
        }


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of tokens of a prompt, on the device until they are read.

    Attributes:
        ids: int64 [n, k], the most likely tokens at each position.
        values: float32 [n, 1 + k], of the token that is there and of those.
    """

    ids: torch.Tensor
    values: torch.Tensor

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> PromptScores:
        """The same of copies of its tensors."""
        return PromptScores(copy(self.ids), copy(self.values))

    def read(self) -> list[TokenLogprobs]:
        """One entry a position. Waits for the device if that is where the tensors are."""
        lists = _lists(self.ids, self.values[:, 1:])
        return [TokenLogprobs(*pair) for pair in zip(self.values[:, 0].tolist(), lists, strict=True)]


def score_prompt(
    logits: torch.Tensor, next_ids: torch.Tensor, k: int, workspace: Workspace | None = None
) -> PromptScores:
    """Scores tokens under the model's own scores at the positions before them.

    Args:
        logits: floating [n, vocab], at n positions of a prompt; left as they are.
        next_ids: int64 [n], the token after each position, on the host or the device.
        k: how many of the most likely tokens to list with each.
        workspace: memory to use; own memory when None.
    """
    if next_ids.device != logits.device:
        (next_ids,) = send([next_ids.numpy()], logits.device)
    workspace = Workspace() if workspace is None else workspace
    k = min(k, logits.shape[1])
    all_ids, all_values = [next_ids.new_empty(0, k)], [torch.empty(0, 1 + k, device=logits.device)]
    for block, ids in zip(logits.split(_PROMPT_ROWS), next_ids[:, None].split(_PROMPT_ROWS), strict=True):
        scores = Scores(block.float().contiguous(), workspace)
        if k:
            ids = torch.cat((ids, most_likely(scores, k)[1]), dim=1)
        all_ids.append(ids[:, 1:])
        all_values.append(_log_softmax_at(scores, ids))
    return PromptScores(torch.cat(all_ids), torch.cat(all_values))


def prompt_logprobs(
    logits: torch.Tensor, next_ids: torch.Tensor, k: int, workspace: Workspace | None = None
) -> list[TokenLogprobs]:
    """As `score_prompt`, and reads the scores."""
    return score_prompt(logits, next_ids, k, workspace).read()


def _log_softmax_at(scores: Scores, ids: torch.Tensor) -> torch.Tensor:
    """Of the logits of n rows at ids int64 [n, m]: float32 [n, m]."""
    values = torch.empty(ids.shape, device=ids.device)
    for part, logits in scores.logit_pieces():
        piece = scores.workspace.take("scores", logits.shape, logits.device)
        values[part] = torch.log_softmax(logits, -1, out=piece).gather(1, ids[part])
    return values


def _of_kept(scores: torch.Tensor, least: torch.Tensor | None) -> torch.Tensor:
    """Scores [n, m] of drawn rows, -inf where exp(score) is 0 or under `least` float32 [n]: such tokens have no chance.

    Without `least` they stay as they are: then the most likely ones of each row were counted.
    """
    if least is None:
        return scores
    weights = scores.exp()
    return drop_below(least, weights, torch.empty_like(weights)).log_()


def _lists(ids: torch.Tensor, values: torch.Tensor) -> list[list[tuple[int, float]]]:
    return [
        [(token, value) for token, value in zip(*row, strict=True) if value > _NEVER]
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
