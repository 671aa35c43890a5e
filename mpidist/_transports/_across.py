"""Reductions of one flat buffer over nodes: a rank with its peers.

Few peers exchange by messages between each pair, and every rank adds up in the order of
the peers:

- *two of them, and not many bytes*: each sends all to the other, straight into the
  array for the result, and adds its own;
- *else* in slices, one of each peer: all send to each peer its slice; each adds up its
  own, and sends the sum to all, straight into their results. So every rank sends and
  gets twice (P - 1) / P of the bytes, which is the least that is possible.

Many peers leave it to MPI, which then has ways with fewer messages.

All waits are polled, and look for ranks that have left.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np

from mpidist._comm import MPIOp, Peers
from mpidist._transports._stream import COMBINE

FEW: Final = 8
"""So many peers exchange messages between each pair."""

_WHOLE_BYTES: Final = 512 * 1024
_LINE: Final = 64


class Across:
    """All-reduces buffers of at most ``room`` bytes over the peers of a rank."""

    def __init__(self, peers: Peers, room: int) -> None:
        self.peers = peers
        self._me = peers.rank
        self._size = peers.size
        # For what comes from each peer, and for sums that are not complete.
        self._scratch = np.empty(0, np.uint8)
        self._row = 0
        if self._size <= FEW:
            self._row = -(-room // self._size // _LINE) * _LINE + _LINE
            rows = max(self._size * self._row, min(room, _WHOLE_BYTES))
            self._scratch = np.empty(rows, np.uint8)

    def reduce(self, source: Any, target: Any, op: MPIOp) -> None:
        """Reduce a buffer of all peers into ``target``. Collective over the peers.

        Args:
            source: this rank's; None if it is in the ``target``.
            target: for the result.
            op: the operation.
        """
        if self._size > FEW:
            self.peers.allreduce(source, target, op)
        elif self._size == 2 and target.nbytes <= _WHOLE_BYTES:
            self._exchange_whole(source, target, op)
        else:
            self._exchange_slices(source, target, op)

    def _exchange_whole(self, source: Any, target: Any, op: MPIOp) -> None:
        other = 1 - self._me
        theirs = target
        if source is None:
            source = target
            theirs = self._scratch[: target.nbytes].view(target.dtype)
        self.peers.swap([(other, source)], [(other, theirs)])
        pair = (theirs, source) if self._me else (source, theirs)
        COMBINE[op](*pair, out=target)

    def _exchange_slices(self, source: Any, target: Any, op: MPIOp) -> None:
        me, size = self._me, self._size
        if source is None:
            source = target
        line = max(1, _LINE // target.itemsize)
        lines = -(-target.size // line)
        cuts = [min(lines * k // size * line, target.size) for k in range(size + 1)]
        slices = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        own = slices[me]
        nbytes = (own.stop - own.start) * target.itemsize
        rows = [
            self._scratch[k * self._row : k * self._row + nbytes].view(target.dtype)
            for k in range(size)
        ]
        # Everybody begins with the next one, so that not all send to the same.
        others = [(me + k) % size for k in range(1, size)]
        filled = [k for k in others if slices[k].start < slices[k].stop]
        self.peers.swap(
            [(k, source[slices[k]]) for k in filled],
            [(k, rows[k]) for k in others] if nbytes else [],
        )
        out = target[own]
        if nbytes:
            parts = [source[own] if k == me else rows[k] for k in range(size)]
            self._combine(parts, rows[me], out, op)
        self.peers.swap(
            [(k, out) for k in others] if nbytes else [],
            [(k, target[slices[k]]) for k in filled],
        )

    def _combine(self, parts: list[Any], scratch: Any, out: Any, op: MPIOp) -> None:
        """Reduce in the order of the peers; ``out`` may be one of the parts."""
        combine = COMBINE[op]
        total = parts[0]
        for part in parts[1:-1]:
            combine(total, part, out=scratch)
            total = scratch
        combine(total, parts[-1], out=out)
