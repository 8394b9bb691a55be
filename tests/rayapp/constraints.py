"""Constraints that bare handle callers send: they run in the engine thread, so they can do anything to it.

Pickled by value, as a caller's own would be. Loads no torch.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import cloudpickle

from tests.models import SMOL_VOCAB

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Grammar:
    """Each token must be in another residue class than the one before: a state that follows from the tokens alone."""

    def allowed(self, output_ids: list[int]) -> Any:
        mask = np.ones(SMOL_VOCAB, bool)
        if output_ids:
            mask[(output_ids[-1] + len(output_ids)) % 3 :: 3] = False
        return mask


@dataclass
class After:
    """Once there are so many tokens, does what it says to the engine: "raise" there, "end" its thread, "stuck"."""

    tokens: int
    what: str

    def allowed(self, output_ids: list[int]) -> None:
        if len(output_ids) < self.tokens:
            return
        if self.what == "raise":
            raise ValueError("a bad constraint")
        if self.what == "stuck":
            time.sleep(600)
        frame = sys._getframe()  # up to the loop of the engine thread, whose next turn then fails
        while type(frame.f_locals.get("self")).__name__ != "EngineLoop":
            assert frame.f_back is not None
            frame = frame.f_back
        frame.f_locals["self"]._take_turn = None
