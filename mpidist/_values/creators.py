"""`variable_creator_scope`: functions that change how variables are made."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

from mpidist._base.expect import expect

# Any: it gets the arguments of `Variable` by name, and returns what it is given.
Creator: TypeAlias = Callable[..., Any]
Creators: TypeAlias = tuple[Creator, ...]
_P = ParamSpec("_P")
_V = TypeVar("_V")


_creators: Final[ContextVar[Creators]] = ContextVar("creators", default=())


def current() -> Creators:
    """Return the functions that change how variables are made, the outermost first."""
    return _creators.get()


@contextlib.contextmanager
def variable_creator_scope(variable_creator: Creator) -> Iterator[None]:
    """Let a function change how variables are created in a ``with`` block.

    Not collective, but all ranks must enter it, since they create variables together.
    As ``tf.variable_creator_scope``: the innermost function is called first. It
    also applies to the slots of optimizers. In ``merge_fn`` only rank 0's function is
    called.

    Args:
        variable_creator: called as ``variable_creator(next_creator, **kwargs)`` with
            all arguments of `mpidist.Variable` by name. It calls
            ``next_creator(**kwargs)`` once, with these or other arguments, and returns
            the variable that it gets.

    Raises:
        TypeError: if it is not a function; and where a variable is made, if it does not
            return what ``next_creator`` returned.

    Example: variables that are not for training::

        def frozen(next_creator, **kwargs):
            return next_creator(**kwargs | {"trainable": False})


        with strategy.scope(), mpidist.variable_creator_scope(frozen):
            weights = mpidist.Variable(np.zeros(3))
    """
    what = "a function(next_creator, **kwargs)"
    expect(callable(variable_creator), "variable_creator_scope", what, variable_creator)
    with _changed((*current(), variable_creator)):
        yield


@contextlib.contextmanager
def _changed(creators: Creators) -> Iterator[None]:
    before = _creators.set(creators)
    try:
        yield
    finally:
        _creators.reset(before)


def by_creators(
    init: Callable[Concatenate[_V, _P], None],
) -> Callable[Concatenate[_V, _P], None]:
    """Return a decorated ``__init__``, which asks the creators, if there are any."""
    parameters = list(inspect.signature(init).parameters.values())[1:]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    names = [p.name for p in parameters]

    @functools.wraps(init)
    def made(self: _V, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        creators = current()
        if not creators or len(args) > len(names):
            return init(self, *args, **kwargs)
        done = 0

        def create(outer: Creators, arguments: dict[str, Any]) -> _V:
            nonlocal done
            # What a creator makes without `next_creator` is up to those further out.
            with _changed(outer[:-1]):
                if outer:
                    return outer[-1](
                        lambda **more: create(outer[:-1], more), **arguments
                    )
                done += 1
                init(self, **arguments)  # type: ignore[call-arg]
                return self

        named = defaults | dict(zip(names, args, strict=False)) | kwargs
        if create(creators, named) is not self or done != 1:
            raise TypeError(
                "variable_creator_scope: expected the function to call `next_creator` "
                "once, and to return the variable that it gets; write `return "
                "next_creator(**kwargs)`"
            )
        return None

    return made
