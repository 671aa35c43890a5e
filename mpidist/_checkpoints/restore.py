"""A restore, and what it has left in the checkpoint for objects attached after it.

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
import contextlib
import functools
import gc
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from mpidist._agreement.mismatch import Call, fingerprint
from mpidist._base import checksums
from mpidist._base.errors import warn_caller
from mpidist._base.types import HostArray
from mpidist._checkpoints import contents, restoring
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.exchange import differing_generators
from mpidist._checkpoints.items import Item, LaterItem, StateItem, VariableItem
from mpidist._checkpoints.restoring import Found, find, listed, names_of, unnoticed
from mpidist._checkpoints.storage import CheckpointReader
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist._values.storage import VariableStorage
from mpidist._values.variable import storage_of, when_made

_numbers: Final = itertools.count(1)
_all: Final[weakref.WeakValueDictionary[int, Restore]] = weakref.WeakValueDictionary()
# The groups that have had restores which left something. Whether one is still there
# depends on each rank's garbage collector, so no collective call may depend on it.
_groups: Final[weakref.WeakSet[ReplicaGroup]] = weakref.WeakSet()


class Restore:
    """A restore, and the items that it has not found among the objects.

    Of several restores each object keeps what the last one has for it.

    Attributes:
        objects: the objects, by name.
        number: restores are counted. A variable has that of its last one.
        saved: the names of all items in the checkpoint.
        names: of those that are left for what is attached.
        lost: of those for which that did not fit, or was told of too late.
        group: the ranks.
    """

    def __init__(
        self,
        objects: MutableMapping[str, Any],
        group: ReplicaGroup,
        path: str = "",
        partial: bool = False,
        root: Callable[[], Any] = object,
    ) -> None:
        """Note the objects, the ranks, and the arguments of the restore.

        ``root`` returns the `SavedObjects`; None when it is gone.
        """
        self.names: set[str] = set()  # first, since `__del__` asks for it
        self.objects: MutableMapping[str, Any] = objects
        self._path, self._partial = path, partial
        self.group: ReplicaGroup = group
        self.number: int = next(_numbers)
        self.saved: set[str] = set()
        self.lost: set[str] = set()
        self._root = root
        self._containers: dict[str, object] = {}
        # What this restore or a later one has restored, by `id`; not variables.
        self._given: dict[int, Callable[[], object]] = {}
        self._reader: CheckpointReader | None = None  # on rank 0

    def __reduce__(self) -> Any:
        return Restore, ({}, None)  # of a copied module: it has nothing

    def read(
        self, call: CollectiveCall, items: Sequence[Item], source: str | None = None
    ) -> Callable[[], list[str]] | None:
        """Read and verify what the checkpoint has of some items. Collective.

        Args:
            call: the call that restores them.
            items: they.
            source: the checkpoint to open on rank 0; None: that of an earlier call.

        Returns:
            A function that restores them, and returns their names; collective. None if
            no checkpoint is open.
        """
        differing = differing_generators(call, items)
        arrays: dict[str, HostArray] = {}

        def look() -> Found | None:
            if source is not None:
                self._reader = CheckpointReader(source)
            if self._reader is None:
                return None
            return find(call, items, self._reader, arrays, self._partial, self._outer)

        with call.guard.span(call.name):
            found = call.on_rank_0(look)
        if found is None:
            return None
        by_name = {item.name: item for item in items}
        restored = {name: by_name[name] for name in found.names}
        # A checkpoint of one replica does not show whether its generators should be
        # the same on all: whether they are now determines it.
        apart = differing if found.replicas == 1 else ()

        def put() -> list[str]:
            restoring.put(
                call,
                restored,
                found.states,
                restoring.share(call, found.kinds, arrays),
                apart,
                (self._partial, self._path, self.number),
            )
            self.saved.update(found.kinds, found.states, found.left)
            owners = [x.owner for x in restored.values() if x.owner is not None]
            for restore in (self, *self._earlier()):
                restore._given.update((id(x), _reference(x)) for x in owners)
            for item in restored.values():
                if isinstance(item, VariableItem):
                    storage_of(item.variable).restored = self.number
            if source is not None:
                self._begin(found.left)
            return [x.name for x in restored.values() if not isinstance(x, LaterItem)]

        return put

    def _begin(self, left: list[str]) -> None:
        """Note what was left; earlier restores leave to this one what it has."""
        self.names = set(left)
        earlier = self._earlier()
        places = set(map(self._place, self.saved if earlier else ()))
        for other in earlier:
            if other._root() is None:  # nothing can be added beside its objects
                other._lose([x for x in other.names if other._outer(x) is None])
            other.names = {x for x in other.names if other._place(x) not in places}
            if not other.names:
                other._reader = None
        if left:
            self._root().__when_attached__(self)
            self._watch()
            _all[self.number] = self
            _groups.add(self.group)
        else:
            self._reader = None

    def _earlier(self) -> list[Restore]:
        pending = [x for x in _pending() if x.number < self.number]
        return [
            x for x in pending if x.group is self.group or x.objects is self.objects
        ]

    def _place(self, name: str) -> tuple[int, str]:
        """Return the `id` of the object that has an item, and the name in it."""
        outer = self._outer(name)
        if outer is None:
            return id(self.objects), name
        return id(self.objects[outer]), name[len(outer) :]

    def _outer(self, name: str) -> str | None:
        """Return the name of the object that has an item; None: of none yet."""
        starts = itertools.accumulate(name.split("/"), "{}/{}".format)
        return max(filter(self.objects.__contains__, starts), key=len, default=None)

    def _watch(self) -> None:
        """Have modules and checkpoints among the objects tell what is attached.

        What was left for the parts of one object is not for those of another in its
        place. Objects keep a restore that has left something for one of them, not for
        others beside them.
        """
        inside = any(map(self._outer, self.names))
        for name, value in contents.containers("", self.objects, set()):
            if self._containers.setdefault(name, value) is not value:
                self._containers[name] = value
                self._lose(x for x in self.names if x.startswith(f"{name}/"))
            if inside and hasattr(value, "__when_attached__"):
                value.__when_attached__(self)

    def __bool__(self) -> bool:
        """Return whether anything is left."""
        return bool(self.names)

    def _lose(self, names: Iterable[str]) -> None:
        self.lost.update(names)
        self.names -= self.lost

    def __call__(self, is_assigned: bool) -> None:
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
                self._restore_more(items, is_assigned)
            except Exception as error:
                names = listed([item.name for item in items])
                error.add_note(f"{names}: attached after `Checkpoint.restore`")
                raise

    def found(self) -> list[Item]:
        """Return the items of what was attached since."""
        items = self.waiting(contents.collect(self.objects, "later"))
        # The program sets a pytree to save it: perhaps it is a newer one.
        return [x for x in items if not x.is_held]

    @tells("Checkpoint.restore", operator.attrgetter("group"))
    def _restore_more(self, items: list[Item], is_assigned: bool) -> None:
        """Restore items that were attached after the restore. Collective.

        Those that were not assigned just now only if no rank has changed one of them.
        """
        group = contents.group_of(items, "Checkpoint.restore") or self.group
        in_replica = context.is_in_replica(group)
        frame = group.cross_frame if in_replica else context.current()
        with frame if in_replica else contextlib.nullcontext():
            call = CollectiveCall(group, "Checkpoint.restore")
            call.agree(f" of {{{', '.join(map(str, items))}}}, attached after it")
            names = self.take(items)
            changed = not is_assigned and any(x.is_changed() for x in items)
            call.guard.agree_on(Call(f"{call.name}, looking"), largest=changed)
            if call.guard.largest:
                self._tell(items)
                return
            put = self.read(call, items)
            assert put is not None
            put()
            self.lost -= names

    def take(self, items: Sequence[Item]) -> set[str]:
        """Return the names of what is left for some items, which is `lost` now.

        Called on all ranks, so that it is the same on all if one of them raises.
        """
        found = {*itertools.chain(*names_of(items, self.names).values())}
        self._lose(found)
        return found

    def waiting(self, items: Sequence[Item]) -> list[Item]:
        """Return the items that this restore would have restored, had it met them."""
        found: list[Item] = []
        names = names_of(items, self.names)
        for item in items:
            own = [x for x in names[item.name] if x in self.names]
            if isinstance(item, VariableItem) and item.count in self.names:
                own.append(item.name)
            if own and self._has_given(item):
                self.names.difference_update(own)  # by another name, or a later restore
            elif own:
                found.append(item)
        return found

    def _has_given(self, item: Item) -> bool:
        """Return whether an item has its value from this restore or a later one."""
        if isinstance(item, VariableItem):
            return storage_of(item.variable).restored >= self.number
        return self._given.get(id(item.owner), bool)() is item.owner

    def missing(self) -> tuple[list[str], list[str]]:
        """Return the names of objects that were attached unnoticed, or never saved."""
        items = contents.collect(self.objects, "later")
        unnoticed = dict.fromkeys(item.name for item in self.waiting(items))
        never: list[str] = []
        for item in items:
            if isinstance(item, StateItem):
                restored = item.is_optional or item.name in self.saved
            else:
                restored = self._has_given(item)
            if not restored and item.name not in unnoticed:
                never.append(item.name)
        return [*unnoticed], never

    def unbuilt(self) -> list[str]:
        """Return the names of objects that keep values of variables to be made."""
        items = contents.collect(self.objects, "later")
        found = [x for x in items if isinstance(x, LaterItem)]
        return [x.name for x in found if len(x.owner.__saved_unbuilt__()) > 1]

    def matches(self) -> bool:
        """Return whether the checkpoint has anything for these objects."""
        return any(map(self._outer, self.saved))

    def warn(self) -> None:
        """Warn, on rank 0, of objects that were attached unnoticed; once."""
        if not self.names:
            return
        items = self.waiting(contents.collect(self.objects, "later"))
        self.take(items)
        if items:
            self._tell(items)

    def _tell(self, items: Iterable[Item]) -> None:
        """Warn, on rank 0, that some items keep their values."""
        if self._reader is not None:
            warn_caller(
                f"Checkpoint.restore: {unnoticed([item.name for item in items])}"
            )

    def __del__(self) -> None:
        self.warn()


def _reference(x: object) -> Callable[[], object]:
    try:
        return weakref.ref(x)
    except TypeError:  # a generator of NumPy
        return lambda: x


def warn_of(objects: Mapping[str, object]) -> None:
    """Warn of what was attached unnoticed to the objects of a checkpoint; once."""
    for restore in _pending():
        if restore.objects is objects:
            restore.warn()


def _pending() -> list[Restore]:
    """Return those that have something left, the last restore first."""
    found = [reference() for reference in _all.valuerefs()]  # other threads add some
    pending = [x for x in found if x is not None and x.names]
    return sorted(pending, key=lambda x: -x.number)


def _note(storage: VariableStorage) -> None:
    """Have the next `run` look for what a new variable has in a checkpoint."""
    if storage.group in _groups:
        storage.first = checksums.summarize(storage.array)
        storage.group.before_run = functools.partial(_look, storage.group)


def _found(group: ReplicaGroup, call: Call) -> tuple[list[Restore], bool]:
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
        for restore in pending:
            restore(False)


when_made.append(_note)


@atexit.register
def _warn_at_end() -> None:
    for restore in _pending():
        restore.warn()
        restore.names.clear()
