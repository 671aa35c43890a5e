"""`MPIClusterResolver`: the ranks of a strategy, as MPI knows them."""

from __future__ import annotations

from mpidist._base.names import counted
from mpidist.cluster._resolvers import ClusterResolver
from mpidist.cluster._spec import ClusterSpec


class MPIClusterResolver(ClusterResolver):
    """The ranks of a strategy: hosts, nodes and devices, as MPI knows them.

    Returned by `mpidist.Strategy.cluster_resolver`; no configuration is needed. There
    is one job, ``"worker"``, with one task for each rank. There are no ports: an
    address is a host name; that of `master` by default of rank 0, the coordinator. All
    is known on every rank, and no call communicates.

    Args:
        hosts: the name of each rank's host, in rank order.
        rank: the rank of this process.
        devices: the device string of each rank.
        nodes: the number of each rank's node, from 0; ranks of one node share memory.
            Default: a node for each host name.

    Attributes:
        rpc_layer: ``"mpi"``.
        environment: ``"mpi"``.
        hosts: the name of each rank's host.
        devices: the device of each rank, such as ``"/rank:1/device:GPU:0"``.
        nodes: the number of each rank's node. Hosts of one name are different nodes.
        local_ranks: the number of each rank among those of its node, from 0.
    """

    rpc_layer: str = "mpi"
    environment: str = "mpi"

    def __init__(
        self,
        hosts: tuple[str, ...],
        rank: int,
        devices: tuple[str, ...],
        nodes: tuple[int, ...] | None = None,
    ) -> None:
        """Store what MPI reported when the strategy was created."""
        names = list(dict.fromkeys(hosts))
        self.hosts: tuple[str, ...] = hosts
        self.devices: tuple[str, ...] = devices
        self.nodes: tuple[int, ...] = nodes or tuple(map(names.index, hosts))
        self.local_ranks: tuple[int, ...] = tuple(
            self.nodes[:rank].count(node) for rank, node in enumerate(self.nodes)
        )
        self.task_type: str = "worker"
        self.task_id: int = rank
        self._rank = rank

    def cluster_spec(self) -> ClusterSpec:
        """Return the host of each task: ``{"worker": [...]}``, in rank order."""
        return ClusterSpec({"worker": self.hosts})

    def get_task_info(self) -> tuple[str, int]:
        """Return ``task_type`` and ``task_id``, as `SlurmClusterResolver` does."""
        return self.task_type, self.task_id

    def _master(self, job: str | None, task: int | None, layer: str | None) -> str:
        layer = None if layer == self.rpc_layer else layer  # an address is a host
        return super()._master(job, task or 0, layer)

    def _accelerators(self, task_id: int | None) -> dict[str, int]:
        number = self._rank if task_id is None else task_id
        return {"GPU": 1} if "GPU" in self.devices[number] else {}

    def __repr__(self) -> str:
        places = ", ".join(dict.fromkeys(self.hosts))
        nodes = counted(len(set(self.nodes)), "node")
        return (
            f"<mpidist.MPIClusterResolver: task {self._rank} of {len(self.hosts)}, on "
            f"{nodes} ({places})>"
        )
