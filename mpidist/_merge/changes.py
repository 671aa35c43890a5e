"""With ``MPIDIST_DEBUG=1``: which objects merge_fn changes on rank 0 alone.

TensorFlow's merge_fn runs in the one process of all replicas, so ``self.steps += 1`` in
it counts for all. Here the other ranks, which do not run it, keep their old number.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base.errors import level_of_caller
from mpidist._base.fingerprint import fingerprint
from mpidist._collectives.collectives import Collectives
from mpidist._merge.commands import ATOMS
from mpidist._merge.object_names import Names
from mpidist._merge.object_parts import Step

_MOST_BYTES: Final = 64 << 20  # of an array that is compared


class Changes:
    """What merge_fn can reach, before it runs, on one rank."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._before = [_contents(x, names) for x in names.reached]

    def _paths(self) -> Iterator[str]:
        for place, before in enumerate(self._before):
            after = _contents(self._names.reached[place], self._names)
            for step in before.keys() | after.keys():
                if not _same(before.get(step, self), after.get(step, self)):
                    yield self._names.text_of(place, step)

    def tell(self, collectives: Collectives) -> None:
        """Warn on rank 0 of what has changed there only. Collective."""
        own = sorted(self._paths())
        call = Call("merge_call (MPIDIST_DEBUG: the same objects changed?)")
        if collectives.guard.agree_on(call, fingerprint(str(own))).same_value:
            return
        comm = collectives.comm
        rows = comm.all_gather_objects(pickle.dumps(own))
        first, *others = [set(pickle.loads(row)) for row in rows]
        alone = first.difference(*others)
        if alone and comm.rank == 0:
            warnings.warn(
                f"merge_call: merge_fn has changed {', '.join(sorted(alone))} on rank "
                "0, and not on the other ranks, which do not run it; write a "
                "`mpidist.Variable`, or change it after the `merge_call`",
                RuntimeWarning,
                stacklevel=level_of_caller(),
            )


def _contents(x: object, names: Names) -> dict[Step, Any]:
    if isinstance(x, np.ndarray):
        # Objects have comparisons of their own, and large arrays need memory.
        is_small = x.nbytes <= _MOST_BYTES and not x.dtype.hasobject
        return {"": np.array(x)} if is_small else {}
    return dict(names.parts(x))


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        known = (one.dtype, one.shape) == (other.dtype, other.shape)
        return known and one.tobytes() == other.tobytes()
    return one is other or (
        type(one) is type(other) and type(one) in ATOMS and one == other
    )
