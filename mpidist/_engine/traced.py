"""Collectives and plans that are traced; see `mpidist._agreement.trace`.

The routes of `TracedCollectives` make plans that open a call of the trace, so neither
`Plans.all_reduce` nor the optimizers, which run plans themselves, know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist import _native
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._agreement.root_messages import RootMessages
from mpidist._agreement.trace import NO_ROUTE, Trace
from mpidist._agreement.traced_guard import TracedGuard
from mpidist._base import backend, nest
from mpidist._base.environment import Environment
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions
from mpidist._base.types import Array, Nest
from mpidist._engine import ROUTES
from mpidist._engine.collectives import Collectives
from mpidist._engine.memory import SharedMemory
from mpidist._engine.plans import Plan, PlanResources, Route, Signature
from mpidist._mpi.communicator import AnyCommunicator


class TracedPlan:
    """A plan whose runs have a line.

    It is not a `plans.CheckingPlan`, which checks by itself if arrays have its
    signature: a call that did not take place would have begun.

    Args:
        plan: what does the work.
        route: its name.
        trace: of the strategy.
    """

    def __init__(self, plan: Plan, route: str, trace: Trace) -> None:
        self.call: Call = plan.call
        self.traced = plan
        self._route = route
        self._trace = trace

    def __call__(
        self,
        arrays: list[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> list[Array]:
        """Agree with the other ranks, and reduce; see `Plan`."""
        with self._trace.call(sum(int(x.nbytes) for x in arrays), self._route):
            return self.traced(arrays, call, timeout)


def _traced(route: Route, trace: Trace) -> Route:
    name = getattr(route, "__name__", "unknown")

    def make(resources: PlanResources, signature: Signature) -> Plan | None:
        plan = route(resources, signature)
        return None if plan is None else TracedPlan(plan, name, trace)

    return make


class TracedMessages(RootMessages):
    """Messages from rank 0, each with a line in the trace."""

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: Guard,
        ring: _native.Channel | None,
        trace: Trace,
    ) -> None:
        super().__init__(comm, guard, ring)
        self._trace = trace
        self._route = "mpi" if ring is None else "shared"

    def send(self, data: bytes) -> None:
        """Call the method of `RootMessages`."""
        text, number = "a message to all ranks", self.guard.sequence + 1
        with self._trace.call(len(data), self._route, text, number):
            super().send(data)

    def receive(
        self, what: str = "a message from rank 0", timeout: float | None = None
    ) -> bytes:
        """Call the method of `RootMessages`."""
        number = self.guard.sequence + 1
        with self._trace.call(0, self._route, what, number) as record:
            data = super().receive(what, timeout)
            record.nbytes = len(data)
        return data


class TracedCollectives(Collectives):
    """The collectives of one group of replicas, each with a line in the trace.

    An all-reduce has the line of its plan.
    """

    def __init__(
        self,
        comm: AnyCommunicator,
        guard: TracedGuard,
        options: CommunicationOptions,
        environment: Environment,
        device: backend.Device,
        memory: SharedMemory,
    ) -> None:
        self._trace = guard.trace
        self.routes = tuple(_traced(route, guard.trace) for route in ROUTES)
        super().__init__(comm, guard, options, environment, device, memory)

    def buffers_like(self, tree: Nest) -> Nest:
        """Call the method of `Collectives`."""
        with self._trace.call(_bytes_of(tree), NO_ROUTE):
            return super().buffers_like(tree)

    def all_gather(
        self,
        tree: Nest,
        axis: int,
        options: CommunicationOptions | None = None,
        call: str = "all_gather",
    ) -> Nest:
        """Call the method of `Collectives`."""
        with self._trace.call(_bytes_of(tree), self._route_of(tree, options)):
            return super().all_gather(tree, axis, options, call)

    def broadcast(
        self,
        tree: Nest,
        root: int = 0,
        options: CommunicationOptions | None = None,
        call: str = "broadcast",
    ) -> Nest:
        """Call the method of `Collectives`."""
        with self._trace.call(_bytes_of(tree), self._route_of(tree, options)):
            return super().broadcast(tree, root, options, call)

    def share(self, make: Callable[[], list[Any]], text: str) -> list[Any]:
        """Call the method of `Collectives`."""
        with self._trace.call(0, self._route_of(None)) as record:
            values = super().share(make, text)
            record.nbytes = _bytes_of(values)
        return values

    def collect(self, values: list[Any], call: str) -> list[list[Any]]:
        """Call the method of `Collectives`."""
        with self._trace.call(_bytes_of(values), self._route_of(None)):
            return super().collect(values, call)

    def scatter(self, values: list[list[Any]] | None, call: str) -> list[Any]:
        """Call the method of `Collectives`."""
        with self._trace.call(_bytes_of(values), self._route_of(None)) as record:
            own = super().scatter(values, call)
            record.nbytes = record.nbytes or _bytes_of(own)
        return own

    def send_arrays(self, values: list[Any], call: str) -> None:
        """Call the method of `Collectives`."""
        text, number = f"arrays of {call} to all ranks", self.guard.sequence + 1
        with self._trace.call(_bytes_of(values), self._route_of(values), text, number):
            super().send_arrays(values, call)

    def receive_arrays(self, call: str = "a message from rank 0") -> list[Any]:
        """Call the method of `Collectives`."""
        route, number = self._route_of(None), self.guard.sequence + 1
        with self._trace.call(0, route, call, number) as record:
            values = super().receive_arrays(call)
            record.nbytes = _bytes_of(values)
        return values

    def _make_messages(self) -> RootMessages:
        plain = super()._make_messages()
        return TracedMessages(plain.comm, plain.guard, plain.ring, self._trace)

    def _route_of(self, tree: Nest, options: CommunicationOptions | None = None) -> str:
        """Return the names of the transports of these arrays."""
        try:
            chosen = self.transports
            if options is not None:
                chosen = self.transports_of(self.merge_options(options))
            on_device = {*map(backend.is_device_array, _leaves_of(tree))} or {False}
        except Exception:  # the collective reports it to all ranks
            return "unknown"
        routes = []
        if False in on_device:
            is_shared = self.node is not None and chosen.host.name == "shared"
            routes.append("shared" if is_shared else "mpi")
        if True in on_device:
            routes.append(chosen.device.name)
        return "+".join(routes)


def _leaves_of(tree: Nest) -> list[Any]:
    return nest.flatten(tree)[0]


def _bytes_of(tree: Nest) -> int:
    """Return the bytes of the arrays and numbers of a nest; 0 if it is not a nest."""
    try:
        return sum(map(_nbytes, _leaves_of(tree)))
    except Exception:  # the collective reports it to all ranks
        return 0


def _nbytes(leaf: Any) -> int:
    if isinstance(leaf, IndexedSlices):
        return _nbytes(leaf.values) + _nbytes(leaf.indices)
    if backend.is_array(leaf):
        return int(leaf.nbytes)
    is_number = backend.is_number(leaf) or isinstance(leaf, bool)
    return int(np.asarray(leaf).nbytes) if is_number else 0
