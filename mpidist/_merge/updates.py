"""Updates: a function runs on every rank, and changes its copies of variables.

There is one way to run them, an `UpdateBatch`: updates one after the other, and a join
at the end. It is a section (`guard`), which ends when it has ended on all ranks. What
each update has written and returned becomes a few numbers; the header of the join
carries the fingerprint of them all, and so says whether it was the same on all ranks.
What fails on some rank is raised on all, and all copies that were written are made
equal to rank 0's again.

At program level an update is a batch of one: every rank makes it with arguments of
its own, so these are compared too.

In ``merge_fn`` there may be many, and nothing but rank 0's commands makes the ranks
meet. Rank 0 sends an update and runs it, without waiting for the other ranks, which run
it when they come to it. The batch ends before the next command that is no update, at
the end of merge_fn, or when it has become long (`coordinator`).

- Rank 0's own exception is raised at once: the batch ends there.
- A rank on which a function raises goes to the join at once, and waits there for
  the others, as at the end of any section. So functions that communicate (few do)
  learn of it by their headers. The exception is raised on all ranks by the call that
  ends the batch. What rank 0 has sent in the meantime that rank drops: each message
  has the number of joins that were before it.
- All variables that were written in the batch are made equal then: rank 0's copies,
  on which all updates of the batch have run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mpidist._agreement.guard import Written
from mpidist._agreement.mismatch import Call, ErrorKind, call_of
from mpidist._base import backend, nest
from mpidist._base.errors import CollectiveError
from mpidist._base.fingerprint import (
    fingerprint,
    fingerprint_of_bytes,
    fingerprint_of_numbers,
)
from mpidist._runtime import context, dispatch
from mpidist._runtime.dispatch import check_arguments
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import Mirrored, PerReplica, argument_of
from mpidist._values.storage import VariableStorage
from mpidist._values.variable import Variable, array_of, differs, storage_of

_BATCH: Final = Call("the end of updates in merge_fn")
_LONGEST_SECONDS: Final = 0.25
_LEAF: Final = str(nest.flatten(None)[1])
_LEAF_FINGERPRINT: Final = fingerprint(_LEAF)
# Arguments that a function gets as they are.
_AS_THEY_ARE: Final = frozenset(
    (np.ndarray, float, int, bool, str, type(None), np.float32, np.float64)
)


@dataclasses.dataclass(slots=True)
class _Effect:
    """What one update has left, for the message where ranks differ."""

    var: Any
    fn: Any
    structure: str  # of the result
    written: list[
        tuple[VariableStorage, int]
    ]  # variables and fingerprints of their values
    returned: list[Any]
    arguments: str  # where each rank has its own


class UpdateBatch:
    """Updates of a ``merge_fn`` on this rank, between two joins.

    Attributes:
        open: whether there were any since the last join.
        joins: how many joins there were.
        ring_start: for rank 0: where its messages were when the batch began.
    """

    # What is set when the batch begins: most merge_calls have none.
    _frame: context.Frame
    _began: float
    _outer: Sequence[Written]

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._guard = group.guard
        self.open = False
        self.joins = 0
        self.ring_start = 0
        self._numbers: list[int] = []
        self._written: list[VariableStorage] = []
        self._effects: list[_Effect] = []

    @property
    def long(self) -> bool:
        """Whether it is time for a join, so that failures are not told too late."""
        return self.open and time.monotonic() - self._began > _LONGEST_SECONDS

    def begin(self) -> None:
        """Enter the section, where this is the first update since a join."""
        if self.open:
            return
        guard = self._guard
        written: list[VariableStorage] | None = None
        if guard.checks:
            guard.enter_section()
            self.open = True
            self._began = time.monotonic()
            self._written = written = []
            self._outer = guard.record(written)
        self._frame = context.Frame(self._group, context.Level.UPDATE, written=written)

    def run(
        self,
        number: int,
        var: Any,
        fn: Any,
        args: Any,
        kwargs: Any,
        grouped: bool,
        arguments: str = "",
    ) -> Any:
        """Run an update on this rank; return what its function returns.

        Args:
            number: counted on all ranks alike.
            var: the variable; None for `update_non_slot`.
            fn: the function.
            args: its further positional arguments.
            kwargs: its keyword arguments.
            grouped: whether the results are the same on all ranks.
            arguments: a text of those that have to be the same on all ranks.
        """
        guard, written = self._guard, self._written
        if self.open:
            guard.require_section()
            guard.record(written)
        before = len(written)
        own = [_own(x) for x in args]
        if var is not None:
            own.insert(0, var)
        with context.entered(self._frame):
            if kwargs:
                result = fn(*own, **nest.map_structure(argument_of, kwargs))
            else:
                result = fn(*own)
        if self.open:
            effect = _Effect(var, fn, _LEAF, [], [], arguments)
            if result is not None and type(result) is not Variable:
                leaves, shape = nest.flatten(result)
                effect.structure = str(shape)
                if grouped:
                    effect.returned = [x for x in leaves if _is_value(x)]
            self._note(number, effect, written[before:])
        return result

    def _note(
        self, number: int, effect: _Effect, written: list[VariableStorage]
    ) -> None:
        """Add what an update has left to what is compared at the join."""
        if len(written) > 1:
            written = _by_key(written)
        seed = _seed_of(number)
        numbers, text = self._numbers, effect.structure
        numbers.append(_LEAF_FINGERPRINT if text is _LEAF else fingerprint(text))
        if effect.arguments:
            numbers.append(fingerprint_of_bytes(effect.arguments.encode()))
        for v in written:
            one = v.fingerprint(seed)
            numbers += (v.key[0], one)
            effect.written.append((v, one))
        for x in effect.returned:
            numbers.append(backend.fingerprint_of_array(_array(x), seed))
        self._effects.append(effect)

    def end(
        self,
        error: BaseException | None = None,
        kind: ErrorKind = "raised",
        call: str = "",
    ) -> BaseException | None:
        """Wait for the end of the batch on all ranks; return what to raise.

        Collective.

        Args:
            error: what an update has raised on this rank.
            kind: of that error.
            call: which update.
        """
        if not self.open:
            return error
        guard = self._guard
        if isinstance(error, CollectiveError):
            kind = "agreed"
        guard.record(self._written)
        what = call_of(call) if call else _BATCH
        try:
            number = fingerprint_of_numbers(self._numbers)
            return guard.join(what, error, kind, self._describe, number)
        finally:
            self.leave()
            self.joins += 1

    def leave(self) -> None:
        """Leave the section, also without a join."""
        if self.open:
            self.open = False
            guard = self._guard
            guard.record(self._outer)
            guard.leave_section()
            self._numbers = []
            self._effects = []
            self._written = []

    def _describe(self) -> str:
        """Return a text of what the updates have left."""
        last = {
            v.key: k
            for k, effect in enumerate(self._effects)
            for v, _ in effect.written
        }
        parts = []
        for k, effect in enumerate(self._effects):
            texts = [
                f"{v.name!r} [#{v.key[0]}] = {backend.sample(v.array)}"
                + (f" (then {n:x})" if last[v.key] != k or _is_large(v) else "")
                for v, n in effect.written
            ]
            part = f"{describe(effect.var, effect.fn)} -> {effect.structure}"
            if effect.arguments:
                part += f", with arguments {effect.arguments}"
            if texts:
                part += f", wrote {', '.join(texts)}"
            if effect.returned:
                part += f", returned {_texts_of(effect.returned)}"
            parts.append(part)
        # First what it is about: of long texts the end is cut off.
        return f"what {_MUST_BE_SAME}: {'; '.join(parts)}"


def _own(x: Any) -> Any:
    """Return what the function gets for an argument."""
    kind = type(x)
    if kind is Mirrored:
        return x.value()
    return x if kind in _AS_THEY_ARE else nest.map_structure(argument_of, x)


def describe(var: Any, fn: Any) -> str:
    """Return the name of an update, for messages."""
    if var is None:
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        return f"update_non_slot({name})"
    return f"update of Variable {var.name!r} [#{storage_of(var).key[0]}]"


@dispatch.operation("update")
def _update(
    group: ReplicaGroup, var: Any, fn: Any, args: Any, kwargs: Any, grouped: bool
) -> Any:
    """Run an update that all ranks make: a batch of one."""
    registry = group.registry
    batch = UpdateBatch(group)
    error: BaseException | None = None
    result: Any = None
    kind: ErrorKind = "invalid"
    batch.begin()
    try:
        check_arguments("update", args, kwargs)
        leaves = nest.flatten((tuple(args), kwargs))[0]
        check_update(var, fn, leaves)
        plain = [x for x in leaves if _is_value(x)] if batch.open else []
        texts = ", ".join([backend.summarize(_array(x)) for x in plain])
        kind = "raised"
        result = batch.run(registry.count, var, fn, args, kwargs, grouped, texts)
    except KeyboardInterrupt:
        batch.leave()
        raise
    except BaseException as raised:
        error = raised
    error = batch.end(error, kind, describe(var, fn))
    if error is not None:
        raise error
    # Counted now: where it has failed, some rank may not have made this call.
    return wrap(group, result, registry.next_key(), grouped)


def wrap(group: ReplicaGroup, result: Any, number: int, grouped: bool) -> Any:
    """Return what the function of an update has returned, as a value of all ranks."""
    if result is None or type(result) is Variable:
        return result
    kind = Mirrored if grouped else PerReplica
    return group.registry.wrap_numbered(kind, result, number)


def check_update(var: Any, fn: Any, leaves: list[Any]) -> None:
    """Raise for what cannot be updated so.

    Args:
        var: the variable, or None.
        fn: the function.
        leaves: of its further arguments.

    Raises:
        TypeError, ValueError: as `StrategyExtended.update` says.
    """
    if not callable(fn):
        raise TypeError(f"update: expected `fn` to be a function, got {fn!r}")
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            raise ValueError(
                "update: got a PerReplica among the arguments, which would make "
                "the copies of the variable differ; reduce it first: "
                "`strategy.extended.reduce_to(op, value, var)`"
            )
        if differs(leaf) and var is not None and not differs(var):
            raise ValueError(
                f"update: got {leaf!r} among the arguments, whose copies would make "
                "those of the mirrored variable differ; pass its value: "
                "`strategy.extended.read_var(variable)`"
            )


def _is_value(x: Any) -> bool:
    return backend.is_array(x) or backend.is_number(x)


def _by_key(written: list[VariableStorage]) -> list[VariableStorage]:
    """Return each variable once, in an order that is the same on all ranks."""
    return [v for _, v in sorted({v.key: v for v in written}.items())]


_MUST_BE_SAME: Final = "must be the same on all replicas, see `reduce_to`"


def _array(x: Any) -> Any:
    return backend.as_array(x, "update")[0]


def _texts_of(values: list[Any]) -> str:
    return ", ".join([backend.sample(_array(x)) for x in values])


def _is_large(storage: VariableStorage) -> bool:
    """Return whether the text of its values may not show what its fingerprint does."""
    return bool(storage.array.nbytes >= backend.SAMPLED_BYTES)


def _seed_of(number: int) -> int:
    """Return which words of large arrays are compared in the call with this number."""
    return (number * 0x9E3779B1 & 0xFFFFFFFF) >> 12  # looks random: calls come in steps


def make_equal(group: ReplicaGroup, keys: list[Any]) -> None:
    """Give all ranks rank 0's copy of what an update wrote before it failed.

    Collective, but without a header: the guard calls it on all ranks, together with
    the exchange of reports.

    Args:
        group: whose variables they are.
        keys: those of the variables that were written on any rank.
    """
    collectives = group.collectives
    registry = group.registry
    variables = [registry.get(key) for key in keys]
    known = collectives.comm.all_gather_integers(
        [int(v is not None) for v in variables]
    )
    for index, variable in enumerate(variables):
        if all(row[index] for row in known):
            array = array_of(variable)
            transport = collectives.transports.of(array)
            transport.broadcast(backend.as_bytes(array), 0)
