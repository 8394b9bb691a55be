"""Which fields of a request body are served and which are refused by name, as a table for readers.

`python -m rayapp.api.fields` prints it; README holds it.
"""

from __future__ import annotations

import json

from rayapp.api.response_fields import ResponsesRequest
from rayapp.api.schemas import Body, ChatRequest, CompletionRequest

ENDPOINTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}

LIMITED = {"best_of": " (equal to `n`)", "user": " (has no effect)"}


def field_table() -> str:
    """Markdown: a row for each endpoint. A refused field may hold the values that stand behind it, or null."""
    lines = ["| endpoint | served | accepted only where it changes nothing |", "|---|---|---|"]
    for path, kind in ENDPOINTS.items():
        served = ", ".join(f"`{name}`{LIMITED.get(name, '')}" for name in sorted(kind.model_fields))
        refused = ", ".join(_refused(name, values) for name, values in sorted(kind.refused.items()))
        lines.append(f"| `{path}` | {served} | {refused} |")
    return "\n".join(lines)


def _refused(name: str, values: tuple[object, ...]) -> str:
    shown = ", ".join(json.dumps(value) for value in values)
    return f"`{name}`" + (f" ({shown})" if shown else "")


if __name__ == "__main__":
    print(field_table())
