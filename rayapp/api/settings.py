"""Settings of the HTTP API: who may call, and what a request may ask for.

`ApiConfig` is fixed when the application is built; `RequestSettings` is the Router's `user_config`, which an operator
changes while it runs. Read by `rayapp.api` and handed down by the Router.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rayapp.strict import StrictModel


class ApiConfig(StrictModel):
    """Who may call. The keys themselves never stand here, where `serve config` and the dashboard would show them.

    Attributes:
        keys_env: name of an environment variable of the Router's process that holds the keys, separated by commas or
            white space.
        keys_file: file with the keys, one a line, # begins a comment; read again when it changes. With neither, nobody
            needs a key.
        cors_origins: web origins whose pages may call from a browser; "*" is any.
    """

    keys_env: str | None = Field(default=None, min_length=1)
    keys_file: Path | None = None
    cors_origins: tuple[str, ...] = ()


class SamplingDefaults(StrictModel):
    """What requests that leave a field out get, before the model's own defaults. None: the model's."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)


class RequestSettings(StrictModel):
    """Limits and defaults of requests.

    Attributes:
        max_body_bytes: a longer body is refused.
        max_text_length: characters that one request may have tokenized, all its prompts together; a million of them
            take about half a second.
        max_prompt_tokens: a longer prompt is refused; None: the model's context is the limit.
        max_completion_tokens: a larger limit of a request is cut to it, as it is to the context; None: no other limit.
        max_requests_per_key: requests that one key may have in one Router process at a time; None: any number.
        defaults: of sampling fields.
    """

    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    max_text_length: int = Field(default=4 * 2**20, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_requests_per_key: int | None = Field(default=None, ge=1)
    defaults: SamplingDefaults = SamplingDefaults()
