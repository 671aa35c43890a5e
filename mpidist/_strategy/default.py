"""The default strategy outside every scope: one replica, without MPI."""

from __future__ import annotations

from mpidist._runtime import context
from mpidist._strategy.setup import complete, group_of_one
from mpidist._strategy.strategy import Strategy, group_of


class DefaultStrategy(Strategy):
    """The strategy outside every scope: one replica, on the host, no MPI."""

    _name = "default strategy"

    def __init__(self) -> None:
        complete(self, group_of_one())

    def __repr__(self) -> str:
        return "<mpidist default strategy: 1 replica, without MPI>"


context.set_default(group_of(DefaultStrategy()).replica_frame)
