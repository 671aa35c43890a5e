"""The commands of a `merge_call`: their contents, and their encoding.

A command has a name and a content. The name is that of an operation, which all ranks
run, or one of these: *update*: all ranks run an update; *join*: they go to the join;
*check*: the function of an update communicates (`updates`); *return* and *raise*:
merge_fn has ended, with this result or exception.

The content is pickled by cloudpickle, once. What every rank has is not copied: the
pickle holds a number, and each rank uses its own object: one that is known from the
start, such as the strategy, or one that a *reference* in the command stands for.

=========  ===================  ======================================================
reference  fields               stands for
=========  ===================  ======================================================
value      key                  a variable or a distributed value
named      path, aliases, type  an object that merge_fn can reach (`object_names`)
global     module, name         a function or class of a module
function   code, module         one that closes over nothing, with a module's globals
array      dtype, shape, data,  an array of at most `MOST_INLINE_BYTES`, or not in this
           strides              machine's byte order; its strides unless in C order
sent       number, strides      another array, which is sent separately, from its buffer
=========  ===================  ======================================================

In the arguments of a command containers and arrays are data: rank 0's are sent, also
if merge_fn can reach them.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import cloudpickle
import numpy as np

from mpidist._base import backend
from mpidist._base.errors import CollectiveError
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, HostArray, Nest
from mpidist._merge import object_names, object_parts
from mpidist._merge.object_parts import ATOMS
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Key, Registered
from mpidist._values.distributed import DistributedValues, Mirrored, PerReplica
from mpidist._values.variable import Variable

MOST_INLINE_BYTES: Final = 16 * 1024
_BY_VALUE: Final = ATOMS | {tuple}
_NO_DATA: Final = ATOMS | {types.FunctionType, Mirrored, PerReplica, Variable}
_CONTAINERS: Final = (list, tuple, dict, collections.deque)
_KEYED: Final = (DistributedValues, Variable)  # also of users' classes
_NUMBERS: Final = "biufc"  # kinds of dtypes

# Operations that send a function: the user's name, and its place in the arguments.
_FUNCTIONS: Final = {"update": ("update", 1), "call_for_each_replica": ("run", 0)}

Pickler: Any = cloudpickle.Pickler  # a class of a library without types

Reference: TypeAlias = tuple[Any, ...]
"""A row of the table above: the kind, and the fields."""

Content: TypeAlias = tuple[bytes, list[Reference], int]
"""What a command is about: the pickled object; its references; how many arrays are sent
after the command."""

NOTHING: Final[Content] = (pickle.dumps(None), [], 0)
"""The content of a command that has none."""

# What every rank has under the same number, before the objects of the strategy.
_OURS: Final = (*ReduceOp, object_parts.make, object_parts.fill)


class NotThereError(ValueError):
    """Rank 0 refers to a value that the others do not have."""


class Writer:
    """Encodes the contents of the commands of one merge_call, on rank 0.

    Args:
        group: the ranks.
        key_of: returns the key under which every rank has a value; may send a command.
        names: the names of what merge_fn can reach; None if it has no names.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        key_of: Callable[[Registered], Key],
        names: object_names.Names | None,
    ) -> None:
        self.key_of = key_of
        self.names = names
        self._group = group

    @functools.cached_property
    def known(self) -> dict[int, int]:
        """The numbers of the objects that every rank has, by id."""
        known = (*_OURS, *self._group.public_objects)
        return dict(zip(map(id, known), range(len(known)), strict=True))

    def write(
        self, content: Nest, *, named: bool = True
    ) -> tuple[Content, list[Array]]:
        """Encode the content of a command; return it and the arrays to send after it.

        Args:
            content: what the command is about.
            named: whether objects that merge_fn can reach are sent by name.
        """
        if type(content) in ATOMS:
            return (pickle.dumps(content), [], 0), []
        names = self.names if named else None
        stream = io.BytesIO()
        pickler = _Pickler(stream, self, names, content)
        pickler.dump(content)
        arrays: list[Array] = pickler.arrays
        return (stream.getvalue(), pickler.references, len(arrays)), arrays

    def write_arguments(
        self, name: str, args: tuple[Any, ...]
    ) -> tuple[Content, list[Array]]:
        """Encode the arguments of an operation; say which of them cannot be sent."""
        try:
            return self.write(args)
        except NotThereError:
            raise
        except Exception as error:
            if name not in _FUNCTIONS or self._group.guard.broken:
                raise
            call, first = _FUNCTIONS[name]
            culprit = self._culprit(*args[first : first + 3])
            if not culprit:
                raise
            why = str(error).rstrip(".")
            raise TypeError(
                f"{call}: {culprit} which cannot be sent to the other ranks: {why}. "
                "Make it on every rank, before `merge_call`, and let merge_fn close "
                "over it: then each rank uses its own; or make it in the function that "
                f"`{call}` runs"
            ) from error

    def _culprit(
        self, fn: object, args: Sequence[Nest], kwargs: Mapping[str, Nest] | None
    ) -> str:
        """Describe the part of a call that cannot be sent; "" if each can by itself."""
        for what, part in _parts_of(fn, args, kwargs or {}):
            try:
                self.write((part,))
            except CollectiveError:
                raise
            except Exception:
                kind = type(part)
                name = f"{kind.__module__}.{kind.__qualname__}"
                return f"{what}, a {name.removeprefix('builtins.')},"
        return ""


def _parts_of(
    fn: object, args: Sequence[Nest], kwargs: Mapping[str, Nest]
) -> list[tuple[str, Nest]]:
    """Return the parts of a call, each with a description."""
    found: list[tuple[str, Nest]] = []
    inner = object_parts.function_in(fn)
    if isinstance(inner, types.FunctionType):
        name = inner.__qualname__
        closed = zip(
            inner.__code__.co_freevars, object_parts.contents_of(inner), strict=True
        )
        keywords = inner.__kwdefaults__ or {}
        found += [(f"`{name}` closes over `{key}`", x) for key, x in closed]
        found += [(f"`{name}` has a default", x) for x in inner.__defaults__ or ()]
        found += [(f"`{name}` has the default `{k}`", x) for k, x in keywords.items()]
    if isinstance(fn, types.MethodType):
        found.append((f"`{fn.__name__}` is a method of an object", fn.__self__))
    elif not isinstance(fn, types.FunctionType):
        found.append(("its function is an object", fn))
    found += [(f"it gets args[{i}]", x) for i, x in enumerate(args)]
    found += [(f"it gets kwargs[{key!r}]", x) for key, x in kwargs.items()]
    return found


class _Pickler(Pickler):  # type: ignore[misc]
    """Pickles a command, with references to objects that every rank has.

    Attributes:
        references: of the objects until now.
        arrays: to send separately.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        writer: Writer,
        names: object_names.Names | None,
        content: Nest,
    ) -> None:
        super().__init__(stream, protocol=5)
        self._writer = writer
        self._names = names
        self._content = content
        self._made: set[int] = set()  # functions, which are saved again, with the state
        # By id of a variable that functions close over: the first of them, and where.
        self._cells: dict[int, tuple[types.FunctionType, int]] = {}
        self._numbers: dict[int, int] = dict(writer.known)
        self._referred: list[object] = []  # kept, since an id may be used again
        self.references: list[Reference] = []
        self.arrays: list[Array] = []

    def persistent_id(self, obj: Any) -> int | None:
        # Called for every object in the content.
        if type(obj) in _BY_VALUE or id(obj) in self._made:
            return None
        number = self._numbers.get(id(obj))
        if number is None and (reference := self._reference_to(obj)) is not None:
            number = self._numbers[id(obj)] = len(self._numbers)
            self.references.append(reference)
            self._referred.append(obj)
        return number

    def _reference_to(self, obj: Any) -> Reference | None:
        kind = type(obj)
        if isinstance(obj, _KEYED):
            return ("value", self._writer.key_of(obj))
        # Every rank runs the same program, and has what is at the top level of the
        # script too. cloudpickle would copy it, with the globals that it uses.
        is_named = kind is types.FunctionType or isinstance(obj, type)
        if is_named and object_parts.is_global(obj):
            return ("global", obj.__module__, obj.__qualname__)
        if self._names is not None and id(obj) not in self._data:
            name = self._names.name_of(obj)
            if name is not None:
                return ("named", *name)
        if kind is types.FunctionType:
            if obj.__closure__ or object_parts.state_of(obj) != object_parts.NO_STATE:
                return None
            home = object_parts.module_of(obj.__globals__)
            if home is None:
                return None
            return ("function", object_parts.encode(obj.__code__), home)
        if kind is np.ndarray or backend.is_device_array(obj):
            return self._reference_to_array(obj)
        return None

    def _reference_to_array(self, x: Array) -> Reference | None:
        strides = None
        if isinstance(x, np.ndarray):
            # Not those of ml_dtypes, which `dtype.str` does not name.
            if x.dtype.isbuiltin == 2 or x.dtype.kind not in _NUMBERS:
                return None
            strides = None if x.flags.c_contiguous else x.strides
            if x.nbytes <= MOST_INLINE_BYTES or not x.dtype.isnative:
                return ("array", x.dtype.str, x.shape, x.tobytes(), strides)
        self.arrays.append(x)
        return ("sent", len(self.arrays) - 1, strides)

    @functools.cached_property
    def _data(self) -> dict[int, Nest]:
        """The containers and arrays in the arguments of a command, by their ids."""
        found: dict[int, Nest] = {}
        waiting = [self._content]
        while waiting:
            x = waiting.pop()
            if type(x) in _NO_DATA:
                continue
            if isinstance(x, _CONTAINERS) and id(x) not in found:
                found[id(x)] = x
                waiting += x.values() if isinstance(x, dict) else x
            elif isinstance(x, (IndexedSlices, collections.UserDict)):
                found[id(x)] = x
                waiting += vars(x).values()
            elif type(x) is np.ndarray or backend.is_array(x):
                found[id(x)] = x
        return found

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not types.FunctionType:
            return super().reducer_override(obj)
        home: str | dict[str, Any] | None = object_parts.module_of(obj.__globals__)
        if home is None:  # `exec` has made it, perhaps together with merge_fn
            home = obj.__globals__
            if self._names is None or self._names.name_of(home) is None:
                return super().reducer_override(obj)
        self._made.add(id(obj))
        shared = []
        for i, cell in enumerate(obj.__closure__ or ()):
            first, place = self._cells.setdefault(id(cell), (obj, i))
            if first is not obj:
                shared.append((i, first, place))
        parts = object_parts.encode(obj.__code__), home, *shared
        state = object_parts.state_of(obj)
        return object_parts.make, parts, state, None, None, object_parts.fill


def _laid_out(x: Array, strides: Sequence[int] | None) -> Array:
    """Return an array laid out as rank 0's, but with gaps of at most one element.

    NumPy then goes through both in the same order, on which the bits of sums depend.
    """
    if strides is None:
        return x
    new = [*strides]
    step = until = x.itemsize
    # Of axes with one stride (windows of an array) the last one is the inner one.
    for axis in sorted(range(x.ndim), key=lambda i: (abs(strides[i]), -i)):
        size, old = x.shape[axis], abs(strides[axis])
        if size > 1 and old:
            step += x.itemsize * (old != until)
            new[axis] = step if strides[axis] > 0 else -step
            step, until = step * size, old * size
    start = sum(s * (1 - n) for s, n in zip(new, x.shape, strict=True) if s < 0)
    memory = np.empty(step, np.uint8)
    made: HostArray = np.ndarray(x.shape, x.dtype, memory, start, new)
    made[...] = x
    return made


class _Unpickler(pickle.Unpickler):
    """Has attributes: Python 3.13.0 can set no `persistent_load` of the base class."""


class Reader:
    """Decodes the contents of the commands of one merge_call, on the other ranks.

    Args:
        group: the ranks.
        names: the names of what this rank's merge_fn can reach; None if it has none.
    """

    def __init__(self, group: ReplicaGroup, names: object_names.Names | None) -> None:
        self._group = group
        self._names = names
        self._resolvers: dict[str, Callable[..., Any]] = {
            "value": self._value,
            "named": self._named,
            "global": object_parts.lookup,
            "function": object_parts.make,
            "array": lambda dtype, shape, data, strides: _laid_out(
                np.ndarray(shape, dtype, data).copy(), strides
            ),
        }

    def read(self, content: Content, arrays: list[Array]) -> Any:
        """Return the object that `Writer.write` has encoded.

        Args:
            content: the content of the command.
            arrays: those that were sent after it.
        """
        data, references, _ = content
        resolvers = self._resolvers | {
            "sent": lambda number, strides: _laid_out(arrays[number], strides)
        }
        objects = [*_OURS, *self._group.public_objects]
        objects += [resolvers[kind](*fields) for kind, *fields in references]
        unpickler = _Unpickler(io.BytesIO(data))
        # Not a method in Python: this one is written in C.
        unpickler.persistent_load = objects.__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    def _value(self, key: Key) -> Any:
        value = self._group.registry.get(key)
        if value is None:
            raise ValueError(
                f"merge_fn uses a value that rank {self._group.replica_id} has not "
                "kept; pass it to `merge_call` as an argument"
            )
        return value

    def _named(self, *name: Any) -> Any:
        # Without names nothing is found, which is an error.
        return (self._names or object_names.Names(None)).object(*name)
