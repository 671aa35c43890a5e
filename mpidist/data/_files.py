"""AutoShardPolicy.FILE: each replica reads files of its own."""

from __future__ import annotations

import dataclasses
from typing import Final

from mpidist.data._sharding import split_by_plan
from mpidist.data._stage import Derived, Stage
from mpidist.data._stage_batches import Batch, Unbatch
from mpidist.data._stage_combinations import Interleave
from mpidist.data._stage_functions import Filter, Map
from mpidist.data._stage_order import (
    Cache,
    Prefetch,
    Repeat,
    Shard,
    Shuffle,
    Skip,
    Take,
    WithOptions,
)

# What these do with a row does not depend on the rows of other replicas.
_ROW_BY_ROW: Final = (
    Batch, Cache, Filter, Map, Prefetch, Repeat, Shuffle, Unbatch, WithOptions,
)  # fmt: skip
# After the last `batch` these count steps, which all replicas make.
_OF_STEPS: Final = (Skip, Take)
_CALL: Final = "experimental_distribute_dataset"


def shard_by_file(stage: Stage, replicas: int, replica: int) -> Stage:
    """Return the part of a pipeline that one replica reads.

    Its `interleave` opens every n-th element of its input, and its last `batch` makes
    the replica's part of a global batch.

    Raises:
        ValueError: if the pipeline has no `interleave`, or fewer files than replicas,
            or a stage for which the rows of other replicas matter, such as `take`.
    """
    return _part(stage, replicas, replica, batched=False)


def _part(stage: Stage, replicas: int, replica: int, *, batched: bool) -> Stage:
    if not isinstance(stage, Derived) or not _has_interleave(stage):
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE is for a dataset that opens files in an "
            "`interleave`: `Dataset.list_files(pattern).interleave(open_one).batch(n)`"
            "; write AutoShardPolicy.DATA"
        )
    if isinstance(stage, Interleave) and not _has_interleave(stage.parent):
        count = stage.parent.size
        if 0 <= count < replicas:
            raise ValueError(
                f"{_CALL}: AutoShardPolicy.FILE needs a file for each of {replicas} "
                f"replicas, and the `interleave` of this dataset has {count}; write "
                "AutoShardPolicy.DATA"
            )
        return dataclasses.replace(stage, parent=Shard(stage.parent, replicas, replica))
    allowed = _ROW_BY_ROW if batched else (*_ROW_BY_ROW, *_OF_STEPS)
    if not isinstance(stage, (*allowed, Interleave)):
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE cannot be used with the "
            f"`{type(stage).__name__.lower()}` after the `interleave`, since it would "
            "count the rows of each replica separately; write AutoShardPolicy.DATA"
        )
    last = isinstance(stage, Batch) and not batched
    parent = _part(stage.parent, replicas, replica, batched=batched or last)
    if isinstance(stage, Batch) and last:
        if stage.rows < replicas:
            raise ValueError(
                f"{_CALL}: AutoShardPolicy.FILE needs global batches of a row for each "
                f"replica, {replicas}, and those of this dataset have {stage.rows}"
            )
        first, after = split_by_plan(stage.rows, replicas, replica, stage.rows)
        return dataclasses.replace(stage, parent=parent, rows=after - first)
    return dataclasses.replace(stage, parent=parent)


def _has_interleave(stage: Stage) -> bool:
    while isinstance(stage, Derived):
        if isinstance(stage, Interleave):
            return True
        stage = stage.parent
    return False
