"""The default strategy outside every scope: one replica, without MPI."""

from __future__ import annotations

from mpidist._agreement.guard import Guard
from mpidist._base import backend
from mpidist._base.environment import (
    Environment,
)
from mpidist._base.options import (
    CommunicationOptions,
)
from mpidist._engine.collectives import Collectives
from mpidist._mpi.self_communicator import SelfCommunicator
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.replica_context import attach
from mpidist._strategy.strategy import Strategy, group_of


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
        super().__init__(ReplicaGroup(collectives, number=0, is_mpi=False))
        attach(self, None)

    def __repr__(self) -> str:
        return "<mpidist default strategy: 1 replica, without MPI>"


context.set_default(group_of(DefaultStrategy()).replica_frame)
