"""The replicas that run together, as all rooms below the strategies see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mpidist._agreement.guard import Guard
from mpidist._base.gpus import Device
from mpidist._collectives.collectives import Collectives
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._runtime.registry import Registry


class ReplicaGroup:
    """One rank's view of the replicas that run together. Creating one is collective.

    A strategy has one, and shows it to its users by other names. Its attributes are
    public in the package, and are set while the strategy is created.

    Attributes:
        strategy: the `mpidist.Strategy`; None until it has the group. For users and for
            messages: nothing below `_strategy/` calls it.
        number: the number of the strategy in this process, from 1; 0 for the default.
        is_mpi: whether the replicas are on the ranks of a communicator.
        collectives: the collectives.
        communicator: the communicator of the ranks.
        guard: compares the calls of the ranks.
        device: the device of this rank's replica.
        replica_id: the number of this rank's replica, from 0: its rank.
        num_replicas: the number of replicas: the size of the communicator.
        device_name: the device of this rank's replica, as users see it.
        device_names: the devices of all replicas, in replica order.
        host_names: the machines of all replicas, in replica order.
        node_numbers: the nodes of all replicas, in replica order, from 0 in the order
            of their first ranks. Ranks of a node share memory; names do not say it.
        registry: the distributed values by key.
        custom_ops: the user's `CrossDeviceOps`; None if there are none.
        all_reduce: ``all_reduce(op, tree, options=None, call=...)`` reduces a nest of
            this rank's components, with the user's `CrossDeviceOps` if there are some.
            Collective. Set by `_strategy/setup`, as the next one.
        all_gather: ``all_gather(value, axis, options=None)`` concatenates. Collective.
        public_objects: the objects of the strategy that users may hold, also inside
            objects such as datasets, and pass to a command: the same on all ranks, in
            the same order. Set by the strategy.
        unfinished: ``unfinished(call)`` waits for a save that goes on beside the
            program, and raises its error on all ranks; None: there is none. Collective.
        before_run: looks for values of new variables in a checkpoint that was restored
            before; None: there are no new ones. Collective.
        cross_frame: the `context.Frame` of code in cross-replica context.
        replica_frame: the `context.Frame` of code in a replica function.
    """

    # Set by the strategy. Frames, and the user's `CrossDeviceOps`, are `Any` because
    # their classes are above this file.
    public_objects: tuple[object, ...]
    cross_frame: Any
    replica_frame: Any
    all_reduce: Callable[..., Any]
    all_gather: Callable[..., Any]

    def __init__(
        self,
        collectives: Collectives,
        *,
        number: int,
        is_mpi: bool,
        make_registry: type[Registry] = Registry,
    ) -> None:
        self.strategy: Any = None
        self.number = number
        self.is_mpi = is_mpi
        self.collectives = collectives
        comm: AnyCommunicator = collectives.comm
        self.communicator = comm
        self.guard: Guard = collectives.guard
        self.device: Device = collectives.device
        self.replica_id: int = comm.rank
        self.num_replicas: int = comm.size
        self.device_name: str = self.device.name_on(comm.rank)
        self.device_names: tuple[str, ...] = tuple(collectives.resources.device_names)
        self.host_names: tuple[str, ...] = tuple(comm.host_names)
        self.node_numbers: tuple[int, ...] = tuple(comm.node_numbers)
        self.registry: Registry = make_registry(self, comm.rank, comm.size)
        self.custom_ops: Any = None
        self.unfinished: Callable[[str], None] | None = None
        self.before_run: Callable[[], None] | None = None

    def all_reduce_of(self, owner: object) -> Callable[..., Any]:
        """Return `all_reduce` for the gradients of an owner; see `Plans.of`."""
        if self.custom_ops is not None:
            return self.all_reduce
        return self.collectives.plans.of(owner).all_reduce

    def __repr__(self) -> str:
        return repr(self.strategy)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self} cannot be pickled or copied: it is a group of processes. Make it "
            "once, and call `mpidist.get_strategy()` where it is needed"
        )
