"""Options of a `Dataset`, with the names of ``tf.data.Options``.

One has an effect: the auto-shard policy. The others steer the runtime of TensorFlow.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from mpidist.data._records import AutoShardPolicy


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


@dataclasses.dataclass(slots=True)
class ThreadingOptions:
    """Threads of TensorFlow's runtime: accepted, without effect."""

    max_intra_op_parallelism: int | None = None
    private_threadpool_size: int | None = None


@dataclasses.dataclass(slots=True)
class AutotuneOptions:
    """TensorFlow's choice of buffer sizes and threads: accepted, without effect."""

    enabled: bool | None = None
    cpu_budget: int | None = None
    ram_budget: int | None = None
    autotune_algorithm: object = None
    initial_parallelism: int | None = None
    min_parallelism: int | None = None


@dataclasses.dataclass(slots=True)
class OptimizationOptions:
    """Rewriting of TensorFlow's graphs: accepted, without effect."""

    apply_default_optimizations: bool | None = None
    filter_fusion: bool | None = None
    filter_parallelization: bool | None = None
    inject_prefetch: bool | None = None
    map_and_batch_fusion: bool | None = None
    map_and_filter_fusion: bool | None = None
    map_fusion: bool | None = None
    map_parallelization: bool | None = None
    noop_elimination: bool | None = None
    parallel_batch: bool | None = None
    seq_interleave_prefetch: bool | None = None
    shuffle_and_repeat_fusion: bool | None = None


@dataclasses.dataclass(slots=True)
class Options:
    """Options for `Dataset.with_options`.

    Any other name is an AttributeError.

    Attributes:
        experimental_distribute: how a distributed dataset is split.
        deterministic: accepted, without effect: the order of elements is always the
            same.
        threading: accepted, without effect.
        autotune: accepted, without effect.
        experimental_optimization: accepted, without effect.
        experimental_slack: accepted, without effect.
        experimental_symbolic_checkpoint: accepted, without effect.
        experimental_warm_start: accepted, without effect.
        dataset_name: accepted, without effect.
    """

    experimental_distribute: DistributeOptions = dataclasses.field(
        default_factory=DistributeOptions
    )
    deterministic: bool | None = None
    threading: ThreadingOptions = dataclasses.field(default_factory=ThreadingOptions)
    autotune: AutotuneOptions = dataclasses.field(default_factory=AutotuneOptions)
    experimental_optimization: OptimizationOptions = dataclasses.field(
        default_factory=OptimizationOptions
    )
    experimental_slack: bool | None = None
    experimental_symbolic_checkpoint: bool | None = None
    experimental_warm_start: bool | None = None
    dataset_name: str | None = None

    def merge(self, options: Options) -> Options:
        """Return new options: those of ``options``, and these where it has none."""
        return _merged(self, options)


_Group = TypeVar(
    "_Group",
    Options,
    DistributeOptions,
    ThreadingOptions,
    AutotuneOptions,
    OptimizationOptions,
)


def _merged(first: _Group, second: _Group) -> _Group:
    """Merge two groups: a value of the second counts if it is not the default."""
    default = type(second)()
    result = type(first)()
    for field in dataclasses.fields(first):
        one, two = getattr(first, field.name), getattr(second, field.name)
        if dataclasses.is_dataclass(two):
            value = _merged(one, two)
        else:
            value = one if two == getattr(default, field.name) else two
        setattr(result, field.name, value)
    return result
