"""How an input is split over the replicas: by options and policy; its description."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from mpidist._base.expect import as_member, expect
from mpidist._runtime.group import ReplicaGroup
from mpidist.data._combinations import Interleave
from mpidist.data._conversions import Batch
from mpidist.data._dataset import Dataset, stage_of
from mpidist.data._items import Items
from mpidist.data._options import (
    AutoShardPolicy,
    InputOptions,
    InputReplicationMode,
)
from mpidist.data._rows import LazyBlock, RowBlock, block_of, count_rows, join
from mpidist.data._selections import Part
from mpidist.data._sources import is_nest
from mpidist.data._stages import UNKNOWN, Block, Derived, Pass, Stage, Token

_CALL: Final = "experimental_distribute_dataset"


def check_options(options: Any, call: str) -> InputOptions:
    """Return the options that were given, or the default."""
    if options is None:
        return InputOptions()
    expected = "`options` to be a `mpidist.InputOptions`"
    expect(isinstance(options, InputOptions), call, expected, options)
    if not options.experimental_place_dataset_on_device:
        return options
    if options.experimental_replication_mode is not InputReplicationMode.PER_REPLICA:
        raise ValueError(
            f"{call}: `experimental_place_dataset_on_device` needs "
            "InputReplicationMode.PER_REPLICA; leave it out: elements come on the "
            "replica's device anyway"
        )
    if options.experimental_fetch_to_device:
        raise ValueError(
            f"{call}: `experimental_place_dataset_on_device` contradicts "
            "`experimental_fetch_to_device`, which is True by default; leave the first "
            "out, or write `experimental_fetch_to_device=False`"
        )
    return options


def split_input(
    group: ReplicaGroup, dataset: object, options: InputOptions, call: str
) -> tuple[Stage, AutoShardPolicy]:
    """Return what this rank reads of a dataset of global batches, and the policy."""
    policy: Any = options.auto_shard_policy
    if isinstance(dataset, Dataset) and policy is AutoShardPolicy.AUTO:
        own = dataset.options().experimental_distribute.auto_shard_policy
        policy = as_member(
            "DistributeOptions", "auto_shard_policy", own, AutoShardPolicy
        )
    if policy is AutoShardPolicy.HINT:
        raise ValueError(
            f"{call}: AutoShardPolicy.HINT is not supported; write `strategy."
            "distribute_datasets_from_function(fn)`, where `fn` calls `dataset.shard("
            "context.num_input_pipelines, context.input_pipeline_id)`"
        )
    stage = input_of(dataset, call)
    if isinstance(dataset, Dataset) and not stage.has_batches:
        raise ValueError(
            f"{call}: got {dataset!r}, whose elements are single rows. Call the "
            "`batch` method on the input Dataset in order to be able to split your "
            f"input across {group.num_replicas} replicas: "
            "`dataset.batch(global_batch_size)`; if its elements are batches already, "
            "`dataset.unbatch().batch(global_batch_size)`"
        )
    if policy is AutoShardPolicy.FILE:
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"{call}: AutoShardPolicy.FILE is for a `mpidist.data.Dataset` with an "
                "`interleave` over files; otherwise write `strategy."
                "distribute_datasets_from_function(fn)`, where `fn` takes the files of "
                "its rank: `files[context.input_pipeline_id::context."
                "num_input_pipelines]`"
            )
        stage = _shard_by_file(stage, group.num_replicas, group.replica_id)
    return stage, policy


def input_of(dataset: object, call: str) -> Stage:
    """Return the stage for a user's dataset."""
    if isinstance(dataset, Dataset):
        return stage_of(dataset)
    is_array = is_nest(dataset)  # or a nest of arrays: a tuple or dict is one element
    if isinstance(dataset, list):
        is_array = bool(dataset) and all(
            isinstance(part, (int, float, complex)) for part in dataset
        )
    if is_array:
        raise TypeError(
            f"{call}: got {_describe(dataset)}, which is not a dataset of batches; "
            "write `mpidist.data.Dataset.from_tensor_slices(x).batch(batch_size)` for "
            "its rows, or a list of batches"
        )
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    what = "a `mpidist.data.Dataset`, a list of batches, or an iterable of them"
    expect(indexed or hasattr(dataset, "__iter__"), call, what, dataset)
    return Items(dataset, call)


def _describe(x: object) -> str:
    if hasattr(x, "shape"):
        return f"a {type(x).__name__} of shape {tuple(x.shape)}"
    try:
        return f"{block_of(x, 'dataset')!s:.160}"
    except TypeError:
        return f"{x!r:.80}"


# --- the rows of each replica ------------------------------------------------------
# TensorFlow has both rules, and the auto-shard policy determines which one it uses
# (`tensorflow/python/data/experimental/ops/distribute.py` of 2.21:
# `_LegacyRebatchDataset` for AUTO and DATA, `_RebatchDataset` for OFF).


def split_as_it_comes(rows: int, replicas: int, replica: int) -> tuple[int, int]:
    """Return the first row of a replica, and the one after its last.

    Parts of ceil(rows / replicas) rows, until there are no more: 5 rows over 4 replicas
    are 2, 2, 1, 0.
    """
    piece = -(-rows // replicas)
    return min(rows, replica * piece), min(rows, (replica + 1) * piece)


def split_by_plan(
    rows: int, replicas: int, replica: int, batch_size: int
) -> tuple[int, int]:
    """Return the first row of a replica, and the one after its last.

    The full batch is split into parts whose sizes differ by at most one, the larger
    ones first: 5 rows over 4 replicas are 2, 1, 1, 1. A smaller batch fills these parts
    in order: 6 rows of 8 over 3 replicas are 3, 3, 0. A batch with more rows than the
    full one gets its own plan.
    """
    piece, larger = divmod(max(rows, batch_size), replicas)
    start = replica * piece + min(replica, larger)
    stop = start + piece + (replica < larger)
    return min(rows, start), min(rows, stop)


def split_rows(
    policy: AutoShardPolicy | None,
    rows: int,
    batch_size: int,
    replicas: int,
    replica: int,
) -> tuple[int, int]:
    """Return the range of rows of a global batch that a replica gets."""
    if policy is AutoShardPolicy.OFF:
        return split_by_plan(rows, replicas, replica, batch_size or rows)
    return split_as_it_comes(rows, replicas, replica)


# --- a description -----------------------------------------------------------------


def describe_split(
    stage: Stage, policy: AutoShardPolicy | None, size: int | None, n: int
) -> dict[str, str]:
    """Return what each of n replicas reads of an input, and how batches are split."""
    count = stage.cardinality()
    if policy in (None, AutoShardPolicy.FILE):
        steps = f"{count} on this rank; all ranks make as many as the longest input has"
        names = {-1: "without end", -2: "as many as the longest input of a rank has"}
        read = "each rank reads its own input, and its replica gets all of it"
        if policy:
            read = (
                f"FILE: each replica opens 1 of {n} inputs of the `interleave`; this "
                f"one takes up to {size} rows in a step"
            )
        ends = "a rank without rows gets empty arrays until all are done"
        return {"steps": names.get(count, steps), "rows": read, "uneven ends": ends}
    names = {-1: "without end", -2: "their number is not known"}
    many = names.get(count, f"{count} an epoch")
    rule = f"each batch as it comes, in pieces of ceil(rows / {n})"
    if policy is AutoShardPolicy.OFF:
        rule = (
            "by a plan for the full batch, in pieces that differ by one row at most; a "
            "partial batch fills them in order"
        )
    assert policy is not None
    facts = {
        "global batches": f"of {size or 'the same number of'} rows, {many}",
        "split": f"{policy.name}: {rule}",
        "reading": _reading(stage),
    }
    if size is None:
        return facts
    bounds = [split_rows(policy, size, size, n, replica) for replica in range(n)]
    pieces = itertools.groupby(stop - start for start, stop in bounds)
    runs = [(rows, len(list(run))) for rows, run in pieces]
    shown = ", ".join(f"{rows} on {replicas}" for rows, replicas in runs)
    facts["rows"] = f"of a full batch on how many replicas: {shown}"
    if idle := sum(replicas for rows, replicas in runs if not rows):
        remedy = f"batches of {n} rows or more"
        if size >= n:
            remedy = f'a multiple of {n} rows, or auto_shard_policy="OFF"'
        facts["note"] = f"{idle} of {n} replicas never get a row; take {remedy}"
    return facts


def _reading(stage: Stage) -> str:
    text = "each rank reads whole batches, and keeps the rows of its replica"
    if not stage.whole:
        text = "each rank goes through all elements, and keeps those of its replica"
        if stage.indexed:
            text = "each rank reads the rows of its replica, and no others"
    elif not isinstance(stage, Items):
        text += f", because of {stage.whole}"
    return f"{text}; a thread reads {stage.depth} ahead" if stage.depth else text


# --- AutoShardPolicy.FILE ----------------------------------------------------------

# What these do with a row does not depend on the rows of other replicas. "": options.
_ROW_BY_ROW: Final = (
    "batch", "cache", "filter", "interleave", "map", "padded_batch", "prefetch",
    "repeat", "shuffle", "unbatch", "",
)  # fmt: skip
# After the last `batch` these count the batches of each replica, as in TensorFlow.
_OF_BATCHES: Final = ("skip", "take")


def _shard_by_file(stage: Stage, replicas: int, replica: int) -> Stage:
    """Return a pipeline whose first `interleave` opens every n-th element of its input.

    In a step the pieces of all replicas together have the rows of a batch.
    """
    chain: list[Any] = [stage]  # from the last stage to the first
    while len(chain[-1].parents) == 1:
        chain.extend(chain[-1].parents)
    while chain and not isinstance(chain[-1], Interleave):
        chain.pop()
    if not chain:
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE is for a dataset that opens files in an "
            "`interleave`: `Dataset.list_files(pattern).interleave(open_one).batch(n)`"
            "; write AutoShardPolicy.DATA"
        )
    opening = chain.pop()
    unknown = _check_later_stages(chain)
    if 0 <= opening.parent.size < replicas:
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE needs a file for each of {replicas} "
            f"replicas, and the `interleave` of this dataset has {opening.parent.size};"
            " write AutoShardPolicy.DATA"
        )
    part: Stage = Part([opening.parent], "", replica, None, replicas)
    for one in (opening, *reversed(chain)):
        part = dataclasses.replace(one, parents=[part])
    if replicas == 1:
        return part
    rows = part.batch_size or 0
    if rows < replicas:
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE needs global batches of a row for each "
            f"replica, {replicas}, and those of this dataset have {rows}"
        )
    bounds = [split_by_plan(rows, replicas, one, rows) for one in range(replicas)]
    sizes = [stop - start for start, stop in bounds]
    return Pieces([part], sizes[replica:] + sizes[:replica], unknown)


def _check_later_stages(chain: Sequence[Any]) -> bool:
    """Return whether TensorFlow would not know the number of rows in a batch.

    Args:
        chain: the stages after the `interleave`, from the last one to the first.

    Raises:
        ValueError: if a stage counts rows.
    """
    batched = unknown = False
    for one in chain:
        if one.method not in (_ROW_BY_ROW if batched else _ROW_BY_ROW + _OF_BATCHES):
            raise ValueError(
                f"{_CALL}: AutoShardPolicy.FILE cannot be used with the `{one.method}` "
                "after the `interleave`, since it would count the rows of each replica "
                "separately; write AutoShardPolicy.DATA"
            )
        batched |= isinstance(one, Batch)
        unknown |= not batched and one.method == "map" and not one.full
    return unknown


class Pieces(Derived):
    """The batches of a replica that has its own, each cut into pieces for n steps.

    By TensorFlow's two rules: `_LegacyRebatchDataset` cuts each batch ``separately``;
    `_RebatchDataset` fills pieces of given sizes, if need be with rows of the next
    batch. A token is the list of the parts of batches in a piece.
    """

    call: str = dataclasses.field(init=False, default="")
    sizes: Sequence[int]
    separately: bool

    def __post_init__(self) -> None:
        self.inherit(UNKNOWN)
        self.indexed, self.full, self.whole = False, False, ""
        self.batch_size = max(self.sizes)

    def in_order(self, in_pass: Pass) -> Iterator[Token]:
        count, sizes = len(self.sizes), itertools.cycle(self.sizes)
        parts: list[tuple[Block, int, int]] = []
        left = next(sizes)
        for block in self.parent.opened(self.parent.tokens(in_pass)):
            rows = block.rows
            if isinstance(block, RowBlock):
                rows = count_rows(block, count)
            if self.separately:
                for number in range(count):
                    yield [(block, *split_as_it_comes(rows, count, number))]
                continue
            start = 0
            while start < rows:
                stop = min(rows, start + left)
                parts.append((block, start, stop))
                left -= stop - start
                start = stop
                if not left:
                    yield parts
                    parts, left = [], next(sizes)
        if parts:
            yield parts

    def open(self, token: Token) -> LazyBlock:
        def read(start: int, stop: int) -> RowBlock | None:
            read = [block.part(first, after) for block, first, after in token]
            found = [part for part in read if part is not None]
            return join(found).part(start, stop) if found else None

        return LazyBlock(sum(after - first for _, first, after in token), read)
