"""The collectives of a group: one object for replicas, strategies and commands.

Every collective has the same steps: check the arguments, agree with the other ranks
(`Guard`), move the bytes (a plan, or `Transports`), and wrap the result. What can fail
on one rank alone is done before the agreement, and its failure is told to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from mpidist._agreement.guard import Guard
from mpidist._base import gpus
from mpidist._base.options import CommunicationOptions
from mpidist._base.types import Nest
from mpidist._collectives.all_gather import AllGathers
from mpidist._collectives.copies import Copies
from mpidist._collectives.plan import PlanCache
from mpidist._collectives.plans import Plans
from mpidist._collectives.resources import Resources
from mpidist._mpi.any_communicator import AnyCommunicator


class Collectives(Copies):
    """The collectives of one group of replicas.

    Args:
        resources: what the collectives share.

    Attributes:
        comm: the ranks.
        guard: compares the calls of the ranks.
        options: of the strategy.
        device: of this rank.
        plans: makes and keeps the plans of all-reduces.
        all_reduce: `Plans.all_reduce`; the core runs plans of small arrays (`quick`).
        all_gather: `AllGathers.all_gather`, in the same way.
    """

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self.comm: AnyCommunicator = resources.comm
        self.guard: Guard = resources.guard
        self.options: CommunicationOptions = resources.options
        self.device: gpus.Device = resources.device
        self.invalid: Callable[[str, BaseException], NoReturn] = resources.invalid
        self.cache: PlanCache = PlanCache()
        self._gathers = resources.observing(AllGathers)(resources, self.cache)
        self.all_gather: Callable[..., Nest] = self._gathers.quick.entry
        self.plans: Plans = Plans(resources, self.cache, self.all_gather)
        self.all_reduce: Callable[..., Nest] = self.plans.quick.entry

    def release(self) -> None:
        """Let go of shared memory: the strategy is being closed. Not collective."""
        self.resources.release()
        self.cache.clear()
        self.plans.owned.clear()
        self.plans.quick.forget()
        self._gathers.quick.forget()
