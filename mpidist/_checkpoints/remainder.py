"""What a restore has left in a checkpoint, for objects that are attached after it.

A program may restore before its objects have all their variables. Modules and
checkpoints tell what is assigned to their attributes, and what then has a value in the
checkpoint gets it at once, as in TensorFlow. Rank 0 keeps the files open, which are
read then: no rank keeps values in memory, and the checkpoint may be deleted meanwhile.
So the assignment is a collective call, like the restore itself: a rank that makes it
alone gets the same `CollectiveMismatchError` as the others at their next call.

What else tells nothing (a list, a dict, an object of another class) is found by the
first `run` after its variables were made, and before the next assignment. It gets its
value if it is sure that the program has not changed it: new variables note their first
value (`VariableStorage.first`). Otherwise it keeps what it has, with a warning, which
the next save, the status and the end of the program give, too.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final

from mpidist._agreement.mismatch import Call, fingerprint
from mpidist._base import checksums
from mpidist._checkpoints import contents
from mpidist._checkpoints.items import Item, LaterItem, StateItem, VariableItem
from mpidist._checkpoints.restoring import listed
from mpidist._checkpoints.storage import CheckpointReader
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist._values.storage import VariableStorage
from mpidist._values.variable import storage_of, when_made

_numbers: Final = itertools.count(1)
_all: Final[weakref.WeakValueDictionary[int, Remainder]] = weakref.WeakValueDictionary()
_groups: Final[weakref.WeakSet[ReplicaGroup]] = weakref.WeakSet()


class Remainder:
    """The items of a checkpoint that a restore has not found among the objects.

    Attributes:
        number: of the restore. A variable has that of its last one.
        saved: the names of all items in the checkpoint.
        names: of those that are left for what is attached.
        lost: of those for which that did not fit, or was told of too late.
        later: the objects that restore their variables when they make them.
        group: the ranks.
        path: of the checkpoint.
        reader: the open checkpoint, on rank 0.
    """

    def __init__(
        self,
        objects: MutableMapping[str, Any],
        restore: Callable[[Remainder, list[Item], bool], None],
        group: ReplicaGroup,
        path: str,
    ) -> None:
        """Note the objects, and the collective function that restores more of them."""
        self.names: set[str] = set()  # first, since `__del__` asks for it
        self._objects, self._restore = objects, restore
        self.group: ReplicaGroup = group
        self.path: str = path
        self.number: int = next(_numbers)
        self.saved: set[str] = set()
        self.lost: set[str] = set()
        self._containers: dict[str, object] = {}
        self.later: list[LaterItem] = []
        self.reader: CheckpointReader | None = None

    def __reduce__(self) -> Any:
        return Remainder, ({}, None, None, "")  # of a copied module: it has nothing

    def begin(
        self, restored: list[str], later: list[LaterItem], left: list[str]
    ) -> None:
        """Note what was restored, and what was left."""
        self.saved, self.names = {*restored, *left}, set(left)
        self.later = later
        if left:
            self._watch()
            _all[self.number] = self
            _groups.add(self.group)
        else:
            self.reader = None

    def _watch(self) -> None:
        """Have modules and checkpoints among the objects tell what is attached.

        What was left for the parts of one object is not for those of another in its
        place.
        """
        for name, value in contents.containers("", self._objects, set()):
            if self._containers.setdefault(name, value) is not value:
                self._containers[name] = value
                self._lose(x for x in self.names if x.startswith(f"{name}/"))
            if hasattr(value, "__when_attached__"):
                value.__when_attached__(self.attached)

    def _lose(self, names: Iterable[str]) -> None:
        self.lost.update(names)
        self.names -= self.lost

    def attached(self, is_assigned: bool) -> None:
        """Restore what was attached since. Collective if that is anything.

        Args:
            is_assigned: whether an assignment has just attached it; otherwise the
                program may have changed it since, and then it keeps its value.
        """
        if not self.names:
            return
        self._watch()
        if items := self.found():
            try:
                self._restore(self, items, is_assigned)
            except Exception as error:
                names = listed([item.name for item in items])
                error.add_note(f"{names}: attached after `Checkpoint.restore`")
                raise

    def found(self) -> list[Item]:
        """Return the items of what was attached since."""
        items = self.waiting(contents.collect(self._objects, "later"))
        # The program sets a pytree to save it: perhaps it is a newer one.
        return [x for x in items if not getattr(x, "is_held", False)]

    def take(self, items: Iterable[Item]) -> set[str]:
        """Return the names of what is left for some items, which is `lost` now.

        Called on all ranks, so that it is the same on all if one of them raises.
        """
        found = {item.name for item in items}
        later = (item for item in items if isinstance(item, LaterItem))
        found.update(*(item.arrays(self.names) for item in later))
        found &= self.names
        self._lose(found)
        return found

    def waiting(self, items: Iterable[Item]) -> list[Item]:
        """Return the items that this restore would have restored, had it met them."""
        found: list[Item] = []
        for item in items:
            if isinstance(item, VariableItem):
                is_saved = item.name in self.names or item.count in self.names
                if is_saved and storage_of(item.variable).restored >= self.number:
                    self.names.discard(item.name)  # by another name, or a later restore
                elif is_saved:
                    found.append(item)
                continue
            is_later = isinstance(item, LaterItem) and item.arrays(self.names)
            if item.name in self.names or is_later:
                found.append(item)
        return found

    def missing(self) -> tuple[list[str], list[str]]:
        """Return the names of objects that were attached unnoticed, or never saved."""
        items = contents.collect(self._objects, "later")
        unnoticed = [item.name for item in self.waiting(items)]
        own = {item.name for item in self.later}
        kept = tuple(f"{name}/" for name in own)
        never: list[str] = []
        for item in items:
            if isinstance(item, VariableItem):
                restored = storage_of(item.variable).restored >= self.number
                restored = restored or item.name.startswith(kept)
            elif isinstance(item, StateItem):
                restored = item.is_optional or item.name in self.saved
            else:
                restored = item.name in own
            if not restored and item.name not in unnoticed:
                never.append(item.name)
        return unnoticed, never

    def matches(self) -> bool:
        """Return whether the checkpoint has anything for these objects."""
        own = {name.partition("/")[0] for name in self.saved}
        return not own.isdisjoint(self._objects)

    def warn(self) -> None:
        """Warn, on rank 0, of objects that were attached unnoticed; once."""
        if not self.names:
            return
        items = self.waiting(contents.collect(self._objects, "later"))
        self.take(items)
        if items:
            self.tell(items)

    def tell(self, items: Iterable[Item]) -> None:
        """Warn, on rank 0, that some items keep their values."""
        if self.reader is not None:
            warnings.warn(
                f"Checkpoint.restore: {unnoticed([item.name for item in items])}",
                RuntimeWarning,
                stacklevel=2,
            )

    def __del__(self) -> None:
        self.warn()


def unnoticed(names: list[str]) -> str:
    """Return a message about objects that were attached unnoticed."""
    return (
        f"not restored, although in the checkpoint: {listed(names)}; attached after "
        "the restore, to a list, a dict or another object that tells nothing, or a "
        "pytree. Write `checkpoint.restore(path, partial=True)` once more, after that"
    )


def is_changed(item: Item) -> bool:
    """Return whether the program may have changed an item since it was made."""
    if isinstance(item, VariableItem):
        storage = storage_of(item.variable)
        return storage.first != checksums.summarize(storage.array)
    if isinstance(item, StateItem):
        return not item.is_optional or item.get() is not None  # an assigned rate
    return False  # it has no variables yet


def _pending() -> list[Remainder]:
    """Return those that have something left, the last restore first."""
    found = [reference() for reference in _all.valuerefs()]  # other threads add some
    pending = [x for x in found if x is not None and x.names]
    return sorted(pending, key=lambda x: -x.number)


def _note(storage: VariableStorage) -> None:
    """Have the next `run` look for what a new variable has in a checkpoint."""
    if storage.group in _groups:
        storage.first = checksums.summarize(storage.array)
        storage.group.before_run = functools.partial(_look, storage.group)


def _found(group: ReplicaGroup, call: Call) -> tuple[list[Remainder], bool]:
    """Return the restores of a group, and whether all ranks found the same for them."""
    pending = [x for x in _pending() if x.group is group]
    found = [items for x in pending if (items := [*map(str, x.found())])]
    return pending, group.guard.agree_on(call, fingerprint(str(found)))


@tells("Strategy.run", lambda group: group)
def _look(group: ReplicaGroup) -> None:
    """Restore what was attached to lists and dicts, before `run`. Collective.

    Objects that the program has dropped may still be there on some of the ranks; then
    they are collected. If another rank makes another call, all raise, and the next
    `run` looks.
    """
    try:
        context.require_program_level(group, "Strategy.run")
    except RuntimeError:
        return  # in `merge_fn`, or `run` raises it too
    call = Call("Strategy.run, restoring what was attached before")
    pending, agreed = _found(group, call)
    if not agreed:
        del pending
        gc.collect()
        pending, agreed = _found(group, call)
    group.before_run = None
    if agreed:
        for remainder in pending:
            remainder.attached(False)


when_made.append(_note)


@atexit.register
def _warn_at_end() -> None:
    for remainder in _pending():
        remainder.warn()
        remainder.names.clear()
