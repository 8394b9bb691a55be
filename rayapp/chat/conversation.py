"""The history of a chat: what is sent with the next message, and the file it is kept in.

Used by `rayapp.chat.session`. Knows nothing of servers or terminals.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STOPPED = "stopped"
BROKE_OFF = "broke off"


@dataclass
class Turn:
    """A message and its answer.

    Attributes:
        answer: None until something of it came.
        incomplete: STOPPED by the user or BROKE_OFF by a failure; None: the answer is whole.
        attempts: how often it was asked.
    """

    user: str
    answer: str | None = None
    incomplete: str | None = None
    attempts: int = 0


@dataclass
class Conversation:
    """Turns in order; the last is the one that is asked, and no other is without an answer."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Begins a turn. A message that never got an answer is given up: models expect roles to alternate."""
        if self.turns and self.turns[-1].answer is None:
            self.turns.pop()
        self.turns.append(Turn(text))

    def question(self) -> list[dict[str, Any]]:
        """The messages that ask for the answer of the last turn."""
        messages = self.messages()
        return messages if self.turns[-1].answer is None else messages[:-1]

    def messages(self) -> list[dict[str, Any]]:
        """All of it as OpenAI's messages."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            if turn.answer is not None:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def save(self, file: Path, model: str) -> None:
        """Writes JSON that `load` reads: `{"model", "messages"}`; an answer that is not whole has "incomplete".

        Raises:
            OSError
            ValueError: the file is there and is not a saved chat, so it is left alone.
        """
        if file.exists():
            try:
                self.load(file)
            except ValueError as error:
                raise ValueError(f"{error}; it is left as it is") from None
        messages = self.messages()
        answers = [message for message in messages if message["role"] == "assistant"]
        for message, turn in zip(answers, self.turns, strict=False):
            if turn.incomplete:
                message["incomplete"] = turn.incomplete
        text = json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=1) + "\n"
        file.write_bytes(text.encode(errors="backslashreplace"))  # in JSON, that is how a lone surrogate is written

    @classmethod
    def load(cls, file: Path) -> Conversation:
        """What `save` wrote.

        Raises:
            OSError
            ValueError: the file holds something else.
        """
        try:
            messages = json.loads(file.read_bytes())["messages"]
            loaded = cls()
            for number, message in enumerate(messages):
                loaded._read(number, message["role"], message["content"], message.get("incomplete"))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise ValueError(f"{file} is not a saved chat") from None
        return loaded

    def _read(self, number: int, role: str, content: str, incomplete: str | None) -> None:
        answered = not self.turns or self.turns[-1].answer is not None
        if not isinstance(content, str):
            raise ValueError("no text")
        if role == "system" and number == 0:
            self.system = content
        elif role == "user" and answered:
            self.turns.append(Turn(content))
        elif role == "assistant" and not answered:
            self.turns[-1].answer = content
            self.turns[-1].incomplete = None if incomplete is None else str(incomplete)
        else:
            raise ValueError("out of order")
