"""What an argument is in JSON that a model writes without quotes, by the schema of its parameter.

Used by the format that writes calls in XML, and by its grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayapp.text.tools.json_scanner import sendable

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_STEPS = 100
"""Schemas looked at for one parameter: a reference may lead to itself."""

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


def value_types(parameters: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """JSON's types that the parameter of a function may have; of one that is not described, a string."""
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return frozenset({"string"})
    return frozenset(_types(schema, parameters or {}, [0]))


def _types(schema: Any, root: Mapping[str, Any], steps: list[int]) -> set[str]:
    steps[0] += 1
    if not isinstance(schema, dict) or steps[0] > MAX_STEPS:
        return set(TYPES)
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(reference, root), root, steps)
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {one for one in named if isinstance(one, str)} & TYPES or set(TYPES)
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {type_of(one) for one in schema.get("enum", [schema.get("const")])} or set(TYPES)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return set[str]().union(*(_types(one, root, steps) for one in schema[key]))
    return set(TYPES)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside the schema leads to; None for others."""
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if reference.startswith("#/") else None


def type_of(value: Any) -> str:
    """JSON's name for what a value is."""
    return _JSON_TYPES.get(type(value), "null")


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON: as it was written where that is JSON of one of the types, else a string."""
    written = text.strip(" \t\r\n")
    written = _PYTHON.get(written, written)
    try:
        kind = type_of(json.loads(written, parse_constant=_refused))
    except (ValueError, RecursionError):
        kind = "string"
    if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
        return sendable(written)
    return sendable(json.dumps(text, ensure_ascii=False))


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not in JSON")
