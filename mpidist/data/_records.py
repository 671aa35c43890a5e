"""Input contexts, options, specs, and the results of iterators."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from mpidist._base.types import DType, Nest

INFINITE_CARDINALITY: Final = -1
UNKNOWN_CARDINALITY: Final = -2


class OutOfRangeError(LookupError):
    """`DistributedIterator.get_next` was called at the end of the input.

    On all ranks together. It is not a StopIteration, which a generator or a ``for``
    loop around the call would interpret as its own end.
    """


class InputReplicationMode(enum.Enum):
    """How many input pipelines a worker has.

    A rank is one worker with one replica, so both mean one pipeline for each rank.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """The rule by which global batches are split over the replicas.

    ``AUTO`` and ``DATA``: each batch is split separately into parts of ceil(rows /
    replicas). ``OFF``: by a balanced plan for the full batch, whose parts differ by at
    most one row. ``FILE``: each replica opens every n-th input of the dataset's
    `interleave`, and makes its own part of each global batch of their rows; in
    TensorFlow ``AUTO`` does that for files. ``HINT`` is rejected.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array in an element of a dataset.

    Attributes:
        shape: the sizes; None for one that is unknown or differs between elements.
        dtype: the NumPy dtype.
    """

    shape: tuple[int | None, ...]
    dtype: DType

    def __repr__(self) -> str:
        return f"ArraySpec(shape={self.shape}, dtype={self.dtype})"

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class InputContext:
    """Tells an input function which of the input pipelines to create.

    Args:
        num_input_pipelines: the number of input pipelines, which is the number of
            ranks.
        input_pipeline_id: the number of this one, from 0: the rank.
        num_replicas_in_sync: the number of replicas that share a step.
    """

    __slots__ = ("_id", "_pipelines", "_replicas")

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None:
        self._pipelines = num_input_pipelines
        self._id = input_pipeline_id
        self._replicas = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """The number of input pipelines."""
        return self._pipelines

    @property
    def input_pipeline_id(self) -> int:
        """The number of this pipeline, from 0."""
        return self._id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._replicas

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of one replica for a global batch size.

        Raises:
            ValueError: if the rows cannot be divided evenly.
        """
        size, rest = divmod(global_batch_size, self._replicas)
        if rest:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self._replicas!r}; choose a multiple, or let "
                "`strategy.experimental_distribute_dataset` split uneven batches"
            )
        return size

    def __str__(self) -> str:
        return (
            f"mpidist.InputContext(input pipeline id {self._id}, total: "
            f"{self._pipelines})"
        )

    def __repr__(self) -> str:
        return (
            f"InputContext(num_input_pipelines={self._pipelines}, input_pipeline_id="
            f"{self._id}, num_replicas_in_sync={self._replicas})"
        )


@dataclasses.dataclass(frozen=True, init=False)
class InputOptions:
    """Options of a distributed dataset.

    Attributes:
        experimental_fetch_to_device: whether arrays are moved to the replica's device
            (the default) or stay on the host.
        experimental_replication_mode: an `InputReplicationMode`; both mean the same
            here, but PER_REPLICA is only allowed for
            `distribute_datasets_from_function`.
        experimental_place_dataset_on_device: accepted only with PER_REPLICA, as in
            TensorFlow, and without effect: arrays are read on the host.
        experimental_per_replica_buffer_size: accepted and ignored; use
            `Dataset.prefetch`.
        auto_shard_policy: an `AutoShardPolicy` or its name. In TensorFlow it is an
            option of the dataset, which counts here if this is AUTO.
    """

    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int
    auto_shard_policy: AutoShardPolicy

    def __init__(
        self,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = (
            InputReplicationMode.PER_WORKER
        ),
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
        auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.AUTO,
        *,
        experimental_prefetch_to_device: bool | None = None,
    ) -> None:
        """Check and store the options.

        Args:
            experimental_fetch_to_device: see above; None means True.
            experimental_replication_mode: see above.
            experimental_place_dataset_on_device: see above.
            experimental_per_replica_buffer_size: see above.
            auto_shard_policy: see above.
            experimental_prefetch_to_device: the older name of the first.

        Raises:
            TypeError: if both names of the first option are given, or the mode is
                invalid.
            ValueError: if the policy is unknown.
        """
        if experimental_prefetch_to_device is not None:
            if experimental_fetch_to_device is not None:
                raise TypeError(
                    "InputOptions: got both `experimental_fetch_to_device` and its "
                    "older name `experimental_prefetch_to_device`; write the first only"
                )
            experimental_fetch_to_device = experimental_prefetch_to_device
        mode: object = experimental_replication_mode
        if not isinstance(mode, InputReplicationMode):
            raise TypeError(
                "InputOptions: expected `experimental_replication_mode` to be a "
                f"`mpidist.InputReplicationMode`, got {mode!r}"
            )
        fetch = experimental_fetch_to_device is not False
        put = object.__setattr__
        put(self, "experimental_fetch_to_device", fetch)
        put(self, "experimental_replication_mode", mode)
        put(
            self,
            "experimental_place_dataset_on_device",
            bool(experimental_place_dataset_on_device),
        )
        put(
            self,
            "experimental_per_replica_buffer_size",
            experimental_per_replica_buffer_size,
        )
        put(self, "auto_shard_policy", as_policy(auto_shard_policy, "InputOptions"))


def as_policy(value: object, where: str) -> AutoShardPolicy:
    """Return an `AutoShardPolicy`, given one or its name.

    Raises:
        ValueError: if it is neither; ``where`` is named in the message.
    """
    if isinstance(value, AutoShardPolicy):
        return value
    if isinstance(value, str) and value.upper() in AutoShardPolicy.__members__:
        return AutoShardPolicy[value.upper()]
    raise ValueError(
        f"{where}: expected `auto_shard_policy` to be one of "
        f"{', '.join(AutoShardPolicy.__members__)}, got {value!r}"
    )


class Optional:
    """An element of an input, or nothing at its end."""

    __slots__ = ("_element", "_has_value")

    def __init__(self, element: Nest = None, *, has_value: bool = False) -> None:
        self._element = element
        self._has_value = has_value

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return self._has_value

    def get_value(self) -> Nest:
        """Return the element.

        Raises:
            ValueError: at the end of the input.
        """
        if not self._has_value:
            raise ValueError(
                "Optional.get_value: the input has ended and this holds no element; "
                "ask `has_value()` first"
            )
        return self._element

    def __repr__(self) -> str:
        return f"Optional({self._element!r})" if self._has_value else "Optional()"
