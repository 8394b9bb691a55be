"""The API against its own description: whatever fits it, or nearly does, gets an answer of the form it promises."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rayapp.api.openapi import document
from rayapp.api.routes import build_api
from rayapp.api.service import ServedModel
from rayapp.text.template import ChatTemplate
from tests.rayapp.scripted import ScriptedService
from tests.rayapp.test_api_tools import TEMPLATE
from tests.rayapp.test_openai_forms import Said

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))  # for each operation and mode
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [(path, method.upper()) for path, methods in document(["smol"])["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def described(models: dict[str, ServedModel]) -> Any:
    plain = models["smol"]
    able = replace(plain, template=ChatTemplate(plain.tokenizer, TEMPLATE), tool_format="hermes", reasons=True)
    service = ScriptedService({"smol": plain, "able": able}, script=Said().script)
    return schemathesis.openapi.from_asgi("/openapi.json", build_api(service))


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fits", "does not fit"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_as_described(described: Any, path: str, method: str, mode: GenerationMode) -> None:
    operation = described[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("there is nothing to get wrong")
    seen = set()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call()
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    assert seen
