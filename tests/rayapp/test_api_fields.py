"""Every field that the original documents is served or refused by name, and README says which."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from rayapp.api.fields import ENDPOINTS, field_table
from tests.serving import ROOT

DOCUMENTED: dict[str, Any] = {
    "/v1/chat/completions": chat_create_params.CompletionCreateParamsStreaming,
    "/v1/completions": completion_create_params.CompletionCreateParamsStreaming,
    "/v1/responses": response_create_params.ResponseCreateParamsStreaming,
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_O33_every_documented_field_is_known(path: str) -> None:
    kind = ENDPOINTS[path]
    known = kind.model_fields.keys() | kind.refused.keys()
    documented = DOCUMENTED[path].__annotations__.keys()
    assert len(documented) > 10 and documented - known == set()
    assert not kind.model_fields.keys() & kind.refused.keys()


def test_the_table_for_readers_is_the_code_s() -> None:
    assert field_table() in (ROOT / "README.md").read_text()
