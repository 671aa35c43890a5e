"""The processes of a strategy and their hosts, under tf.distribute's names."""

from __future__ import annotations


class MPIClusterResolver:
    """Describes the processes of a job; returned by `Strategy.cluster_resolver`.

    The names are those of ``tf.distribute.cluster_resolver.ClusterResolver``. There
    is one job, ``"worker"``, with one task for each rank. No configuration is needed.
    There are no ports: an address is a host name.

    Args:
        hosts: the name of each rank's host, in rank order.
        rank: the rank of this process.
        devices: the device string of each rank.
    """

    environment = "mpi"
    rpc_layer = "mpi"
    task_type = "worker"

    def __init__(
        self, hosts: tuple[str, ...], rank: int, devices: tuple[str, ...]
    ) -> None:
        """Store what MPI reported when the strategy was created."""
        self._hosts = hosts
        self._rank = rank
        self._devices = devices

    @property
    def task_id(self) -> int:
        """This process's number: its rank."""
        return self._rank

    def cluster_spec(self) -> dict[str, list[str]]:
        """Return the host of each task: ``{"worker": [...]}``, in rank order."""
        return {"worker": list(self._hosts)}

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the host of a task, by default of rank 0, the coordinator.

        Raises:
            ValueError: for a job other than "worker", or a task that does not exist.
        """
        number = 0 if task_id is None else task_id
        if task_type not in (None, "worker") or not 0 <= number < len(self._hosts):
            raise ValueError(
                f"MPIClusterResolver.master: expected task_type 'worker' and 0 <= "
                f"task_id < {len(self._hosts)}, got {task_type!r} and {task_id!r}"
            )
        return self._hosts[number]

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
        return {"GPU": 1} if "GPU" in self._devices[number] else {}

    def __repr__(self) -> str:
        hosts = sorted(set(self._hosts))
        return (
            f"<mpidist.MPIClusterResolver: task {self._rank} of {len(self._hosts)}, on "
            f"{', '.join(hosts)}>"
        )
