"""The default strategy outside every scope: one replica, without MPI."""

from __future__ import annotations

from typing import TypeVar

from mpidist._agreement.guard import Guard
from mpidist._base import backend
from mpidist._base.environment import Environment
from mpidist._base.options import CommunicationOptions
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Nest
from mpidist._engine.collectives import Collectives
from mpidist._mpi.self_communicator import SelfCommunicator
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Components, Key, Registry
from mpidist._strategy.outside import require_scope, warn_of_own_value
from mpidist._strategy.replica_context import attach
from mpidist._strategy.strategy import Strategy, group_of
from mpidist._values.distributed import PerReplica, PerReplicaOfOne

_C = TypeVar("_C", bound=Components)


class _OneReplica(Registry):
    """The registry of one replica: its component is all that there is."""

    def wrap(self, kind: type[_C], own: Nest, key: Key) -> _C:
        """Return a PerReplica that acts as its component, or a Mirrored."""
        if kind is PerReplica:
            return super().wrap(PerReplicaOfOne, own, key)  # type: ignore[return-value]
        return super().wrap(kind, own, key)


class DefaultStrategy(Strategy):
    """The strategy outside every scope: one replica, on the host, no MPI."""

    _name = "default strategy"

    def __init__(self) -> None:
        environment = Environment(
            abort=False,
            cuda_aware=None,
            guard=False,
            timeout_seconds=0.0,
            stall_seconds=0.0,
            bytes_per_pack=0,
        )
        comm = SelfCommunicator()
        guard = Guard(comm, None, timeout_seconds=0.0, stall_seconds=0.0, enabled=False)
        device = backend.Device("cpu")
        options = CommunicationOptions()
        collectives = Collectives(comm, guard, options, environment, device)
        group = ReplicaGroup(
            collectives, number=0, is_mpi=False, make_registry=_OneReplica
        )

        def all_reduce(
            op: ReduceOp,
            tree: Nest,
            options: CommunicationOptions | None = None,
            call: str = "all_reduce",
        ) -> Nest:
            if call == "all_reduce":  # of a replica context, not of a variable
                warn_of_own_value()
            return collectives.all_reduce(op, tree, options, call)

        def all_gather(
            value: Nest, axis: int, options: CommunicationOptions | None = None
        ) -> Nest:
            require_scope("all_gather")
            return collectives.small_gathers.entry(value, axis, options)

        group.all_reduce = all_reduce
        group.all_gather = all_gather
        super().__init__(group)
        attach(self, None)

    def __repr__(self) -> str:
        return "<mpidist default strategy: 1 replica, without MPI>"


context.set_default(group_of(DefaultStrategy()).replica_frame)
