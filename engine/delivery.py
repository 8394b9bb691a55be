"""Results on their way from the engine thread to whoever asked: mailboxes, iteration, handlers.

The engine thread publishes; callers take by request id, take whatever comes next, or have a callback run on
their own event loop. Each output reaches exactly one of them. Knows nothing of models or scheduling.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from engine.outputs import FINISHED, GenerationOutput

logger = logging.getLogger(__name__)

ResultHandler = Callable[[GenerationOutput], None]

Receiver = tuple[ResultHandler, asyncio.AbstractEventLoop | None]
"""A handler and the event loop that it runs on; without a loop it runs in the engine thread and must not raise."""


@dataclass(slots=True, eq=False)
class _Mailbox:
    """Outputs of one request id that nobody has taken yet."""

    changed: threading.Condition
    outputs: deque[tuple[int, GenerationOutput]] = field(default_factory=deque)
    open_requests: int = 0  # whose terminal output has not been taken; 2 when an id is used again
    readers: int = 0  # threads reading by this id; while there are any, nobody else takes from it
    receiver: Receiver | None = None

    @property
    def shared(self) -> bool:
        """True when `take_next` may take from here."""
        return self.readers == 0 and self.receiver is None


class Delivery:
    """Hands every output of every request to exactly one taker, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._boxes: dict[str, _Mailbox] = {}
        self._shared: OrderedDict[int, str] = OrderedDict()  # outputs that `take_next` may take: number -> id
        self._published = 0
        self._opened = 0
        self._ended = False

    def begin(self) -> None:
        """A session starts: iteration waits for its first request."""
        with self._lock:
            self._ended = False
            if not self._boxes:
                self._opened = 0

    def open(self, request_id: str, receiver: Receiver | None = None) -> None:
        """Expect one more request under this id, whose outputs go to `receiver` if there is one."""
        with self._lock:
            box = self._boxes.get(request_id)
            if box is None:
                box = self._boxes[request_id] = _Mailbox(threading.Condition(self._lock))
            box.open_requests += 1
            self._opened += 1
            if receiver is not None:
                box.receiver = receiver
            self._arrived.notify_all()

    def knows(self, request_id: str) -> bool:
        """True while a request with this id is live or its result has not been taken."""
        return request_id in self._boxes

    def end(self) -> None:
        """Nothing more will be published: readers of what never came return."""
        with self._lock:
            self._ended = True
            self._wake_all()

    def attach(self, request_id: str, receiver: Receiver) -> None:
        """Give this request's outputs to `receiver`, those that already wait first.

        Raises:
            KeyError: the id is unknown or its result was already taken.
        """
        with self._lock:
            box = self._box(request_id)
            self._hide(box)
            box.receiver = receiver
            waiting = [output for _, output in box.outputs]
            box.outputs.clear()
            self._close_finished(request_id, box, waiting)
            # Under the lock, so that an output published meanwhile cannot overtake these.
            _hand_over(receiver[1], [(receiver[0], output) for output in waiting])

    def publish(self, outputs: Iterable[GenerationOutput]) -> None:
        """Deliver one step's outputs. One wake-up per event loop, whatever their number."""
        calls: defaultdict[asyncio.AbstractEventLoop | None, list[tuple[ResultHandler, GenerationOutput]]]
        calls = defaultdict(list)
        last_loop, on_last_loop = None, calls[None]
        with self._lock:
            boxes = self._boxes
            for output in outputs:
                request_id = output.request_id
                box = boxes.get(request_id)
                if box is None:
                    continue
                if box.receiver is not None:
                    handler, loop = box.receiver
                    if loop is not last_loop:
                        last_loop, on_last_loop = loop, calls[loop]
                    on_last_loop.append((handler, output))
                    if output.status >= FINISHED:
                        self._closed_one(request_id, box)
                    continue
                self._published += 1
                box.outputs.append((self._published, output))
                if box.readers:
                    box.changed.notify_all()
                else:
                    self._shared[self._published] = request_id
                    self._arrived.notify()
            for loop, batch in calls.items():
                _hand_over(loop, batch)

    def take(self, request_id: str, timeout: float | None = None) -> GenerationOutput | None:
        """The next output of this request; None when `timeout` seconds pass or the engine ended without one.

        Raises:
            KeyError: the id is unknown or its result was already taken.
        """
        with self._reading(request_id) as box:
            output = self._take_from(request_id, box, timeout)
        if output is None and not self._ended and self._boxes.get(request_id) is not box:
            raise KeyError(f"the result of request {request_id!r} was delivered to someone else meanwhile")
        return output

    def iterate(self, request_id: str) -> Iterator[GenerationOutput]:
        """Every output of this request, ending after the terminal one. The id is this reader's until then.

        Raises:
            KeyError: the id is unknown or its result was already taken.
        """
        with self._reading(request_id) as box:
            while (output := self._take_from(request_id, box, None)) is not None:
                yield output
                if output.is_finished():
                    return

    def take_next(self, timeout: float | None = None, *, until_done: bool = False) -> GenerationOutput | None:
        """The oldest output that no id reader or handler owns; None when `timeout` passes or the engine ended.

        With `until_done` it also returns None once requests were seen and none is outstanding.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._shared:
                if self._ended or (until_done and self._opened and not self._outstanding()):
                    return None
                if not _wait(self._arrived, deadline):
                    return None
            _, request_id = self._shared.popitem(last=False)
            box = self._boxes[request_id]
            _, output = box.outputs.popleft()
            self._close_finished(request_id, box, [output])
            return output

    # The rest runs with the lock held.

    def _reading(self, request_id: str) -> _Reading:
        return _Reading(self, request_id)

    def _take_from(self, request_id: str, box: _Mailbox, timeout: float | None) -> GenerationOutput | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not box.outputs:
                # Another reader of the same id may have taken the end of it.
                if self._ended or self._boxes.get(request_id) is not box or box.receiver is not None:
                    return None
                if not _wait(box.changed, deadline):
                    return None
            _, output = box.outputs.popleft()
            self._close_finished(request_id, box, [output])
            return output

    def _box(self, request_id: str) -> _Mailbox:
        box = self._boxes.get(request_id)
        if box is None:
            raise KeyError(f"request {request_id!r} is unknown, or its result was already delivered")
        return box

    def _close_finished(self, request_id: str, box: _Mailbox, taken: list[GenerationOutput]) -> None:
        for output in taken:
            if output.is_finished():
                self._closed_one(request_id, box)

    def _closed_one(self, request_id: str, box: _Mailbox) -> None:
        box.open_requests -= 1
        if box.open_requests == 0:
            del self._boxes[request_id]
            box.changed.notify_all()
            self._arrived.notify_all()

    def _outstanding(self) -> bool:
        return any(box.shared for box in self._boxes.values())

    def _hide(self, box: _Mailbox) -> None:
        for number, _ in box.outputs:
            self._shared.pop(number, None)

    def _show(self, request_id: str, box: _Mailbox) -> None:
        for number, _ in box.outputs:
            self._shared[number] = request_id
        if box.outputs:
            self._shared = OrderedDict(sorted(self._shared.items()))
            self._arrived.notify_all()

    def _wake_all(self) -> None:
        self._arrived.notify_all()
        for box in self._boxes.values():
            box.changed.notify_all()


class _Reading:
    """While a thread reads by id, what arrives for that id is kept for such readers."""

    def __init__(self, delivery: Delivery, request_id: str) -> None:
        self._delivery = delivery
        self._request_id = request_id

    def __enter__(self) -> _Mailbox:
        with self._delivery._lock:
            self._box = self._delivery._box(self._request_id)
            self._box.readers += 1
            self._delivery._hide(self._box)
            self._delivery._arrived.notify_all()
            return self._box

    def __exit__(self, *exc_info: object) -> None:
        with self._delivery._lock:
            self._box.readers -= 1
            if self._box.shared:
                self._delivery._show(self._request_id, self._box)


def _wait(condition: threading.Condition, deadline: float | None) -> bool:
    """Wait once; False when the deadline has passed."""
    if deadline is None:
        return condition.wait()
    left = deadline - time.monotonic()
    return left > 0 and (condition.wait(min(left, threading.TIMEOUT_MAX)) or time.monotonic() < deadline)


def _hand_over(loop: asyncio.AbstractEventLoop | None, calls: list[tuple[ResultHandler, GenerationOutput]]) -> None:
    if not calls:
        return
    if loop is None:
        _run_handlers(calls)
        return
    try:
        loop.call_soon_threadsafe(_run_handlers, calls)
    except RuntimeError:  # that loop was closed; nobody is left to tell, and the others must not suffer
        logger.warning("%d results could not be delivered: their event loop is closed", len(calls))


def _run_handlers(calls: list[tuple[ResultHandler, GenerationOutput]]) -> None:
    for handler, output in calls:
        try:
            handler(output)
        except Exception:
            logger.exception("the result handler of request %r raised", output.request_id)
