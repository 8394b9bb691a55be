"""Scores of some rows of logits, computed where somebody looks at them, and the memory that this takes.

A step reads its logits once or twice; nothing of their size is allocated. Used by the searches, processors and
log-probabilities; made by the sampler. Knows nothing of parameters or requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

_PIECE = 1 << 18  # scores that each thread of a CPU has in hand: they should stay in its caches


class Workspace:
    """Memory that is kept from step to step: it grows to the largest step. Serves one step at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Float32 of this shape that holds anything, until the name is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            self._buffers.pop(name, None)  # before the next one is there
            with torch.inference_mode(False):  # so that it can be written to in any mode
                buffer = self._buffers[name] = torch.empty(size, device=device)
        return buffer[:size].view(*shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


@dataclass(slots=True)
class Scores:
    """(logits - best) / temperature of n rows: at most 0, so that no temperature overflows.

    Attributes:
        logits: float32 [any, vocab], contiguous; not changed here. Where all that looks at them are the device's own
            kernels, they may be in half precision.
        workspace: where pieces of the scores are kept.
        rows: int64 [n] of the logits; None for all of them.
        best: the largest logit of each row, float32 [n], with `temperature` float32 [n]; None where the scores are
            the logits.
        maxima: float32 [n, vocab // SPREAD] as `search.best_of` gives them, if it did.
    """

    logits: torch.Tensor
    workspace: Workspace
    rows: torch.Tensor | None = None
    best: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    maxima: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.logits if self.rows is None else self.rows)

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    def at(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of the token ids int64 [n, m], float32 [n, m]."""
        return self._scale(self.logits_at(ids), slice(None))

    def logits_at(self, ids: torch.Tensor) -> torch.Tensor:
        """The same, of the logits."""
        if self.rows is None:
            return self.logits.gather(1, ids)
        places = (self.rows * self.vocab)[:, None] + ids
        return self.logits.view(-1).index_select(0, places.view(-1)).view(ids.shape)

    def narrowed(self, at: torch.Tensor) -> Scores:
        """Those at int64 [m], on the same device, of the n rows."""
        best, temperature, maxima = (
            None if each is None else each[at] for each in (self.best, self.temperature, self.maxima)
        )
        return replace(
            self, rows=at if self.rows is None else self.rows[at], best=best, temperature=temperature, maxima=maxima
        )

    def whole(self) -> torch.Tensor:
        """All scores, float32 [n, vocab], until pieces are taken next."""
        return self._piece(slice(0, len(self)))

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """All scores of some rows at a time, which may be overwritten and hold until the next ones."""
        return ((part, self._piece(part)) for part in self._parts())

    def logit_pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The same, of the logits, which are not to be changed."""
        return ((part, self._logits(part)) for part in self._parts())

    def _parts(self) -> Iterator[slice]:
        step = len(self)
        if self.logits.device.type == "cpu":
            step = max(1, torch.get_num_threads() * _PIECE // self.vocab)
        return (slice(start, min(start + step, len(self))) for start in range(0, max(len(self), 1), max(step, 1)))

    def _logits(self, part: slice) -> torch.Tensor:
        if self.rows is None:
            return self.logits[part]
        rows = self.rows[part]
        piece = self.workspace.take("logits of rows", (len(rows), self.vocab), self.logits.device)
        return torch.index_select(self.logits, 0, rows, out=piece)

    def _piece(self, part: slice) -> torch.Tensor:
        piece = self.workspace.take("scores", (part.stop - part.start, self.vocab), self.logits.device)
        if self.rows is not None:
            return self._scale(torch.index_select(self.logits, 0, self.rows[part], out=piece), part)
        if self.best is None:
            return piece.copy_(self.logits[part])
        torch.sub(self.logits[part], self.best[part, None], out=piece)
        return self._divide(piece, part)

    def _scale(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        return logits if self.best is None else self._divide(logits.sub_(self.best[part, None]), part)

    def _divide(self, scores: torch.Tensor, part: slice) -> torch.Tensor:
        return scores if self.temperature is None else scores.div_(self.temperature[part, None])
