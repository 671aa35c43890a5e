"""What the ranks of one node tell each other through memory that they share.

Each rank has a part of the memory, which it alone writes, and all read. A part holds

- two *headers*, used in turn: their sequence number, five words that are compared as
  bytes (flag, fingerprint, soft, patience, most: see `_guard`), the lateness, and a
  note, which only some calls write;
- a *tick*: how many steps of a payload this rank has made, and whether it has *left* in
  the middle of one;
- *spare* words for headers of each kind, which the users of the board fill;
- short *messages* of the first rank to the others: their number, a ring of bytes, and
  an *acknowledgement*: how many bytes of it this rank has read.

What is published is written first, and its number after it; a reader looks at the
number first. Processors of the x86 kind keep that order for all to see; on others a
fence between the two does (`fence`).

Why two of each are enough: a rank writes header k + 2 only when it has completed
header k + 1, so all ranks had begun k + 1, so all had read k. A message waits until the
ring has room for it: what all ranks have read.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import Any, Final

# The words of a header that is exchanged by MPI, which takes the largest of each.
FLAG, PRINT, NOT_PRINT, SOFT, NOT_SOFT, LATENESS, PATIENCE, MOST, WORDS = range(9)
MESSAGE_BYTES: Final = 4080  # the most of one message
RING_BYTES: Final = 8192  # of all messages that some rank has not read

# Places in units of 8 bytes. What is read together shares a line of the cache.
_HEADERS: Final = (0, 16)
_LATE: Final = 6  # from the place of a header, after the number and the words
_NOTE: Final = 7
_TICK: Final = 32
_LEFT: Final = 33
_READ: Final = 40
_SENT: Final = 48
_RING: Final = 64
SPARE_WORDS: Final = 128
_SPARE: Final = _RING + RING_BYTES // 8
BYTES: Final = 12 * 1024  # of a part: all of this, in whole pages

STRONGLY_ORDERED: Final = os.uname().machine in ("x86_64", "i686", "AMD64")
"""Whether all processors see what one writes in the order in which it was written."""

_SPINS: Final = 2000
_YIELDS: Final = 30
_TESTS: Final = 64
_LOOKS: Final = 64 * _TESTS

pack: Final = struct.Struct("5q").pack
"""Make the words of a header that are compared: flags, print, soft, patience, most."""

OVERDUE: Final = 2
"""The flag of a rank that is so late that it has to say how late it is."""


class LeftError(Exception):
    """Another rank has left in the middle of a payload, or does not go on.

    Attributes:
        rank: which.
        why: what it has done, as a part of a sentence.
    """

    def __init__(self, rank: int, why: str = "has left") -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank
        self.why = why


class Board:
    """Headers, ticks and messages in shared memory.

    Args:
        parts: for each rank its part: an array of `BYTES` uint8.
        rank: this rank.
        crowded: whether there are more ranks than cores. Then a waiting rank gives
            its core away at once.
        fence: makes what was written before it visible before what is written after.
        progress: moves along what MPI has under way.
        patience: gives the seconds that a rank waits for a tick; 0: for ever.
    """

    def __init__(
        self,
        parts: list[Any],
        rank: int,
        *,
        crowded: bool,
        fence: Callable[[], None] | None,
        progress: Callable[[], None],
        patience: Callable[[], float] = float,
    ) -> None:
        self._words = [memoryview(part[:BYTES]).cast("B").cast("q") for part in parts]
        self._bytes = [memoryview(part[:BYTES]).cast("B") for part in parts]
        self._mine = self._words[rank]
        self.headers = 0  # that were published; the same number on all ranks
        self._others = [w for k, w in enumerate(self._words) if k != rank]
        self._spins = 0 if crowded else _SPINS
        self._fence = fence
        self._progress = progress
        self._patience = patience
        self._since = 0.0
        self._tick = 0
        # Messages that were begun, and written or read; and the bytes of the latter.
        self._message = 0
        self._moved = 0
        self.ring_end = 0
        ring = self._bytes[0][8 * _RING : 8 * _RING + RING_BYTES]
        self._ring, self._ring_words = ring, ring.cast("q")
        # For the header of even and of odd number: its place, where to write the words
        # that are compared, and for each other rank its words and where to read them.
        heads = [
            [raw[8 * place + 8 : 8 * place + 48] for raw in self._bytes]
            for place in _HEADERS
        ]
        self._turns = [
            (
                place,
                own_and_others[rank],
                [
                    (self._words[k], head)
                    for k, head in enumerate(own_and_others)
                    if k != rank
                ],
            )
            for place, own_and_others in zip(_HEADERS, heads, strict=True)
        ]

    def beside(self, turn: int) -> list[memoryview]:
        """Return the spare words of all ranks for headers of a turn, as bytes.

        There are `SPARE_WORDS`. What a rank writes there before it publishes the
        header, all can read when they have it, until they begin the next.

        Args:
            turn: 1 for the next header where `headers` is odd, 0 where it is even.
        """
        start = 8 * (_SPARE + turn * SPARE_WORDS)
        return [raw[start : start + 8 * SPARE_WORDS] for raw in self._bytes]

    # --- headers --------------------------------------------------------------

    def meet(self, data: bytes, lateness: int) -> bool | None:
        """Publish a header, and return whether all ranks have published the same.

        Args:
            data: this rank's words, from `pack`.
            lateness: in milliseconds. It is not compared: a rank for which it matters
                has `OVERDUE` in its flag.

        Returns:
            Whether all are the same; None if some are not there yet. Then, and where
            they differ, `pending_header` has more.
        """
        self.headers = number = self.headers + 1
        place, mine, others = self._turns[number & 1]
        mine[:] = data
        words = self._mine
        words[place + _LATE] = lateness
        if self._fence is not None:
            self._fence()
        words[place] = number
        for words, _ in others:
            if words[place] < number and not self._spin(words, place, number):
                return None
        if self._fence is not None:
            self._fence()
        return all(head.tobytes() == data for _, head in others)

    def note(self, number: int) -> None:
        """Write a number that comes with the next header, and is not compared."""
        self._mine[self._turns[(self.headers + 1) & 1][0] + _NOTE] = number

    def notes(self) -> tuple[int, ...]:
        """Return the numbers that came with the last header, by rank."""
        place = self._turns[self.headers & 1][0] + _NOTE
        return tuple([words[place] for words in self._words])

    def _spin(self, words: Any, place: int, number: int) -> bool:
        """Wait for a word of another rank, not for long; return whether it is there."""
        for _ in range(self._spins):
            if words[place] >= number:
                return True
        for _ in range(_YIELDS):
            os.sched_yield()
            if words[place] >= number:
                return True
        return False

    def pending_header(self) -> HeaderRequest:
        """Return the header that this rank published last."""
        return HeaderRequest(self, self.headers, self._turns[self.headers & 1][0])

    def start_header(self, words: list[int]) -> HeaderRequest:
        """Publish this rank's words; the request has the largest of all ranks."""
        late = 4 * words[LATENESS] >= -words[PATIENCE]
        data = pack(
            words[FLAG] | (OVERDUE if late else 0),
            words[PRINT],
            words[SOFT],
            words[PATIENCE],
            words[MOST],
        )
        self.headers = number = self.headers + 1
        place, mine, _ = self._turns[number & 1]
        mine[:] = data
        self._mine[place + _LATE] = words[LATENESS]
        if self._fence is not None:
            self._fence()
        self._mine[place] = number
        return HeaderRequest(self, number, place)

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

        A header has shown that all are on their way. But one that a signal interrupts
        between the header and its first step may not come.

        Raises:
            LeftError: if a rank that has not made as many has left, or has not made
                them for as long as `patience` says.
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
                        if words[_LEFT]:
                            raise LeftError(self._rank_of(words))
                        if not count % _LOOKS:
                            self._look_at_clock(words, first=count == -_LOOKS)
        if self._fence is not None:
            self._fence()

    def _look_at_clock(self, words: Any, *, first: bool) -> None:
        now = time.monotonic()
        patience = self._patience()
        if first:
            self._since = now
        elif patience and now - self._since > patience:
            why = f"has not gone on for {patience:.3g} s, and so left"
            raise LeftError(self._rank_of(words), why)

    def _rank_of(self, words: Any) -> int:
        return next(k for k, w in enumerate(self._words) if w is words)

    def leave(self) -> None:
        """Tell those who wait for this rank's ticks that there will be no more."""
        self._mine[_LEFT] = 1

    # --- messages -------------------------------------------------------------

    def start_message(self, data: bytes | None) -> MessageRequest:
        """Send a message from the first rank, or wait for one.

        Args:
            data: at most `MESSAGE_BYTES`; None on the ranks that wait for it.
        """
        self._message += 1
        return MessageRequest(self, self._message, data)

    def post(self, data: bytes) -> bool:
        """Send a message from the first rank at once; return False if it has to wait.

        Args:
            data: at most `MESSAGE_BYTES`.
        """
        number = self._message + 1
        if self._moved != self._message or not self._put(data, number):
            return False
        self._message = number
        self._mine[_SENT] = number
        return True

    def take(self) -> bytes | None:
        """Return the next message; None if it does not come before long."""
        words, number = self._words[0], self._message + 1
        if words[_SENT] < number and not self._spin(words, _SENT, number):
            return None
        self._message = self._moved = number
        return self._get()

    def _put(self, data: bytes, number: int) -> bool:
        """Write a message, without its number; False if there is no room for it."""
        size = len(data)
        end = self.ring_end + room_of(size)
        for words in self._others:
            if end - words[_READ] > RING_BYTES:
                return False
        start = self.ring_end % RING_BYTES
        self._ring_words[start >> 3] = size
        start = (start + 8) % RING_BYTES
        stop = start + size
        if stop <= RING_BYTES:
            self._ring[start:stop] = data
        else:
            first = RING_BYTES - start
            self._ring[start:] = data[:first]
            self._ring[: size - first] = data[first:]
        if self._fence is not None:
            self._fence()
        self.ring_end = end
        self._moved = number
        return True

    def _get(self) -> bytes:
        """Read a message that has come."""
        if self._fence is not None:
            self._fence()
        start = self.ring_end % RING_BYTES
        size = self._ring_words[start >> 3]
        start = (start + 8) % RING_BYTES
        stop = start + size
        data = bytes(self._ring[start:stop])
        if stop > RING_BYTES:
            data += bytes(self._ring[: stop - RING_BYTES])
        self.ring_end += room_of(size)
        self._mine[_READ] = self.ring_end
        return data


def room_of(size: int) -> int:
    """Return how many bytes of the ring a message takes."""
    return 8 + (size + 7 & ~7)


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
            rows = [_spread(words, place) for words in self._board._words]
            self.result = [max(column) for column in zip(*rows, strict=True)]
        return True

    def leak(self) -> None:
        """Do nothing: no buffer of this process is under way."""


def _spread(words: Any, place: int) -> list[int]:
    """Return a header in the form that goes over MPI."""
    flag, text, soft, patience, most, late = words[place + 1 : place + 1 + _LATE]
    return [flag & 1, text, ~text, soft, ~soft, late, patience, most]


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
        if self.result is None:
            if board._moved != number - 1 or not board._put(data, number):
                return False  # those before it come first
            board._mine[_SENT] = number
            self.result = data
        return True

    def _receive(self) -> bool:
        board, number = self._board, self._number
        if self.result is None:
            if board._moved != number - 1 or board._words[0][_SENT] < number:
                return False
            self.result = board._get()
            board._moved = number
        return True

    def leak(self) -> None:
        """Do nothing: no buffer of this process is under way."""
