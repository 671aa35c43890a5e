"""The commands of a `merge_call`: their contents, and their encoding.

A command has a name and a content. The name is that of an operation, which all ranks
run, or one of these: *update*: all ranks run an update; *join*: they go to the join;
*check*: the function of an update communicates (`updates`); *return* and *raise*:
merge_fn has ended, with this result or exception.

The content is pickled by cloudpickle, once. What every rank has is not copied: the
pickle holds the number of a *reference*, and each rank uses its own object.

=========  ==================  =======================================================
reference  fields              stands for
=========  ==================  =======================================================
value      key                 a variable or a distributed value
known      number              an object of the strategy, or a `ReduceOp`
named      number              an object that merge_fn can reach (`object_names`)
global     module, name        a function or class of a module
code       number              the code of any other function (`function_codec`)
globals    home                the globals of a function
function   code, home, closed  a function that closes over atoms and references only
array      dtype, shape, data  an array of at most `MOST_INLINE_BYTES`
sent       number              another array, which is sent separately, from its buffer
=========  ==================  =======================================================

In the arguments of a command lists, dicts and arrays are data: rank 0's are sent, also
if merge_fn can reach them. A code object and the name of an object are sent once, as
the *news* of the next command.

Rejected: a second encoding for the usual commands, with marshal: it took 5 us less on
rank 0 and 1 us less on the others, which a loop of 20 updates did not show. Code
objects by cloudpickle: 20 us more for each update.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import cloudpickle
import numpy as np

from mpidist._base import backend, function_codec
from mpidist._base.errors import CollectiveError
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, Nest
from mpidist._merge import object_names
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Key, Registered
from mpidist._values.distributed import DistributedValues, Mirrored, PerReplica
from mpidist._values.variable import Variable

MOST_INLINE_BYTES: Final = 16 * 1024
ATOMS: Final = frozenset((bool, int, float, str, bytes, type(None)))
_BY_VALUE: Final = ATOMS | {tuple}
_NO_DATA: Final = ATOMS | {types.FunctionType, Mirrored, PerReplica, Variable}
_KEYED: Final = (DistributedValues, Variable)  # also of users' classes
_NUMBERS: Final = "biufc"  # kinds of dtypes

Pickler: Any = cloudpickle.Pickler  # a class of a library without types

KeyOf: TypeAlias = Callable[[Registered], Key]
"""Returns the key under which every rank has a value."""

Reference: TypeAlias = tuple[Any, ...]
"""A row of the table above: the kind, and the fields."""

News: TypeAlias = tuple[list[tuple[int, bytes]], list[object_names.News]]
"""Code objects, and names of objects, that the other ranks have to know."""

object_names.register_values(*_KEYED)


Content: TypeAlias = tuple[bytes, list[Reference], int]
"""What a command is about: the pickled object; what its references stand for; how many
arrays are sent after the command."""


NOTHING: Final[Content] = (pickle.dumps(None), [], 0)
"""The content of a command that has none."""


# What every rank has under the same number, before the objects of the strategy.
_OURS: Final = (*ReduceOp, function_codec.make_empty, function_codec.fill)


class Writer:
    """Encodes the commands of one merge_call, on rank 0.

    Args:
        group: the ranks.
        key_of: returns the keys of values; may send a command itself.
        names: the names of what merge_fn can reach; None if it has no names.
    """

    def __init__(
        self, group: ReplicaGroup, key_of: KeyOf, names: object_names.Names | None
    ) -> None:
        self.key_of = key_of
        self.names = names
        self.codes = group.registry.codes
        known = (*_OURS, *group.public_objects)
        self.known = {id(x): ("known", i) for i, x in enumerate(known)}

    def close(self) -> None:
        """Drop the references to the coordinator, and to what merge_fn can reach."""
        del self.key_of, self.names

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
        pickler = _Pickler(stream, self, names)
        pickler.data = {} if names is None else _data_in(content)
        pickler.dump(content)
        arrays: list[Array] = pickler.arrays
        data = stream.getvalue()
        return (data, pickler.references, len(arrays)), arrays

    def command(
        self, name: str, content: Content = NOTHING, dropped: Sequence[Key] = ()
    ) -> bytes:
        """Return a command as bytes, with the news until now.

        Args:
            name: what the others do, see above.
            content: what it is about.
            dropped: the keys of values that rank 0 has dropped.
        """
        codes, names = self.codes, self.names
        news: News = (codes.unsent, [] if names is None else names.unsent)
        if news[0]:
            codes.unsent = []
        if news[1] and names is not None:
            names.unsent = []
        return pickle.dumps((name, dropped, news, *content))

    def culprit(
        self, fn: object, args: Sequence[Nest], kwargs: Mapping[str, Nest] | None
    ) -> str:
        """Describe the part of a function and its arguments that cannot be sent.

        Returns "" if each part can be sent by itself.
        """
        for what, part in _parts_of(fn, args, kwargs):
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
    fn: object, args: Sequence[Nest], kwargs: Mapping[str, Nest] | None
) -> list[tuple[str, Nest]]:
    """Return the parts of a call, each with a description."""
    found: list[tuple[str, Nest]] = []
    inner = getattr(fn, "__func__", getattr(fn, "func", fn))
    if isinstance(inner, types.FunctionType):
        name = inner.__qualname__
        closed, defaults, keywords, *_ = function_codec.state_of(inner)
        for variable, contents in zip(inner.__code__.co_freevars, closed, strict=True):
            found += [(f"`{name}` closes over `{variable}`", x) for x in contents]
        found += [(f"`{name}` has a default", x) for x in defaults or ()]
        found += [
            (f"`{name}` has the default `{key}`", x)
            for key, x in (keywords or {}).items()
        ]
    if isinstance(fn, types.MethodType):
        found.append((f"`{fn.__name__}` is a method of an object", fn.__self__))
    elif not isinstance(fn, types.FunctionType):
        found.append(("its function is an object", fn))
    found += [(f"it gets args[{i}]", x) for i, x in enumerate(args)]
    found += [(f"it gets kwargs[{key!r}]", x) for key, x in (kwargs or {}).items()]
    return found


def _data_in(content: Nest) -> dict[int, Nest]:
    """Return the lists, dicts and arrays of a command, by their ids.

    Only those in the arguments themselves, not those inside other objects.
    """
    found: dict[int, Nest] = {}
    waiting = [content]
    while waiting:
        x = waiting.pop()
        if type(x) in _NO_DATA:
            continue
        if isinstance(x, (list, tuple, dict)) and id(x) not in found:
            found[id(x)] = x
            waiting += x.values() if isinstance(x, dict) else x
        elif backend.is_array(x):
            found[id(x)] = x
    return found


class _Pickler(Pickler):  # type: ignore[misc]
    """Pickles references in place of what every rank has.

    Attributes:
        data: the lists, dicts and arrays that are sent by value, by their ids.
        references: of the objects until now.
        arrays: to send separately.
    """

    def __init__(
        self, stream: io.BytesIO, writer: Writer, names: object_names.Names | None
    ) -> None:
        super().__init__(stream, protocol=5)
        self._writer = writer
        self._names = names
        self._globals: dict[int, str | int] = {}
        self.data: dict[int, Nest] = {}
        self.references: list[Reference] = []
        self.arrays: list[Array] = []

    def persistent_id(self, obj: Any) -> int | None:
        # Called for every object in the content.
        kind = type(obj)
        if kind in _BY_VALUE:
            return None
        if isinstance(obj, _KEYED):
            reference: Reference | None = ("value", self._writer.key_of(obj))
        else:
            reference = self._reference_to(obj, kind)
        if reference is None:
            return None
        self.references.append(reference)
        return len(self.references) - 1

    def _reference_to(self, obj: Any, kind: type) -> Reference | None:
        writer = self._writer
        known = writer.known.get(id(obj))
        if known is not None:
            return known
        if kind is types.FunctionType:
            return self._reference_to_function(obj)
        if kind is types.CodeType:
            return ("code", writer.codes.number_of(obj))
        if isinstance(obj, type) and function_codec.is_global(obj):
            return ("global", obj.__module__, obj.__qualname__)
        if kind is dict and (home := self._globals.get(id(obj))) is not None:
            return ("globals", home)
        number = self._name_of(obj)
        if number is not None:
            return ("named", number)
        if kind is np.ndarray and obj.dtype.kind in _NUMBERS:
            if obj.nbytes <= MOST_INLINE_BYTES:
                return ("array", obj.dtype.str, obj.shape, obj.tobytes())
        elif not backend.is_device_array(obj):
            return None
        self.arrays.append(obj)
        return ("sent", len(self.arrays) - 1)

    def _reference_to_function(self, obj: types.FunctionType) -> Reference | None:
        # Every rank runs the same program, and has what is at the top level of the
        # script too. cloudpickle would copy it, with the globals that it uses.
        if function_codec.is_global(obj):
            return ("global", obj.__module__, obj.__qualname__)
        number = self._name_of(obj)
        if number is not None:
            return ("named", number)
        home = self._home_of(obj.__globals__)
        if home is None:
            return None
        self._globals[id(obj.__globals__)] = home
        closed = self._closed_over_by(obj) if function_codec.is_plain(obj) else None
        if closed is None:
            return None  # see `reducer_override`
        return ("function", self._writer.codes.number_of(obj.__code__), home, closed)

    def _closed_over_by(self, obj: types.FunctionType) -> tuple[Any, ...] | None:
        """Return what a function closes over; None unless it is all as in the table."""
        closed = []
        for cell in obj.__closure__ or ():
            try:
                x = cell.cell_contents
            except ValueError:  # an empty cell
                return None
            if type(x) not in ATOMS:
                if isinstance(x, _KEYED):
                    x = ("value", self._writer.key_of(x))
                elif type(x) is tuple or (number := self._name_of(x)) is None:
                    return None
                else:
                    x = ("named", number)
            closed.append(x)
        return tuple(closed)

    def _name_of(self, obj: object) -> int | None:
        """Return the number of an object that merge_fn can reach; None: of no other."""
        names = self._names
        if names is None or id(obj) in self.data:
            return None
        return names.number_of(obj)

    def _home_of(self, variables: dict[str, Any]) -> str | int | None:
        """Return the name of a function's globals; None if they have none."""
        module = function_codec.module_of(variables)
        if module is not None or self._names is None:
            return module
        return self._names.number_of(variables)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType and id(obj.__globals__) in self._globals:
            return (
                function_codec.make_empty,
                (obj.__code__, obj.__globals__),
                function_codec.state_of(obj),
                None,
                None,
                function_codec.fill,
            )
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    """Has attributes: Python 3.13.0 can set no `persistent_load` of the base class."""


class Reader:
    """Decodes the commands of one merge_call, on the other ranks.

    Args:
        group: the ranks.
        names: the names of what this rank's merge_fn can reach; None if it has none.
    """

    def __init__(self, group: ReplicaGroup, names: object_names.Names | None) -> None:
        self._group = group
        self.codes = group.registry.codes
        self._made: dict[tuple[int, str | int], types.FunctionType] = {}
        self.names = names

    def command(self, message: bytes) -> tuple[str, Sequence[Key], Content]:
        """Return the name of a command, the dropped keys, and the content.

        Its news are stored, for this command and later ones.
        """
        name, dropped, news, data, references, num_arrays = pickle.loads(message)
        codes, names = news
        for code in codes:
            self.codes.receive(*code)
        if self.names is not None:
            for one in names:
                self.names.receive(*one)
        return name, dropped, (data, references, num_arrays)

    def read(self, content: Content, arrays: list[Array]) -> Any:
        """Return the object that `Writer.write` has encoded.

        Args:
            content: the content of the command.
            arrays: those that were sent after it.
        """
        data, references, _ = content
        unpickler = _Unpickler(io.BytesIO(data))
        objects = [self._resolve(x, arrays) for x in references]
        # Not a method in Python: this one is written in C.
        unpickler.persistent_load = objects.__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    def _resolve(self, reference: Reference, arrays: list[Array]) -> Any:
        """Return this rank's object for a reference."""
        if reference[0] == "sent":
            return arrays[reference[1]]
        return _RESOLVERS[reference[0]](self, *reference[1:])

    def _value(self, key: Key) -> Any:
        value = self._group.registry.get(key)
        if value is None:
            raise ValueError(
                f"merge_fn uses a value that rank {self._group.replica_id} has not "
                "kept; pass it to `merge_call` as an argument"
            )
        return value

    def _known(self, number: int) -> object:
        return (*_OURS, *self._group.public_objects)[number]

    def _named(self, number: int) -> Any:
        if self.names is None:
            raise LookupError("the coordinator names objects that have no names here")
        return self.names.object(number)

    def _globals(self, home: str | int) -> dict[str, Any]:
        if type(home) is str:
            return function_codec.globals_of(home)
        variables: dict[str, Any] = self._named(home)  # type: ignore[arg-type]
        return variables

    def _function(
        self, code: int, home: str | int, closed: tuple[Any, ...]
    ) -> types.FunctionType:
        made = self._made.get((code, home))
        if made is None or closed:
            names = self._globals(home)
            cells = [self._resolve(x, []) if type(x) is tuple else x for x in closed]
            made = function_codec.make(self.codes.code(code), names, cells)
            if not closed:
                self._made[code, home] = made
        return made


_RESOLVERS: Final[dict[str, Callable[..., Any]]] = {
    "value": Reader._value,
    "known": Reader._known,
    "named": Reader._named,
    "global": lambda reader, module, name: function_codec.lookup_or_raise(module, name),
    "code": lambda reader, number: reader.codes.code(number),
    "globals": Reader._globals,
    "function": Reader._function,
    "array": lambda reader, dtype, shape, data: np.ndarray(shape, dtype, data).copy(),
}
