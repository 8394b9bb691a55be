"""`StrictModel`: what every section of the configuration is made of. Knows no section."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def _refuse_unknown(data: dict[str, Any], valid: list[str]) -> None:
    for key in data:
        if key not in valid:
            near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "valid keys: " + ", ".join(sorted(valid))
            raise ValueError(f"unknown key {key!r}: {hint}")


class StrictModel(BaseModel):
    """A section of the configuration: unknown keys are errors that name the nearest valid one; it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            _refuse_unknown(data, list(cls.model_fields))
        return data
