"""What ranks made together and must give back together: communicators.

MPI frees a communicator in a collective call, but Python collects objects
at another moment on each rank, and in the middle of any call. So nothing that is run by
the garbage collector calls MPI. What is not used any more is only marked, and given
back at the next *release*: a moment that all ranks of a communicator reach together
(making a strategy, closing one).

The protocol. Each resource has a key that its first rank has drawn when it was made,
and that all of its ranks have. In a release

1. every rank sends the keys of its resources that it does not use any more, and for
   each the number of ranks that made it;
2. all ranks count the same answer: a resource is free if as many ranks have sent its
   key as have made it;
3. every rank gives its free ones back, in the order of their keys; this is collective
   over the ranks of the resource alone;
4. where anything was free, once more, since one resource may be the last user of
   another.

Why it is sound:

- *Nobody is left out.* A rank sends a key once, and only ranks that made a resource
  have its key. If as many have sent it as made it, all of them are in this release and
  have read the same answer, so all give it back. Otherwise nobody does, and it stays
  for a later release, perhaps of a larger group. Ranks that are in other releases
  at the same time do not matter: one that is not here has not sent its key here.
- *No deadlock.* All ranks give back in one order. Of those that are not yet given back
  take the one with the smallest key: each of its ranks has finished all smaller ones,
  so all of them are at it.
- *Nothing in use goes.* A resource is sent by a rank only when its objects there are
  dead (of a communicator: its collectives). What is dead on all ranks takes part in no
  call, so calls of it have ended everywhere. What is dead cannot come to life again.
- *Different moments of collection* only delay it: the rank that collects last decides.
  Strategies are parts of cycles, so before a release a rank that has many resources
  collects its garbage.

A strategy that gave up on a missing rank is never freed: an operation of it may still
be under way.
"""

from __future__ import annotations

import gc
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Final

_FEW: Final = 16

_held: dict[bytes, CollectiveResource] = {}
_many = _FEW


class CollectiveResource:
    """A communicator, until its ranks have given it back.

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


def count() -> int:
    """Return how many resources this rank has."""
    return len(_held)


def release_unused(gather: Callable[[bytes], list[bytes]]) -> None:
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
