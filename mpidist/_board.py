"""What the ranks of one node tell each other through memory that they share.

Each rank has a part of the memory, which it alone writes, and all read. A part holds

- two *headers* (sequence number, words), used in turn;
- a *tick*: how many steps of a payload this rank has made;
- two short *messages* of the first rank to the others, used in turn, and an
  *acknowledgement*: how many of them this rank has read.

What is published is written first, and its number after it; a reader looks at the
number first. Processors of the x86 kind keep that order for all to see; on others a
fence between the two does (`fence`).

Why two of each are enough: a rank writes header k + 2 only when it has completed
header k + 1, so all ranks had begun k + 1, so all had read k. A message waits until its
place has been acknowledged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

WORDS: Final = 8  # of a header
MESSAGE_BYTES: Final = 4080

_HEADERS: Final = (0, 16)  # places in units of 8 bytes
_TICK: Final = 32
_READ: Final = 40
_MESSAGES: Final = (64, 64 + 2 + MESSAGE_BYTES // 8)
BYTES: Final = 12 * 1024  # of a part: all of this, in whole pages

_SPINS: Final = 2000
_TESTS: Final = 64


class Board:
    """Headers, ticks and messages in shared memory.

    Args:
        parts: for each rank its part: an array of `BYTES` uint8.
        rank: this rank.
        crowded: whether there are more ranks than cores. Then a waiting rank gives
            its core away at once.
        fence: makes what was written before it visible before what is written after.
        progress: moves along what MPI has under way.
    """

    def __init__(
        self,
        parts: list[Any],
        rank: int,
        *,
        crowded: bool,
        fence: Callable[[], None] | None,
        progress: Callable[[], None],
    ) -> None:
        self._words = [memoryview(part[:BYTES]).cast("B").cast("q") for part in parts]
        self._bytes = [memoryview(part[:BYTES]).cast("B") for part in parts]
        self._mine = self._words[rank]
        self._others = [w for k, w in enumerate(self._words) if k != rank]
        self._spins = 0 if crowded else _SPINS
        self._fence = fence
        self._progress = progress
        self._header = 0
        self._tick = 0
        self._message = 0

    # --- headers --------------------------------------------------------------

    def start_header(self, words: list[int]) -> HeaderRequest:
        """Publish this rank's words; the request has the largest of all ranks."""
        self._header += 1
        place = _HEADERS[self._header & 1]
        mine = self._mine
        for index, word in enumerate(words, place + 1):
            mine[index] = word
        if self._fence is not None:
            self._fence()
        mine[place] = self._header
        return HeaderRequest(self, self._header, place)

    # --- ticks ----------------------------------------------------------------

    def step(self) -> None:
        """Publish that this rank has made a step, and wait until all have."""
        self.tick()
        self.wait()

    def tick(self) -> None:
        """Publish that this rank has made a step."""
        if self._fence is not None:
            self._fence()
        self._tick += 1
        self._mine[_TICK] = self._tick

    def wait(self) -> None:
        """Wait until all ranks have made as many steps as this one.

        Without a deadline: a header has shown that all are on their way.
        """
        tick = self._tick
        for words in self._others:
            count = self._spins
            while words[_TICK] < tick:
                count -= 1
                if count < 0:
                    os.sched_yield()
                    if not count % _TESTS:
                        self._progress()
        if self._fence is not None:
            self._fence()

    # --- messages -------------------------------------------------------------

    def start_message(self, data: bytes | None) -> MessageRequest:
        """Send a message from the first rank, or wait for one.

        Args:
            data: at most `MESSAGE_BYTES`; None on the ranks that wait for it.
        """
        self._message += 1
        return MessageRequest(self, self._message, data)


class HeaderRequest:
    """A header that has been published, until all ranks have published theirs."""

    __slots__ = ("_board", "_number", "_pending", "_place", "_tests", "result")

    def __init__(self, board: Board, number: int, place: int) -> None:
        self._board = board
        self._number = number
        self._place = place
        self._pending = board._others
        self._tests = 0
        self.result: list[int] = []

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether all ranks have published theirs."""
        place, number = self._place, self._number
        for words in self._pending:
            if words[place] < number:
                self._tests += 1
                if not self._tests % _TESTS:
                    self._board._progress()
                return False
        if not self.result:
            if self._board._fence is not None:
                self._board._fence()
            rows = [w[place + 1 : place + 1 + WORDS] for w in self._board._words]
            self.result = list(map(max, *rows)) if len(rows) > 1 else list(rows[0])
        return True

    def leak(self) -> None:
        """Do nothing: no buffer of this process is under way."""


class MessageRequest:
    """A message under way; ``result`` has it when `Test` has returned True."""

    __slots__ = ("_board", "_data", "_number", "_tests", "result")

    def __init__(self, board: Board, number: int, data: bytes | None) -> None:
        self._board = board
        self._number = number
        self._data = data
        self._tests = 0
        self.result: bytes | None = None

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether it is on its way (first rank), or has come (others)."""
        done = self._receive() if self._data is None else self._send(self._data)
        if not done:
            self._tests += 1
            if not self._tests % _TESTS:
                self._board._progress()
        return done

    def _send(self, data: bytes) -> bool:
        board, number = self._board, self._number
        if self.result is not None:
            return True
        for words in board._others:
            if words[_READ] < number - 2:
                return False  # its place is not free
        place = _MESSAGES[number & 1]
        start = 8 * (place + 2)
        board._bytes[0][start : start + len(data)] = data
        board._mine[place + 1] = len(data)
        if board._fence is not None:
            board._fence()
        board._mine[place] = number
        self.result = data
        return True

    def _receive(self) -> bool:
        board, number = self._board, self._number
        if self.result is not None:
            return True
        place = _MESSAGES[number & 1]
        words = board._words[0]
        if words[place] < number:
            return False
        if board._fence is not None:
            board._fence()
        start = 8 * (place + 2)
        self.result = bytes(board._bytes[0][start : start + words[place + 1]])
        board._mine[_READ] = number
        return True

    def leak(self) -> None:
        """Do nothing: no buffer of this process is under way."""
