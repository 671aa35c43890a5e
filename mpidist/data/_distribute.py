"""DistributedDataset, and the functions of a strategy that create one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from mpidist._agreement.guard import SectionResult
from mpidist._agreement.mismatch import Call
from mpidist._base.environment import debugging
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist.data._dataset import Dataset
from mpidist.data._dataset_base import stage_of
from mpidist.data._describe import describe_feed
from mpidist.data._distributed_sources import (
    DatasetSource,
    FunctionSource,
    Source,
    source_of,
)
from mpidist.data._feed import Feed, describe, spec_from_nest
from mpidist.data._files import shard_by_file
from mpidist.data._iterator import DistributedIterator
from mpidist.data._records import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    as_policy,
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
        return _distribute_dataset(group, dataset, options)

    @staticmethod
    def _of_function(
        group: ReplicaGroup,
        dataset_fn: Callable[[InputContext], object],
        options: InputOptions | None,
        call: str = "distribute_datasets_from_function",
        *,
        functions: bool = False,
    ) -> DistributedDataset:
        """Run `Strategy.distribute_datasets_from_function`. Collective.

        Args:
            group: the group of the strategy.
            dataset_fn: creates this rank's input.
            options: the user's options.
            call: the user's call, for messages.
            functions: whether ``dataset_fn`` may return a function that returns
                elements, and the mode in the options must be PER_WORKER.
        """
        return _distribute_from_function(
            group, dataset_fn, options, call, functions=functions
        )

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
        return self._feed.source.cardinality()

    def __len__(self) -> int:
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("DistributedDataset: an infinite dataset has no len()")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError(
                "DistributedDataset: the number of steps is not known before the end"
            )
        return count

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
        feed = self._feed
        return (
            f"<mpidist.DistributedDataset #{feed.number} on {feed.replicas} replicas: "
            f"{feed.source.text}>"
        )


def _distribute_dataset(
    group: ReplicaGroup, dataset: object, options: InputOptions | None
) -> DistributedDataset:
    call = "experimental_distribute_dataset"
    context.require_program_level(group, call)
    collectives = group.collectives
    try:
        chosen = _check_options(options, call)
        if chosen.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                f"{call}: InputReplicationMode.PER_REPLICA is only supported in "
                "`distribute_datasets_from_function`"
            )
        source, policy = _split_source(group, dataset, chosen, call)
        spec = spec_from_nest(source.spec) if source.spec is not None else None
        kind = "" if spec is None else f", {describe(spec.empty())}"
        text = (
            f"{call} of {source.text} ({_many(source)}{kind}), split by {policy.name}"
        )
        by_file = policy is AutoShardPolicy.FILE
        if by_file:  # the ranks have different numbers of rows
            text = f"{call} of {source.text}, split by FILE"
        checked = source.reads_whole and debugging() and not by_file
        if checked:
            text += ", compared (MPIDIST_DEBUG)"
    except Exception as error:
        collectives.invalid(call, error)
    collectives.guard.agree(Call(text))
    return DistributedDataset(
        Feed(
            group,
            source,
            group.registry.next_key(),
            None if by_file else policy,
            chosen.experimental_fetch_to_device,
            spec=spec,
            checked=checked,
        )
    )


def _split_source(
    group: ReplicaGroup, dataset: object, options: InputOptions, call: str
) -> tuple[Source, AutoShardPolicy]:
    """Return what this rank reads of a dataset of global batches, and the policy."""
    policy = options.auto_shard_policy
    if isinstance(dataset, Dataset) and policy is AutoShardPolicy.AUTO:
        own = dataset.options().experimental_distribute.auto_shard_policy
        policy = as_policy(own, "DistributeOptions")
    if policy is AutoShardPolicy.HINT:
        raise ValueError(
            f"{call}: AutoShardPolicy.HINT is not supported; write `strategy."
            "distribute_datasets_from_function(fn)`, where `fn` calls `dataset.shard("
            "context.num_input_pipelines, context.input_pipeline_id)`"
        )
    source = source_of(dataset, call)
    if isinstance(dataset, Dataset) and source.batch_size is None:
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
        part = shard_by_file(stage_of(dataset), group.num_replicas, group.replica_id)
        source = DatasetSource(Dataset(part), whole=dataset)
    return source, policy


def _many(source: Source) -> str:
    count = source.cardinality()
    return {-1: "endless", -2: "of unknown length"}.get(count, f"{count} batches")


def _distribute_from_function(
    group: ReplicaGroup,
    dataset_fn: Callable[[InputContext], object],
    options: InputOptions | None,
    call: str,
    *,
    functions: bool,
) -> DistributedDataset:
    context.require_program_level(group, call)
    guard = group.guard
    input_context = InputContext(
        group.num_replicas,
        group.replica_id,
        group.num_replicas,
    )

    def make(section: SectionResult) -> tuple[InputOptions, Source]:
        chosen = _check_options(options, call)
        mode = chosen.experimental_replication_mode
        if functions and mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"{call}: Input replication mode not supported: {mode}; write "
                "InputReplicationMode.PER_WORKER"
            )
        if chosen.auto_shard_policy not in _NO_POLICY:
            raise ValueError(
                f"{call}: got AutoShardPolicy.{chosen.auto_shard_policy.name}, but "
                "nothing is sharded here; `dataset_fn` takes this rank's part by "
                "`context.input_pipeline_id`"
            )
        if not callable(dataset_fn):
            raise TypeError(
                f"{call}: expected a function of an InputContext, got "
                f"{dataset_fn!r:.80}; for a dataset of global batches write "
                "`strategy.experimental_distribute_dataset(dataset)`"
            )
        section.kind = "raised"
        return chosen, _source_of_function(dataset_fn(input_context), call, functions)

    chosen, source = guard.run_section(Call(call), make)
    return DistributedDataset(
        Feed(
            group,
            source,
            group.registry.next_key(),
            None,
            chosen.experimental_fetch_to_device,
        )
    )


def _source_of_function(made: object, call: str, functions: bool) -> Source:
    if (
        functions
        and callable(made)
        and not isinstance(made, Dataset)
        and not hasattr(made, "__iter__")
    ):
        return FunctionSource(made, call)
    return source_of(made, f"{call}: the function's dataset")


def _check_options(options: object, call: str) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(
            f"{call}: expected `options` to be a `mpidist.InputOptions`, got "
            f"{type(options).__name__}"
        )
    if (
        options.experimental_place_dataset_on_device
        and options.experimental_replication_mode
        is not InputReplicationMode.PER_REPLICA
    ):
        raise ValueError(
            f"{call}: `experimental_place_dataset_on_device` needs "
            "InputReplicationMode.PER_REPLICA; leave it out: elements come on the "
            "replica's device anyway"
        )
    return options
