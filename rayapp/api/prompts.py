"""From what a request says to token ids: which model, which template, how long a text may be.

Called by `resolve` and `ops` in worker threads: rendering and tokenizing take too long for the event loop. A text that
is too long by far is refused before it is tokenized, which takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayapp.api.errors import ApiError, invalid_request, not_found
from rayapp.api.schemas import Prompt, TemplateFields
from rayapp.api.service import ServedModel
from rayapp.api.settings import RequestSettings
from rayapp.text.template import Message
from rayapp.text.tools import tools_for_template

TEMPLATE_ARGUMENTS = frozenset(
    (
        "conversation", "messages", "chat_template", "documents", "tools", "tokenize", "add_generation_prompt",
        "continue_final_message", "return_tensors", "return_dict", "tokenizer_kwargs", "padding", "truncation",
        "max_length", "return_assistant_tokens_mask",
    )
)  # fmt: skip
"""Arguments of `apply_chat_template` that are not variables of templates."""


def find_model(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    """The model of that name.

    Raises:
        ApiError: 404 that says which there are.
    """
    if name in models:
        return models[name]
    served = ", ".join(repr(one) for one in models) or "none"
    raise not_found(f"there is no model {name[:100]!r}; the models served here: {served}", "model", "model_not_found")


class PromptReader:
    """What turns a request's texts into token ids.

    Args:
        fits: refuse at once what can be no prompt of the model; False counts tokens of any text.
    """

    def __init__(self, model: ServedModel, settings: RequestSettings, fits: bool = True) -> None:
        self._model = model
        self._settings = settings
        self._fits = fits

    def render(
        self, messages: list[Message], fields: TemplateFields, param: str, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The prompt that the model's template makes of messages and tools.

        Raises:
            ApiError: 400.
        """
        template = self._model.template
        if template is None:
            raise invalid_request(
                f"model {self._model.name!r} has no chat template; use /v1/completions with a finished prompt", param
            )
        options = _template_options(fields)
        if tools:
            options["tools"] = tools_for_template(tools)
        try:
            return template.render(messages, **options)
        except ValueError as error:
            raise invalid_request(str(error), param) from None

    def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text.

        Raises:
            ApiError: 400 or 413.
        """
        self._check_lengths([text], param)
        try:
            return self._model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise invalid_request(f"{param}: {error}", param) from None

    def prompts(self, prompts: Sequence[Prompt], param: str) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            ApiError: 400 or 413.
        """
        self._check_lengths([one for one in prompts if isinstance(one, str)], param)
        return [self._prompt(one, name) for one, name in zip(prompts, names_of(param, len(prompts)), strict=True)]

    def _check_lengths(self, texts: Sequence[str], param: str) -> None:
        """Raises ApiError for texts of which one can be no prompt, or that are too long together."""
        for text, name in zip(texts, names_of(param, len(texts)), strict=True):
            if self._fits:
                self._check_fits(text, name)
        length, limit = sum(map(len, texts)), self._settings.max_text_length
        if length > limit:
            raise ApiError(
                413,
                f"{param}: the text has {length} characters, and this server tokenizes {limit} a request "
                f"(max_text_length): shorten it by at least {length - limit} characters",
                param=param,
                code="text_too_long",
            )

    def _prompt(self, prompt: Prompt, param: str) -> list[int]:
        if isinstance(prompt, str):
            ids = self.encode(prompt, param)
        else:
            try:
                self._model.tokenizer.check_ids(prompt)
            except ValueError as error:
                raise invalid_request(f"{param}: {error}", param) from None
            ids = prompt
        if not ids:
            raise invalid_request(f"{param} has no tokens", param)
        return ids

    def _check_fits(self, text: str, param: str) -> None:
        """Raises ApiError for a text that even its longest tokens would not make short enough."""
        least = self._model.tokenizer.least_tokens(text)
        said = f"the prompt has {len(text)} characters, which are at least {least} tokens, "
        if least > self._model.context_length:
            raise invalid_request(
                f"{said}but {self._model.name!r} takes {self._model.context_length} in all, prompt and completion "
                f"together: shorten the prompt by at least {least - self._model.context_length + 1} tokens",
                param,
                "context_length_exceeded",
            )
        most = self._settings.max_prompt_tokens
        if most is not None and least > most:
            raise invalid_request(
                f"{said}and this server takes {most} (max_prompt_tokens): shorten it by at least {least - most} tokens",
                param,
                "context_length_exceeded",
            )


def names_of(field: str, count: int) -> list[str]:
    """What to call each of `count` prompts in an error."""
    return [field] if count == 1 else [f"{field}.{position}" for position in range(count)]


def _template_options(fields: TemplateFields) -> dict[str, Any]:
    """What the chat template gets beside the messages.

    Raises:
        ApiError: 400.
    """
    for name in fields.chat_template_kwargs.keys() & TEMPLATE_ARGUMENTS:
        raise invalid_request(f"chat_template_kwargs: {name!r} is not for the template", f"chat_template_kwargs.{name}")
    add = not fields.continue_final_message if fields.add_generation_prompt is None else fields.add_generation_prompt
    return {
        **fields.chat_template_kwargs,
        "add_generation_prompt": add,
        "continue_final_message": fields.continue_final_message,
    }
