"""Chat messages to the prompt text of a model, by the model's own template.

Used by the chat endpoint from worker threads and by Python callers. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayapp.text.tokenizer import Tokenizer
from rayapp.text.tools.requests import with_written_arguments

Message = dict[str, Any]
"""`role` and `content` (text), and what else the template may read: `name`, `tool_calls`, `tool_call_id`."""


class TemplateRefused(ValueError):
    """The template does not take these messages; the text says why, in the template's own words."""


class ChatTemplate:
    """The chat template of one model.

    Args:
        source: the Jinja text; the tokenizer gives the special tokens that it may name.
        tool_source: that for prompts with tools; None is the same.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, tool_source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.source = source
        self.tool_source = tool_source or source

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template that came with the tokenizer, of several "default" and, for tools, "tool_use"; None without."""
        template = tokenizer.fast.chat_template
        named = template if isinstance(template, dict) else {"default": template}
        source = named.get("default")
        return cls(tokenizer, source, named.get("tool_use")) if source else None

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt text, ending where the assistant's answer begins.

        Args:
            **options: what templates may read beside the messages (`tools`, `enable_thinking`, ...), and
                add_generation_prompt and continue_final_message.

        Raises:
            TemplateRefused: the template raised, or failed on these messages.
        """
        try:
            try:
                return self._rendered(messages, options)
            except TypeError:
                # Most templates write a call's arguments as JSON themselves; DeepSeek's want them written.
                return self._rendered(with_written_arguments(messages), options)
        except Exception as error:  # a template is a program: what it may raise is not for us to say
            raise TemplateRefused(f"the model's chat template refuses this conversation: {error}") from error

    def _rendered(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        source = self.tool_source if options.get("tools") else self.source
        rendered = self._tokenizer.fast.apply_chat_template(
            list(messages), **{"add_generation_prompt": True} | dict(options), chat_template=source, tokenize=False
        )
        return str(rendered)
