"""Tool calls: out of a model's text (`tool_parser`), into its prompt (`tools_for_template`), and forced.

Used by the chat endpoints. Loads no torch; knows nothing of HTTP.
"""

from __future__ import annotations

from rayapp.text.tools.forced import after_thinking, forced_structure
from rayapp.text.tools.formats import FORMATS, parser_name_for, tool_parser
from rayapp.text.tools.parser import ToolParser, call_id
from rayapp.text.tools.requests import calls_for_template, functions_of, tools_for_template

__all__ = [
    "FORMATS",
    "ToolParser",
    "after_thinking",
    "call_id",
    "calls_for_template",
    "forced_structure",
    "functions_of",
    "parser_name_for",
    "tool_parser",
    "tools_for_template",
]
