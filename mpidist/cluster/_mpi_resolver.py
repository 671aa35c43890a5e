"""`MPIClusterResolver`: the ranks of a strategy, as MPI knows them."""

from __future__ import annotations

from mpidist.cluster._resolvers import ClusterResolver, with_protocol
from mpidist.cluster._spec import ClusterSpec


class MPIClusterResolver(ClusterResolver):
    """The ranks of a strategy: hosts, nodes and devices, as MPI knows them.

    Returned by `mpidist.Strategy.cluster_resolver`; no configuration is needed. There
    is one job, ``"worker"``, with one task for each rank. There are no ports: an
    address is a host name. All is known on every rank, and no call communicates.

    Args:
        hosts: the name of each rank's host, in rank order.
        rank: the rank of this process.
        devices: the device string of each rank.
        nodes: the number of each rank's node, from 0; ranks of one node share memory.
            Default: a node for each host name.

    Attributes:
        rpc_layer: ``"mpi"``.
        hosts: the name of each rank's host.
        devices: the device of each rank, such as ``"/rank:1/device:GPU:0"``.
        nodes: the number of each rank's node. Hosts of one name are different nodes.
    """

    def __init__(
        self,
        hosts: tuple[str, ...],
        rank: int,
        devices: tuple[str, ...],
        nodes: tuple[int, ...] | None = None,
    ) -> None:
        """Store what MPI reported when the strategy was created."""
        names = list(dict.fromkeys(hosts))
        self.rpc_layer: str = "mpi"
        self.hosts: tuple[str, ...] = hosts
        self.devices: tuple[str, ...] = devices
        self.nodes: tuple[int, ...] = nodes or tuple(map(names.index, hosts))
        self._task_type = "worker"
        self._task_id = rank
        self._rank = rank

    @property
    def environment(self) -> str:
        """``"mpi"``."""
        return "mpi"

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The number of each rank among those of its node, from 0."""
        return tuple(
            self.nodes[:rank].count(node) for rank, node in enumerate(self.nodes)
        )

    def cluster_spec(self) -> ClusterSpec:
        """Return the host of each task: ``{"worker": [...]}``, in rank order."""
        return ClusterSpec({"worker": self.hosts})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the host of a task, by default of rank 0, the coordinator.

        Args:
            task_type: "worker".
            task_id: the rank.
            rpc_layer: a protocol to put before it; default: none.

        Raises:
            ValueError: for a job other than "worker", or a task that does not exist.
        """
        number = 0 if task_id is None else task_id
        if task_type not in (None, "worker") or not 0 <= number < len(self.hosts):
            raise ValueError(
                f"MPIClusterResolver.master: expected task_type 'worker' and 0 <= "
                f"task_id < {len(self.hosts)}, got {task_type!r} and {task_id!r}"
            )
        return with_protocol(self.hosts[number], rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return how many GPUs a task uses: ``{"GPU": 1}``, or ``{}`` on the host.

        The default is the task of this process.
        """
        number = self._rank if task_id is None else task_id
        return {"GPU": 1} if "GPU" in self.devices[number] else {}

    def __repr__(self) -> str:
        places = ", ".join(dict.fromkeys(self.hosts))
        count = len(set(self.nodes))
        return (
            f"<mpidist.MPIClusterResolver: task {self._rank} of {len(self.hosts)}, on "
            f"{count} node{'s' * (count != 1)} ({places})>"
        )
