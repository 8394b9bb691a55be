"""The command `convoy`: a chat in the terminal with any OpenAI-compatible server.

The console script of the distribution. Loads neither Ray nor torch; the server is started by `serve run`.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, NoReturn

import typer

from rayapp.chat.screen import Screen
from rayapp.chat.server import Server, ServerError
from rayapp.chat.session import Session

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Url = Annotated[str, typer.Option(help="Of the server, with or without the final /v1.")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Never shown.")]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.callback()
def convoy() -> None:
    """Clients of a running server."""


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="By default the first that the server lists.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The most tokens of an answer.")] = None,
    top_p: float | None = None,
    seed: int | None = None,
    api_key: ApiKey = None,
) -> None:
    """Chat with a model; /help lists the commands.

    Standard input that is not a terminal is one message, and the exit status is 0 only for a whole answer.
    """
    options = {"temperature": temperature, "max_tokens": max_tokens, "top_p": top_p, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    screen = Screen()
    try:
        server = Server(url, api_key)
        session = Session(server, screen, choose_model(server, model), system, given)
        if screen.interactive:
            session.talk()
            return
        text = screen.read_all()
    except (ServerError, UnicodeDecodeError) as error:
        fail(screen, "standard input is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error))
    if not text.strip():
        fail(screen, "standard input is empty: there is nothing to send")
    raise typer.Exit(session.once(text))


@app.command()
def models(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """List the server's models."""
    screen = Screen()
    try:
        server = Server(url, api_key)
        names = asyncio.run(server.models())
        if names is None:
            raise ServerError(f"{server.name} has no list of models")
    except ServerError as error:
        fail(screen, str(error))
    for name in names:
        screen.line(name)


def choose_model(server: Server, name: str | None) -> str:
    """The model of that name, or the first there is. A server that has no list is believed to have it.

    Raises:
        ServerError: there is no such model.
    """
    names = asyncio.run(server.models())
    if names is None and name is not None:
        return name
    if not names:
        raise ServerError(f"{server.name} lists no models" + ("; name one with --model" if names is None else ""))
    if name is not None and name not in names:
        raise ServerError(f"there is no model {name!r} at {server.name}; there is: {', '.join(names)}")
    return name or names[0]


def fail(screen: Screen, message: str) -> NoReturn:
    screen.error(f"convoy: {message}")
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
