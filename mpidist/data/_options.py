"""Contexts, options and specs of datasets, with the names of TensorFlow."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from dataclasses import field
from typing import Any, Final

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.expect import as_member, expect
from mpidist._base.types import DType, HostArray, Nest

INFINITE_CARDINALITY: Final = -1
UNKNOWN_CARDINALITY: Final = -2
_FLOAT32: Final = np.dtype(np.float32)


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
    `interleave`, makes batches of their rows, and takes a piece of its batch in each
    step, so that all together have as many rows as a batch; in TensorFlow ``AUTO`` does
    that for files. ``HINT`` is rejected.
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
        dtype: the NumPy dtype; float32 if none is given, as in tf.TensorSpec.
    """

    shape: tuple[int | None, ...]
    dtype: DType = _FLOAT32
    name: dataclasses.InitVar[str | None] = None  # accepted, as in tf.TensorSpec

    def __post_init__(self, name: str | None) -> None:
        """Ignore the name."""

    def __repr__(self) -> str:
        return f"ArraySpec(shape={self.shape}, dtype={self.dtype})"

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Tells an input function which of the input pipelines to create.

    Attributes:
        num_input_pipelines: the number of input pipelines, which is the number of
            ranks.
        input_pipeline_id: the number of this one, from 0: the rank.
        num_replicas_in_sync: the number of replicas that share a step.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of one replica for a global batch size.

        Raises:
            ValueError: if the rows cannot be divided evenly.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync!r}; choose a "
                "multiple, or let `strategy.experimental_distribute_dataset` split "
                "uneven batches"
            )
        return size

    def __str__(self) -> str:
        return (
            f"mpidist.InputContext(input pipeline id {self.input_pipeline_id}, total: "
            f"{self.num_input_pipelines})"
        )


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """Options of a distributed dataset.

    Attributes:
        experimental_fetch_to_device: True or None, the default: arrays are moved to the
            replica's device. False: they stay on the host.
        experimental_replication_mode: an `InputReplicationMode`. PER_REPLICA is only
            allowed for `distribute_datasets_from_function`, and differs from PER_WORKER
            by the name `MirroredStrategy` only: each rank has an input of its own.
        experimental_place_dataset_on_device: accepted, as in TensorFlow only with
            PER_REPLICA and ``experimental_fetch_to_device=False``, and without effect:
            arrays are read on the host.
        experimental_per_replica_buffer_size: accepted and ignored; use
            `Dataset.prefetch`.
        auto_shard_policy: an `AutoShardPolicy` or its name. With AUTO that of the
            dataset's `Options` is used, which is TensorFlow's place for it.
        experimental_prefetch_to_device: the older name of the first.

    Raises:
        TypeError: if both names of the first option are given, or the mode is invalid.
        ValueError: if the policy is unknown.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.AUTO
    _: dataclasses.KW_ONLY
    experimental_prefetch_to_device: dataclasses.InitVar[bool | None] = None

    def __post_init__(self, experimental_prefetch_to_device: bool | None) -> None:
        fetch = self.experimental_fetch_to_device
        if experimental_prefetch_to_device is not None:
            if fetch is not None:
                raise TypeError(
                    "InputOptions: got both `experimental_fetch_to_device` and its "
                    "older name `experimental_prefetch_to_device`; write the first only"
                )
            fetch = experimental_prefetch_to_device
        mode = self.experimental_replication_mode
        expect(
            isinstance(mode, InputReplicationMode),
            "InputOptions",
            "`experimental_replication_mode` to be a `mpidist.InputReplicationMode`",
            mode,
        )
        policy = as_member(
            "InputOptions", "auto_shard_policy", self.auto_shard_policy, AutoShardPolicy
        )
        object.__setattr__(self, "experimental_fetch_to_device", fetch is not False)
        object.__setattr__(self, "auto_shard_policy", policy)


# --- options of a Dataset ----------------------------------------------------------


@dataclasses.dataclass(slots=True)
class DistributeOptions:
    """How a distributed dataset is split.

    Attributes:
        auto_shard_policy: an `AutoShardPolicy` or its name. That of `InputOptions`
            has precedence if it is not AUTO.
        num_devices: accepted, without effect.
    """

    auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.AUTO
    num_devices: int | None = None


class IgnoredOptions(types.SimpleNamespace):
    """Options that steer TensorFlow's runtime: any name is accepted, without effect."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols, of `copy` for example
            raise AttributeError(name)
        return None


class ThreadingOptions(IgnoredOptions):
    """Options for threads of TensorFlow's runtime; accepted, without effect."""


class AutotuneOptions(IgnoredOptions):
    """Options for TensorFlow's autotuning; accepted, without effect."""


class OptimizationOptions(IgnoredOptions):
    """Options for TensorFlow's graph optimizer; accepted, without effect."""


@dataclasses.dataclass
class Options:
    """Options for `Dataset.with_options`.

    One has an effect: ``experimental_distribute.auto_shard_policy``. The others are for
    TensorFlow's runtime, and are accepted without effect. The order of elements is
    always the same, also with ``deterministic=False``.
    """

    experimental_distribute: DistributeOptions = field(
        default_factory=DistributeOptions
    )
    deterministic: bool | None = None
    threading: ThreadingOptions = field(default_factory=ThreadingOptions)
    autotune: AutotuneOptions = field(default_factory=AutotuneOptions)
    experimental_optimization: OptimizationOptions = field(
        default_factory=OptimizationOptions
    )
    experimental_service: IgnoredOptions = field(default_factory=IgnoredOptions)
    experimental_threading: ThreadingOptions = field(default_factory=ThreadingOptions)
    experimental_deterministic: Any = None
    experimental_external_state_policy: Any = None
    experimental_slack: Any = None
    experimental_symbolic_checkpoint: Any = None
    experimental_warm_start: Any = None
    dataset_name: Any = None
    framework_type: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Options.__dataclass_fields__:  # a policy without effect
            raise AttributeError(
                f"Options has no option {name!r}; a policy of sharding is in "
                "`options.experimental_distribute.auto_shard_policy`"
            )
        super().__setattr__(name, value)

    def merge(self, options: Options) -> Options:
        """Return new options: those of ``options``, and these where it has none."""
        merged = copy.deepcopy(self)
        _set_given(merged, options)
        return merged


def _set_given(target: Any, options: Any) -> None:
    """Set those of some options that are not the default."""
    slots = isinstance(options, DistributeOptions)
    for name in options.__slots__ if slots else vars(options):
        own, value = getattr(target, name), getattr(options, name)
        if isinstance(value, (IgnoredOptions, DistributeOptions)) and own is not None:
            _set_given(own, value)
        elif value not in (None, AutoShardPolicy.AUTO):
            setattr(target, name, copy.deepcopy(value))


def spec_with_rows(spec: Nest, rows: int | None = None) -> Nest:
    """Return the specs of a batch of other rows, or any number, given a batch's."""
    return nest.map_structure(
        lambda one: ArraySpec((rows, *one.shape[1:]) if one.shape else (), one.dtype),
        spec,
    )


def common_spec(one: ArraySpec, two: ArraySpec) -> ArraySpec:
    """Return the spec of arrays of either: None for sizes that differ."""
    dtype = longest_text(one.dtype, two.dtype)
    if dtype != longest_text(two.dtype, one.dtype) or len(one.shape) != len(two.shape):
        raise TypeError(f"{one} and {two} have no spec in common")
    sizes = zip(one.shape, two.shape, strict=True)
    return ArraySpec(tuple(a if a == b else None for a, b in sizes), dtype)


def longest_text(dtype: DType, other: DType) -> DType:
    """Return a dtype; of text and text that of the longer one."""
    if dtype.kind not in "SU" or other.kind != dtype.kind:
        return dtype
    return max(dtype, other, key=lambda one: one.itemsize)


def can_have(array: HostArray, dtype: DType) -> bool:
    """Return whether an array may be converted; NumPy makes text of numbers."""
    if array.dtype == dtype:
        return True
    if all(backend.number_kind(one) in "biufc" for one in (array.dtype, dtype)):
        return backend.fits(array, dtype)
    is_text = array.dtype.kind in "SU" or dtype.kind not in "SU"
    return is_text and np.can_cast(array.dtype, dtype, "same_kind")


def name_of_dtype(dtype: DType) -> str:
    """Return its name, without the length of text, which may differ."""
    return {"U": "str", "S": "bytes"}.get(dtype.kind, dtype.name)
