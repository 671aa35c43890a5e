"""What the commands of `merge_call` are made of, and how it travels.

A message is a tuple of plain objects, which marshal writes several times as fast as
pickle. Variables, distributed values and functions are put into tuples by hand. What
has anything else in it is pickled as a whole, and arrays travel apart, from their
buffers.

What every rank has is named, not copied:

- variables and distributed values by their keys, the strategy by a word;
- functions and classes of modules by module and name; the globals of a function by
  the module that it is from; code objects by a number, once sent (`function_codec`);
- in functions: the objects that merge_fn can reach, by a number, once told
  (`object_names`).
  In the arguments of a command lists, dicts and arrays are data: rank 0's count.

What has to be told once travels as the news of the next message, whichever that is, and
the other ranks read the news of each message, also of one that they drop.
"""

from __future__ import annotations

import functools
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import cloudpickle
import numpy as np

from mpidist._base import backend, function_codec
from mpidist._base.errors import CollectiveError
from mpidist._base.options import ReduceOp
from mpidist._merge import object_names
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.registry import Key
from mpidist._values.distributed import DistributedValues, Mirrored, PerReplica
from mpidist._values.variable import Variable

_VALUE: Final = "value"
_NAMED: Final = "named"
_KNOWN: Final = "known"
_CODE: Final = "code"
_GLOBALS: Final = "globals"
_ARRAY: Final = "array"
_PERSISTENT: Final = frozenset((_NAMED, _KNOWN, _CODE, _GLOBALS))
_KEYED: Final = frozenset((Variable, Mirrored, PerReplica))
_KEYED_TOO: Final = (DistributedValues, Variable)
_NUMBERS: Final = "biufc"  # kinds of dtypes
_SMALL: Final = 8  # elements of an array that is pickled
_DEEPEST: Final = 4  # functions that close over functions
ATOMS: Final = frozenset((bool, int, float, str, bytes, type(None)))
_PICKLED: Final = "pickled"  # no plain form

Pickler: Any = cloudpickle.Pickler

KeyOf = Callable[[Any], Key]
"""Gives the key under which every rank has a value."""

News = tuple[list[tuple[int, bytes]], list[tuple[Any, ...]]]
"""Code objects, and names of objects, that the other ranks have to know."""

object_names.register_values(*_KEYED_TOO)


class Writer:
    """Takes the messages of one merge_call apart, on rank 0.

    Args:
        group: of the merge_call.
        key_of: gives the keys of values; may send a message itself.
        names: what merge_fn can reach; None where that has no names.
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
        """What belongs to the strategy, by its id: its name."""
        return {id(x): (_KNOWN, i) for i, x in enumerate(self._group.public_objects)}

    def close(self) -> None:
        """Let go of who made this, and of what merge_fn can reach."""
        del self.key_of, self.names

    def take_news(self) -> News | tuple[()]:
        """Return what the next message has to carry."""
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

    def write(self, message: Any, *, named: bool = True) -> tuple[Any, list[Any]]:
        """Take a message apart; return its plain part, and arrays that travel apart.

        Args:
            message: a tuple of what an operation gets, or what merge_fn has returned.
            named: whether objects that merge_fn can reach are sent by name.
        """
        names = self.names if named else None
        try:
            plain = self.plain(message, names)
        except RecursionError:  # a list that is in itself
            plain = _PICKLED
        if plain is not _PICKLED:
            return plain, []
        stream = io.BytesIO()
        data = {} if names is None else _data_in(message)
        pickler = _Pickler(stream, self, names, data)
        pickler.dump(message)
        return ("pickle", stream.getvalue()), pickler.arrays

    def plain(self, x: Any, names: object_names.Names | None) -> Any:
        """Return an object in a form for marshal; ``_PICKLED`` where there is none."""
        kind = type(x)
        if kind in ATOMS:
            return x
        if kind in _KEYED:
            return (_VALUE, self.key_of(x))
        if kind is tuple or kind is list:
            if kind is list and (keys := self._keys_of_pairs(x)) is not None:
                return ("pairs", keys)
            items: list[Any] = [kind.__name__]
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

    def function(self, fn: Any) -> Any:
        """Return a function in a form for marshal; ``_PICKLED`` where there is none."""
        return self._part(fn, self.names, 0)

    def _part(self, x: Any, names: object_names.Names | None, depth: int) -> Any:
        """As `plain`, for what is in a function: no copies of lists, which it shares.

        Args:
            x: the object.
            names: of what merge_fn can reach.
            depth: how many functions it is in.
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
        if isinstance(x, _KEYED_TOO):
            return (_VALUE, self.key_of(x))
        return _PICKLED

    def _function(
        self, x: types.FunctionType, names: object_names.Names | None, depth: int
    ) -> Any:
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

    def _method(self, x: Any, names: object_names.Names | None, depth: int) -> Any:
        owner, name = x.__self__, x.__func__.__name__
        if isinstance(owner, type) or getattr(type(owner), name, None) != x.__func__:
            return _PICKLED
        part = self._part(owner, names, depth + 1)
        return _PICKLED if part is _PICKLED else ("method", part, name)

    def _partial(self, x: Any, names: object_names.Names | None, depth: int) -> Any:
        if names is not None and (number := names.number_of(x)) is not None:
            return (_NAMED, number)
        if depth >= _DEEPEST or x.__dict__:
            return _PICKLED
        inner = (x.func, *x.args, *x.keywords.values())
        parts = [self._part(one, names, depth + 1) for one in inner]
        return _PICKLED if _PICKLED in parts else ("partial", parts, [*x.keywords])

    def home_of(
        self, variables: dict[str, Any], names: object_names.Names | None
    ) -> Any:
        """Return the name of a function's globals; None where they have none."""
        module = function_codec.module_of(variables)
        if module is not None or names is None:
            return module
        return names.number_of(variables)

    def arguments(self, args: Any) -> list[tuple[bool, Any]] | None:
        """Return the arguments of an update for `Reader.arguments`.

        None where some are neither numbers nor strings nor Mirrored. Of what
        these are there is nothing to check: it is the same on all ranks.
        """
        found: list[tuple[bool, Any]] = []
        for x in args:
            kind = type(x)
            if kind is Mirrored:
                found.append((True, self.key_of(x)))
            elif kind in ATOMS:
                found.append((False, x))
            else:
                return None
        return found

    def _keys_of_pairs(self, x: list[Any]) -> list[Key] | None:
        """Return the keys of a list of pairs (value, variable); None for others."""
        keys: list[Key] = []
        for pair in x:
            if type(pair) is not tuple or len(pair) != 2:
                return None
            first, second = pair
            if type(first) not in _KEYED or type(second) not in _KEYED:
                return None
            keys += (self.key_of(first), self.key_of(second))
        return keys

    def culprit(self, fn: Any, args: Any, kwargs: Any) -> str:
        """Return which part of a function and its arguments cannot be sent.

        For a message; "" if each can be sent by itself.
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


def _is_data(x: Any) -> bool:
    return isinstance(x, (list, tuple, dict)) or backend.is_array(x)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _parts_for_message(fn: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Return what a call is made of, with a description of each part."""
    found: list[tuple[str, Any]] = []
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


def _data_in(message: Any) -> dict[int, Any]:
    """Return the lists, dicts and arrays of a message, by their id.

    Those in the arguments themselves, not in the objects among them.
    """
    found: dict[int, Any] = {}
    waiting = [message]
    while waiting:
        x = waiting.pop()
        if isinstance(x, (list, tuple, dict)) and id(x) not in found:
            found[id(x)] = x
            waiting += x.values() if isinstance(x, dict) else x
        elif backend.is_array(x):
            found[id(x)] = x
    return found


def dump(message: tuple[Any, ...]) -> bytes:
    """Return a message as bytes: by marshal, several times as fast, where it can be."""
    try:
        return b"m" + marshal.dumps(message)
    except ValueError:
        return b"p" + pickle.dumps(message)


def load(data: bytes) -> Any:
    """Return the message that `dump` was given."""
    body = memoryview(data)[1:]
    return marshal.loads(body) if data[:1] == b"m" else pickle.loads(body)


class Reader:
    """Puts the messages of one merge_call together, on the other ranks.

    Args:
        group: of the merge_call.
        names: what this rank's merge_fn can reach; None where that has no names.
    """

    def __init__(self, group: ReplicaGroup, names: object_names.Names | None) -> None:
        self._group = group
        self._codes = group.registry.codes
        self._made: dict[tuple[int, str | int], types.FunctionType] = {}
        self.names = names

    def receive_news(self, news: News | tuple[()]) -> None:
        """Take in what a message tells for those after it."""
        if news:
            codes, names = news
            for code in codes:
                self._codes.receive(*code)
            for name in names:
                if self.names is not None:
                    self.names.receive(*name)

    def read(self, head: Any, arrays: list[Any]) -> Any:
        """Put together what `Writer.write` has taken apart."""
        if type(head) is not tuple:
            return head
        kind = head[0]
        if kind == "tuple":
            return tuple([self.read(item, arrays) for item in head[1:]])
        if kind == _VALUE:
            return value_of(head[1], self._group)
        if kind == "fn":
            _, code, home, closed, defaults = head
            if not (closed or defaults):
                return self._alone(code, home)
            return function_codec.make(
                self._codes.code(code),
                self.globals_of(home),
                [self.read(x, arrays) for x in closed],
                tuple([self.read(x, arrays) for x in defaults]),
            )
        if kind == "global":
            return function_codec.lookup_or_raise(head[1], head[2])
        if kind in _PERSISTENT:
            return self.persistent(head)
        if kind == "method":
            return getattr(self.read(head[1], arrays), head[2])
        if kind == "pickle":
            return _Unpickler(head[1], self, arrays).load()
        if kind == "pairs":
            values = [value_of(key, self._group) for key in head[1]]
            return list(zip(values[::2], values[1::2], strict=True))
        if kind == "list":
            return [self.read(item, arrays) for item in head[1:]]
        if kind == "scalar":
            return np.frombuffer(head[2], head[1])[0]
        if kind == "partial":
            fn, *parts = [self.read(x, arrays) for x in head[1]]
            count = len(parts) - len(head[2])
            named = dict(zip(head[2], parts[count:], strict=True))
            return functools.partial(fn, *parts[:count], **named)
        if kind == "module":
            return function_codec.module(head[1])
        if kind == "op":
            return ReduceOp[head[1]]
        return {}

    def arguments(self, arguments: list[tuple[bool, Any]]) -> list[Any]:
        """Return the arguments for which `Writer.arguments` has given this."""
        group = self._group
        return [value_of(x, group) if keyed else x for keyed, x in arguments]

    def _alone(self, code: int, home: str | int) -> types.FunctionType:
        """Return a function that closes over nothing: made once."""
        made = self._made.get((code, home))
        if made is None:
            variables = self.globals_of(home)
            made = function_codec.make(self._codes.code(code), variables, [], ())
            self._made[code, home] = made
        return made

    def globals_of(self, home: str | int) -> dict[str, Any]:
        """Return this rank's globals for what `Writer.home_of` has given."""
        if type(home) is str:
            return function_codec.globals_of(home)
        return self.persistent((_NAMED, home))  # type: ignore[no-any-return]

    def persistent(self, name: Any) -> Any:
        """Return what every rank has under a name, as this rank has it."""
        kind, number = name
        if kind == _VALUE:
            return value_of(number, self._group)
        if kind == _KNOWN:
            return self._group.public_objects[number]
        if kind == _CODE:
            return self._codes.code(number)
        if kind == _GLOBALS:
            return self.globals_of(number)
        if self.names is None:
            raise LookupError("the coordinator names objects that have no names here")
        return self.names.object(number)


class _Pickler(Pickler):  # type: ignore[misc]
    """Pickles what every rank has by name; other functions by code; arrays apart."""

    def __init__(
        self,
        stream: io.BytesIO,
        writer: Writer,
        names: object_names.Names | None,
        data: dict[int, Any],
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=None)
        self._writer = writer
        self._names = names
        self._data = data
        self._globals: dict[int, Any] = {}
        self.arrays: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        # Called for every object in the message.
        kind = type(obj)
        if kind in ATOMS or kind is tuple:
            return None
        if isinstance(obj, _KEYED_TOO):
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
        # Every rank runs the same program, so what is at the top level of the script
        # is there too: by reference, as for any other module. cloudpickle would copy
        # it with the globals that it uses.
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
    def __init__(self, data: bytes, reader: Reader, arrays: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._reader = reader
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == _ARRAY:
            return self._arrays[pid[1]]
        return self._reader.persistent(pid)


def value_of(key: Key, group: ReplicaGroup) -> Any:
    """Return the value of rank 0 that a key stands for, as this rank has it."""
    value = group.registry.get(key)
    if value is None:
        raise ValueError(
            f"merge_fn uses a value that rank {group.replica_id} has not "
            "kept; pass it to `merge_call` as an argument"
        )
    return value
