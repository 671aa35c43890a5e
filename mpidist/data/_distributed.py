"""Distributed datasets and their iterators: one header for each step, and nothing else.

A step: read this rank's part; exchange a header with its number of rows plus one (0:
the input of this rank has ended), of which all ranks get the maximum; wrap the part. If
the maximum is 0, all inputs have ended, and all ranks stop. A rank that could not read
reports this in place of its header, and all ranks leave this element out.

If the spec of a source's elements is known only after reading, the ranks also exchange
it in the first step. From then on the spec is part of the fingerprint of each header.
A rank without rows gets empty arrays, for which all ranks have to know what elements
are like. Row shapes may differ between steps and between ranks; those of empty arrays
are the last ones that this rank has seen, or another rank's if it has seen none.
"""

from __future__ import annotations

import dataclasses
import io
import operator
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import backend, nest, shuffle_seeds
from mpidist._base.environment import debugging
from mpidist._base.errors import CollectiveMismatchError, by_value, on_rank, warn_caller
from mpidist._base.expect import expect
from mpidist._base.fingerprint import fingerprint
from mpidist._base.types import Array, Nest
from mpidist._merge.commands import Pickler
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist._values.distributed import PerReplica
from mpidist.data._ahead import read_ahead, stop_reading
from mpidist.data._items import Calls, Items, state_of
from mpidist.data._options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    as_policy,
    spec_with_rows,
)
from mpidist.data._positions import Optional, PositionedIterator, checked_state
from mpidist.data._rows import (
    ONE_KIND,
    PAD,
    LazyBlock,
    RowBlock,
    count_rows,
    describe,
    describe_rows,
    empty_of,
)
from mpidist.data._selections import Part
from mpidist.data._shards import (
    check_options,
    describe_split,
    input_of,
    split_input,
    split_rows,
)
from mpidist.data._stages import Block, Stage, TooShortError

_DIFFERENT_ROWS: Final = (
    "the arrays of the dataset are not the same on all ranks, but each reads its part "
    "of the same rows: some are used twice, others never. Load all data on every rank, "
    "in the same order and with the same seeds, or write `strategy.distribute_datasets_"
    "from_function(fn)` for a dataset of each rank's own"
)
_OWN_INPUTS: Final = (
    "for inputs that differ write `strategy.distribute_datasets_from_function`"
)
_NO_POLICY = (AutoShardPolicy.AUTO, AutoShardPolicy.OFF)


@dataclasses.dataclass
class _Piece:
    """This rank's part of an element.

    Attributes:
        rows: rows of the global batch, or of this rank's batch if each rank has its own
            input.
        block: this rank's rows; None if there are none and their spec is unknown.
        checksum: the checksum of the whole batch, if batches are compared.
    """

    rows: int
    block: RowBlock | None
    checksum: int = 0


_ENDED: Final = _Piece(-1, None)
"""What is read at the end of the input."""


def _dump_spec(block: RowBlock | None) -> bytes:
    """Return the pickled specs of a block; none of None."""
    if block is None:
        return b""
    spec = block.spec()
    try:
        return pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, ImportError):
        # A named tuple that pickle cannot find by name. (cloudpickle would copy one of
        # the program's main module, too, which all ranks have.)
        file = io.BytesIO()
        Pickler(file).dump(spec)
        return file.getvalue()


class DistributedDataset:
    """An input of all replicas. Iterating over it gives each replica its part.

    `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function` create it. Each
    ``for element in dataset`` starts from the beginning; every rank must run it,
    because each step is a collective call.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        stage: Stage,
        policy: AutoShardPolicy | None,
        to_device: bool = True,
    ) -> None:
        """Not for users: see above.

        Args:
            group: the group of the strategy.
            stage: the input that this rank reads.
            policy: how global batches are split; None for inputs from a function.
            to_device: whether arrays are moved to the replica's device.
        """
        self._group, self._stage, self._policy = group, stage, policy
        self._to_device = to_device
        # Whether each rank has its own input: rows of ranks differ.
        self._is_own = policy in (None, AutoShardPolicy.FILE)
        # Whether global batches are compared.
        self._checked = bool(stage.whole) and debugging() and not self._is_own
        # Elements without rows, once all ranks know what they are like.
        self._empty = None if policy is None else empty_of(stage.spec())
        # Whether the shapes of rows are compared.
        self._varies = self._empty is None and not (self._is_own or self._checked)
        self._batch_size = stage.batch_size  # None if not known (yet)
        self._iterations = 0  # so far: the number of the next one
        self._number = 0  # of the dataset, the same on all ranks

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
            made = DistributedDataset(group, stage, policy, to_device)
            text = f"{call} of {made._text}"
            if not made._is_own:
                count = stage.cardinality()
                many = {-1: "endless", -2: "of unknown length"}
                kind = "" if made._empty is None else f", {describe(made._empty)}"
                text += f" ({many.get(count, f'{count} batches')}{kind})"
            text += f", split by {policy.name}"
            if made._checked:
                text += ", compared (MPIDIST_DEBUG)"
            sample = stage.sample()
        unknown = int(not sample)
        same = group.guard.agree_on(Call(text), sample, unknown)
        if not (same or group.guard.largest):
            warn_caller(on_rank(group.replica_id, f"{call}: {_DIFFERENT_ROWS}"))
        made._number = group.registry.next_key()
        return made

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
        made = DistributedDataset(group, stage, None, to_device)
        # Counted now: if it has failed, some rank may not have made this call.
        made._number = group.registry.next_key()
        return made

    @tells("iter(dataset)", operator.attrgetter("_group"))
    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self)

    @property
    def element_spec(self) -> Nest:
        """The nest of `mpidist.data.ArraySpec` of a replica's part of an element.

        Raises:
            ValueError: for an iterable from which nothing has been read yet.
        """
        if self._empty is not None:
            return self._empty.spec(batched=True)
        spec = self._stage.element_spec
        return spec if self._is_own else spec_with_rows(spec)

    def cardinality(self) -> int:
        """Return the number of steps in an epoch.

        `mpidist.data.INFINITE_CARDINALITY` (-1) if infinite,
        `mpidist.data.UNKNOWN_CARDINALITY` (-2) if it is known only after reading. If
        each rank has its own input, the number for this rank.
        """
        return self._stage.cardinality()

    def __len__(self) -> int:
        return self._stage.require_length("DistributedDataset")

    def __bool__(self) -> bool:
        return True

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
        group = self._group
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
        if self._group.replica_id == 0:
            print(self.shard_plan, flush=True)

    @property
    def shard_plan(self) -> str:
        """The text that `describe` prints: what each replica reads."""
        spec = self._stage.spec() if self._empty is None else self.element_spec
        elements = "not known before the first is read"
        if spec is not None:
            leaves, structure = nest.flatten(spec)
            elements = structure.render([str(leaf) for leaf in leaves])
        count, size = self._group.num_replicas, self._batch_size
        facts = {"input": self._text, "elements": elements}
        facts |= describe_split(self._stage, self._policy, size, count)
        plural = "" if count == 1 else "s"
        lines = [f"DistributedDataset #{self._number} on {count} replica{plural}"]
        lines += [f"  {name:<16}{text}" for name, text in facts.items()]
        return "\n".join(lines)

    @property
    def _text(self) -> str:
        text = self._stage.text
        return text if isinstance(self._stage, Items) else f"Dataset of {text}"

    def __repr__(self) -> str:
        return (
            f"<mpidist.DistributedDataset #{self._number} on "
            f"{self._group.num_replicas} replicas: {self._text}>"
        )

    def __elastic_problem__(self) -> str:
        """Return why nobody can read this input when a replica has died, or ""."""
        if self._is_own:
            return (
                "is an input of its own on each replica, which cannot be split anew "
                "when replicas are lost; write `strategy.experimental_distribute_"
                "dataset(dataset)`, with the same global batches on all of them"
            )
        if self._stage.one_shot:
            return (
                f"is a {self._stage.text}, which can be read only once, and after a "
                "loss it is read again; give an object whose `__iter__` starts from "
                "the beginning, or a `mpidist.data.Dataset.from_generator`"
            )
        return ""

    # --- for its iterators ----------------------------------------------------

    def _pieces(self, stream: Iterator[Block]) -> Iterator[_Piece]:
        """Yield this rank's parts of elements. May run in a thread; no MPI."""
        for block in stream:
            rows, checksum = block.rows, 0
            replicas, own = self._group.num_replicas, self._group.replica_id
            if self._is_own:
                whole = block.part(0, rows) if isinstance(block, LazyBlock) else block
                yield _Piece(rows, whole)
                continue
            if isinstance(block, RowBlock):
                rows = count_rows(block, "experimental_distribute_dataset", replicas)
                checksum = block.checksum() if self._checked else 0
            if self._batch_size is None:
                self._batch_size = rows
            size = self._batch_size
            start, stop = split_rows(self._policy, rows, size, replicas, own)
            yield _Piece(rows, block.part(start, stop), checksum)

    def _place(self, leaf: Array) -> Array:
        """Return an array on the device where it belongs."""
        device = self._group.device
        if not self._to_device or device.kind == "cpu" or backend.is_device_array(leaf):
            return leaf
        if leaf.dtype.kind not in "biufcV":
            return leaf  # of strings, for example: a GPU cannot hold it
        return backend.place(leaf, device)

    def _seen(self, block: RowBlock) -> None:
        """Remember the shapes of the rows that this rank has seen last."""
        known = [] if self._empty is None else self._empty.leaves
        if [x.shape[1:] for x in known] != [x.shape[1:] for x in block.leaves]:
            self._empty = empty_of(block.spec())

    def _learn(self, own: bytes) -> None:
        """Tell all ranks what elements are like, by each `_dump_spec`. Collective."""
        texts = self._exchange(own, describe)
        if len(set(texts) - {None}) > 1:
            lines = by_value(texts, lambda text: text or "")
            raise CollectiveMismatchError(
                on_rank(
                    self._group.replica_id,
                    "the elements of the ranks' datasets differ in structure, dtype or "
                    f"number of dimensions:\n{lines}",
                )
            )

    def _exchange(
        self, own: bytes, text_of: Callable[[RowBlock], str]
    ) -> list[str | None]:
        """Return the texts of all ranks' elements; None for one without. Collective.

        Keeps empty arrays like this rank's elements, or another's, if all are alike.

        Args:
            own: the `_dump_spec` of this rank.
            text_of: returns the text of a rank's elements.
        """
        comm = self._group.communicator
        with comm.traffic:
            dumped = comm.all_gather_objects(own)
        found = [empty_of(pickle.loads(x)) if x else None for x in dumped]
        texts = [None if block is None else text_of(block) for block in found]
        if len(set(texts) - {None}) == 1:
            others = (block for block in found if block is not None)
            self._empty = found[comm.rank] or next(others)
        return texts

    def _differing(self, what: str, piece: _Piece, own: bytes) -> tuple[str, bool]:
        """Return what each rank has of a batch that differs. Collective.

        Args:
            what: the batch.
            piece: this rank's part.
            own: its `_dump_spec`, if the shapes of rows are compared.

        Returns:
            The text, which is "" if some rank has no rows, and the others agree; and
            whether it is the number of rows that differs.
        """
        comm = self._group.communicator
        with comm.traffic:
            found = comm.all_gather_integers([piece.rows, piece.checksum])
        numbers, checksums = map(list, zip(*found, strict=True))
        by_rows = len(set(numbers)) > 1
        if by_rows:
            texts = ["the input has ended" if n < 0 else f"{n} rows" for n in numbers]
            remedy = f"; {_OWN_INPUTS}"
        elif self._varies:
            kinds = self._exchange(own, describe_rows)
            if len(set(kinds) - {None}) == 1:
                return "", False
            lines = by_value([kind or "no rows" for kind in kinds])
            return f"{what}: {ONE_KIND}\n{lines}\n{PAD}; {_OWN_INPUTS}", False
        else:
            texts = [f"checksum {x:x}" for x in checksums]
            remedy = (
                ". Give every shuffle and every random function of the input the same "
                "seed on all ranks"
            )
        text = (
            f"{what} is not the same on all ranks:\n{by_value(texts)}\n"
            "`experimental_distribute_dataset` needs the same global batches on every "
            f"rank, of which each replica gets its part{remedy}"
        )
        return text, by_rows


class DistributedIterator(PositionedIterator):
    """Iterates over the elements of a `DistributedDataset`, one for each step.

    An element has the structure of the dataset's, and each of its leaves is a
    `PerReplica`. All ranks get an element, or reach the end, together: a replica
    without rows gets arrays with 0 rows. An element that raised an exception on some
    rank is skipped on all: the next call goes on after it.
    """

    _unit = "steps"

    def __init__(self, dataset: DistributedDataset) -> None:
        """Not for users: call ``iter(dataset)``."""
        fits = isinstance(dataset, DistributedDataset)
        hint = "write `iter(dataset)`"
        expect(fits, "DistributedIterator", "a DistributedDataset", dataset, hint)
        self._dataset, self._stage = dataset, dataset._stage
        self._group = dataset._group
        self._start(dataset._iterations, 0)

    def _start(self, iteration: int, position: int) -> None:
        """Go to the position before an element of an iteration."""
        self._iteration, self._dataset._iterations = iteration, iteration + 1
        self._position = position
        self._source_state: Any = None  # before an element that was not returned
        self._state_after: Any = None  # one that could not be read
        self._stream: Iterator[Block] | None = None
        self._pieces: Iterator[_Piece] | None = None
        self._piece: _Piece | None = None  # that was read but not returned
        self._returned = False  # any element
        self._failure = ""
        what = f"next(iterator) of dataset #{self._dataset._number}"
        self._call = Call(f"{what}, iteration {iteration}")
        self._calls: dict[tuple[Any, ...], Call] = {}  # by what elements are like

    def get_next(self) -> Nest:
        """Return the next element. Collective.

        Raises:
            OutOfRangeError: the one in `mpidist.data`, at the end of the input, on all
                ranks together.
        """
        return super().get_next()

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or nothing at the end. Collective.

        The result is the same kind on all ranks:
        ``while (step := it.get_next_as_optional()).has_value():``.
        """
        return super().get_next_as_optional()

    @property
    def element_spec(self) -> Nest:
        """The nest of `mpidist.data.ArraySpec` of a replica's part of an element."""
        return self._dataset.element_spec

    @tells("initialize", operator.attrgetter("_group"))
    def initialize(self) -> list[object]:
        """Start again at the first element. Collective.

        For TensorFlow 1 code. Returns an empty list: there are no operations to run.
        """
        context.require_program_level(self._group, "initialize")
        self._close()
        self._start(self._dataset._iterations, 0)
        text = f"initialize of an iterator of dataset #{self._dataset._number}"
        self._group.guard.agree(Call(text))
        return []

    @property
    def initializer(self) -> Callable[[], list[object]]:
        """The method `initialize`: call it, on every rank, to start again.

        Accessing it has no effect, and a new iterator is at its first element:
        TensorFlow 1 code that runs the initializer once before its loop does not need
        it.
        """
        return self.initialize

    # --- position -------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position, as a small nest for JSON.

        It counts the elements that were returned, not those that a thread has read
        ahead, and includes the state of the source if that has ``get_state`` and
        ``set_state``, like grain's iterators, and the seeds of shuffles that the
        program gave none. Pass it to `restore`, in this run or
        another. Not collective; in a checkpoint the state of one rank is enough.
        """
        dataset, own = self._dataset, self._own_state()
        # All ranks read the same global batches: one state, for any number of ranks.
        rank = self._group.replica_id if dataset._is_own else 0
        return super().state() | {
            "input": "own" if dataset._is_own else "global",
            "batch_size": dataset._batch_size,
            "cardinality": self._stage.cardinality(),
            "replicas": self._group.num_replicas,
            "sources": {} if own is None else {str(rank): own},
        }

    def _own_state(self) -> Any:
        """Return the state of the user's iterator, as JSON; None if it has none."""
        waits = self._piece is not None and self._piece is not _ENDED
        if self._stream is None or waits:
            return self._source_state
        return state_of(self._stream)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a position: the next element is the one after it. Collective.

        A `mpidist.data.Dataset` or a source with ``__getitem__`` goes there directly,
        and one with ``set_state`` by calling it. Any other source is restarted and read
        up to the position. Positions of global batches are valid for any number of
        ranks.

        Args:
            state: the result of `state`, the same on all ranks, except for the states
                of the sources themselves. Shuffles without a seed get those of the
                state, here and in later iterators.

        Raises:
            ValueError: if it is not such a state, or that of a dataset of another
                length or batch size; on all ranks. For
                `Strategy.distribute_datasets_from_function` also if it was taken on a
                different number of ranks. After any error the iterator keeps its
                position, on all ranks; but a source that can be read only once is lost.
        """
        dataset, call = self._dataset, "DistributedIterator.restore"
        context.require_program_level(self._group, "restore")
        guard = self._group.guard
        with guard.checking(call):
            to = checked_state(call, state, self.state())
            iteration, position = int(to["iteration"]), int(to["position"])
            source_state = to["sources"].get(str(self._group.replica_id))
            if source_state is None and not dataset._is_own:
                source_state = next(iter(to["sources"].values()), None)
            seeds = to["shuffle_seeds"]
            stage = self._stage.with_shuffle_seeds(iter(seeds))
        batch_size = dataset._batch_size or to["batch_size"]
        text = (
            f"restore of dataset #{dataset._number} to element {position} of iteration "
            f"{iteration}"
        )
        if not dataset._is_own:
            text += f", with batch_size={batch_size}"
            text += f", and the seeds {seeds}" if seeds else ""
        stream = self._stream if stage.one_shot else None
        short: TooShortError | None = None
        try:
            # Nothing that was read before is dropped until all ranks have got there.
            with guard.checking(call):
                try:
                    stream = stage.stream(iteration, position, source_state, stream)
                except TooShortError as error:
                    if not dataset._is_own:
                        raise
                    short, stream = error, iter(())  # others may have longer inputs
            guard.agree_on(Call(text), largest=int(short is None))
            if short is not None and not guard.largest:
                raise short
        except BaseException:
            if stage.one_shot:
                self._failure = (
                    "its `restore` failed, and its source can be read only once; "
                    "restore an iterator of a new source"
                )
            raise
        dataset._batch_size = batch_size
        self._close()
        self._start(iteration, position)
        self._stream = stream
        self._stage = dataset._stage = stage

    def __elastic_problem__(self) -> str:
        return self._dataset.__elastic_problem__()

    def __repr__(self) -> str:
        return (
            f"<mpidist.DistributedIterator of dataset #{self._dataset._number}: "
            f"iteration {self._iteration}, {self._position} steps so far>"
        )

    # --- a step ---------------------------------------------------------------

    @tells("next(iterator)", operator.attrgetter("_group"))
    def _step(self, name: str) -> tuple[bool, Nest]:
        dataset = self._dataset
        if context.depth() and context.current().level is context.Level.REPLICA:
            raise ValueError(
                f"{name}: next(iterator) should be called from outside of replica_fn. "
                "e.g. strategy.run(replica_fn, args=(next(iterator),))"
            )
        context.require_program_level(self._group, name)
        guard = self._group.guard
        if self._failure:
            text, self._failure = f"{name}: {self._failure}", ""
            # A loop that ignores errors finds an end.
            self._piece = _ENDED
            with guard.checking(name):
                raise RuntimeError(text)
        failures = guard.reports.failures
        try:
            piece, call, own = self._next_piece(guard)
            number = piece.rows + 1
            compared = piece.checksum
            if dataset._varies:  # without rows: if they are as before
                compared = fingerprint(describe_rows(piece.block or dataset._empty))
            same = guard.agree_on(call, compared ^ number, number)
        except Exception:
            if guard.reports.failures > failures or self._group.num_replicas == 1:
                self._leave_out(guard.reports.calls)
            raise
        if guard.largest == 0:
            return False, None
        if not dataset._is_own and not same:
            self._compare(name, piece, own)
        # An element that is refused in `learn` is left out, too.
        self._count()
        self._returned = True
        if dataset._empty is None:
            dataset._learn(own)
        return True, self._wrap(piece.block)

    def _compare(self, name: str, piece: _Piece, own: bytes) -> None:
        """Raise if a batch really differs between ranks. Collective."""
        text, by_rows = self._dataset._differing(f"batch {self._position}", piece, own)
        if by_rows:  # and so would all that follow
            self._failure = text
        elif text:
            self._count()
        if text:
            raise ValueError(on_rank(self._group.replica_id, f"{name}: {text}"))

    def _next_piece(self, guard: Guard) -> tuple[_Piece, Call, bytes]:
        """Return this rank's part of the element, and what the others are told."""
        try:
            if self._piece is None:
                with guard.span("reading input"):
                    self._piece = self._read()
            piece = self._piece
            call = self._call_for(piece.block)
            asked = self._dataset._empty is None or self._dataset._varies
            own = _dump_spec(piece.block) if asked else b""
        except KeyboardInterrupt as error:
            # Code that catches it and continues must not miss the element being read.
            self._forget_stream(error, wait=False)
            raise
        except BaseException as error:
            if self._stage.again:
                self._state_after = state_of(self._stream)
            self._forget_stream(error)
            raise guard.fail(self._call, _no_stop(error), "raised")  # noqa: B904
        return piece, call, own

    def _leave_out(self, calls: set[str]) -> None:
        """Go on after an element that failed on some rank, if all were reading it."""
        own = re.escape(self._call.text)
        if all(re.match(rf"{own}(: | \(|$)", call) for call in calls):
            self._count()
            if self._stream is None:  # it failed here
                self._source_state = self._state_after
            if not (self._returned or self._stage.batch_size):
                self._forget_batch_size()

    def _forget_batch_size(self) -> None:
        """Take it from the next batch: ranks that failed do not know this one's."""
        dataset = self._dataset
        dataset._batch_size = None
        if self._stage.depth and dataset._policy is AutoShardPolicy.OFF:
            self._close()  # what was read ahead is split by it
            self._stream = None

    def _count(self) -> None:
        """Go on after the element that was read."""
        self._position += 1
        if self._piece is not _ENDED:
            self._piece = None

    def _wrap(self, block: RowBlock | None) -> Nest:
        dataset = self._dataset
        if block is None:
            block = dataset._empty
            assert block is not None  # some rank has rows, and has told the others
        else:
            dataset._seen(block)
        placed = block.structure.unflatten(map(dataset._place, block.leaves))
        return self._group.registry.wrap_tree(PerReplica, placed)

    def _call_for(self, block: RowBlock | None) -> Call:
        """Return the call that this rank is about to make, with its elements' spec."""
        if self._dataset._empty is None:
            return self._call
        block = block or self._dataset._empty
        # A rank without rows has a column where the others have scalars.
        kinds = [(leaf.dtype, max(1, leaf.ndim)) for leaf in block.leaves]
        key = (block.structure, *kinds)
        call = self._calls.get(key)
        if call is None:
            text = f"{self._call.text}: {describe(block)}"
            call = self._calls[key] = Call(text)
        return call

    # --- reading --------------------------------------------------------------

    def _read(self) -> _Piece:
        if self._stream is None:
            self._stream = self._stage.stream(
                self._iteration, self._position, self._own_state()
            )
        if self._pieces is None:
            pieces = self._dataset._pieces(self._stream)
            self._pieces = read_ahead(pieces, self._stage.depth)
        if self._stage.again:
            self._source_state = state_of(self._stream)
        return next(self._pieces, _ENDED)

    def _forget_stream(self, error: BaseException, *, wait: bool = True) -> None:
        """After an error, prepare to open the input anew, or never again."""
        self._close(wait=wait)
        lost = not self._stage.again
        if isinstance(error, Exception):  # what fails as it opens fails there again
            lost |= self._stream is None and self._position > 0
        self._stream = self._piece = None
        if lost:
            self._failure = (
                f"its input raised a {type(error).__name__} and cannot continue; make "
                "a new iterator with `iter(dataset)`, or `restore` a state"
            )

    def _close(self, *, wait: bool = True) -> None:
        stop_reading(self._pieces, wait=wait)
        self._pieces = None


def _no_stop(error: BaseException) -> BaseException:
    """Return an error that no loop interprets as the end of its iterator."""
    if not isinstance(error, StopIteration):
        return error
    other = RuntimeError("the input raised StopIteration inside an element")
    other.__cause__ = error
    return other
