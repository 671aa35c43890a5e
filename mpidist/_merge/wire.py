"""The messages of a `merge_call`: their contents, and their encoding.

A message is a tuple of plain objects, which marshal writes several times as fast as
pickle. Variables, distributed values and functions are converted to tuples here. A
message with any other object in it is pickled as a whole, and arrays are sent
separately, from their buffers.

What every rank has is sent by name, without a copy:

- variables and distributed values by their keys, the strategy by a number;
- functions and classes of modules by module and name; the globals of a function by
  the module of the function; code objects by a number, after they were sent once
  (`function_codec`);
- in functions: the objects that merge_fn can reach, by a number, after their names
  were sent once (`object_names`).
  In the arguments of a command lists, dicts and arrays are data: rank 0's are sent.

What is sent once is the news of the next message, of any kind. The other ranks read
the news of every message, also of a message that they discard.

Messages
--------
Each begins with the number of joins before it, its kind, the keys that rank 0 has
dropped, and the news (see `dump`). After these come, by kind:

========  =======================================================================
do        name of the operation, arguments, number of arrays that follow
update    key of the variable, function, arguments (None: they are in function),
          number of arrays that follow, whether the results are the same on all
          ranks, whether overwritten values are kept, whether a join follows
join      nothing: a batch of updates ends
return    result of merge_fn, number of arrays that follow
raise     pickled exception of merge_fn, its traceback as text
========  =======================================================================

They are tuples, and not records: marshal writes only plain tuples, and an update is
so short that converting them would show.

Plain forms
-----------
A number, string, bytes or None stands for itself. Any other object is a tuple of a
tag and fields, which `Reader.read` unpacks by name:

=======  ==========================================  =============================
tag      fields                                      stands for
=======  ==========================================  =============================
tuple    items                                       a tuple
list     items                                       a list
dict     none                                        an empty dict
pairs    keys of values and variables, in turn       a list of (value, variable)
value    key                                         a distributed value, variable
known    number                                      an object of the strategy
named    number                                      an object of `object_names`
global   module, name                                a function or class
module   name                                        a module
fn       code, home, closed over, defaults           a function
method   owner, name                                 a method
partial  function and arguments, names of keywords   a `functools.partial`
scalar   dtype, bytes                                a NumPy scalar
op       name                                        a `ReduceOp`
pickle   bytes                                       anything else
=======  ==========================================  =============================
"""

from __future__ import annotations

import functools
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

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

_VALUE: Final = "value"
_NAMED: Final = "named"
_KNOWN: Final = "known"
# Only in pickled messages:
_CODE: Final = "code"
_GLOBALS: Final = "globals"
_ARRAY: Final = "array"
_PERSISTENT: Final = frozenset((_NAMED, _KNOWN, _CODE, _GLOBALS))
_KEYED: Final = frozenset((Variable, Mirrored, PerReplica))
_KEYED_BASES: Final = (DistributedValues, Variable)  # also of users' classes
_NUMBERS: Final = "biufc"  # kinds of dtypes
_SMALL: Final = 8  # elements of an array that is pickled
_DEEPEST: Final = 4  # functions that close over functions
ATOMS: Final = frozenset((bool, int, float, str, bytes, type(None)))
_PICKLED: Final = "pickled"  # there is no plain form

Pickler: Any = cloudpickle.Pickler  # a class of a library without types

KeyOf: TypeAlias = Callable[[Registered], Key]
"""Returns the key under which every rank has a value."""

Plain: TypeAlias = Any
"""The plain form of an object: nested tuples, which marshal can write."""

Kind: TypeAlias = Literal["do", "update", "join", "return", "raise"]

News: TypeAlias = tuple[list[tuple[int, bytes]], list[object_names.News]]
"""Code objects, and names of objects, that the other ranks have to know."""

object_names.register_values(*_KEYED_BASES)


class Writer:
    """Converts the messages of one merge_call to plain forms, on rank 0.

    Args:
        group: the ranks.
        key_of: returns the keys of values; may send a message itself.
        names: the names of what merge_fn can reach; None if it has no names.
    """

    def __init__(
        self, group: ReplicaGroup, key_of: KeyOf, names: object_names.Names | None
    ) -> None:
        self.key_of = key_of
        self.names = names
        self.codes = group.registry.codes
        self._group = group

    @functools.cached_property
    def known(self) -> dict[int, tuple[str, int]]:
        """The plain forms of the objects of the strategy, by their ids."""
        return {id(x): (_KNOWN, i) for i, x in enumerate(self._group.public_objects)}

    def close(self) -> None:
        """Drop the references to the coordinator, and to what merge_fn can reach."""
        del self.key_of, self.names

    def take_news(self) -> News | tuple[()]:
        """Return the news for the next message."""
        codes, names = self.codes, self.names
        told = names.unsent if names is not None else []
        if not codes.unsent and not told:
            return ()
        news = (codes.unsent, told)
        codes.unsent = []
        if names is not None:
            names.unsent = []
        return news

    def return_news(self, news: News | tuple[()]) -> None:
        """Undo `take_news`, for a message that was not sent."""
        if news:
            self.codes.unsent[:0] = news[0]
            if self.names is not None:
                self.names.unsent[:0] = news[1]

    def write(self, message: Nest, *, named: bool = True) -> tuple[Plain, list[Array]]:
        """Return the plain form of an object, and the arrays to send separately.

        Args:
            message: a tuple of the arguments of an operation, or the result of
                merge_fn.
            named: whether objects that merge_fn can reach are sent by name.
        """
        names = self.names if named else None
        try:
            plain = self.plain(message, names)
        except RecursionError:  # a list that contains itself
            plain = _PICKLED
        if plain is not _PICKLED:
            return plain, []
        stream = io.BytesIO()
        data = {} if names is None else _data_in(message)
        pickler = _Pickler(stream, self, names, data)
        pickler.dump(message)
        return ("pickle", stream.getvalue()), pickler.arrays

    def plain(self, x: Nest, names: object_names.Names | None) -> Plain:
        """Return the plain form of an object; ``_PICKLED`` if there is none."""
        kind = type(x)
        if kind in ATOMS:
            return x
        if kind in _KEYED:
            return (_VALUE, self.key_of(x))
        if kind is tuple or kind is list:
            if kind is list and (keys := self._keys_of_pairs(x)) is not None:
                return ("pairs", keys)
            items: list[Plain] = [kind.__name__]
            for item in x:
                part = self.plain(item, names)
                if part is _PICKLED:
                    return _PICKLED
                items.append(part)
            return tuple(items)
        if kind is ReduceOp:
            return ("op", x.name)
        if kind is dict:
            return _PICKLED if x else ("dict",)
        return self._part(x, names, 0)

    def function(self, fn: object) -> Plain:
        """Return the plain form of a function; ``_PICKLED`` if there is none."""
        return self._part(fn, self.names, 0)

    def _part(self, x: Any, names: object_names.Names | None, depth: int) -> Plain:
        """Return the plain form of an object in a function.

        Lists are not copied, because the function may share them.

        Args:
            x: the object.
            names: the names of what merge_fn can reach.
            depth: the number of functions that it is in.
        """
        kind = type(x)
        if kind in ATOMS:
            return x
        if kind in _KEYED:
            return (_VALUE, self.key_of(x))
        if kind is types.FunctionType:
            return self._function(x, names, depth)
        if kind is types.MethodType:
            return self._method(x, names, depth)
        if isinstance(x, np.generic):
            if x.dtype.kind in _NUMBERS and x.dtype.isnative:
                return ("scalar", x.dtype.str, x.tobytes())
            return _PICKLED
        if kind is types.ModuleType:
            named = sys.modules.get(x.__name__) is x
            return ("module", x.__name__) if named else _PICKLED
        if kind is type and function_codec.is_global(x):
            return ("global", x.__module__, x.__qualname__)
        if kind is functools.partial:
            return self._partial(x, names, depth)
        known = self.known.get(id(x))
        if known is not None:
            return known
        if names is not None and (depth or not _is_data(x)):
            number = names.number_of(x)
            if number is not None:
                return (_NAMED, number)
        if isinstance(x, _KEYED_BASES):
            return (_VALUE, self.key_of(x))
        return _PICKLED

    def _function(
        self, x: types.FunctionType, names: object_names.Names | None, depth: int
    ) -> Plain:
        if function_codec.is_global(x):
            return ("global", x.__module__, x.__qualname__)
        if names is not None and (number := names.number_of(x)) is not None:
            return (_NAMED, number)
        if depth >= _DEEPEST or not function_codec.is_bare(x):
            return _PICKLED
        home = self.home_of(x.__globals__, names)
        if home is None:
            return _PICKLED
        closed = []
        for cell in x.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # an empty cell
                return _PICKLED
            part = self._part(contents, names, depth + 1)
            if part is _PICKLED:
                return _PICKLED
            closed.append(part)
        defaults = []
        for default in x.__defaults__ or ():
            part = self._part(default, names, depth + 1)
            if part is _PICKLED:
                return _PICKLED
            defaults.append(part)
        return ("fn", self.codes.number_of(x.__code__), home, closed, defaults)

    def _method(
        self, x: types.MethodType, names: object_names.Names | None, depth: int
    ) -> Plain:
        owner, name = x.__self__, x.__func__.__name__
        if isinstance(owner, type) or getattr(type(owner), name, None) != x.__func__:
            return _PICKLED
        part = self._part(owner, names, depth + 1)
        return _PICKLED if part is _PICKLED else ("method", part, name)

    def _partial(
        self,
        x: functools.partial[Any],
        names: object_names.Names | None,
        depth: int,
    ) -> Plain:
        if names is not None and (number := names.number_of(x)) is not None:
            return (_NAMED, number)
        if depth >= _DEEPEST or x.__dict__:
            return _PICKLED
        inner = (x.func, *x.args, *x.keywords.values())
        parts = [self._part(one, names, depth + 1) for one in inner]
        return _PICKLED if _PICKLED in parts else ("partial", parts, [*x.keywords])

    def home_of(
        self, variables: dict[str, Any], names: object_names.Names | None
    ) -> str | int | None:
        """Return the name of a function's globals; None if they have none."""
        module = function_codec.module_of(variables)
        if module is not None or names is None:
            return module
        return names.number_of(variables)

    def arguments(self, args: Sequence[Nest]) -> list[tuple[bool, Plain]] | None:
        """Return the arguments of an update for `Reader.arguments`.

        None if some are neither numbers nor strings nor Mirrored. All of these need
        no check: they are the same on all ranks.
        """
        found: list[tuple[bool, Plain]] = []
        for x in args:
            kind = type(x)
            if kind is Mirrored:
                found.append((True, self.key_of(x)))
            elif kind in ATOMS:
                found.append((False, x))
            else:
                return None
        return found

    def _keys_of_pairs(self, x: list[Nest]) -> list[Key] | None:
        """Return the keys of a list of pairs (value, variable); None if it is none."""
        keys: list[Key] = []
        for pair in x:
            if type(pair) is not tuple or len(pair) != 2:
                return None
            first, second = pair
            if type(first) not in _KEYED or type(second) not in _KEYED:
                return None
            keys += (self.key_of(first), self.key_of(second))
        return keys

    def culprit(
        self, fn: object, args: Sequence[Nest], kwargs: Mapping[str, Nest]
    ) -> str:
        """Describe the part of a function and its arguments that cannot be sent.

        Returns "" if each part can be sent by itself.
        """
        for what, part in _parts_for_message(fn, args, kwargs):
            try:
                self.write((part,))
            except CollectiveError:
                raise
            except Exception:
                kind = type(part)
                name = f"{kind.__module__}.{kind.__qualname__}"
                return f"{what}, a {name.removeprefix('builtins.')},"
        return ""


def _is_data(x: object) -> bool:
    return isinstance(x, (list, tuple, dict)) or backend.is_array(x)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _parts_for_message(
    fn: object, args: Sequence[Nest], kwargs: Mapping[str, Nest]
) -> list[tuple[str, Nest]]:
    """Return the parts of a call, each with a description."""
    found: list[tuple[str, Nest]] = []
    inner = getattr(fn, "__func__", getattr(fn, "func", fn))
    if isinstance(inner, types.FunctionType):
        name = inner.__qualname__
        names = inner.__code__.co_freevars
        for variable, cell in zip(names, inner.__closure__ or (), strict=True):
            if not _is_empty(cell):
                what = f"`{name}` closes over `{variable}`"
                found.append((what, cell.cell_contents))
        defaults = inner.__defaults__ or ()
        found += [(f"`{name}` has a default", x) for x in defaults]
        keywords = inner.__kwdefaults__ or {}
        found += [
            (f"`{name}` has the default `{key}`", keywords[key]) for key in keywords
        ]
    if isinstance(fn, types.MethodType):
        found.append((f"`{fn.__name__}` is a method of an object", fn.__self__))
    elif not isinstance(fn, types.FunctionType):
        found.append(("its function is an object", fn))
    found += [(f"it gets args[{i}]", x) for i, x in enumerate(args)]
    found += [(f"it gets kwargs[{key!r}]", x) for key, x in kwargs.items()]
    return found


def _data_in(message: Nest) -> dict[int, Nest]:
    """Return the lists, dicts and arrays of a message, by their ids.

    Only those in the arguments themselves, not those inside other objects.
    """
    found: dict[int, Nest] = {}
    waiting = [message]
    while waiting:
        x = waiting.pop()
        if isinstance(x, (list, tuple, dict)) and id(x) not in found:
            found[id(x)] = x
            waiting += x.values() if isinstance(x, dict) else x
        elif backend.is_array(x):
            found[id(x)] = x
    return found


def dump(
    joins: int,
    kind: Kind,
    *body: Plain,
    dropped: Sequence[Key] = (),
    news: News | tuple[()] = (),
) -> bytes:
    """Return a message as bytes: by marshal if possible, several times as fast.

    Args:
        joins: the number of joins that were before it.
        kind: the kind of the message.
        body: the fields of this kind of message, see above.
        dropped: the keys that rank 0 has dropped.
        news: what the other ranks have to know from now on.
    """
    message = (joins, kind, dropped, news, *body)
    try:
        return b"m" + marshal.dumps(message)
    except ValueError:
        return b"p" + pickle.dumps(message)


def load(data: bytes) -> tuple[Any, ...]:
    """Return the message that `dump` has written: its arguments, the body last."""
    body = memoryview(data)[1:]
    message: tuple[Any, ...]
    message = marshal.loads(body) if data[:1] == b"m" else pickle.loads(body)
    return message


class Reader:
    """Converts the plain forms of one merge_call back, on the other ranks.

    Args:
        group: the ranks.
        names: the names of what this rank's merge_fn can reach; None if it has none.
    """

    def __init__(self, group: ReplicaGroup, names: object_names.Names | None) -> None:
        self._group = group
        self.codes = group.registry.codes
        self._made: dict[tuple[int, str | int], types.FunctionType] = {}
        self.names = names

    def receive_news(self, news: News | tuple[()]) -> None:
        """Store the news of a message, for this message and later ones."""
        if news:
            codes, names = news
            for code in codes:
                self.codes.receive(*code)
            for name in names:
                if self.names is not None:
                    self.names.receive(*name)

    def read(self, plain: Plain, arrays: list[Array]) -> Nest:
        """Return the object for which `Writer.write` has returned these."""
        if type(plain) is not tuple:
            return plain
        tag = plain[0]
        if tag == "tuple":
            return tuple([self.read(item, arrays) for item in plain[1:]])
        if tag == _VALUE:
            _, key = plain
            return value_of(key, self._group)
        if tag == "fn":
            _, code, home, closed, defaults = plain
            if not (closed or defaults):
                return self._without_closure(code, home)
            return function_codec.make(
                self.codes.code(code),
                self.globals_of(home),
                [self.read(x, arrays) for x in closed],
                tuple([self.read(x, arrays) for x in defaults]),
            )
        if tag == "global":
            _, module, name = plain
            return function_codec.lookup_or_raise(module, name)
        if tag in _PERSISTENT:
            return self.persistent(plain)
        if tag == "method":
            _, owner, name = plain
            return getattr(self.read(owner, arrays), name)
        if tag == "pickle":
            _, data = plain
            return _Unpickler(data, self, arrays).load()
        if tag == "pairs":
            _, keys = plain
            values = [value_of(key, self._group) for key in keys]
            return list(zip(values[::2], values[1::2], strict=True))
        if tag == "list":
            return [self.read(item, arrays) for item in plain[1:]]
        if tag == "scalar":
            _, dtype, data = plain
            return np.frombuffer(data, dtype)[0]
        if tag == "partial":
            _, inner, keywords = plain
            fn, *parts = [self.read(x, arrays) for x in inner]
            count = len(parts) - len(keywords)
            named = dict(zip(keywords, parts[count:], strict=True))
            return functools.partial(fn, *parts[:count], **named)
        if tag == "module":
            _, name = plain
            return function_codec.module(name)
        if tag == "op":
            _, name = plain
            return ReduceOp[name]
        return {}

    def arguments(self, arguments: list[tuple[bool, Plain]]) -> list[Nest]:
        """Return the arguments for which `Writer.arguments` has returned these."""
        group = self._group
        return [value_of(x, group) if keyed else x for keyed, x in arguments]

    def _without_closure(self, code: int, home: str | int) -> types.FunctionType:
        """Return a function that closes over nothing; each is created only once."""
        made = self._made.get((code, home))
        if made is None:
            variables = self.globals_of(home)
            made = function_codec.make(self.codes.code(code), variables, [], ())
            self._made[code, home] = made
        return made

    def globals_of(self, home: str | int) -> dict[str, Any]:
        """Return this rank's globals for the result of `Writer.home_of`."""
        if type(home) is str:
            return function_codec.globals_of(home)
        variables: dict[str, Any] = self.persistent((_NAMED, home))
        return variables

    def persistent(self, plain: tuple[str, Any]) -> Any:
        """Return this rank's object for a name that every rank has."""
        tag, number = plain
        if tag == _VALUE:
            return value_of(number, self._group)
        if tag == _KNOWN:
            return self._group.public_objects[number]
        if tag == _CODE:
            return self.codes.code(number)
        if tag == _GLOBALS:
            return self.globals_of(number)
        if self.names is None:
            raise LookupError("the coordinator names objects that have no names here")
        return self.names.object(number)


class _Pickler(Pickler):  # type: ignore[misc]
    """Pickles what every rank has by name, other functions by code, without arrays."""

    def __init__(
        self,
        stream: io.BytesIO,
        writer: Writer,
        names: object_names.Names | None,
        data: dict[int, Nest],
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=None)
        self._writer = writer
        self._names = names
        self._data = data
        self._globals: dict[int, str | int] = {}
        self.arrays: list[Array] = []

    def persistent_id(self, obj: Any) -> Any:
        # Called for every object in the message.
        kind = type(obj)
        if kind in ATOMS or kind is tuple:
            return None
        if isinstance(obj, _KEYED_BASES):
            return (_VALUE, self._writer.key_of(obj))
        if kind is types.CodeType:
            return (_CODE, self._writer.codes.number_of(obj))
        if kind is dict and (home := self._globals.get(id(obj))) is not None:
            return (_GLOBALS, home)
        if self._names is not None and id(obj) not in self._data:
            number = self._names.number_of(obj)
            if number is not None:
                return (_NAMED, number)
        plain = kind is np.ndarray and obj.dtype.kind in _NUMBERS and obj.size > _SMALL
        if plain or backend.is_device_array(obj):
            self.arrays.append(obj)
            return (_ARRAY, len(self.arrays) - 1)
        return self._writer.known.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        # Every rank runs the same program and has what is at the top level of the
        # script: it is sent by reference, as from any other module. cloudpickle would
        # copy it with the globals that it uses.
        kind = type(obj)
        may_have_name = kind is types.FunctionType or isinstance(obj, type)
        if may_have_name and function_codec.is_global(obj):
            if obj.__module__ != function_codec.MAIN:
                return super().reducer_override(obj)
            return (
                function_codec.lookup_or_raise,
                (function_codec.MAIN, obj.__qualname__),
            )
        if kind is types.FunctionType:
            home = self._writer.home_of(obj.__globals__, self._names)
            if home is not None:
                self._globals[id(obj.__globals__)] = home
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
    def __init__(self, data: bytes, reader: Reader, arrays: list[Array]) -> None:
        super().__init__(io.BytesIO(data))
        self._reader = reader
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == _ARRAY:
            return self._arrays[pid[1]]
        return self._reader.persistent(pid)


def value_of(key: Key, group: ReplicaGroup) -> Any:
    """Return this rank's value for a key that rank 0 has sent.

    Raises:
        ValueError: if this rank has no such value.
    """
    value = group.registry.get(key)
    if value is None:
        raise ValueError(
            f"merge_fn uses a value that rank {group.replica_id} has not "
            "kept; pass it to `merge_call` as an argument"
        )
    return value
