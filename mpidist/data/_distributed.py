"""Distributed datasets: the inputs of all replicas, and how they are made."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import nest, shuffle_seeds
from mpidist._base.errors import on_rank, warn_caller
from mpidist._base.expect import expect
from mpidist._base.names import counted
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist.data._distributed_iterator import DistributedIterator
from mpidist.data._input import Input
from mpidist.data._items import Calls, Items
from mpidist.data._options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from mpidist.data._rows import describe
from mpidist.data._selections import Part
from mpidist.data._shards import check_options, describe_split, input_of, split_input
from mpidist.data._stages import Stage

_DIFFERENT_ROWS: Final = (
    "the arrays of the dataset are not the same on all ranks, but each reads its part "
    "of the same rows: some are used twice, others never. Load all data on every rank, "
    "in the same order and with the same seeds, or write `strategy.distribute_datasets_"
    "from_function(fn)` for a dataset of each rank's own"
)


class DistributedDataset:
    """An input of all replicas. Iterating over it gives each replica its part.

    `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function` create it. Each
    ``for element in dataset`` starts from the beginning; every rank must run it,
    because each step is a collective call.
    """

    def __init__(self, input: Input) -> None:
        """Not for users: see above."""
        self._input = input

    @staticmethod
    def _of_batches(
        group: ReplicaGroup, dataset: object, options: InputOptions | None
    ) -> DistributedDataset:
        """Run `Strategy.experimental_distribute_dataset`. Collective."""
        call = "experimental_distribute_dataset"
        context.require_program_level(group, call)
        with group.guard.checking(call):
            chosen = check_options(options, call)
            if chosen.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
                raise NotImplementedError(
                    f"{call}: InputReplicationMode.PER_REPLICA is only supported in "
                    "`distribute_datasets_from_function`"
                )
            stage, policy = split_input(group, dataset, chosen, call)
            to_device = bool(chosen.experimental_fetch_to_device)
            input = Input(group, stage, policy, to_device)
            text = f"{call} of {input.text}"
            if not input.is_own:
                count = stage.cardinality()
                many = {-1: "endless", -2: "of unknown length"}
                kind = "" if input.empty is None else f", {describe(input.empty)}"
                text += f" ({many.get(count, f'{count} batches')}{kind})"
            text += f", split by {policy.name}"
            if input.checked:
                text += ", compared (MPIDIST_DEBUG)"
            sample = stage.sample()
        same = group.guard.agree_on(Call(text), sample, int(not sample))
        if not (same or group.guard.largest):
            warn_caller(on_rank(group.replica_id, f"{call}: {_DIFFERENT_ROWS}"))
        input.number = group.registry.next_key()
        return DistributedDataset(input)

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
            chosen = check_options(options, call)
            mode = chosen.experimental_replication_mode
            if functions and mode is not InputReplicationMode.PER_WORKER:
                raise ValueError(
                    f"{call}: Input replication mode not supported: {mode}; write "
                    "InputReplicationMode.PER_WORKER"
                )
            policy: Any = chosen.auto_shard_policy
            if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.OFF):
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
        input = Input(group, stage, None, bool(chosen.experimental_fetch_to_device))
        # Counted now: if it has failed, some rank may not have made this call.
        input.number = group.registry.next_key()
        return DistributedDataset(input)

    @tells("iter(dataset)", operator.attrgetter("_input.group"))
    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._input)

    @property
    def element_spec(self) -> Nest:
        """The nest of `mpidist.data.ArraySpec` of a replica's part of an element.

        Raises:
            ValueError: for an iterable from which nothing has been read yet.
        """
        return self._input.element_spec()

    def cardinality(self) -> int:
        """Return the number of steps in an epoch.

        `mpidist.data.INFINITE_CARDINALITY` (-1) if infinite,
        `mpidist.data.UNKNOWN_CARDINALITY` (-2) if it is known only after reading. If
        each rank has its own input, the number for this rank.
        """
        return self._input.stage.cardinality()

    def __len__(self) -> int:
        return self._input.stage.require_length("DistributedDataset")

    def __bool__(self) -> bool:
        return True

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold all elements into one value. Collective.

        If the function raises on one rank, all ranks raise.

        Args:
            initial_state: the first state.
            reduce_func: a function of the state and an element that returns the next
                state. It runs in cross-replica context, on every rank; call
                `Strategy.run` and `Strategy.reduce` there.

        Returns:
            The last state.
        """
        group, call = self._input.group, "DistributedDataset.reduce"
        context.require_program_level(group, call)

        def fold(section: SectionResult) -> Any:
            section.kind = "raised"
            state = initial_state
            for element in self:
                with context.scope(group):
                    state = reduce_func(state, element)
            return state

        return run_section(group.guard, Call(f"the end of {call}"), fold)

    def describe(self) -> None:
        """Print on rank 0 what each replica reads, to check before a long run.

        Not collective. `shard_plan` returns the text.
        """
        if self._input.group.replica_id == 0:
            print(self.shard_plan, flush=True)

    @property
    def shard_plan(self) -> str:
        """The text that `describe` prints: what each replica reads."""
        input = self._input
        spec = input.stage.spec() if input.empty is None else self.element_spec
        elements = "not known before the first is read"
        if spec is not None:
            leaves, structure = nest.flatten(spec)
            elements = structure.render([str(leaf) for leaf in leaves])
        count, size = input.group.num_replicas, input.batch_size
        facts = {"input": input.text, "elements": elements}
        facts |= describe_split(input.stage, input.policy, size, count)
        replicas = counted(count, "replica")
        lines = [f"DistributedDataset #{input.number} on {replicas}"]
        lines += [f"  {name:<16}{text}" for name, text in facts.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        input = self._input
        return (
            f"<mpidist.DistributedDataset #{input.number} on "
            f"{input.group.num_replicas} replicas: {input.text}>"
        )

    def __elastic_problem__(self) -> str:
        return self._input.elastic_problem()
