"""Names of the objects that a ``merge_fn`` can reach, which every rank has.

Each rank passes its own ``merge_fn`` to `merge_call`. Only rank 0's is called, but the
objects that it closes over are on the other ranks too: their ``merge_fn`` closes over
them. If a function that rank 0 sends refers to such an object, the name of the object
is sent, and each rank uses its own object. A name is a path: ``merge_fn``, the closure
variable ``self``, the attribute ``optimizer``.

The rule
--------
- Objects that have a name: those that, when the `merge_call` begins, are reached from
  merge_fn (its ``__self__``, closure, defaults, the parts of a `functools.partial`, the
  globals that its code mentions) and from those arguments of the call that merge_fn
  receives unchanged, through attributes, slots, lists, tuples, dicts and functions of
  the program: the nearest ones first, up to `MOST`.
- Values have no name: numbers, strings, tuples, frozensets and the like are sent by
  value. So are objects that merge_fn creates.
- A name stands for each rank's own object, in the state that it has on that rank.
  Changes that merge_fn has made to rank 0's object before it calls `update` are not
  made on the other ranks.
- Names are valid for one `merge_call`, during which all these objects stay alive.
- merge_fns of different code (a dummy on some ranks) have no names: then everything is
  sent by value.

Each rank checks, for each name that is used, before the function runs: the object
exists, it has the type of rank 0's object, it is the same object under each of the
names of rank 0's object, and no other name in use stands for it. If a check fails, all
ranks raise an error. Differences between objects that are not named (a log that only
rank 0 keeps) have no effect. If the state of objects differs, the comparison after an
update (`updates`) finds what matters: copies of variables that differ.

The objects are found when the `merge_call` begins, on all ranks at the same time, and
not when the first name is needed: by then merge_fn may have replaced objects.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base.errors import warn_caller
from mpidist._collectives.collectives import Collectives
from mpidist._merge.object_parts import (
    ATOMS,
    MOST,
    THING,
    Kind,
    Part,
    Step,
    function_in,
    kind_of,
    parts_of,
)

_MOST_ALIASES: Final = 4
_MOST_BYTES: Final = 64 << 20  # of an array that is compared

Path: TypeAlias = tuple[Step, ...]

Name: TypeAlias = tuple[Path, tuple[tuple[Path, Path], ...], str]
"""What is sent for an object of rank 0: the path to it; pairs of paths that lead to one
object there, which is this one or on the way to it; and the text of its type."""


class Names:
    """The objects of one `merge_call` that have names, on one rank.

    Args:
        merge_fn: the function. Functions with other globals are not entered.
        arguments: those of the call that are the same on all ranks, and their numbers.
        known: objects that have a name of another kind, and are not entered.

    Attributes:
        reached: the objects, the nearest ones first.
    """

    def __init__(
        self,
        merge_fn: object,
        arguments: Iterable[tuple[int, object]] = (),
        known: Iterable[object] = (),
    ) -> None:
        # The place of each object that was found, in `reached`, by its id.
        self._found: dict[int, int] = dict.fromkeys(map(id, known), -1)
        # The place of the object that holds it, and the step from there.
        self._origins: list[tuple[int, Step]] = []
        # Further paths to objects that were found before: the place of the object, the
        # place where the last step begins, and this step.
        self._again: list[tuple[int, int, Step]] = []
        self.reached: list[Any] = []
        self._names: dict[int, Name | None] = {}  # by place
        self._used: dict[int, Path] = {}  # by place: the name that stands for it
        roots: list[Part] = [("merge_fn", merge_fn)]
        for number, argument in arguments:
            roots.append((f"argument {number} of merge_call", argument))
        function = function_in(merge_fn)
        if type(function) is not types.FunctionType:  # an object that can be called
            function = vars(type(function)).get("__call__")
        self._home: dict[str, Any] | None = getattr(function, "__globals__", None)
        self._walk(roots)

    def _walk(self, roots: list[Part]) -> None:
        reached, found, origins = self.reached, self._found, self._origins
        home = self._home
        entered: list[Kind] = []
        current = -1
        parts: Iterable[Part] = roots
        while True:
            for step, part in parts:
                role = kind_of(type(part))
                if role is None:
                    continue
                place = found.get(id(part))
                if place is not None:
                    if place >= 0:
                        self._again.append((place, current, step))
                    continue
                found[id(part)] = len(reached)
                # The globals of merge_fn have a name, and are not entered.
                entered.append(THING if part is home else role)
                reached.append(part)
                origins.append((current, step))
            current += 1
            if current >= len(reached) or len(reached) >= MOST:
                break
            kind = entered[current]
            parts = () if kind is THING else parts_of(reached[current], kind, home)

    def parts(self, x: Any) -> Iterable[Part]:
        """Return the parts of an object (items, attributes) with their names."""
        kind = kind_of(type(x))
        if kind is None or x is self._home:
            return ()
        return parts_of(x, kind, self._home)

    def text_of(self, place: int, step: Step) -> str:
        """Return the path to a part of an object, as a person would write it."""
        path = self._path_of(place)
        if step != "":
            path = (*path, step)
        return f"`{readable(path)}`"

    # --- on rank 0 ------------------------------------------------------------

    def name_of(self, x: object) -> Name | None:
        """Return what stands for an object in commands; None if it has no name."""
        place = self._found.get(id(x), -1)
        if place < 0:
            return None
        if place not in self._names:
            self._names[place] = self._make_name(place, x)
        return self._names[place]

    def _make_name(self, place: int, x: Any) -> Name | None:
        kind = kind_of(type(x))
        if kind is None or not kind.named:
            return None
        aliases = []
        above = place
        while above >= 0:
            found = [(at, step) for k, at, step in self._again if k == above]
            for at, step in found[:_MOST_ALIASES]:
                aliases.append((self._path_of(above), (*self._path_of(at), step)))
            above = self._origins[above][0]
        return self._path_of(place), tuple(aliases), _text_of(x)

    def _path_of(self, place: int) -> Path:
        steps: list[Step] = []
        while place >= 0:
            place, step = self._origins[place]
            steps.append(step)
        return tuple(reversed(steps))

    # --- on the other ranks ---------------------------------------------------

    def object(
        self, path: Path, aliases: Sequence[tuple[Path, Path]], text: str
    ) -> Any:
        """Return this rank's object for the name of an object of rank 0.

        Raises:
            ValueError: if this rank has none, or if it is not like rank 0's.
        """
        place = self._resolve(path)
        wrong = self._difference(place, path, aliases, text)
        if wrong or place is None:
            raise ValueError(
                f"a function that merge_fn sends refers to `{readable(path)}`, and "
                f"each rank uses its own, but {wrong}. Make the objects of the program "
                "alike on all ranks, or make what belongs to rank 0 alone inside "
                "merge_fn"
            )
        self._used[place] = path
        return self.reached[place]

    def _difference(
        self,
        place: int | None,
        path: Path,
        aliases: Sequence[tuple[Path, Path]],
        text: str,
    ) -> str:
        """Return how this rank's object differs from rank 0's; "" if it does not."""
        if place is None:
            return f"this rank has no object under that name (rank 0: {text})"
        mine = _text_of(self.reached[place])
        if mine != text:
            return f"rank 0 has {text} there, and this rank {mine}"
        for one, other in aliases:
            if len({self._resolve(one), self._resolve(other)} - {None}) > 1:
                return (
                    f"`{readable(one)}` and `{readable(other)}` are one object on "
                    "rank 0, and two on this rank"
                )
        before = self._used.get(place, path)
        if before != path:
            return (
                f"it is the same object as `{readable(before)}` on this rank, and "
                "another one on rank 0"
            )
        return ""

    @functools.cached_property
    def _steps(self) -> dict[tuple[int, Step], int]:
        """The place of each object, by the place and the step that lead to it."""
        steps = {origin: place for place, origin in enumerate(self._origins)}
        return steps | {(at, step): place for place, at, step in self._again}

    def _resolve(self, path: Path) -> int | None:
        place: int | None = -1
        for step in path:
            place = self._steps.get((place, step)) if place is not None else None
        return place


def _text_of(x: Any) -> str:
    """Return the type of an object, and the name of a function or class."""
    kind = type(x)
    text = f"a {kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, (type, types.FunctionType)):
        text += f" ({x.__module__}.{x.__qualname__})"
    return text.replace("a builtins.", "a ")


def readable(path: Path) -> str:
    """Return a path as a person would write it."""
    text = ""
    for step in path:
        if type(step) is str:
            text += f".{step}" if text else step
        elif type(step) is int:
            text += f"[{step}]"
        elif type(step) is tuple and len(step) == 1:
            text += f"[{step[0]!r}]"
        elif type(step) is tuple:
            kind, name = step
            text += f".<{kind} {name}>"
    return text


class Changes:
    """With ``MPIDIST_DEBUG=1``: which objects merge_fn changes on rank 0 alone.

    TensorFlow's merge_fn runs in the one process of all replicas, so ``self.n += 1`` in
    it counts for all. Here the other ranks, which do not run it, keep their old number.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._before = [_contents(x, names) for x in names.reached]

    def _paths(self) -> Iterator[str]:
        for place, before in enumerate(self._before):
            after = _contents(self._names.reached[place], self._names)
            for step in before.keys() | after.keys():
                if not _same(before.get(step, self), after.get(step, self)):
                    yield self._names.text_of(place, step)

    def tell(self, collectives: Collectives) -> None:
        """Warn on rank 0 of what has changed there only. Collective."""
        own = sorted(self._paths())
        call = Call("merge_call (MPIDIST_DEBUG: the same objects changed?)")
        first, *others = map(set, collectives.guard.values_of_all(call, own))
        alone = first.difference(*others)
        if alone and collectives.comm.rank == 0:
            warn_caller(
                f"merge_call: merge_fn has changed {', '.join(sorted(alone))} on rank "
                "0, and not on the other ranks, which do not run it; write a "
                "`mpidist.Variable`, or change it after the `merge_call`"
            )


def _contents(x: object, names: Names) -> dict[Step, Any]:
    if isinstance(x, np.ndarray):
        # Objects have comparisons of their own, and large arrays need memory.
        is_small = x.nbytes <= _MOST_BYTES and not x.dtype.hasobject
        return {"": np.array(x)} if is_small else {}
    return dict(names.parts(x))


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        known = (one.dtype, one.shape) == (other.dtype, other.shape)
        return known and one.tobytes() == other.tobytes()
    return one is other or (
        type(one) is type(other) and type(one) in ATOMS and one == other
    )
