"""The route of small nests of host arrays between few ranks without shared memory.

The data is sent behind the header, as by *eager* on one node: one exchange instead of
two. Every rank has the nests of all when the headers agree, and adds them up in the
order of the ranks, in the core (``_native/py_rows.c``).
"""

from __future__ import annotations

import dataclasses

from mpidist import _native
from mpidist._base.memory import round_up
from mpidist._engine.core_routes import EagerReduce, is_for_core, nbytes_of
from mpidist._engine.plans import PlanResources, Signature


def header(resources: PlanResources, signature: Signature) -> HeaderReduce | None:
    """Return the plan of a small nest, if ranks exchange headers by messages."""
    leaves = signature.leaves
    room = room_behind(resources)
    if not room:
        return None
    if signature.root is not None or signature.compress is not None:
        return None
    if signature.transports.mixed:  # a rank with arrays on a GPU uses another route
        return None
    # What ranks of a node share has no part in it.
    alone = dataclasses.replace(resources, node=None, nodes=None)
    if any(leaf.on_device or not is_for_core(alone, leaf) for leaf in leaves):
        return None
    unit = _native.core.ROW_ALIGNMENT
    nbytes = sum(round_up(nbytes_of(alone, leaf), unit) for leaf in leaves)
    return HeaderReduce(alone, signature) if 0 < nbytes <= room else None


def room_behind(resources: PlanResources) -> int:
    """Return the bytes that a rank can send behind a header; 0: nothing."""
    channel: _native.Rows = resources.guard.channel
    if _native.core is None or type(channel) is not _native.core.Rows:
        return 0
    return channel.room if resources.guard.enabled else 0


class HeaderReduce(EagerReduce):
    """All-reduces small nests, each with its header."""

    def _new_core(
        self,
        resources: PlanResources,
        signature: Signature,
        rows: list[_native.ReduceLeaf],
    ) -> _native.Reduce:
        """Return the nest in the core."""
        guard = resources.guard
        return _native.core.RowReduce(
            guard.channel, rows, signature.call.fingerprint, guard.patience_ms
        )
