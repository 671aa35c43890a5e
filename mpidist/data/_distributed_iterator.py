"""The iterators of distributed datasets: one header for each step, and nothing else.

A step: read this rank's part; exchange a header with its number of rows plus one (0:
the input of this rank has ended), of which all ranks get the maximum; wrap the part. If
the maximum is 0, all inputs have ended, and all ranks stop. A rank that could not read
reports this in place of its header, and all ranks leave this element out.

Once the spec of elements is known (`_input`), it is part of the fingerprint of each
header.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._base.errors import on_rank
from mpidist._base.expect import expect
from mpidist._base.fingerprint import fingerprint
from mpidist._base.types import Nest
from mpidist._runtime import context
from mpidist._runtime.interruptions import tells
from mpidist.data._ahead import read_ahead, stop_reading
from mpidist.data._input import ENDED, Input, Piece, dump_spec
from mpidist.data._items import state_of
from mpidist.data._options import AutoShardPolicy
from mpidist.data._positions import Optional, PositionedIterator, checked_state
from mpidist.data._rows import RowBlock, describe, describe_rows
from mpidist.data._stages import Block, TooShortError


class DistributedIterator(PositionedIterator):
    """Iterates over the elements of a `DistributedDataset`, one for each step.

    An element has the structure of the dataset's, and each of its leaves is a
    `PerReplica`. All ranks get an element, or reach the end, together: a replica
    without rows gets arrays with 0 rows. An element that raised an exception on some
    rank is skipped on all: the next call goes on after it.
    """

    _unit = "steps"

    def __init__(self, input: Input) -> None:
        """Not for users: call ``iter(dataset)``."""
        hint, call = "write `iter(dataset)`", "DistributedIterator"
        expect(isinstance(input, Input), call, "a dataset to make it", input, hint)
        self._input, self._stage, self._group = input, input.stage, input.group
        self._start(input.iterations, 0)

    def _start(self, iteration: int, position: int) -> None:
        """Go to the position before an element of an iteration."""
        self._iteration, self._input.iterations = iteration, iteration + 1
        self._position = position
        self._source_state: Any = None  # before an element that was not returned
        self._state_after: Any = None  # one that could not be read
        self._stream: Iterator[Block] | None = None
        self._pieces: Iterator[Piece] | None = None
        self._piece: Piece | None = None  # that was read but not returned
        self._returned = False  # any element
        self._failure = ""
        what = f"next(iterator) of dataset #{self._input.number}"
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
        return self._input.element_spec()

    @tells("initialize", operator.attrgetter("_group"))
    def initialize(self) -> list[object]:
        """Start again at the first element. Collective.

        For TensorFlow 1 code. Returns an empty list: there are no operations to run.
        """
        context.require_program_level(self._group, "initialize")
        self._close()
        self._start(self._input.iterations, 0)
        text = f"initialize of an iterator of dataset #{self._input.number}"
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
        input, own = self._input, self._own_state()
        # All ranks read the same global batches: one state, for any number of ranks.
        rank = self._group.replica_id if input.is_own else 0
        return super().state() | {
            "input": "own" if input.is_own else "global",
            "batch_size": input.batch_size,
            "cardinality": self._stage.cardinality(),
            "replicas": self._group.num_replicas,
            "sources": {} if own is None else {str(rank): own},
        }

    def _own_state(self) -> Any:
        """Return the state of the user's iterator, as JSON; None if it has none."""
        waits = self._piece is not None and self._piece is not ENDED
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
        input, call = self._input, "DistributedIterator.restore"
        context.require_program_level(self._group, "restore")
        guard = self._group.guard
        with guard.checking(call):
            to = checked_state(call, state, self.state())
            iteration, position = int(to["iteration"]), int(to["position"])
            source_state = to["sources"].get(str(self._group.replica_id))
            if source_state is None and not input.is_own:
                source_state = next(iter(to["sources"].values()), None)
            seeds = to["shuffle_seeds"]
            stage = self._stage.with_shuffle_seeds(iter(seeds))
        batch_size = input.batch_size or to["batch_size"]
        text = (
            f"restore of dataset #{input.number} to element {position} of iteration "
            f"{iteration}"
        )
        if not input.is_own:
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
                    if not input.is_own:
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
        input.batch_size = batch_size
        self._close()
        self._start(iteration, position)
        self._stream = stream
        self._stage = input.stage = stage

    def __elastic_problem__(self) -> str:
        return self._input.elastic_problem()

    def __repr__(self) -> str:
        return (
            f"<mpidist.DistributedIterator of dataset #{self._input.number}: "
            f"iteration {self._iteration}, {self._position} steps so far>"
        )

    # --- a step ---------------------------------------------------------------

    @tells("next(iterator)", operator.attrgetter("_group"))
    def _step(self, name: str) -> tuple[bool, Nest]:
        input = self._input
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
            self._piece = ENDED
            with guard.checking(name):
                raise RuntimeError(text)
        failures = guard.reports.failures
        try:
            piece, call, own = self._next_piece(guard)
            number = piece.rows + 1
            compared = piece.checksum
            if input.varies:  # without rows: if they are as before
                compared = fingerprint(describe_rows(piece.block or input.empty))
            same = guard.agree_on(call, compared ^ number, number)
        except Exception:
            if guard.reports.failures > failures or self._group.num_replicas == 1:
                self._leave_out(guard.reports.calls)
            raise
        if guard.largest == 0:
            return False, None
        if not input.is_own and not same:
            self._compare(name, piece, own)
        # An element that is refused in `learn` is left out, too.
        self._count()
        self._returned = True
        if input.empty is None:
            input.learn(own)
        return True, input.wrap(piece.block)

    def _compare(self, name: str, piece: Piece, own: bytes) -> None:
        """Raise if a batch really differs between ranks. Collective."""
        text, by_rows = self._input.differing(f"batch {self._position}", piece, own)
        if by_rows:  # and so would all that follow
            self._failure = text
        elif text:
            self._count()
        if text:
            raise ValueError(on_rank(self._group.replica_id, f"{name}: {text}"))

    def _next_piece(self, guard: Guard) -> tuple[Piece, Call, bytes]:
        """Return this rank's part of the element, and what the others are told."""
        try:
            if self._piece is None:
                with guard.span("reading input"):
                    self._piece = self._read()
            piece = self._piece
            call = self._call_for(piece.block)
            asked = self._input.empty is None or self._input.varies
            own = dump_spec(piece.block) if asked else b""
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
                # Take it from the next batch: ranks that failed do not know this one's.
                self._input.batch_size = None
                if self._stage.depth and self._input.policy is AutoShardPolicy.OFF:
                    self._close()  # what was read ahead is split by it
                    self._stream = None

    def _count(self) -> None:
        """Go on after the element that was read."""
        self._position += 1
        if self._piece is not ENDED:
            self._piece = None

    def _call_for(self, block: RowBlock | None) -> Call:
        """Return the call that this rank is about to make, with its elements' spec."""
        if self._input.empty is None:
            return self._call
        block = block or self._input.empty
        # A rank without rows has a column where the others have scalars.
        kinds = [(leaf.dtype, max(1, leaf.ndim)) for leaf in block.leaves]
        key = (block.structure, *kinds)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = Call(f"{self._call.text}: {describe(block)}")
        return call

    # --- reading --------------------------------------------------------------

    def _read(self) -> Piece:
        if self._stream is None:
            self._stream = self._stage.stream(
                self._iteration, self._position, self._own_state()
            )
        if self._pieces is None:
            pieces = self._input.pieces(self._stream)
            self._pieces = read_ahead(pieces, self._stage.depth)
        if self._stage.again:
            self._source_state = state_of(self._stream)
        return next(self._pieces, ENDED)

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
