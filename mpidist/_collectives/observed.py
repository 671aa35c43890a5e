"""How collectives and plans are observed; see `mpidist._timeline.observer`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._agreement.root_messages import FROM_RANK_0
from mpidist._base import backend, nest
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions
from mpidist._base.types import Array, Nest
from mpidist._collectives.plan import Plan, Results
from mpidist._collectives.resources import Resources
from mpidist._timeline.observer import Observers, Opens, Span


class ObservedPlan(Plan):
    """A plan whose runs are observed.

    It has no `attempt`, which may find that the arrays are not for the plan when the
    observers have seen a call begin; and no `quick`, which would not tell them.

    Args:
        resources: of the strategy.
        plan: what does the work.
    """

    def __init__(self, resources: Resources, plan: Plan) -> None:
        super().__init__(resources, plan.call)
        self.observed = plan

    def _run(
        self, arrays: Sequence[Array], call: Call, timeout: float | None
    ) -> Results:
        observers, nbytes = self._guard.observers, sum(int(x.nbytes) for x in arrays)
        assert observers is not None
        with observers.call(nbytes, self.observed.route):
            return self.observed(arrays, call, timeout)


Piece: TypeAlias = Any
"""An object with ``resources``, such as `Copies`, whose module imports this one."""


def nest_of_all(
    observers: Observers,
    piece: Piece,
    tree: Nest,
    how: object = None,
    options: CommunicationOptions | None = None,
    *_: object,
    **__: object,
) -> AbstractContextManager[Span]:
    """Observe a collective of the arrays of a nest."""
    return observers.call(bytes_of(tree), _route_of(piece.resources, tree, options))


def of_values(route: str = "") -> Opens:
    """Return how a collective of values is observed that move through host memory.

    Args:
        route: how they move; "": as arrays of all ranks do.
    """

    def opens(
        observers: Observers, piece: Piece, values: Any, *_: object, **__: object
    ) -> AbstractContextManager[Span]:
        return observers.call(
            bytes_of(values), route or _route_of(piece.resources, None)
        )

    return opens


def values_to_all(
    observers: Observers, piece: Piece, values: list[Any], call: str
) -> AbstractContextManager[Span]:
    """Observe a message of rank 0 with arrays."""
    text, number = f"arrays of {call} to all ranks", piece.resources.guard.sequence + 1
    return observers.call(
        bytes_of(values), _route_of(piece.resources, values), text, number
    )


def values_from_rank_0(
    observers: Observers, piece: Piece, call: str = FROM_RANK_0
) -> AbstractContextManager[Span]:
    """Observe the wait for a message of rank 0 with arrays."""
    number = piece.resources.guard.sequence + 1
    return observers.call(0, _route_of(piece.resources, None), call, number)


def has_values(span: Span, values: Nest) -> None:
    """Set the bytes of a call that gets its arrays from rank 0."""
    span.nbytes = span.nbytes or bytes_of(values)


def _route_of(
    resources: Resources, tree: Nest, options: CommunicationOptions | None = None
) -> str:
    """Return the names of the transports of these arrays."""
    try:
        chosen = resources.transports
        if options is not None:
            chosen = resources.transports_of(resources.merge_options(options))
        on_device = {*map(backend.is_device_array, nest.flatten(tree)[0])} or {False}
    except Exception:  # the collective reports it to all ranks
        return "unknown"
    routes = []
    if False in on_device:
        is_shared = resources.node is not None and chosen.host.name == "shared"
        routes.append("shared" if is_shared else "mpi")
    if True in on_device:
        routes.append(chosen.device.name)
    return "+".join(routes)


def bytes_of(tree: Nest) -> int:
    """Return the bytes of the arrays and numbers of a nest; 0 if it is not a nest."""
    try:
        return sum(map(_nbytes, nest.flatten(tree)[0]))
    except Exception:  # the collective reports it to all ranks
        return 0


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, IndexedSlices):
        return _nbytes(leaf.values) + _nbytes(leaf.indices)
    if backend.is_array(leaf):
        return int(leaf.nbytes)
    is_number = backend.is_number(leaf) or isinstance(leaf, bool)
    return int(np.asarray(leaf).nbytes) if is_number else 0
