"""What a device may do itself when tokens are chosen: `SamplingKernels`.

Implemented beside the device's other operations, called by the sampler. Nothing in it waits for the device.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.sampling.processors import Choice
from engine.sampling.scores import Scores


class SamplingKernels(Protocol):
    """Each row's result depends on the row alone.

    Where scores are taken, they have `rows`, `best` and `temperature`, and their logits are as of `find_best`.
    """

    def find_best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely token of each row, of equal ones the lowest.

        Args:
            logits: float32, float16 or bfloat16 [n, vocab], contiguous; left as they are.

        Returns:
            int64 [2, n], tokens and 1 where a row holds NaN or +inf or nothing above -inf, whose token is 0; and the
            largest logits, float32 [n], of bad rows not finite.
        """
        ...

    def choose_in_vocabulary_order(self, scores: Scores, min_p: torch.Tensor, uniform: torch.Tensor) -> Choice:
        """See processors.py. `min_p` is 0 in rows that have none."""
        ...

    def choose_most_likely(
        self,
        scores: Scores,
        top_k: torch.Tensor | None,
        most: int,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> Choice:
        """As `choose_from_top_k` and `choose_from_all_sorted` of processors.py; without `top_k`, `choose_from_nucleus`.

        Args:
            top_k: int64 [n] in [1, vocab]; None: all, which only top-p narrows.
            most: the largest of top_k.
        """
        ...
