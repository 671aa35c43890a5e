"""Headers and messages between nodes, through the first rank of each node.

A *header* goes in three steps: the ranks of a node publish theirs on its board; the
first rank of each node, the *leader*, all-reduces the largest words with the other
leaders (MPI, non-blocking); and tells its node the result by a message on the board.

A *message* of rank 0, which is a leader, goes to the leaders by MPI, and on from them
over the boards.

Nothing runs by itself: each step begins in a `Test` of the one before. A member of a
node waits for its leader, the leader for MPI. So if a rank is missing, all others are
left waiting in `Test`, as without a relay, and run into the same deadlines. A leader
completes its request when its node has the result, so nobody waits for a leader that
has gone on.

All ranks start headers and messages in the same order, and complete each before they
start the next (who breaks off a wait, breaks the strategy), so messages on a board that
end a header can not be taken for others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from mpidist._board import WORDS, Board
from mpidist._comm import Peers, Request

_WORDS: Final = struct.Struct(f"{WORDS}q")

Step = Callable[[Any], Request]


class LeaderRelay:
    """Carries headers and messages of all ranks.

    Args:
        board: of this node.
        leaders: the leaders of all nodes, on a leader; None on other ranks.
    """

    def __init__(self, board: Board, leaders: Peers | None) -> None:
        self._board = board
        self._leaders = leaders

    def start_header(self, words: list[int]) -> Request:
        """Start the elementwise maximum of `WORDS` integers over all ranks."""
        board, leaders = self._board, self._leaders
        steps: list[Step]
        if leaders is None:
            steps = [lambda _: board.start_message(None)]
        else:
            steps = [
                leaders.start_header,
                lambda largest: board.start_message(_WORDS.pack(*largest)),
            ]
        return _Chain(board.start_header(words), steps, _unpack)

    def start_message(self, data: bytes | None) -> Request:
        """Send a message from rank 0, or wait for one.

        Args:
            data: None on the ranks that wait for it.
        """
        if self._leaders is None:
            return self._board.start_message(None)
        # Rank 0 is done when its own node has it: MPI has taken the bytes by then.
        return _Chain(
            self._leaders.start_message(data), [self._board.start_message], bytes
        )


def _unpack(data: bytes) -> list[int]:
    return list(_WORDS.unpack(data))


class _Chain:
    """Requests of which each starts with the result of the one before it."""

    __slots__ = ("_at", "_read", "_request", "_steps")

    def __init__(
        self, first: Request, steps: list[Step], read: Callable[[Any], Any]
    ) -> None:
        self._request = first
        self._steps = steps
        self._at = 0
        self._read = read

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether the last of them has completed, and move them along."""
        while self._request.Test():
            if self._at == len(self._steps):
                return True
            step = self._steps[self._at]
            self._at += 1
            self._request = step(self._request.result)
        return False

    def leak(self) -> None:
        """Keep the buffers of what is under way for ever."""
        self._request.leak()

    @property
    def result(self) -> Any:
        """What the last of them gave."""
        return self._read(self._request.result)
