"""The replica that a value is created for."""

from __future__ import annotations


class ValueContext:
    """The replica that a value is created for.

    `Strategy.experimental_distribute_values_from_function` passes one to its
    ``value_fn``; it can also be created directly.

    Args:
        replica_id_in_sync_group: the number of the replica.
        num_replicas_in_sync: the number of replicas.
    """

    def __init__(
        self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1
    ) -> None:
        self._replica_id_in_sync_group = replica_id_in_sync_group
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of the replica, from 0."""
        return self._replica_id_in_sync_group

    def __str__(self) -> str:
        return (
            f"mpidist.ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )

    __repr__ = __str__
