"""DistributedDataset, and the functions of a strategy that create one."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Callable
from typing import Any, Final

from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import shuffle_seeds
from mpidist._base.environment import debugging
from mpidist._base.errors import level_of_caller, on_rank
from mpidist._base.expect import expect
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist.data._combinations import Batch, Interleave, Pieces
from mpidist.data._dataset import Dataset
from mpidist.data._feed import Feed, describe, describe_feed, empty_of
from mpidist.data._inputs import Calls, Items, input_of
from mpidist.data._iterator import DistributedIterator
from mpidist.data._options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    as_policy,
)
from mpidist.data._rows import split_by_plan
from mpidist.data._stage import Derived, Stage
from mpidist.data._stages import Part

_DIFFERENT_ROWS: Final = (
    "the arrays of the dataset are not the same on all ranks, but each reads its part "
    "of the same rows: some are used twice, others never. Load all data on every rank, "
    "in the same order and with the same seeds, or write `strategy.distribute_datasets_"
    "from_function(fn)` for a dataset of each rank's own"
)
_NO_POLICY = (AutoShardPolicy.AUTO, AutoShardPolicy.OFF)


class DistributedDataset:
    """An input of all replicas. Iterating over it gives each replica its part.

    `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function` create it. Each
    ``for element in dataset`` starts from the beginning; every rank must run it,
    because each step is a collective call.
    """

    def __init__(self, feed: Feed) -> None:
        """Not for users: see above."""
        self._feed = feed

    @staticmethod
    def _of_batches(
        group: ReplicaGroup, dataset: object, options: InputOptions | None
    ) -> DistributedDataset:
        """Run `Strategy.experimental_distribute_dataset`. Collective."""
        call = "experimental_distribute_dataset"
        context.require_program_level(group, call)
        with group.guard.checking(call):
            chosen = _check_options(options, call)
            if chosen.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
                raise NotImplementedError(
                    f"{call}: InputReplicationMode.PER_REPLICA is only supported in "
                    "`distribute_datasets_from_function`"
                )
            stage, policy = _split_input(group, dataset, chosen, call)
            by_file = policy is AutoShardPolicy.FILE  # then rows of ranks differ
            feed = Feed(
                group,
                stage,
                None if by_file else policy,
                bool(chosen.experimental_fetch_to_device),
                by_file=by_file,
                checked=bool(stage.whole) and debugging() and not by_file,
                empty=empty_of(stage.spec()),
            )
            text = f"{call} of {feed.text}"
            if not by_file:
                kind = "" if feed.empty is None else f", {describe(feed.empty)}"
                text += f" ({_many(stage)}{kind})"
            text += f", split by {policy.name}"
            if feed.checked:
                text += ", compared (MPIDIST_DEBUG)"
            sample = 0 if by_file else stage.sample()
        unknown = int(not sample)
        same = group.guard.agree_on(Call(text), sample, unknown)
        if not (same or group.guard.largest):
            warnings.warn(
                on_rank(group.replica_id, f"{call}: {_DIFFERENT_ROWS}"),
                RuntimeWarning,
                stacklevel=level_of_caller(),
            )
        feed.number = group.registry.next_key()
        return DistributedDataset(feed)

    @staticmethod
    def _of_function(
        group: ReplicaGroup,
        dataset_fn: Callable[[InputContext], object],
        options: InputOptions | None,
        call: str = "distribute_datasets_from_function",
        *,
        functions: bool = False,
        deals: bool = False,
    ) -> DistributedDataset:
        """Run `Strategy.distribute_datasets_from_function`. Collective.

        With ``functions``, for `Strategy.make_input_fn_iterator`, ``dataset_fn`` may
        return a function that returns elements; the mode must be PER_WORKER. With
        ``deals`` it makes the one input of all replicas, which get its elements in
        turn.
        """
        context.require_program_level(group, call)
        replicas, own = group.num_replicas, group.replica_id

        def make(section: SectionResult) -> tuple[InputOptions, Stage]:
            chosen = _check_options(options, call)
            mode = chosen.experimental_replication_mode
            if functions and mode is not InputReplicationMode.PER_WORKER:
                raise ValueError(
                    f"{call}: Input replication mode not supported: {mode}; write "
                    "InputReplicationMode.PER_WORKER"
                )
            policy = as_policy(chosen.auto_shard_policy, "InputOptions")
            if policy not in _NO_POLICY:
                raise ValueError(
                    f"{call}: got AutoShardPolicy.{policy.name}, but "
                    "nothing is sharded here; `dataset_fn` takes this rank's part by "
                    "`context.input_pipeline_id`"
                )
            expect(
                callable(dataset_fn),
                call,
                "a function of an InputContext",
                dataset_fn,
                "for a dataset of global batches write "
                "`strategy.experimental_distribute_dataset(dataset)`",
            )
            section.kind = "raised"
            takes_turns = deals and mode is not InputReplicationMode.PER_REPLICA
            pipeline = (1, 0) if takes_turns else (replicas, own)
            with shuffle_seeds.counted_from(group.registry.count + 1):
                made = dataset_fn(InputContext(*pipeline, replicas))
            if functions and callable(made) and not hasattr(made, "__iter__"):
                made = Calls(made)
            stage = input_of(made, f"{call}: the function's dataset")
            if takes_turns and isinstance(stage, Items):
                stage.deal(own, replicas)
            elif takes_turns and replicas > 1:
                stage = Part([stage], f"shard({replicas}, {own})", own, None, replicas)
            return chosen, stage

        chosen, stage = run_section(group.guard, Call(call), make)
        to_device = bool(chosen.experimental_fetch_to_device)
        feed = Feed(group, stage, None, to_device)
        # Counted now: if it has failed, some rank may not have made this call.
        feed.number = group.registry.next_key()
        return DistributedDataset(feed)

    @tells("iter(dataset)", operator.attrgetter("_feed.group"))
    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._feed)

    @property
    def element_spec(self) -> Nest:
        """The nest of `mpidist.data.ArraySpec` of a replica's part of an element.

        Raises:
            ValueError: for an iterable from which nothing has been read yet.
        """
        return self._feed.element_spec()

    def cardinality(self) -> int:
        """Return the number of steps in an epoch.

        `mpidist.data.INFINITE_CARDINALITY` (-1) if infinite,
        `mpidist.data.UNKNOWN_CARDINALITY` (-2) if it is known only after reading. If
        each rank has its own input, the number for this rank.
        """
        return self._feed.stage.cardinality()

    def __len__(self) -> int:
        return self._feed.stage.require_length("DistributedDataset")

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold all elements into one value. Collective.

        Args:
            initial_state: the first state.
            reduce_func: a function of the state and an element that returns the next
                state. It runs in cross-replica context, on every rank; call
                `Strategy.run` and `Strategy.reduce` there.

        Returns:
            The last state.
        """
        group = self._feed.group
        context.require_program_level(group, "DistributedDataset.reduce")
        state = initial_state
        for element in self:
            with context.scope(group):
                state = reduce_func(state, element)
        return state

    def describe(self) -> None:
        """Print on rank 0 what each replica reads, to check before a long run.

        Not collective. `shard_plan` returns the text.
        """
        if self._feed.group.replica_id == 0:
            print(self.shard_plan, flush=True)

    @property
    def shard_plan(self) -> str:
        """The text that `describe` prints: what each replica reads."""
        return describe_feed(self._feed)

    def __elastic_problem__(self) -> str:
        return self._feed.why_it_ends_with_a_replica()

    def __repr__(self) -> str:
        feed, count = self._feed, self._feed.group.num_replicas
        return (
            f"<mpidist.DistributedDataset #{feed.number} on {count} replicas: "
            f"{feed.text}>"
        )


def _split_input(
    group: ReplicaGroup, dataset: object, options: InputOptions, call: str
) -> tuple[Stage, AutoShardPolicy]:
    """Return what this rank reads of a dataset of global batches, and the policy."""
    policy = as_policy(options.auto_shard_policy, "InputOptions")
    if isinstance(dataset, Dataset) and policy is AutoShardPolicy.AUTO:
        own = dataset.options().experimental_distribute.auto_shard_policy
        policy = as_policy(own, "DistributeOptions")
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
        if group.num_replicas > 1:
            stage = _in_pieces(stage, group.num_replicas, group.replica_id)
    return stage, policy


def _many(stage: Stage) -> str:
    count = stage.cardinality()
    return {-1: "endless", -2: "of unknown length"}.get(count, f"{count} batches")


def _check_options(options: object, call: str) -> InputOptions:
    if options is None:
        return InputOptions()
    expected = "`options` to be a `mpidist.InputOptions`"
    expect(isinstance(options, InputOptions), call, expected, options)
    assert isinstance(options, InputOptions)
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


# --- AutoShardPolicy.FILE ----------------------------------------------------------

# What these do with a row does not depend on the rows of other replicas. "": options.
_ROW_BY_ROW: Final = (
    "batch", "cache", "filter", "interleave", "map", "padded_batch", "prefetch",
    "repeat", "shuffle", "unbatch", "",
)  # fmt: skip
# After the last `batch` these count the batches of each replica, as in TensorFlow.
_OF_BATCHES: Final = ("skip", "take")
_CALL: Final = "experimental_distribute_dataset"


def _shard_by_file(
    stage: Stage, replicas: int, replica: int, *, batched: bool = False
) -> Stage:
    """Return a pipeline whose `interleave` opens every n-th element of its input."""
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
        mine = Part([stage.parent], "", replica, None, replicas)
        return dataclasses.replace(stage, parents=[mine])
    if stage.method not in (_ROW_BY_ROW if batched else _ROW_BY_ROW + _OF_BATCHES):
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE cannot be used with the `{stage.method}` "
            "after the `interleave`, since it would count the rows of each replica "
            "separately; write AutoShardPolicy.DATA"
        )
    batched = batched or isinstance(stage, Batch)
    parent = _shard_by_file(stage.parent, replicas, replica, batched=batched)
    return dataclasses.replace(stage, parents=[parent])


def _in_pieces(stage: Stage, replicas: int, replica: int) -> Stage:
    """Return pieces of a replica's batches: in a step all together have a batch."""
    rows = stage.batch_size or 0
    if rows < replicas:
        raise ValueError(
            f"{_CALL}: AutoShardPolicy.FILE needs global batches of a row for each "
            f"replica, {replicas}, and those of this dataset have {rows}"
        )
    bounds = [split_by_plan(rows, replicas, one, rows) for one in range(replicas)]
    sizes = [stop - start for start, stop in bounds]
    last: Any = stage
    unknown = False  # to TensorFlow: the number of rows
    while not isinstance(last, Batch):
        unknown |= last.method == "map" and not last.full
        last = last.parent
    return Pieces([stage], sizes[replica:] + sizes[:replica], unknown)


def _has_interleave(stage: Stage) -> bool:
    while not isinstance(stage, Interleave) and len(stage.parents) == 1:
        (stage,) = stage.parents
    return isinstance(stage, Interleave)
