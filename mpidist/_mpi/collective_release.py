"""Resources that ranks create together and must release together: communicators.

MPI frees a communicator in a collective call, but Python collects objects at a
different time on each rank, and in the middle of any call. So nothing that the garbage
collector runs calls MPI. It only marks a resource as unused; the resource is freed at
the next *release*, which all ranks of a communicator reach together (when a strategy is
created or closed).

The protocol. Each resource has a key, which its first rank has drawn when it was made,
and which all of its ranks have. In a release

1. every rank sends the keys of its unused resources, and for each the number of ranks
   that made it;
2. all ranks count the same answers: a resource is free if as many ranks have sent its
   key as have made it;
3. every rank frees its free ones in the order of their keys; this is collective over
   the ranks of the resource only;
4. if anything was free, the release is repeated, since one resource may be the last
   user of another.

Why it is sound:

- *No rank is left out.* A rank sends a key once, and only ranks that made a resource
  have its key. If as many have sent it as made it, all of them are in this release and
  have read the same answers, so all free it. Otherwise none does, and it stays for a
  later release, perhaps of a larger group. Ranks that are in other releases at the same
  time do not matter: they have not sent their keys in this one.
- *No deadlock.* All ranks free in one order. Of the resources that are not yet freed,
  take the one with the smallest key: each of its ranks has finished all smaller ones,
  so all of them are at it.
- *Nothing in use is freed.* A rank sends a resource only when its objects there are
  dead (of a communicator: its collectives). What is dead on all ranks takes part in no
  call, so its calls have ended everywhere. What is dead cannot become alive again.
- *Different times of collection* only delay it: the rank that collects last decides.
  Strategies are parts of cycles, so before a release a rank that has many resources
  collects its garbage.

A strategy that gave up on a missing rank is never freed: one of its operations may
still be in progress.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

_FEW: Final = 16

resources: Final[dict[str, CollectiveResource]] = {}
"""Those of this rank, by their keys."""

_collect_from = _FEW


class CollectiveResource:
    """A communicator, until its ranks have freed it.

    Args:
        key: the same on all ranks that made it, and different from all other keys.
        ranks: how many ranks made it.
        in_use: whether this rank still needs it; never True again after False.
        give_back: frees it. Collective over the ranks that made it.
        is_orphan: whether it is not in use and some of its ranks have died, so that
            each of the others frees it alone.
    """

    def __init__(
        self,
        key: str,
        ranks: int,
        in_use: Callable[[], bool],
        give_back: Callable[[], None],
        is_orphan: Callable[[], bool] = lambda: False,
    ) -> None:
        self.key = key
        self.ranks = ranks
        self.in_use = in_use
        self.is_orphan = is_orphan
        self._give_back = give_back
        resources[key] = self

    def give_back(self) -> None:
        """Free it. Collective over the ranks that made it."""
        if resources.pop(self.key, None) is not None:
            self._give_back()


def count() -> int:
    """Return the number of resources of this rank."""
    return len(resources)


def unused() -> list[tuple[str, int]]:
    """Return the keys of this rank's unused resources, each with its ranks."""
    global _collect_from
    if len(resources) >= _collect_from:
        gc.collect()
        _collect_from = max(_FEW, 2 * sum(one.in_use() for one in resources.values()))
    for one in list(resources.values()):
        if one.is_orphan():
            one.give_back()
    return [
        (one.key, one.ranks) for one in list(resources.values()) if not one.in_use()
    ]


def release_unused(
    gather: Callable[[Any], list[Any]], answers: list[Any] | None = None
) -> None:
    """Free the resources that no rank uses. Collective.

    Args:
        gather: returns the objects of all ranks, in one order.
        answers: what `unused` returned on all ranks, if they have exchanged it.
    """
    while True:
        if answers is None:
            answers = gather(unused())
        sent = Counter((key, ranks) for row in answers for key, ranks in row)
        free = sorted(key for (key, ranks), times in sent.items() if times == ranks)
        for key in free:
            if key in resources:
                resources[key].give_back()
        if not free:
            return
        answers = None
