"""The replicas that run together: what all rooms below the strategies need of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from mpidist._agreement.guard import Guard
from mpidist._base.backend import Device
from mpidist._engine.collectives import Collectives
from mpidist._mpi.communicator import AnyCommunicator
from mpidist._runtime.registry import Registry


class BatchReducer(Protocol):
    """What a group asks of a `mpidist.CrossDeviceOps`."""

    def batch_reduce(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any = None
    ) -> list[Any]:
        """Reduce pairs of per-replica values and destinations. Collective."""
        ...

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Give every replica the value that rank 0 has. Collective."""
        ...


class ReplicaGroup:
    """One rank's view of the replicas that run together. Making one is collective.

    A strategy has one, and shows it to its users by other names. Its attributes are
    public in the package, and set while the strategy is made.

    Attributes:
        strategy: the `mpidist.Strategy`, or None until it has taken the group. For
            users, and for messages: nothing below `_strategy/` calls it.
        number: of the strategies of this process, from 1; 0 for the default one.
        is_mpi: whether the replicas are on the ranks of a communicator.
        collectives: the collectives.
        communicator: of the ranks.
        guard: what compares the calls of the ranks.
        device: of this rank's replica.
        replica_id: of this rank's replica, from 0: its rank.
        num_replicas: how many there are: the size of the communicator.
        device_name: of this rank's replica, as users see it.
        device_names: of all replicas, in replica order.
        host_names: of the machines that they are on, in replica order.
        registry: the distributed values by key.
        custom_ops: the user's `CrossDeviceOps`; None where there are none.
        all_reduce: a nest of this rank's components, by the user's ops where there are
            some: ``all_reduce(op, tree, options=None, call=...)``. Collective.
        merge_call: ``merge_call(group, merge_fn, args, kwargs)``, which makes rank 0
            the coordinator. Collective. Set by the strategy.
        public_objects: what users may hold of the strategy, also in objects such as
            datasets, and pass to a command: the same on all ranks, in one order. Set by
            the strategy.
        cross_frame: the `context.Frame` of code in cross-replica context.
        replica_frame: the `context.Frame` of code in a replica function.
    """

    # Set by the strategy. The frames are of `Any`, since `context` is above this file.
    public_objects: tuple[Any, ...]
    cross_frame: Any
    replica_frame: Any
    merge_call: Callable[..., Any]

    def __init__(
        self,
        collectives: Collectives,
        *,
        number: int,
        is_mpi: bool,
    ) -> None:
        """Tell the other ranks this one's device and host. Collective."""
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
        mine = f"{self.device_name}\n{comm.host_name}".encode()
        rows = [row.decode().split("\n") for row in comm.all_gather_objects(mine)]
        self.device_names: tuple[str, ...] = tuple(device for device, _ in rows)
        self.host_names: tuple[str, ...] = tuple(host for _, host in rows)
        self.registry: Registry = Registry(self, comm.rank, comm.size)
        self.custom_ops: BatchReducer | None = None
        self.all_reduce: Callable[..., Any] = collectives.all_reduce

    def __repr__(self) -> str:
        return repr(self.strategy)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self} cannot be pickled or copied: it is a group of processes. Make it "
            "once, and call `mpidist.get_strategy()` where it is needed"
        )
