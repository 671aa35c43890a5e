"""Updates: a function runs on every rank, and changes its copies of variables.

All updates run in an `UpdateBatch`: one after the other, and a join at the end. A batch
is a section (`sections`), which ends when it has ended on all ranks. What each update
has written and returned is reduced to a few numbers. The header of the join contains
the fingerprint of these numbers, and so shows whether they are the same on all ranks.
If an update fails on some rank, all ranks raise, and all copies that were written are
made equal to rank 0's.

At program level an update is a batch of one: every rank runs it with its own
arguments, so these are compared too.

In ``merge_fn`` a batch may be long. Rank 0 sends an update and runs it, without waiting
for the other ranks, which run it when they receive it. The batch ends with the next
command that is not an update, and where `Coordinator.update` says; this is the same
whatever carries the commands. Each rank reads all commands, in order.

- An exception on rank 0 is raised immediately, and ends the batch.
- A rank on which a function raises discards the updates after it, until the batch ends.
  The call that ends it raises the exception on all ranks.
- If a function communicates (few do), rank 0 first sends a *check*: a rank that has
  failed then goes to the join, and its header tells those that communicate. The batch
  ends after such an update.
- All variables that were written in the batch are then made equal to rank 0's copies,
  on which all updates of the batch have run.

With a PerReplica among its arguments (or in a replica function) the function receives a
value of each replica's own: as in TensorFlow the caller knows that these are equal, or
that the variable may differ. Such an update is a batch of its own, which keeps the
values that it overwrites. If the copies differ afterwards, no rank's copy is the right
one: each rank gets back the value that it had. (Then rank 0's are sent as usual, for
ranks that did not make this update.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from mpidist._agreement.mismatch import Call, ErrorKind, Key, call_of
from mpidist._agreement.sections import SectionResult, join
from mpidist._base import backend, checksums, nest
from mpidist._base.errors import CollectiveError
from mpidist._base.expect import expect
from mpidist._base.fingerprint import fingerprint, fingerprint_of
from mpidist._base.types import Array, Nest
from mpidist._runtime import context
from mpidist._runtime.dispatch import check_arguments
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.components import differs
from mpidist._values.distributed import Mirrored, PerReplica, argument_of
from mpidist._values.storage import VariableStorage
from mpidist._values.variable import Variable, storage_of

_BATCH: Final = Call("the end of updates in merge_fn")
_LONGEST_SECONDS: Final = 0.25

# Types of arguments that the function of an update receives unchanged.
_AS_THEY_ARE: Final = frozenset(
    (np.ndarray, float, int, bool, str, type(None), np.float32, np.float64)
)
_USUAL: Final = _AS_THEY_ARE | {Mirrored, PerReplica}


class Update(NamedTuple):
    """A call of `StrategyExtended.update` or `update_non_slot`.

    Attributes:
        var: the variable; None for `update_non_slot`.
        fn: the function.
        args: its further positional arguments.
        kwargs: its keyword arguments; None: none.
        grouped: whether the results are the same on all ranks.
    """

    var: Variable | None
    fn: Callable[..., Any]
    args: Sequence[Nest]
    kwargs: Mapping[str, Nest] | None
    grouped: bool

    @property
    def kind(self) -> type[Mirrored] | type[PerReplica]:
        """The class of its results."""
        return Mirrored if self.grouped else PerReplica

    def describe(self) -> str:
        """Return its name, for messages."""
        var, fn = self.var, self.fn
        if var is None:
            name = getattr(fn, "__qualname__", type(fn).__qualname__)
            return f"update_non_slot({name})"
        return f"update of Variable {var.name!r} [#{storage_of(var).key[0]}]"

    def check(self) -> bool:
        """Raise if its arguments are wrong.

        Returns:
            Whether the function gets a value of each replica's own.

        Raises:
            TypeError, ValueError: as `StrategyExtended.update` says.
        """
        var, fn, args, kwargs, _ = self
        is_usual = kwargs is None and callable(fn) and type(args) is tuple
        if is_usual and _USUAL.issuperset(kinds := {*map(type, args)}):
            return PerReplica in kinds
        expect(callable(fn), "update", "`fn` to be a function", fn)
        check_arguments("update", args, {} if kwargs is None else kwargs)
        own = False
        for leaf in self.leaves():
            own = own or isinstance(leaf, PerReplica)
            on_read = isinstance(leaf, Variable) and differs(leaf)
            if on_read and var is not None and not differs(var):
                raise ValueError(
                    f"update: got {leaf!r} among the arguments, whose copies would "
                    "make those of the mirrored variable differ; pass its value: "
                    "`strategy.extended.read_var(variable)`"
                )
        return own

    def leaves(self) -> list[Nest]:
        """Return the leaves of all arguments."""
        return nest.flatten((tuple(self.args), self.kwargs))[0]

    def run(self) -> Nest:
        """Call the function with this rank's components, and return its result."""
        own: list[Nest] = [] if self.var is None else [self.var]
        for x in self.args:
            if type(x) is Mirrored:
                x = x.value()
            elif type(x) not in _AS_THEY_ARE:
                x = nest.map_structure(argument_of, x)
            own.append(x)
        if not self.kwargs:
            return self.fn(*own)
        return self.fn(*own, **nest.map_structure(argument_of, self.kwargs))

    def unreduced(self) -> str:
        """Return, for a message, which arguments differ by replica, and the remedy."""
        named = {f"args[{i}]": x for i, x in enumerate(self.args)}
        named |= {f"kwargs[{key!r}]": x for key, x in (self.kwargs or {}).items()}
        own = [
            name
            for name, x in named.items()
            if any(isinstance(leaf, PerReplica) for leaf in nest.flatten(x)[0])
        ]
        if own:
            return (
                f" ({' and '.join(own)} not reduced: pass `strategy.extended.reduce_to("
                "op, value, variable)`)"
            )
        return (  # called in a replica function
            " (arguments of each replica's own: reduce them first, by `mpidist."
            "get_replica_context().all_reduce(op, value)`)"
        )


class _Effect(NamedTuple):
    """The effect of one update, for the message if ranks differ."""

    update: Update  # without its arguments, unless some are each replica's own
    arguments: str  # "" if they are known to be the same on all ranks
    structure: str  # of the result
    written: list[tuple[VariableStorage, int]]
    returned: Sequence[Nest]


class UpdateBatch(SectionResult):
    """Updates on this rank, until the next join.

    It keeps the variables that it writes alive until all ranks have compared them:
    some ranks may have dropped theirs, and all have to make their copies equal.

    Attributes:
        open: whether this is a section, which the join ends; not with the guard off.
        failed: whether one of the updates has raised on this rank.
        communicates: whether the function of the last one did. It ends the batch.
        long: whether it is so old that it should end: failures wait for the end.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._guard = guard = group.guard
        self.open = self.failed = self.communicates = self.long = False
        self.kind = "none"
        self._failed_in = ""
        self._numbers: list[int] = []
        self._effects: list[_Effect] = []
        self._written: list[Variable] = []  # in the order of the writes
        # By key, with the values before; None: these are not kept.
        self._kept: dict[Key, tuple[VariableStorage, Array]] | None = None
        self._began = time.monotonic()
        if guard.checks:
            guard.enter_section()
            self._outer = guard.reports.undo
            guard.reports.undo = self.undo
            self.open = True  # now `leave` has all that it needs
        batch = self if self.open else None
        self._frame = context.Frame(group, context.Level.UPDATE, batch=batch)

    def keep(self) -> None:
        """Keep the values that the only update of this batch overwrites."""
        self._kept = {}

    def will_write(self, variable: Variable) -> None:
        """Note that the function of an update is about to write a variable."""
        storage = storage_of(variable)
        if self._kept is not None and storage.key not in self._kept:
            self._kept[storage.key] = storage, storage.array.copy()
        self._written.append(variable)

    def undo(self) -> list[Key]:
        """Give the variables the values that were kept; return the keys of all."""
        for storage, value in (self._kept or {}).values():
            storage.array[...] = value
        self._kept = None
        return sorted({storage_of(variable).key for variable in self._written})

    def run(self, number: int, update: Update, arguments: str = "") -> Nest:
        """Run an update on this rank; return the result of its function.

        Args:
            number: the number of the call, the same on all ranks.
            update: the update.
            arguments: a text of the arguments that have to be the same on all ranks.
        """
        before = len(self._written)
        with self._frame:
            result = update.run()
        if not self.open:
            return result
        self.long = time.monotonic() - self._began > _LONGEST_SECONDS
        # Compared at the join. The seed chooses words of large arrays, as if at random.
        seed = (number * 0x9E3779B1 & 0xFFFFFFFF) >> 12
        storages = [storage_of(variable) for variable in self._written[before:]]
        if len(storages) > 1:  # each once, in an order that is the same on all ranks
            storages = [v for _, v in sorted({v.key: v for v in storages}.items())]
        structure, returned = nest.LEAF, []
        if result is not None and type(result) is not Variable:
            leaves, shape = nest.flatten(result)
            structure = str(shape)
            if update.grouped:
                returned = [x for x in leaves if _is_value(x)]
        numbers = self._numbers
        numbers.append(fingerprint(structure))
        if arguments:
            numbers.append(fingerprint_of(arguments))
        written: list[tuple[VariableStorage, int]] = []
        for v in storages:
            one = v.fingerprint(seed)
            numbers += (v.key[0], one)
            written.append((v, one))
        for x in returned:
            numbers.append(checksums.fingerprint_of_array(_array(x), seed))
        if self._kept is None:
            # Without the arguments, which may be large.
            update = Update(update.var, update.fn, (), None, update.grouped)
        self._effects.append(_Effect(update, arguments, structure, written, returned))
        return result

    def fail(
        self, error: BaseException, kind: ErrorKind = "raised", call: str = ""
    ) -> None:
        """Store the exception that an update has raised on this rank.

        Args:
            error: the exception.
            kind: the kind of that exception.
            call: the name of the update.
        """
        if self.failed:
            return  # the first one counts
        self.failed = True
        if isinstance(error, CollectiveError):
            kind = "agreed"
        self.error, self.kind, self._failed_in = error, kind, call

    def end(self, call: str = "") -> BaseException | None:
        """Wait for the end of the batch on all ranks; return the exception to raise.

        Collective.

        Args:
            call: the name of the update, if all ranks know it.
        """
        if not self.open:
            return self.error
        guard = self._guard
        guard.reports.undo = self.undo
        name = call or self._failed_in
        what = call_of(name) if name else _BATCH
        try:
            self.fingerprint = fingerprint_of(self._numbers)
            found = join(guard, what, self)
            if found is None:
                self._kept = None
            return found
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the section. Without a join before, undo what `keep` has kept."""
        if self.open:
            self.open = False
            if self._kept is not None:
                self.undo()
            guard = self._guard
            guard.reports.undo = self._outer
            guard.leave_section()
            del self._numbers, self._effects, self._written, self._frame

    def describe(self) -> str:
        """Describe the effects of all updates."""
        last = {
            v.key: k
            for k, effect in enumerate(self._effects)
            for v, _ in effect.written
        }
        parts = []
        for k, effect in enumerate(self._effects):
            texts = []
            for v, n in effect.written:
                text = f"{v.name!r} [#{v.key[0]}] = {checksums.sample(v.array)}"
                # It shows neither an earlier value, nor all values of a large array.
                if last[v.key] != k or v.array.nbytes >= checksums.SAMPLED_BYTES:
                    text += f" (then {n:x})"
                texts.append(text)
            part = f"{effect.update.describe()} -> {effect.structure}"
            if self._kept is not None:
                part += effect.update.unreduced()
            if effect.arguments:
                part += f", with arguments {effect.arguments}"
            if texts:
                part += f", wrote {', '.join(texts)}"
            if effect.returned:
                values = [checksums.sample(_array(x)) for x in effect.returned]
                part += f", returned {', '.join(values)}"
            parts.append(part)
        # The subject first: the ends of long texts are cut off.
        return (
            "what must be the same on all replicas, see `reduce_to`: "
            f"{'; '.join(parts)}"
        )


def run_update(group: ReplicaGroup, update: Update, *, own: bool = False) -> Nest:
    """Run an update that all ranks call, as a batch of one; return its result.

    Collective.

    Args:
        group: the ranks.
        update: the update.
        own: whether it is called in a replica function, where each rank may have
            arguments of its own. The result is then that of this replica.
    """
    batch = UpdateBatch(group)
    result: Nest = None
    kind: ErrorKind = "invalid"
    try:
        if update.check() or own:
            batch.keep()
        texts = ""
        if batch.open and not own:
            plain = [_array(x) for x in update.leaves() if _is_value(x)]
            texts = ", ".join(map(checksums.summarize, plain))
        kind = "raised"
        result = batch.run(group.registry.count, update, texts)
    except KeyboardInterrupt as interrupt:
        batch.leave()
        call = Call(update.describe())
        raise group.guard.abandon(call, interrupt) from None
    except BaseException as raised:
        batch.fail(raised, kind)
    error = batch.end(update.describe())
    if error is not None:
        raise error
    # Counted now: if it has failed, some rank may not have made this call.
    number = group.registry.next_key()
    if own:
        return result
    return group.registry.wrap_numbered(update.kind, result, number)


def _is_value(x: object) -> bool:
    return backend.is_number(x) or backend.is_array(x)


def _array(x: Nest) -> Array:
    return backend.as_array(x, "update")[0]
