"""merge_call: rank 0 commands, the other ranks follow.

The protocol
------------
1. *Entry.* All ranks agree on the structure of the arguments (one header). Arrays and
   numbers become `PerReplica` handles; each rank keeps its component under the same
   key. Other objects are compared by a hash that rides in the same header: equal ones
   stay as they are; if any differ, all ranks exchange the hashes, and those that differ
   become PerReplica of objects.
2. *Commands.* Rank 0 runs merge_fn. Each cross-replica verb that it calls is one
   message to the followers: name and arguments, pickled, with distributed values,
   variables and the strategy replaced by their keys, and arrays sent apart from
   their buffers. Then every rank runs the verb (`_dispatch.execute`), which does its
   own agreement and moves its own data, and registers its results under the same keys.
3. *End.* The last message says what merge_fn returned or raised. Values that the
   ranks have are named by key, arrays that rank 0 made are broadcast from their
   buffers, PerReplica that rank 0 made are scattered, the rest is in the message.

When something fails
--------------------
- merge_fn raises: the last message carries the exception; all ranks raise.
- A verb fails: verbs fail on all ranks or on none (see `_collectives`). Rank 0 raises
  inside merge_fn, which may catch it, so the followers keep quiet and wait for the
  next message. If merge_fn lets it through, they raise what they had, or rank 0's.
- A follower can not even read a message (a function that is not importable there): it
  joins the verb's agreement with its error flag up.
- Rank 0 takes too long: the followers' wait for a message has the guard's deadline.

Memory: when rank 0 drops a handle, its key rides along with the next command, and the
followers drop theirs. At the end of the merge_call all are dropped.

Rejected: gathering the arguments on rank 0 (the one thing that this module avoids);
running merge_fn on every rank, as TensorFlow's multi-worker strategy does (side effects
happen N times, and code that looks at one replica's values diverges silently).
"""

from __future__ import annotations

import hashlib
import io
import marshal
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import numpy as np

from mpidist import _arrays, _context, _dispatch, _functions, _nest
from mpidist._dispatch import OnRank0
from mpidist._errors import CollectiveError, format_exception
from mpidist._options import ReduceOp
from mpidist._policies import component_of
from mpidist._reports import call_of, dump_exception, load_exception
from mpidist._sparse import IndexedSlices
from mpidist._values import (
    DistributedValues,
    Key,
    Mirrored,
    PerReplica,
    own_component,
)
from mpidist._variables import Variable

if TYPE_CHECKING:
    from mpidist._strategy import Strategy

_STRATEGY: Final = "strategy"
_EXTENDED: Final = "extended"
_CONTEXT: Final = "context"
_VALUE: Final = "value"
_ARRAY: Final = "array"
_MAIN: Final = "__main__"
_NO_ARGUMENTS: Final = _nest.flatten(((), {}))[1]


class Coordinator:
    """Rank 0's side of one merge_call, while merge_fn runs."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._collectives = strategy.extended._collectives
        self._registry = strategy.extended._registry
        self._dropped: list[Key] = []
        self._fetched: list[weakref.ref[DistributedValues]] = []

    def command(self, name: str, args: tuple[Any, ...]) -> Any:
        """Have all ranks run a verb; return rank 0's result."""
        if self._collectives.comm.size == 1:
            return self._execute(name, args)
        head, buffers = self.encode(args)
        guard = self._collectives.guard
        leading, guard.leading = guard.leading, False
        guard.check_late()
        guard.leading = leading
        dropped = []
        for waiting in (self._dropped, self._registry.dropped):
            count = len(waiting)
            dropped += waiting[:count]
            del waiting[:count]  # in place: finalizers append to these lists
        message = ("do", head, len(buffers), dropped, name, _label(name, args))
        self._collectives.send_bytes(_dump(message))
        if buffers:
            self._collectives.send_arrays(buffers, name)
        result = self._execute(name, args)
        self.watch(result)
        return result

    def _execute(self, name: str, args: tuple[Any, ...]) -> Any:
        frame = self._strategy.extended._cross_frame
        guard = self._collectives.guard
        leading, guard.leading = guard.leading, False
        try:
            with _context.entered(frame):
                return _dispatch.execute(self._strategy, name, args)
        finally:
            guard.leading = leading

    def fetch(self, values: list[DistributedValues]) -> None:
        """Gather the components of these values to rank 0, where not known."""
        unknown = [v for v in values if v._all is None and not isinstance(v, Mirrored)]
        if unknown:
            columns = self.command("collect", (unknown,))
            for value, column in zip(unknown, columns, strict=True):
                value._all = tuple(column)
                self._fetched.append(weakref.ref(value))

    def forget(self) -> None:
        """Forget what was gathered: the arrays may change until the next merge_call."""
        for reference in self._fetched:
            if (value := reference()) is not None:
                value._all = None

    def watch(self, tree: Any) -> None:
        """Tell the followers when rank 0 drops one of these values."""
        for leaf in () if tree is None else _nest.flatten(tree)[0]:
            if isinstance(leaf, DistributedValues):
                weakref.finalize(leaf, self._dropped.append, leaf._key)

    def encode(self, message: Any) -> tuple[Any, list[Any]]:
        """Take a message apart; return its plain part, and arrays that travel apart.

        What it is made of is mostly variables, values and simple functions. That is
        put into tuples by hand, since a `_Pickler` takes longer than all the rest;
        what has anything else in it is pickled as a whole.
        """
        plain = self._plain(message)
        if plain is not _PICKLED:
            return plain, []
        stream = io.BytesIO()
        pickler = _Pickler(stream, self)
        pickler.dump(message)
        return ("pickle", stream.getvalue()), pickler.arrays

    def _plain(self, x: Any) -> Any:
        kind = type(x)
        if kind in _ATOMS:
            return x
        if kind is tuple or kind is list:
            items = [self._plain(item) for item in x]
            return _PICKLED if _PICKLED in items else (kind.__name__, *items)
        if kind is ReduceOp:
            return ("op", x.name)
        if kind is dict and not x:
            return ("dict",)
        if isinstance(x, (DistributedValues, Variable)):
            return (_VALUE, self.key_of(x))
        if kind is types.FunctionType:
            simple = None
            if not (x.__module__ == _MAIN and _lookup(_MAIN, x.__qualname__) is x):
                simple = _functions.reduce_simple(x, _CLOSED_OVER)
            if simple is not None:
                data, head, closed, defaults = simple[1]
                parts = [self._plain(closed), self._plain(defaults)]
                return _PICKLED if _PICKLED in parts else ("fn", data, head, *parts)
        return _PICKLED

    def key_of(self, value: Any) -> Key:
        """Return the key under which every rank has this value.

        A PerReplica that rank 0 made is scattered first.

        Raises:
            ValueError: for a value that the other ranks do not have.
        """
        key: Key = value._key
        if key is not None and self._registry.get(key) is value:
            return key
        if isinstance(value, DistributedValues) and value._all is not None:
            if isinstance(value, Mirrored):
                _check_mirrored(value)
            self.command("scatter", (OnRank0(value), isinstance(value, Mirrored)))
            self.watch(value)
            return value._key
        raise ValueError(
            f"merge_fn uses {value!r:.200}, which the other ranks do not have (any "
            "more): it belongs to a `merge_call` that has ended, or was made on rank "
            "0 alone. Pass it to `merge_call` as an argument"
        )


def _check_mirrored(value: Mirrored) -> None:
    """Raise for a Mirrored that merge_fn made of components that differ."""
    arrays = [_arrays.as_array(x, "Mirrored")[0] for x in value._all or ()]
    if len({_arrays.describe(x) + _arrays.summarize(x) for x in arrays}) > 1:
        raise ValueError(
            f"merge_fn made a Mirrored of components that differ: {value!r:.200}; "
            "write `mpidist.PerReplica(...)` for a value of each replica's own"
        )


_ATOMS: Final = frozenset((bool, int, float, str, bytes, type(None)))
_PICKLED: Final = "pickled"  # no plain form: see `Coordinator.encode`


def _dump(message: tuple[Any, ...]) -> bytes:
    """Return a message as bytes: by marshal, several times as fast, where it can be."""
    try:
        return b"m" + marshal.dumps(message)
    except ValueError:
        return b"p" + pickle.dumps(message)


def _load(data: bytes) -> Any:
    body = memoryview(data)[1:]
    return marshal.loads(body) if data[:1] == b"m" else pickle.loads(body)


def _decode(head: Any, strategy: Strategy, arrays: list[Any]) -> Any:
    """Put together what `Coordinator.encode` has taken apart."""
    if type(head) is not tuple:
        return head
    kind, *items = head
    if kind == "tuple":
        return tuple([_decode(item, strategy, arrays) for item in items])
    if kind == _VALUE:
        return _value_of(items[0], strategy)
    if kind == "pickle":
        return _Unpickler(items[0], strategy, arrays).load()
    if kind == "list":
        return [_decode(item, strategy, arrays) for item in items]
    if kind == "dict":
        return {}
    if kind == "op":
        return ReduceOp[items[0]]
    data, names, closed, defaults = items
    return _functions.rebuild(
        data,
        names,
        _decode(closed, strategy, arrays),
        _decode(defaults, strategy, arrays),
    )


_CLOSED_OVER: Final = (DistributedValues, Variable, np.ndarray, np.generic)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions by cloudpickle; values by key; arrays apart."""

    def __init__(self, stream: io.BytesIO, coordinator: Coordinator) -> None:
        super().__init__(stream, protocol=5, buffer_callback=None)
        strategy = coordinator._strategy
        self._coordinator = coordinator
        self._known = {
            id(strategy): (_STRATEGY,),
            id(strategy.extended): (_EXTENDED,),
            id(strategy.extended._replica_context): (_CONTEXT,),
        }
        self.arrays: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        # Called for every object in the message: a function has some ninety.
        if isinstance(obj, (DistributedValues, Variable)):
            return (_VALUE, self._coordinator.key_of(obj))
        plain = type(obj) is np.ndarray and obj.dtype.kind in "biufc" and obj.size > 8
        if plain or _arrays.is_device_array(obj):
            self.arrays.append(obj)
            return (_ARRAY, len(self.arrays) - 1)
        return self._known.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        # Every rank runs the same program, so what is at the top level of the script
        # is there too: by reference, as for any other module. cloudpickle would copy
        # it with the globals that it uses.
        if isinstance(obj, (types.FunctionType, type)):
            name = getattr(obj, "__qualname__", "")
            if obj.__module__ == _MAIN and _lookup(_MAIN, name) is obj:
                return (_lookup_or_raise, (_MAIN, name))
            if type(obj) is types.FunctionType and (
                simple := _functions.reduce_simple(obj, _CLOSED_OVER)
            ):
                return simple
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, strategy: Strategy, arrays: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._strategy = strategy
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == _STRATEGY:
            return self._strategy
        if pid[0] == _EXTENDED:
            return self._strategy.extended
        if pid[0] == _CONTEXT:
            return self._strategy.extended._replica_context
        if pid[0] == _ARRAY:
            return self._arrays[pid[1]]
        return _value_of(pid[1], self._strategy)


def _value_of(key: Key, strategy: Strategy) -> Any:
    value = strategy.extended._registry.get(key)
    if value is None:
        raise ValueError(
            f"merge_fn uses a value that rank {strategy.extended._replica_id} has not "
            "kept; pass it to `merge_call` as an argument"
        )
    return value


def _lookup(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _lookup_or_raise(module: str, name: str) -> Any:
    found = _lookup(module, name)
    if found is None:
        raise AttributeError(
            f"`{name}` is not defined in the program of this rank; define it on all "
            "ranks, outside `if rank == 0`"
        )
    return found


# --- one merge_call, from all sides -------------------------------------------------


def merge_call(
    strategy: Strategy,
    merge_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``merge_fn`` on rank 0; return this replica's part of its result.

    Collective.
    """
    collectives = strategy.extended._collectives
    arguments, held = _enter(strategy, merge_fn, args, kwargs)
    if collectives.comm.rank == 0:
        held.clear()  # merge_fn alone keeps its arguments
        return _lead(strategy, merge_fn, arguments)
    del arguments
    return _follow(strategy, held)


def _enter(
    strategy: Strategy,
    merge_fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[list[Any], dict[Key, Any]]:
    """Agree on the arguments; return them as merge_fn sees them, and the handles."""
    collectives = strategy.extended._collectives
    registry = strategy.extended._registry
    try:
        if not callable(merge_fn):
            raise TypeError(
                f"merge_call: expected `merge_fn` to be a function, got {merge_fn!r}"
            )
        leaves: list[Any] = []
        structure = _NO_ARGUMENTS
        if args or kwargs:
            leaves, structure = _nest.flatten((args, kwargs))
        kinds = [_kind_of(leaf, strategy) for leaf in leaves]
        hashes = [
            _object_hash(leaf) if kind == "object" else 0
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
    except Exception as error:
        collectives.invalid("merge_call", error)
    combined = hash(tuple(hashes)) >> 2
    text = structure.render(kinds)
    equal = collectives.guard.agree_softly(call_of(f"merge_call {text}"), combined)
    different: set[int] = set()
    if not equal:
        rows = collectives.comm.all_gather_integers(hashes)
        different = {
            i for i, column in enumerate(zip(*rows, strict=True)) if len({*column}) > 1
        }
    number = registry.next_key()
    held: dict[Key, Any] = {}
    seen = []
    for index, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if kind == "component" or index in different:
            key = (number, index)
            leaf = registry.wrap(PerReplica, own_component(leaf), key)
            held[key] = leaf
        seen.append(leaf)
    # In a list, so that who takes them out is the only one to keep them.
    return [structure.unflatten(seen)], held


def _kind_of(leaf: Any, strategy: Strategy) -> str:
    """Return what becomes of an argument; the same text on all ranks, or a mismatch."""
    if isinstance(leaf, Variable):
        if leaf.distribute_strategy is not strategy:
            raise ValueError(
                f"merge_call: {leaf!r} belongs to {leaf.distribute_strategy}, not to "
                f"{strategy}"
            )
        return f"Variable {leaf.name!r} #{leaf._key}"
    if isinstance(leaf, (DistributedValues, IndexedSlices)):
        return "component"
    if _arrays.is_array(leaf) or _arrays.is_number(leaf):
        _arrays.as_array(leaf, "merge_call")
        return "component"
    return "object"


def _object_hash(x: Any) -> int:
    """Return a hash that is the same on all ranks for equal objects."""
    try:
        data = _canonical(x)
    except Exception:
        # Not picklable (a lock, an open file, an object that holds variables): the
        # ranks' objects are taken for the same if they are of the same type.
        data = type(x).__qualname__.encode()
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _canonical(x: Any) -> bytes:
    """Pickle an object so that equal ones give equal bytes in every process."""
    stream = io.BytesIO()
    pickler = _CanonicalPickler(stream, protocol=5)
    # Without the memo: which strings are one object differs between processes.
    pickler.fast = True
    pickler.dump(x)
    return stream.getvalue()


class _CanonicalPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, obj: Any) -> Any:
        # The order of a set depends on the hashes of strings, which are randomised;
        # that of a dict does not count when dicts are compared.
        if type(obj) in (set, frozenset):
            return (type(obj).__name__, sorted(_canonical(item) for item in obj))
        if type(obj) is dict:
            pairs = ((_canonical(k), _canonical(v)) for k, v in obj.items())
            return ("dict", sorted(pairs))
        return None


def _lead(
    strategy: Strategy, merge_fn: Callable[..., Any], arguments: list[Any]
) -> Any:
    coordinator = Coordinator(strategy)
    collectives = strategy.extended._collectives
    args, kwargs = arguments.pop()
    frame = _context.Frame(
        strategy, _context.Level.COORDINATOR, coordinator=coordinator
    )
    several = collectives.comm.size > 1
    try:
        with _context.entered(frame):
            if args or kwargs:
                coordinator.watch((args, kwargs))
            collectives.guard.leading = several
            try:
                result = merge_fn(strategy, *args, **kwargs)
            finally:
                collectives.guard.leading = False
            del args, kwargs
            leaves, structure = _nest.flatten(result)
            parts = [_part_of(leaf, coordinator) for leaf in leaves]
            if several:
                head, buffers = coordinator.encode(structure.unflatten(parts))
                collectives.guard.check_late()
    except BaseException as error:
        if several and not collectives.guard.broken:
            data = dump_exception(error)
            trace = format_exception(error)
            collectives.send_bytes(_dump(("raise", data, trace)))
        raise
    finally:
        coordinator.forget()
    if several:
        collectives.send_bytes(_dump(("return", head, len(buffers))))
        if buffers:
            collectives.send_arrays(buffers, "merge_call")
    return structure.unflatten([_own_result(leaf) for leaf in leaves])


def _own_result(leaf: Any) -> Any:
    """Return rank 0's part: of an array a copy, since merge_fn may go on using it."""
    return leaf.copy() if _arrays.is_array(leaf) else own_component(leaf)


def _part_of(leaf: Any, coordinator: Coordinator) -> Any:
    """Return a leaf of merge_fn's result in the form in which it travels."""
    if isinstance(leaf, Mirrored) and (
        leaf._key is None or coordinator._registry.get(leaf._key) is not leaf
    ):
        return leaf._own
    return leaf


def _follow(strategy: Strategy, held: dict[Key, Any]) -> Any:
    """Run what rank 0 commands until it says that merge_fn has ended."""
    collectives = strategy.extended._collectives
    failure: BaseException | None = None
    while True:
        message = _load(
            collectives.receive_bytes(
                "merge_call, waiting for merge_fn on rank 0", timeout=None
            )
        )
        if message[0] == "do":
            _, head, num_arrays, dropped, name, label = message
            failure = _obey(strategy, head, num_arrays, name, label, held)
            for key in dropped:
                held.pop(key, None)
                strategy.extended._registry.kept.pop(key, None)
        elif message[0] == "return":
            _, head, num_arrays = message
            arrays = collectives.receive_arrays() if num_arrays else []
            if failure is not None and not collectives.guard.enabled:
                raise failure  # nobody else knows
            result = _decode(head, strategy, arrays)
            return _nest.map_structure(own_component, result)
        else:
            _, data, trace = message
            raise remote_error(collectives.comm.rank, data, trace, failure)


def _label(name: str, args: tuple[Any, ...]) -> str:
    """Return what ranks agree on at the end of a command, for one that fails first."""
    return str(args[-1]) if name == "update" else ""


def _obey(
    strategy: Strategy,
    head: bytes,
    num_arrays: int,
    name: str,
    label: str,
    held: dict[Key, Any],
) -> BaseException | None:
    """Run one command. What it raises, rank 0 has raised too, and decides about."""
    collectives = strategy.extended._collectives
    frame = strategy.extended._cross_frame
    try:
        arrays = collectives.receive_arrays() if num_arrays else []
        with _context.entered(frame):
            try:
                args = _decode(head, strategy, arrays)
            except Exception as error:
                if label:
                    # The others run the function, and may have to be undone.
                    _dispatch.execute(strategy, f"fail to {name}", (error, label))
                collectives.invalid(f"the coordinator's {name}", error)
            result = _dispatch.execute(strategy, name, args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if collectives.guard.broken:
            raise
        return error
    for leaf in _nest.flatten(result)[0]:
        if isinstance(leaf, DistributedValues):
            held[leaf._key] = leaf
        elif isinstance(leaf, Variable):
            # Rank 0 may keep it for later merge_calls, as an optimizer its slots.
            strategy.extended._registry.kept[leaf._key] = leaf
    for value in args:
        if isinstance(value, OnRank0) and isinstance(value.value, DistributedValues):
            held[value.value._key] = value.value
    return None


def remote_error(
    rank: int, data: bytes, trace: str, failure: BaseException | None
) -> BaseException:
    """Return what a follower raises when merge_fn has raised on rank 0."""
    error = load_exception(data, trace)
    own = failure is not None and not isinstance(failure, CollectiveError)
    if own and isinstance(error, CollectiveError) and failure is not None:
        return failure  # it was this rank's own function that failed
    if error is None:
        last = trace.strip().splitlines()[-1] if trace.strip() else "unknown"
        return CollectiveError(
            f"[rank {rank}] merge_fn raised on rank 0: {last}\n{trace}"
        )
    error.add_note(f"[rank {rank}] merge_fn raised this on rank 0, as shown above")
    return error


# --- the verbs that only the coordinator needs ----------------------------------------


@_dispatch.verb("collect")
def _collect(strategy: Strategy, values: list[DistributedValues]) -> Any:
    """Return the components of values: on rank 0, a column for each value."""
    collectives = strategy.extended._collectives
    own = [component_of(value) for value in values]
    rows = collectives.collect(own, "experimental_local_results")
    return [list(column) for column in zip(*rows, strict=True)]


@_dispatch.verb("scatter")
def _scatter(strategy: Strategy, marked: OnRank0, mirrored: bool) -> None:
    """Give each rank its component of a value that rank 0 made."""
    collectives = strategy.extended._collectives
    registry = strategy.extended._registry
    value = marked.value
    rows = None if value is None else [[component] for component in value._all]
    (own,) = collectives.scatter(rows, "scatter a PerReplica of the coordinator")
    key = (registry.next_key(), 0)
    if value is None:
        marked.value = registry.wrap(Mirrored if mirrored else PerReplica, own, key)
    else:
        registry.add(key, value)
