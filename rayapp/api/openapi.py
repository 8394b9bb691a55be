"""The API's description of itself, `/openapi.json`: paths, bodies, and the forms of answers and errors.

Bodies are those of the pydantic models that read them; what a field means stands there and in README.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine import __version__
from rayapp.api.fields import ENDPOINTS
from rayapp.api.ops import DetokenizeRequest, TokenizeRequest
from rayapp.api.schemas import Body

_STRING: dict[str, Any] = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {"prompt_tokens": {"type": "integer"}, "completion_tokens": {"type": "integer"}},
}
_ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"object": {"const": "chat.completion"}, "choices": {"type": "array"}, "usage": _USAGE},
    "/v1/completions": {"object": {"const": "text_completion"}, "choices": {"type": "array"}, "usage": _USAGE},
    "/v1/responses": {"object": {"const": "response"}, "output": {"type": "array"}, "usage": {"type": "object"}},
    "/tokenize": {"count": {"type": "integer"}, "tokens": {"type": "array", "items": {"type": "integer"}}},
    "/detokenize": {"prompt": _STRING},
    "/v1/models": {"object": {"const": "list"}, "data": {"type": "array"}},
    "/tokenizer_info": {"model": _STRING, "vocab_size": {"type": "integer"}},
    "/health": {"status": {"enum": ["ok", "unavailable"]}, "models": {"type": "object"}},
    "/version": {"version": _STRING},
    "/load": {"server_load": {"type": "integer"}},
}


def document(models: Iterable[str]) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        models: names that requests may give.
    """
    names = list(models)
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    bodies = ENDPOINTS | {"/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
    for path, kind in bodies.items():
        schemas |= _schemas_of(kind, names)
        body = {"required": True, "content": {"application/json": {"schema": _ref(kind.__name__)}}}
        paths[path] = {"post": {"requestBody": body, "responses": _responses(path, streams=path in ENDPOINTS)}}
    for path in ("/v1/models", "/health", "/version", "/load", "/tokenizer_info"):
        paths[path] = {"get": {"responses": _responses(path)}}
    paths["/tokenizer_info"]["get"]["parameters"] = [
        {"name": "model", "in": "query", "required": False, "schema": {"enum": names}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Convoy", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _schemas_of(kind: type[Body], models: list[str]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema["properties"]["model"] = {"enum": models}
    return {**schema.pop("$defs", {}), kind.__name__: schema}


def _responses(path: str, streams: bool = False) -> dict[str, Any]:
    answer = {"type": "object", "required": list(_ANSWERS[path]), "properties": _ANSWERS[path]}
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": _STRING}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    if path == "/health":
        responses["503"] = responses["200"] | {"description": "some model cannot be asked"}
    error = {"application/json": {"schema": _ref("Error")}}
    return responses | {"default": {"description": "a refusal or a failure", "content": error}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
