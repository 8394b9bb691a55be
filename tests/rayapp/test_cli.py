"""`convoy chat` as a user has it: a process on a pseudo-terminal or on pipes, against the HTTP app over a script."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.api.errors import ApiError
from rayapp.api.routes import build_api
from rayapp.api.service import Chunk
from rayapp.api.settings import ApiConfig
from rayapp.chat.conversation import BROKE_OFF, STOPPED, Conversation, Turn
from rayapp.chat.screen import visible
from rayapp.chat.server import Answer, Server, ServerError
from rayapp.chat.session import facts
from tests.conftest import wait_limit
from tests.rayapp.scripted import Call, ScriptedService
from tests.serving import free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "rayapp.cli"]
PROMPT = "\r\n> "
ANSWERED = f"]{PROMPT}"
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
KEY = "sk-very-secret"

# Gives the program on its command line the terminal on its standard input as its controlling one.
ON_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def child_env(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "INPUTRC": os.devnull, "NO_PROXY": "127.0.0.1"} | extra


class Terminal:
    """`convoy` with arguments on a terminal of its own; a context manager that leaves nothing behind.

    Attributes:
        raw: everything the program wrote.
    """

    def __init__(self, *args: str, stdout: Any = None, **env: str) -> None:
        self.raw = b""
        self._seen = 0
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", ON_TERMINAL, *COMMAND, *args],
            stdin=slave, stdout=stdout or slave, stderr=slave, env=child_env(**env), cwd=ROOT,
        )  # fmt: skip
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """What a reader sees, without colours and modes."""
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", self.raw.decode(errors="replace"))

    def expect(self, wanted: str, seconds: float = 60) -> str:
        """Waits for `wanted` after what was seen before; returns what came up to its end."""
        deadline = time.monotonic() + wait_limit(seconds)
        while (at := self.text.find(wanted, self._seen)) < 0:
            self._read(deadline, wanted)
        end = at + len(wanted)
        came, self._seen = self.text[self._seen : end], end
        return came

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ask(self, line: str) -> str:
        """Types a line; returns what came of it, up to the next prompt and without the echo."""
        self.send(line + "\r")
        self.expect(line)
        return self.expect(PROMPT).removesuffix(PROMPT).removeprefix("\r\n")

    def status(self, seconds: float = 30) -> int:
        """The exit status, once the program has ended and all it wrote is read."""
        deadline = time.monotonic() + wait_limit(seconds)
        try:
            while True:
                self._read(deadline, "end of the program")
        except OSError:
            return self.process.wait(wait_limit(seconds))

    def interrupt(self) -> int:
        """Ctrl-C at the prompt; the exit status. Again and again, for Python's readline sleeps on when one comes
        between its writing the prompt and its waiting for keys."""

        def ended() -> bool:
            self.send(CTRL_C)
            return bool(select.select([self._master], [], [], 0.5)[0])

        wait_until(ended)
        return self.status()

    def _read(self, deadline: float, wanted: str) -> None:
        ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"no {wanted!r} in {self.text[self._seen :]!r}"
        piece = os.read(self._master, 65536)
        if not piece:
            raise OSError("closed")
        self.raw += piece


@contextmanager
def serving(service: ScriptedService, config: ApiConfig | None = None) -> Iterator[str]:
    """The app under uvicorn in a thread."""
    server = uvicorn.Server(
        uvicorn.Config(
            build_api(service, config), port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(wait_limit(30))


@pytest.fixture
def url(service: ScriptedService) -> Iterator[str]:
    with serving(service) as address:
        yield address


def says(*pieces: str, reason: str = "stop") -> Callable[[Call], AsyncIterator[Chunk]]:
    async def script(call: Call) -> AsyncIterator[Chunk]:
        for number, piece in enumerate(pieces, 1):
            yield Chunk(piece, [7], reason if number == len(pieces) else None, number, len(call.prompt_ids), 0)
            await asyncio.sleep(0.01)

    return script


async def numbered(call: Call) -> AsyncIterator[Chunk]:
    """Every answer differs."""
    numbered.count += 1  # type: ignore[attr-defined]
    yield Chunk(f"answer {numbered.count}", [7], "stop", 1, len(call.prompt_ids), 0)  # type: ignore[attr-defined]


async def endless(call: Call) -> AsyncIterator[Chunk]:
    for number in range(10**6):
        yield Chunk(f"w{number} ", [7], None, number + 1, len(call.prompt_ids), 0)
        await asyncio.sleep(0.02)


async def silent(call: Call) -> AsyncIterator[Chunk]:
    await asyncio.sleep(3600)
    yield Chunk("", [], "stop", 0, 0, 0)


async def breaks_off(call: Call) -> AsyncIterator[Chunk]:
    yield Chunk("half an ans", [7], None, 1, len(call.prompt_ids), 0)
    raise ApiError(503, "the engine stopped")


def was_asked(service: ScriptedService, *texts: str, system: str | None = None) -> bool:
    """Whether the last prompt was this conversation: messages of user and assistant in turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    model = service.models["smol"]
    assert model.template is not None
    prompt_ids = model.tokenizer.encode(model.template.render(messages), add_special_tokens=False)
    return service.calls[-1].prompt_ids == prompt_ids


def convoy(*args: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    """On pipes."""
    return subprocess.run(
        [*COMMAND, *args], input=stdin, capture_output=True, env=child_env(**env), cwd=ROOT, timeout=wait_limit(60)
    )


# On a terminal


def test_answers_stream_and_the_history_goes_with_the_next_message(service: ScriptedService, url: str) -> None:
    go_on = threading.Event()

    async def script(call: Call) -> AsyncIterator[Chunk]:
        yield Chunk("first ", [7], None, 1, 5, 0)
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        yield Chunk("second", [7, 8], "length", 3, 5, 0)

    service.script = script
    with Terminal("chat", "--url", url, "--temperature", "0.5", "--max-tokens", "9", "--top-p", "0.8") as terminal:
        assert f"smol at {url}" in terminal.expect(PROMPT)
        terminal.send("Hello [bold]you[/bold]\r")
        terminal.expect("\r\nfirst ")  # while the rest has not been generated
        go_on.set()
        below = terminal.expect(ANSWERED)
        assert re.fullmatch(
            r"second\r\n\[3 tokens, \d+\.\d tokens/s, TTFT \d+\.\d\d s, cut at the token limit\]\r\n> ", below
        )
        assert was_asked(service, "Hello [bold]you[/bold]")
        sampling = service.calls[0].sampling
        assert (sampling.temperature, sampling.max_new_tokens, sampling.top_p) == (0.5, 9, 0.8)
        service.script = says("Bye.\n")
        assert terminal.ask("And now?").startswith("Bye.\r\n[1 token, TTFT ")
        assert was_asked(service, "Hello [bold]you[/bold]", "first second", "And now?")
        terminal.send("   \r")
        terminal.expect(PROMPT)
        assert len(service.calls) == 2  # nothing to send
        terminal.send("/quit\r")
        assert terminal.status() == 0


def test_commands(service: ScriptedService, url: str) -> None:
    numbered.count = 0  # type: ignore[attr-defined]
    service.script = numbered
    with Terminal("chat", "--url", url, "--model", "smol", "--system", "Be brief.", "--seed", "5") as terminal:
        terminal.expect(PROMPT)
        assert "no message to ask again" in terminal.ask("/regen")
        terminal.ask("one")
        assert was_asked(service, "one", system="Be brief.")
        assert "answer 2" in terminal.ask("/regen")
        assert was_asked(service, "one", system="Be brief.")
        assert [call.sampling.seed for call in service.calls] == [5, 6]
        terminal.ask("two")
        assert was_asked(service, "one", "answer 2", "two", system="Be brief.")
        terminal.ask("/system Speak  French.")
        terminal.ask("three")
        assert was_asked(service, "one", "answer 2", "two", "answer 3", "three", system="Speak  French.")
        terminal.ask("/reset")
        terminal.ask("four")
        assert was_asked(service, "four", system="Speak  French.")
        terminal.ask("/system")
        terminal.ask("/regen")
        assert was_asked(service, "four")
        asked = len(service.calls)
        helped = terminal.ask("/help")
        assert all(name in helped for name in ("/reset", "/system", "/regen", "/save", "/load", "/help", "/quit"))
        for wrong in ("/etc/passwd", "/reset now", "/save", "/"):
            assert terminal.ask(wrong)
        assert len(service.calls) == asked
        terminal.ask(" /etc/passwd")
        assert was_asked(service, "four", "answer 6", "/etc/passwd")
        terminal.send(CTRL_D)
        assert terminal.status() == 0


def test_a_saved_chat_goes_on_in_another_process(service: ScriptedService, url: str, tmp_path: Path) -> None:
    service.script = says("你好 ", '"\\\n\x1b[2J🙂')
    answer = '你好 "\\\n\x1b[2J🙂'
    file, foreign = tmp_path / "a chat.json", tmp_path / "foreign.txt"
    foreign.write_text("mine")
    with Terminal("chat", "--url", url, "--system", "S") as terminal:
        terminal.expect(PROMPT)
        terminal.ask("Héllo")
        assert f"3 messages saved in {file}" in terminal.ask(f"/save {file}")
        assert "not a saved chat" in terminal.ask(f"/save {foreign}")
        assert "No such file" in terminal.ask(f"/save {tmp_path / 'nowhere' / 'x'}")
        assert "not a saved chat" in terminal.ask(f"/load {foreign}")
        assert "3 messages" in terminal.ask(f"/save {file}")  # its own file may be written again
    assert foreign.read_text() == "mine"
    assert json.loads(file.read_text()) == {
        "model": "smol",
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Héllo"},
            {"role": "assistant", "content": answer},
        ],
    }
    with Terminal("chat", "--url", url) as terminal:
        terminal.expect(PROMPT)
        assert "3 messages loaded" in terminal.ask(f"/load {file}")
        terminal.ask("More")
        assert was_asked(service, "Héllo", answer, "More", system="S")


def test_ctrl_c_in_an_answer_stops_that_answer_alone(service: ScriptedService, url: str, tmp_path: Path) -> None:
    with Terminal("chat", "--url", url) as terminal:
        terminal.expect(PROMPT)
        service.script = silent
        terminal.send("Wait\r")
        wait_until(lambda: service.calls)
        terminal.send(CTRL_C)
        assert "[no text, stopped]" in terminal.expect(PROMPT)
        wait_until(lambda: service.calls[0].closed_early)

        service.script = endless
        terminal.send("Talk\r")
        terminal.expect("w3 ")
        terminal.send(CTRL_C)
        assert re.search(r"\[\d+ pieces, [\d.]+ pieces/s, TTFT [\d.]+ s, stopped\]", terminal.expect(PROMPT))
        assert was_asked(service, "Talk")  # the message that nothing came of is not in between
        wait_until(lambda: service.calls[1].closed_early)

        file = tmp_path / "chat.json"
        terminal.ask(f"/save {file}")
        _, partial = json.loads(file.read_text())["messages"]
        assert partial["content"].startswith("w0 w1 w2 w3 ")
        assert partial["incomplete"] == "stopped"

        service.script = says("whole")
        terminal.ask("Next")
        assert was_asked(service, "Talk", partial["content"], "Next")
        assert terminal.interrupt() == 0


@pytest.mark.parametrize("ends", ["by itself", "by Ctrl-C"])
@pytest.mark.parametrize(
    ("typed", "later", "messages"),
    [
        ("Two\rThree\r", "", ["Two", "Three"]),
        ("Two\rThr", "ee\r", ["Two", "Three"]),  # a line that is begun goes on at the prompt
        ("Twp\x7fo\r", "", ["Two"]),
    ],
    ids=["lines", "begun", "edited"],
)
def test_what_is_typed_in_an_answer_is_the_next_input(
    service: ScriptedService, url: str, typed: str, later: str, messages: list[str], ends: str
) -> None:
    goes_on = threading.Event()

    async def script(call: Call) -> AsyncIterator[Chunk]:
        first = len(service.calls) == 1
        yield Chunk("begun ", [7], None, 1, 9, 0)
        while first and not goes_on.is_set():
            await asyncio.sleep(0.01)
        yield Chunk("done", [7], "stop", 2, 9, 0)

    service.script = script
    with Terminal("chat", "--url", url) as terminal:
        terminal.expect(PROMPT)
        terminal.send("One\r")
        terminal.expect("begun ")
        terminal.send(typed)
        terminal.expect(typed[:3])  # its echo: the terminal has it
        if ends == "by itself":
            goes_on.set()
        else:
            terminal.send(CTRL_C)
        for _ in range(len(messages) - bool(later)):
            terminal.expect("begun done")
        terminal.expect(ANSWERED)
        if later:
            terminal.send(later)
            terminal.expect(ANSWERED)
        said = "begun " if ends == "by Ctrl-C" else "begun done"
        history = ["One", said]
        for message in messages:
            history += [message, "begun done"]
        assert was_asked(service, *history[:-1])
        terminal.send(CTRL_D)
        assert terminal.status() == 0


def test_failures_leave_the_chat_going(service: ScriptedService, url: str, tmp_path: Path) -> None:
    with Terminal("chat", "--url", url) as terminal:
        terminal.expect(PROMPT)
        service.script = breaks_off
        came = terminal.ask("Hello")
        assert came.startswith("half an ans\r\n[")
        assert came.endswith("the answer broke off: the engine stopped")
        terminal.ask(f"/save {tmp_path / 'chat.json'}")
        assert json.loads((tmp_path / "chat.json").read_text())["messages"][1]["incomplete"] == "broke off"
        service.script = says("whole")
        terminal.ask("/regen")
        assert was_asked(service, "Hello")
        terminal.ask(f"/save {tmp_path / 'chat.json'}")
        assert json.loads((tmp_path / "chat.json").read_text())["messages"][1:] == [
            {"role": "assistant", "content": "whole"}
        ]
        assert "400" in terminal.ask("long " * 300)  # does not fit the context
        terminal.ask("Again")
        assert was_asked(service, "Hello", "whole", "Again")


def test_what_the_model_writes_is_no_command_to_the_terminal(service: ScriptedService, url: str) -> None:
    service.script = says("\x1b", "]0;title\x07[red]a[/red]\r\n\tb\x9b2J\x7f:smile: c\u2028d")
    with Terminal("chat", "--url", url) as terminal:
        terminal.expect(PROMPT)
        terminal.send("Go\r")
        terminal.expect("Go\r\n")
        shown = terminal.expect("[2 tokens").removesuffix("\r\n[2 tokens")
        assert shown == "\\x1b]0;title\\x07[red]a[/red]\\x0d\r\n\tb\\x9b2J\\x7f:smile: c\u2028d"


def test_lines_are_edited_recalled_and_pasted(service: ScriptedService, url: str) -> None:
    service.script = says("ok")
    with Terminal("chat", "--url", url) as terminal:
        terminal.expect(PROMPT)
        terminal.send("helo\x1b[Dl\r")
        terminal.expect(ANSWERED)
        assert was_asked(service, "hello")
        terminal.send(f"{UP} there\r")
        terminal.expect(ANSWERED)
        assert was_asked(service, "hello", "ok", "hello there")
        terminal.ask("/reset")
        terminal.send("\x1b[200~two\nlines\x1b[201~\r")
        terminal.expect(ANSWERED)
        assert was_asked(service, "two\nlines")


def test_answers_alone_go_to_a_file(service: ScriptedService, url: str, tmp_path: Path) -> None:
    service.script = says("to the file")
    with (tmp_path / "out").open("wb") as out, Terminal("chat", "--url", url, stdout=out) as terminal:
        terminal.expect(PROMPT)
        terminal.send("Hello\r")
        terminal.expect(ANSWERED)
        terminal.send(CTRL_D)
        assert terminal.status() == 0
    assert (tmp_path / "out").read_bytes() == b"to the file\n"


# On pipes


def test_all_of_a_pipe_is_one_message(service: ScriptedService, url: str) -> None:
    text = "/reset\nis no command here\n\nnor [bold]this[/bold] 🙂"
    answer = "a\x1b[31m[red]b[/red]\n 你好 \u2028" + "x" * 300 + "\n"
    service.script = says("", answer[:4], answer[4:])
    done = convoy("chat", "--url", f"{url}/v1/", "--system", "S", stdin=f"{text}\n".encode())
    assert done.returncode == 0
    assert done.stdout == f"{answer}\n".encode()
    assert re.fullmatch(rb"\[3 tokens, [\d.]+ tokens/s, TTFT [\d.]+ s\]\n", done.stderr)
    assert was_asked(service, text, system="S")


@pytest.mark.parametrize(
    ("args", "script", "stdin", "stdout", "told"),
    [
        (
            ["--model", "nope"],
            says("x"),
            b"hi",
            b"",
            "there is no model 'nope' at URL; there is: smol, org/warm, picky",
        ),
        ([], breaks_off, b"hi", b"half an ans\n", "the answer broke off: the engine stopped"),
        (["--temperature", "7"], says("x"), b"hi", b"", "URL answered 400: temperature"),
        ([], says("x"), b"\n", b"", "standard input is empty"),
        ([], says("x"), b"\xff", b"", "standard input is not UTF-8"),
    ],
    ids=["model", "broke-off", "field", "empty", "bytes"],
)
def test_no_failure_passes_for_an_answer(
    service: ScriptedService, url: str, args: list[str], script: Any, stdin: bytes, stdout: bytes, told: str
) -> None:
    service.script = script
    done = convoy("chat", "--url", url, *args, stdin=stdin)
    assert done.returncode == 1
    assert done.stdout == stdout
    assert told.replace("URL", url) in done.stderr.decode()
    assert b"\x1b" not in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["chat", "models"])
def test_a_server_that_is_not_there(command: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = convoy(command, "--url", url, stdin=b"hi")
    assert (done.returncode, done.stdout) == (1, b"")
    assert f"cannot reach {url}".encode() in done.stderr


@pytest.mark.parametrize("leaves", ["reader", "user"])
def test_an_answer_that_nobody_wants_any_more_is_ended(service: ScriptedService, url: str, leaves: str) -> None:
    service.script = endless
    process = subprocess.Popen(
        [*COMMAND, "chat", "--url", url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_env(), cwd=ROOT,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with process:
        process.stdin.write(b"hi")
        process.stdin.close()
        assert process.stdout.read(3) == b"w0 "
        if leaves == "reader":
            process.stdout.close()
            assert process.wait(wait_limit(30)) == 1
            assert process.stderr.read() == b""
        else:
            process.send_signal(signal.SIGINT)
            assert process.wait(wait_limit(30)) == 130
            assert process.stdout.read().endswith(b"\n")
            assert process.stderr.read().endswith(b", stopped]\n")
    wait_until(lambda: service.calls[0].closed_early)


def test_models_and_keys(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEYS", KEY)
    with serving(service, ApiConfig(keys_env="TEST_KEYS")) as url:
        known = convoy("models", "--url", url, OPENAI_API_KEY=KEY)
        assert (known.returncode, known.stdout) == (0, b"smol\norg/warm\npicky\n")
        unknown = convoy("models", "--url", url, "--api-key", "other-key", OPENAI_API_KEY=KEY)
        assert unknown.returncode == 1
        assert b"answered 401" in unknown.stderr
        assert b"other-key" not in unknown.stderr
    assert KEY.encode() not in convoy("chat", "--help", OPENAI_API_KEY=KEY).stdout


# The parts, without a process


def converse(server: Server) -> tuple[Answer, str]:
    """One answer in this process, and what was shown of it; reasoning in braces."""
    answer, shown = Answer(), []

    async def run() -> None:
        asked = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
        show = lambda text, reasoning: shown.append(f"{{{text}}}" if reasoning else text)  # noqa: E731
        await asyncio.wait_for(server.answer(asked, answer, show), wait_limit(30))

    try:
        asyncio.run(run())
    except ServerError as error:
        return answer, f"{''.join(shown)}! {error}"
    return answer, "".join(shown)


@pytest.fixture(scope="module")
def scripted(models: Any) -> Iterator[tuple[ScriptedService, Server]]:
    service = ScriptedService(models)
    with serving(service) as url:
        yield service, Server(url)


@given(st.lists(st.text(), min_size=1, max_size=5))
@settings(max_examples=25)
def test_what_is_shown_is_what_was_sent(scripted: tuple[ScriptedService, Server], pieces: list[str]) -> None:
    service, server = scripted
    service.script = says(*pieces)
    answer, shown = converse(server)
    assert answer.text == shown == "".join(pieces)
    assert answer.completion_tokens == len(pieces)
    assert answer.pieces == sum(map(bool, pieces))


def read_request(connection: socket.socket) -> None:
    """All of it: a connection that is closed before is reset, and what was sent may be lost."""
    head, body = b"", b""
    while b"\r\n\r\n" not in head:
        if not (piece := connection.recv(65536)):
            return
        head += piece
    head, _, body = head.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length is not None and len(body) < int(length[1]) and (piece := connection.recv(65536)):
        body += piece


@contextmanager
def raw_server(response: bytes) -> Iterator[str]:
    """Sends these bytes to everyone who connects, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    read_request(connection)
                    connection.sendall(response)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(wait_limit(30))


def chunk(reason: str | None = None, **delta: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"


def closed(status: str, body: str = "") -> str:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}"


ODD = "a\u2028\x85\\\ud800"
STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"
HALF = STREAM + chunk(content="half")


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        (HALF + chunk("stop"), "half"),  # OpenAI's [DONE] left out
        (HALF, "half! the answer broke off: the stream ended before the answer was whole"),
        (HALF + "data: [DONE]\n\n", "half! the answer broke off: the stream ended before the answer was whole"),
        (HALF + chunk("stop").rstrip(), "half! the answer broke off: the stream ended"),
        (HALF + 'event: error\ndata: "gone"\n\n', "half! the answer broke off: "),
        (HALF + 'data: {"error": "gone"}\n\n', "half! the answer broke off: gone"),
        (HALF + chunk("stop") + 'data: {"error": {"message": "late"}}\n\n', "half! the answer broke off: late"),
        (HALF + "data: {nonsense\n\n", "half! the answer broke off: the server sent what is no chat completion chunk"),
        (HALF + chunk(content=["a"]), "half! the answer broke off: the server sent what is no chat completion chunk"),
        (STREAM + 'data: {"usage": {"completion_tokens": "x"}}\n\n', "! the server sent what is no chat completion"),
        (STREAM + "data: []\n\n", "! the server sent what is no chat completion chunk: []"),
        (STREAM + chunk(reasoning_content="hm") + chunk("stop", content="x"), "{hm}x"),
        (STREAM + chunk(reasoning_content="hm", reasoning="hm", content="x") + chunk("stop", refusal="no"), "{hm}xno"),
        (STREAM + ": wait\r\n\r\n" + chunk("stop", content=ODD).replace("\n", "\r"), ODD),
        (STREAM.replace("Connection", "Content-Length: 9999\r\nConnection") + chunk(content="cut"), "cut! the answer"),
        (closed("200 OK", "hi"), "! Expected response with content"),
        (closed("301 Moved\r\nLocation: http://there/v1"), "! URL answered 301: the address has moved to http://there/v1"),
        (closed("502 Bad", "<b>\n </b>"), "! URL answered 502: <b> </b>"),
        (closed("429 Slow\r\nContent-Type: text/html"), "! URL answered 429: Slow"),
        (closed("401 No", f'{{"detail": "no key {KEY}"}}'), "! URL answered 401: no key ***"),
        ("", "! Server disconnected"),
        ("SSH-2.0-OpenSSH\r\n", "! "),
    ],
    ids=lambda value: "text",  # names of tests are sent between processes, and one of these is no text
)  # fmt: skip
def test_servers_of_every_kind(response: str, shown: str) -> None:
    with raw_server(response.encode()) as url:
        answer, came = converse(Server(url, KEY))
        if "!" in shown:
            assert came.startswith(shown.replace("URL", url))
        else:
            assert came == shown
            assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "names"), [("[]", None), ('{"data": [{}]}', None), ("<html>", None), ('{"data": [{"id": "a"}]}', ["a"])]
)
def test_the_list_of_models(body: str, names: list[str] | None) -> None:
    with raw_server(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()) as url:
        if names is not None:
            assert asyncio.run(Server(url).models()) == names
        else:
            with pytest.raises(ServerError, match="not a list of models"):
                asyncio.run(Server(url).models())


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x:port"])
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ServerError):
        Server(url)


def test_secrets_are_in_no_message() -> None:
    assert Server("http://user:password@host:81/app/v1/", KEY).name == "http://host:81/app"
    for key in (f"{KEY}\nx", f"{KEY}é"):
        with pytest.raises(ServerError) as refused:
            Server("http://host", key)
        assert KEY not in str(refused.value)


ANY_TEXT = st.text(st.characters())  # lone surrogates too


@given(ANY_TEXT)
def test_visible_loses_nothing_and_leaves_no_control_character(text: str) -> None:
    shown = visible(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    if "\\" not in text:
        assert re.sub(r"\\x(..)", lambda match: chr(int(match[1], 16)), shown) == text


TURNS = st.lists(st.builds(Turn, ANY_TEXT, ANY_TEXT, st.sampled_from([None, STOPPED, BROKE_OFF])), max_size=3)


@given(st.none() | ANY_TEXT, TURNS, st.none() | ANY_TEXT)
def test_any_chat_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, turns: list[Turn], unanswered: str | None
) -> None:
    chat = Conversation(system, turns + ([] if unanswered is None else [Turn(unanswered)]))
    file = tmp_path_factory.getbasetemp() / "any-chat.json"
    file.unlink(missing_ok=True)
    chat.save(file, "m")
    assert Conversation.load(file) == chat


@pytest.mark.parametrize(
    "messages",
    [
        None, 7, [1], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "tool", "content": "x"}],
        [{"role": "assistant", "content": "x"}], [{"role": "user", "content": "x"}] * 2,
        [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}],
    ],
)  # fmt: skip
def test_files_that_are_no_chat(tmp_path: Path, messages: Any) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": messages}))
    with pytest.raises(ValueError, match="not a saved chat"):
        Conversation.load(file)


def test_figures_are_those_of_the_clock() -> None:
    answer = Answer(pieces=4, completion_tokens=21, started=10.0, first=12.5, last=16.5, finish_reason="stop")
    assert facts(answer) == ["21 tokens", "5.0 tokens/s", "TTFT 2.50 s"]
    answer.completion_tokens = None
    assert facts(answer, stopped=True) == ["4 pieces", "0.8 pieces/s", "TTFT 2.50 s", "stopped"]
    assert facts(Answer(finish_reason="stop")) == ["no text"]


# Borders


def test_the_command_loads_neither_ray_nor_torch() -> None:
    child = (
        "import sys, rayapp.cli;"
        "found = {name.partition('.')[0] for name in sys.modules};"
        "sys.exit(str(found & {'ray', 'torch', 'transformers', 'fastapi', 'engine'} or ''))"
    )
    done = subprocess.run([sys.executable, "-c", child], cwd=ROOT, stderr=subprocess.PIPE, timeout=wait_limit(60))
    assert done.stderr.strip() == b""


def test_the_server_knows_nothing_of_the_command() -> None:
    own = [ROOT / "rayapp" / "cli.py", *(ROOT / "rayapp" / "chat").glob("*.py")]
    for file in set((ROOT / "rayapp").rglob("*.py")) - set(own):
        names = {
            name
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        assert not any(name == "rayapp.cli" or name.startswith("rayapp.chat") for name in names), file
    for file in own:
        assert "rayapp.api" not in file.read_text(encoding="utf-8")


def test_the_console_script_is_the_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"convoy": "rayapp.cli:app"}
