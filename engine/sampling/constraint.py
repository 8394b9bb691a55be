"""`TokenConstraint`: what a grammar, or any other rule on the generated tokens, offers to the sampler.

Set as `SamplingParams.constraint`; asked once a step while the forward pass runs. Loads no torch; the libraries that
compile grammars live outside the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@runtime_checkable
class TokenConstraint(Protocol):
    """Which tokens may come next.

    The answer depends on `output_ids` alone, so that preempted, resumed and migrated requests and the several choices
    of one request can use the same object. What is kept between calls is a cache, to be checked against `output_ids`.
    """

    def allowed(self, output_ids: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """The tokens that may follow those generated so far.

        Returns:
            bool [n], True where the token id may be chosen, ids from n on may not; None when every token may. It is
            read before the next call and not changed.

        Raises:
            Exception: fails this request alone, with the text as its error.
        """


def check_mask(mask: npt.NDArray[np.bool_]) -> None:
    """Raise ValueError unless `mask` is what `TokenConstraint.allowed` must return."""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.ndim != 1:
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise ValueError(f"the constraint returned {found}; expected a NumPy array bool [vocabulary]")
    if not mask.any():
        raise ValueError("it allows no token")
