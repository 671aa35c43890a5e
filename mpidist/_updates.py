"""Updates: a function runs on every rank, and changes its copies of variables.

At program level an update is a section (`_guard`): it ends when it has ended on all
ranks, and what it has written and returned is compared. What fails on some rank is
raised on all, and all copies that were written are made equal to rank 0's again.

In ``merge_fn`` there may be many updates, one after the other, and nothing but rank 0's
commands makes the ranks meet. There a *stretch* of updates is one section: rank 0 sends
an update and runs it, without waiting for the other ranks, which run it when they
come to it. What each has written and returned is added up in one number. A stretch ends
with a join: before the next command that is no update, at the end of merge_fn, or when
it has become long (`_coordinator`).

- Rank 0's own exception is raised at once: the stretch ends there.
- A rank on which a function raises goes to the join at once, and waits there for
  the others, as at the end of any section. So functions that communicate (few do)
  learn of it by their headers. The exception is raised on all ranks by the call that
  ends the stretch. What rank 0 has sent in the meantime that rank drops: each message
  has the number of joins that were before it.
- All variables that were written in the stretch are made equal then: rank 0's copies,
  on which all updates of the stretch have run.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mpidist import _arrays, _context, _dispatch, _nest
from mpidist._dispatch import check_arguments
from mpidist._errors import CollectiveError
from mpidist._guard import Part
from mpidist._policies import differs
from mpidist._reports import Call, ErrorKind, call_of, fingerprint
from mpidist._values import Mirrored, PerReplica, argument_of
from mpidist._variables import Variable

if TYPE_CHECKING:
    from mpidist._strategy import Strategy

_STRETCH: Final = Call("the end of updates in merge_fn")
_LONGEST_SECONDS: Final = 0.25
_LEAF: Final = str(_nest.flatten(None)[1])
_LEAF_PRINT: Final = fingerprint(_LEAF)
# Arguments that a function gets as they are.
_AS_THEY_ARE: Final = frozenset(
    (np.ndarray, float, int, bool, str, type(None), np.float32, np.float64)
)


class Stretch:
    """Updates of a ``merge_fn`` on this rank, between two joins.

    Attributes:
        open: whether there were any since the last join.
        joins: how many joins there were.
        ring_start: for rank 0: where its messages were when the stretch began.
    """

    # What is set when the stretch begins: most merge_calls have none.
    _frame: _context.Frame
    _began: float
    _outer: list[Any]

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._guard = strategy.extended._collectives.guard
        self.open = False
        self.joins = 0
        self.ring_start = 0
        self._number = 0
        self._written: list[Any] = []
        # Of each update: the variable, the function, the structure of the result, the
        # written variables with their prints, and the values that it returned.
        self._effects: list[tuple[Any, Any, str, list[Any], list[Any]]] = []

    @property
    def long(self) -> bool:
        """Whether it is time for a join, so that failures are not told too late."""
        return self.open and time.monotonic() - self._began > _LONGEST_SECONDS

    def begin(self) -> None:
        """Enter the section, where this is the first update since a join."""
        if self.open:
            return
        guard = self._guard
        written: list[Any] | None = None
        if guard.checks:
            guard.section().__enter__()
            self.open = True
            self._outer = guard.written
            self._began = time.monotonic()
            self._written = written = []
        self._frame = _context.Frame(
            self._strategy, _context.Level.UPDATE, written=written
        )

    def run(
        self, number: int, var: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        """Run an update on this rank; return what it gives, wrapped.

        Args:
            number: the key of the result, counted on all ranks.
            var: the variable; None for `update_non_slot`.
            fn: the function.
            args: its further positional arguments.
            kwargs: its keyword arguments.
            group: whether the results are the same on all ranks.
        """
        guard, written = self._guard, self._written
        if self.open:
            guard.require_section()
            guard.written = written
        before = len(written)
        own = [_own(x) for x in args]
        if var is not None:
            own.insert(0, var)
        with _context.entered(self._frame):
            if kwargs:
                result = fn(*own, **_nest.map_structure(argument_of, kwargs))
            else:
                result = fn(*own)
        kind = type(result)
        plain = result is None or kind is Variable
        if not self.open:
            if plain:
                return result
        elif plain:
            self._note(number, var, fn, _LEAF, _LEAF_PRINT, written[before:], [])
            return result
        else:
            leaves, shape = _nest.flatten(result)
            text = str(shape)
            values = [x for x in leaves if group and _is_value(x)]
            shape_print = fingerprint(text)
            self._note(number, var, fn, text, shape_print, written[before:], values)
        wrapper = Mirrored if group else PerReplica
        registry = self._strategy.extended._registry
        return registry.wrap_numbered(wrapper, result, number)

    def _note(
        self,
        number: int,
        var: Any,
        fn: Any,
        text: str,
        shape_print: int,
        written: list[Any],
        values: list[Any],
    ) -> None:
        """Add what an update has left to what is compared at the join."""
        if len(written) > 1:
            written = _by_key(written)
        turn = _turn_of(number)
        prints = [(v, v._print(turn)) for v in written]
        # Tuples of integers have the same hash in every process.
        total = hash((self._number, shape_print))
        for v, one in prints:
            total = hash((total, v._key[0], one))
        for x in values:
            array = _arrays.as_array(x, "update")[0]
            total = hash((total, _arrays.print_of(array, turn)))
        self._number = total
        self._effects.append((var, fn, text, prints, values))

    def end(
        self,
        error: BaseException | None = None,
        kind: ErrorKind = "raised",
        call: str = "",
    ) -> BaseException | None:
        """Wait for the end of the stretch on all ranks; return what to raise.

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
        guard.written = self._written
        what = call_of(call) if call else _STRETCH
        try:
            return guard.join(what, error, kind, self._describe, self._number >> 2)
        finally:
            self.leave()
            self.joins += 1

    def leave(self) -> None:
        """Leave the section, also without a join."""
        if self.open:
            self.open = False
            guard = self._guard
            guard.written = self._outer
            guard.__exit__()
            self._number = 0
            self._effects = []
            self._written = []

    def _describe(self) -> str:
        """Return a text of what the updates have left."""
        effects = enumerate(self._effects)
        last = {v._key: k for k, effect in effects for v, _ in effect[3]}
        parts = []
        for k, (var, fn, text, prints, values) in enumerate(self._effects):
            part = _describe_effects(
                [v for v, _ in prints],
                values,
                [
                    f" (then {n:x})" if last[v._key] != k or _is_large(v) else ""
                    for v, n in prints
                ],
            )
            parts.append(f"{describe(var, fn)} -> {text}{part}")
        # First what it is about: of long texts the end is cut off.
        return f"what {_MUST_BE_SAME}: {'; '.join(parts)}"


def _own(x: Any) -> Any:
    """Return what the function gets for an argument."""
    kind = type(x)
    if kind is Mirrored:
        return x._read()
    return x if kind in _AS_THEY_ARE else _nest.map_structure(argument_of, x)


def describe(var: Any, fn: Any) -> str:
    """Return the name of an update, for messages."""
    if var is None:
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        return f"update_non_slot({name})"
    return f"update of Variable {var.name!r} [#{var._key[0]}]"


@_dispatch.verb("update")
def _update(
    strategy: Strategy,
    var: Any,
    fn: Any,
    args: Any,
    kwargs: Any,
    group: bool,
    text: str,
) -> Any:
    """Run ``fn`` in the frame of an update; ``var`` is None for `update_non_slot`."""
    extended = strategy.extended
    guard = extended._collectives.guard
    checks = guard.checks
    written: list[Any] = []
    outer = guard.written

    def body(part: Part) -> Any:
        check_arguments("update", args, kwargs)
        leaves, structure = _nest.flatten((tuple(args), kwargs))
        check_update(var, fn, leaves)
        part.kind = "raised"
        if checks:
            guard.require_section()  # else nobody would undo what is written
            guard.written = written
        frame = _context.Frame(strategy, _context.Level.UPDATE, written=written)
        first = () if var is None else (var,)
        own_args, own_kwargs = structure.unflatten([argument_of(x) for x in leaves])
        with _context.entered(frame):
            result = fn(*first, *own_args, **own_kwargs)
        flat, shape = _nest.flatten(result)
        text = str(shape)
        if not checks:
            part.came_out(text, fingerprint(text))
            return result
        plain = [x for x in leaves if _is_value(x)]
        returned = [x for x in flat if group and _is_value(x)]
        variables = _by_key(written)
        if not (plain or returned):
            turn = _turn_of(extended._registry.count)
            prints = [v._print(turn) for v in variables]
            number = hash((fingerprint(text), *(v._key[0] for v in variables), *prints))
            part.came_out(lambda: text + _effects_text(variables, prints), number >> 2)
            return result
        text = _describe_plain(plain) + text + _effects_text(variables, [], returned)
        part.came_out(text, fingerprint(text))
        return result

    try:
        result = guard.run_section(call_of(text), body)
    finally:
        guard.written = outer
    return extended._registry.wrap_tree(Mirrored if group else PerReplica, result)


def check_update(var: Any, fn: Any, leaves: list[Any]) -> None:
    """Raise for what can not be updated so.

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
    return _arrays.is_array(x) or _arrays.is_number(x)


def _by_key(variables: list[Any]) -> list[Any]:
    """Return each variable once, in an order that is the same on all ranks."""
    return [v for _, v in sorted({v._key: v for v in variables}.items())]


def _describe_plain(values: list[Any]) -> str:
    """Return a text of the plain arguments, which must be the same on all ranks."""
    texts = [_arrays.summarize(_arrays.as_array(x, "update")[0]) for x in values]
    return f"arguments {', '.join(texts)}; result " if texts else ""


_MUST_BE_SAME: Final = "must be the same on all replicas, see `reduce_to`"


def _effects_text(
    variables: list[Any], prints: list[int], returned: list[Any] | None = None
) -> str:
    more = [""] * len(variables)
    for k, one in enumerate(prints):
        if _is_large(variables[k]):
            more[k] = f" ({one:x})"
    text = _describe_effects(variables, returned or [], more)
    return text and f"{text}; {_MUST_BE_SAME}"


def _is_large(variable: Any) -> bool:
    """Whether the text of its values may not show what its print does."""
    return bool(variable._array.nbytes >= _arrays.SAMPLED_BYTES)


def _turn_of(number: int) -> int:
    """Return which words of large arrays are compared in the call with this number."""
    return (number * 0x9E3779B1 & 0xFFFFFFFF) >> 12  # looks random: calls come in steps


def _describe_effects(
    variables: list[Any], returned: list[Any], more: list[str]
) -> str:
    """Return a text of what an update left, which must be the same on all ranks.

    ``fn`` may get at values of its own rank without any argument: through what it
    closes over, or a variable that is ON_READ.
    """
    texts = [
        f"{v.name!r} [#{v._key[0]}] = {_arrays.sample(v._array)}{note}"
        for v, note in zip(variables, more, strict=True)
    ]
    results = [_arrays.sample(_arrays.as_array(x, "update")[0]) for x in returned]
    text = f", wrote {', '.join(texts)}" if texts else ""
    return text + (f", returned {', '.join(results)}" if results else "")


def make_equal(strategy: Strategy, keys: list[Any]) -> None:
    """Give all ranks rank 0's copy of what an update wrote before it failed.

    Collective, but without a header: the guard calls it on all ranks, together with
    the exchange of reports.

    Args:
        strategy: whose variables they are.
        keys: those of the variables that were written on any rank.
    """
    collectives = strategy.extended._collectives
    registry = strategy.extended._registry
    variables = [registry.get(key) for key in keys]
    known = collectives.comm.all_gather_integers(
        [int(v is not None) for v in variables]
    )
    for index, variable in enumerate(variables):
        if all(row[index] for row in known):
            transport = collectives.transports.of(variable._array)
            transport.broadcast(_arrays.as_bytes(variable._array), 0)
