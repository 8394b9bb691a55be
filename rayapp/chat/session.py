"""The chat itself: messages, commands, answers that can be stopped.

Run by `rayapp.cli`. Brings together the server, the screen and the conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayapp.chat.conversation import BROKE_OFF, STOPPED, Conversation
from rayapp.chat.screen import Screen
from rayapp.chat.server import Answer, Server, ServerError

COMMANDS = {
    "/reset": "forget the conversation; the system prompt stays",
    "/system TEXT": "set the system prompt; without TEXT, remove it",
    "/regen": "ask the last message again (with --seed: with the next seed)",
    "/save FILE": "write the conversation to FILE, as JSON",
    "/load FILE": "go on with a conversation that /save wrote",
    "/help": "this list",
    "/quit": "leave, as Ctrl-C and Ctrl-D do",
}
HELP = "\n".join(
    [
        *(f"{command:<14}{what}" for command, what in COMMANDS.items()),
        "Ctrl-C in an answer stops that answer only; what came of it stays in the conversation.",
        "A message that begins with / is sent if a space stands before it.",
    ]
)
CUT_SHORT = {"length": "cut at the token limit", "content_filter": "cut by the server's content filter"}

WHOLE = "whole"


class Session:
    """One chat.

    Args:
        options: sampling fields of every request.
    """

    def __init__(
        self, server: Server, screen: Screen, model: str, system: str | None, options: Mapping[str, Any]
    ) -> None:
        self._server = server
        self._screen = screen
        self._model = model
        self._options = dict(options)
        self._chat = Conversation(system)

    def once(self, text: str) -> int:
        """Sends one message; the exit status: 0 for a whole answer, 1 for a failure, 130 after Ctrl-C."""
        self._chat.add(text)
        return {WHOLE: 0, BROKE_OFF: 1, STOPPED: 130}[self._answer()]

    def talk(self) -> None:
        """Messages and commands until the user leaves."""
        self._screen.note(f"{self._model} at {self._server.name}. /help lists the commands, Ctrl-D leaves.")
        while (line := self._screen.ask()) is not None:
            if line.startswith("/"):
                command, _, rest = line.partition(" ")
                if command == "/quit":
                    return
                self._command(command, rest.strip())
            elif line.strip():
                self._chat.add(line.strip())
                self._answer()

    def _command(self, command: str, rest: str) -> None:
        takes = {name.partition(" ")[0]: " " in name for name in COMMANDS}
        if command not in takes:
            self._screen.error(f"there is no command {command}; /help lists them (nothing was sent)")
        elif rest and not takes[command]:
            self._screen.error(f"{command} takes nothing behind it (nothing was done)")
        else:
            getattr(self, f"_do_{command[1:]}")(*[rest] if takes[command] else [])

    def _do_help(self) -> None:
        self._screen.note(HELP)

    def _do_reset(self) -> None:
        self._chat = Conversation(self._chat.system)
        self._screen.note("the conversation is forgotten")

    def _do_system(self, text: str) -> None:
        self._chat.system = text or None
        self._screen.note("the system prompt is set" if text else "there is no system prompt now")

    def _do_regen(self) -> None:
        if self._chat.turns:
            self._answer()
        else:
            self._screen.error("there is no message to ask again")

    def _do_save(self, name: str) -> None:
        self._with_file("/save", name)

    def _do_load(self, name: str) -> None:
        self._with_file("/load", name)

    def _with_file(self, command: str, name: str) -> None:
        if not name:
            self._screen.error(f"{command} needs the name of a file")
            return
        try:
            file = Path(name).expanduser()
            if command == "/save":
                self._chat.save(file, self._model)
            else:
                self._chat = Conversation.load(file)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of a user there is not
            self._screen.error(str(error))
        else:
            count = len(self._chat.messages())
            done = "saved in" if command == "/save" else "loaded from"
            self._screen.note(f"{count} message{'s' * (count != 1)} {done} {file}")

    def _answer(self) -> str:
        """Asks the last turn, shows what comes and keeps it. Returns WHOLE, STOPPED or BROKE_OFF."""
        turn = self._chat.turns[-1]
        request = {"model": self._model, "messages": self._chat.question(), **self._options}
        if "seed" in request:
            request["seed"] += turn.attempts
        turn.attempts += 1
        answer, failure, outcome = Answer(), None, WHOLE
        try:
            with self._screen.keys_kept():
                asyncio.run(self._server.answer(request, answer, self._screen.show))
        except KeyboardInterrupt:  # the task was cancelled, which has closed the connection
            outcome = WHOLE if answer.finish_reason else STOPPED
        except ServerError as error:
            failure, outcome = error, BROKE_OFF
        whole = outcome is WHOLE
        if whole or answer.text:
            turn.answer, turn.incomplete = answer.text, None if whole else outcome
            self._screen.end_answer()
        else:
            self._screen.end_line()
        if answer.pieces or failure is None:
            self._screen.note(f"[{', '.join(facts(answer, outcome is STOPPED))}]")
        if failure is not None:
            self._screen.error(str(failure))
        return outcome


def facts(answer: Answer, stopped: bool = False) -> list[str]:
    """What is told below an answer.

    Tokens per second leave the wait for the first one out. Without the server's count, the pieces that came are
    counted.
    """
    said = []
    if answer.first is None or answer.last is None:
        said.append("no text")
    else:
        count, unit = answer.pieces, "pieces"
        if answer.completion_tokens is not None:
            count, unit = answer.completion_tokens, "tokens"
        said.append(f"{count} {unit if count != 1 else unit[:-1]}")
        if count > 1 and answer.last > answer.first:
            said.append(f"{(count - 1) / (answer.last - answer.first):.1f} {unit}/s")
        said.append(f"TTFT {answer.first - answer.started:.2f} s")
    if stopped:
        said.append("stopped")
    elif answer.finish_reason in CUT_SHORT:
        said.append(CUT_SHORT[answer.finish_reason])
    return said
