"""The division of a sequence of arrays among ranks, for state that each has a part of.

The elements of the arrays, one array after the other, are divided at *bounds*: rank r
has those from bound r to bound r + 1. So what the ranks have, concatenated in rank
order, is the sequence.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from mpidist._base.types import record


class Piece(NamedTuple):
    """A part of an array: its place in the sequence, the first element and the end."""

    place: int
    start: int
    stop: int


@record
class Partition:
    """Which elements of a sequence of arrays each rank has.

    Attributes:
        order: the numbers of the arrays, in the order of the sequence.
        starts: where each begins, in that order, and the end of the last.
        bounds: where the part of each rank begins, and the end of the last.
    """

    order: tuple[int, ...]
    starts: tuple[int, ...]
    bounds: tuple[int, ...]

    def pieces(self, rank: int) -> list[Piece]:
        """Return the parts of arrays that a rank has.

        They have elements, but for arrays that are empty: each is on one rank.
        """
        low, high = self.bounds[rank : rank + 2]
        pieces = []
        for place, (start, stop) in enumerate(itertools.pairwise(self.starts)):
            first, end = max(start, low), min(stop, high)
            if first < end:
                pieces.append(Piece(place, first - start, end - start))
            elif start == stop and self._owner(start) == rank:
                pieces.append(Piece(place, 0, 0))
        return pieces

    def _owner(self, start: int) -> int:
        """Return the rank that has an empty array which begins there."""
        return min(bisect.bisect_right(self.bounds, start), len(self.bounds) - 1) - 1


def evenly(sizes: Sequence[int], ranks: int) -> Partition:
    """Return a partition into equal parts, which cuts arrays where it must."""
    starts = _starts(sizes)
    bounds = tuple(starts[-1] * rank // ranks for rank in range(ranks + 1))
    return Partition(tuple(range(len(sizes))), starts, bounds)


def by_load(sizes: Sequence[int], loads: list[int]) -> Partition:
    """Return a partition of whole arrays: the largest go first, to the least loaded.

    Args:
        sizes: of the arrays.
        loads: what each rank has already, to which this adds.
    """
    given: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        given[rank].append(number)
    order = tuple(itertools.chain.from_iterable(given))
    bounds = _starts([sum(sizes[i] for i in numbers) for numbers in given])
    return Partition(order, _starts([sizes[i] for i in order]), bounds)


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes, initial=0))
