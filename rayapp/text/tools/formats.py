"""The formats by name, and which one a model writes.

A configuration names a format, or `parser_name_for` picks it by the model's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from rayapp.text.tools.deepseek import BEGIN as DEEPSEEK_BEGIN
from rayapp.text.tools.deepseek import FENCE, DeepSeekParser
from rayapp.text.tools.hermes import HermesParser
from rayapp.text.tools.llama3_json import Llama3JsonParser
from rayapp.text.tools.mistral import MistralParser
from rayapp.text.tools.parser import ToolParser
from rayapp.text.tools.pythonic import PythonicParser
from rayapp.text.tools.qwen3_coder import FUNCTION, PARAMETER, Qwen3CoderParser

FORMATS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
    "deepseek_v3": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
}

_PYTHON_CALL = re.compile(r"\[\s*\w+\(\s*\w+\s*=")
_QUOTED_ARGUMENTS = re.compile(r"""\\?["']arguments\\?["']""")


def tool_parser(
    name: str, functions: Collection[str] | None = None, new_id: Callable[[], str] | None = None
) -> ToolParser:
    """A parser for one generation.

    Args:
        name: of the format.
        functions, new_id: see `ToolParser`.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"there is no tool call format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name](functions, new_id)


def parser_name_for(template_source: str | None, added_tokens: Collection[str] = ()) -> str | None:
    """The format of a model's calls, by what its chat template tells the model to write.

    A template that knows no tools, or one whose calls look like none of the formats, gives None: its answers are
    content. Added tokens decide only between templates that show no example of a call.
    """
    source = template_source or ""
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<|tool_call_start|>" in source or _PYTHON_CALL.search(source):
        return "pythonic"
    if DEEPSEEK_BEGIN in source:
        return "deepseek_v3" if FENCE in source else "deepseek_v31"
    if "<tool_call>" in source:
        if FUNCTION in source and PARAMETER in source:
            return "qwen3_coder"
        # Other families write lists, or XML of their own, between the same markers.
        return "hermes" if _QUOTED_ARGUMENTS.search(source) and FUNCTION not in source else None
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and '"parameters"' in source):
        return "llama3_json"
    if "tools" in source and "<|tool_call_start|>" in added_tokens:
        return "pythonic"
    return None
