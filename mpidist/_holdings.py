"""What ranks made together and must give back together: communicators and windows.

MPI frees a communicator or a window in a collective call, but Python collects objects
at another moment on each rank, and in the middle of any call. So nothing that is run by
the garbage collector calls MPI. What is not used any more is only marked, and given
back at the next *settlement*: a moment that all ranks of a communicator reach together
(making a strategy, closing one, making resident buffers).

The protocol. Each holding has a key that its first rank has drawn when it was made, and
that all of its ranks have. In a settlement

1. every rank sends the keys of its holdings that it does not use any more, and for each
   the number of ranks that made it;
2. all ranks count the same answer: a holding is free if as many ranks have sent its key
   as have made it;
3. every rank gives its free ones back, in the order of their keys; this is collective
   over the ranks of the holding alone;
4. where anything was free, once more, since one holding may be the last user of
   another.

Why it is sound:

- *Nobody is left out.* A rank sends a key once, and only ranks that made a holding have
  its key. If as many have sent it as made it, all of them are in this settlement and
  have read the same answer, so all give it back. Otherwise nobody does, and it stays
  for a later settlement, perhaps of a larger group. Ranks that are in other settlements
  at the same time do not matter: one that is not here has not sent its key here.
- *No deadlock.* All ranks give back in one order. Of those that are not yet given back
  take the one with the smallest key: each of its ranks has finished all smaller ones,
  so all of them are at it.
- *Nothing in use goes.* A holding is sent by a rank only when its objects there are
  dead (`Segment`: every array that views the memory; a communicator: its verbs). What
  is dead on all ranks takes part in no call, so calls of it have ended everywhere. What
  is dead can not come to life again.
- *Different moments of collection* only delay it: the rank that collects last decides.
  Strategies are parts of cycles, so before a settlement a rank that has many holdings
  collects its garbage.

A strategy that gave up on a missing rank is never freed: an operation of it may still
be under way.
"""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

_FEW: Final = 16

_held: dict[bytes, Holding] = {}
_many = _FEW


class Holding:
    """A communicator or a window, until its ranks have given it back.

    Args:
        key: the same on all ranks that made it, and different from all others'.
        ranks: how many ranks made it.
        in_use: whether this rank still needs it; never True again after False.
        give_back: frees it. Collective over the ranks that made it.
    """

    def __init__(
        self,
        key: bytes,
        ranks: int,
        in_use: Callable[[], bool],
        give_back: Callable[[], None],
    ) -> None:
        self.key = key
        self.ranks = ranks
        self.in_use = in_use
        self._give_back = give_back
        _held[key] = self

    def give_back(self) -> None:
        """Free it. Collective over the ranks that made it."""
        if _held.pop(self.key, None) is not None:
            self._give_back()


class Segment:
    """A window of shared memory, for as long as an array views it.

    Args:
        key, ranks, give_back: as of a `Holding`.
        places: for each rank the address of its part, and the number of its bytes.
    """

    def __init__(
        self,
        key: bytes,
        ranks: int,
        give_back: Callable[[], None],
        places: list[tuple[int, int]],
    ) -> None:
        self._places = places
        # Finalizers run at any moment, and on any thread: what they do is one step.
        self._viewed = viewed = {0}
        self._next = 1
        self.holding = Holding(key, ranks, lambda: bool(viewed), give_back)

    def view(self, rank: int, start: int = 0, nbytes: int | None = None) -> Any:
        """Return the part of a rank, or some of it, as an array of uint8.

        The memory stays for as long as the array does, or a view of it. No other array
        that this returns is its base.

        Args:
            rank: whose part.
            start: where the array begins, in bytes.
            nbytes: its size; None: all that is left.
        """
        address, size = self._places[rank]
        memory = _Memory(address + start, size - start if nbytes is None else nbytes)
        number, self._next = self._next, self._next + 1
        self._viewed.add(number)
        weakref.finalize(memory, self._viewed.discard, number).atexit = False
        return np.asarray(memory)

    def seal(self) -> None:
        """Say that there will be no further views."""
        self._viewed.discard(0)


class _Memory:
    """The base of all arrays that view a part of a window."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def count() -> int:
    """Return how many holdings this rank has."""
    return len(_held)


def settle(gather: Callable[[bytes], list[bytes]]) -> None:
    """Give back what no rank uses any more. Collective.

    Args:
        gather: gives each rank's bytes to all ranks, in one order.
    """
    global _many
    if len(_held) >= _many:
        gc.collect()
        _many = max(_FEW, 2 * sum(one.in_use() for one in _held.values()))
    while True:
        mine = [
            (one.key, one.ranks) for one in list(_held.values()) if not one.in_use()
        ]
        answers = gather(pickle.dumps(mine))
        sent = Counter(pair for data in answers for pair in pickle.loads(data))
        free = sorted(key for (key, ranks), times in sent.items() if times == ranks)
        for key in free:
            if key in _held:
                _held[key].give_back()
        if not free:
            return
