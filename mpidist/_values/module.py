"""Module: an object whose variables are found among its attributes."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from mpidist._base.remedies import explain_attributes
from mpidist._values.variable import Variable

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PLAIN: Final = (int, float, complex, str, bytes, type(None), np.ndarray)


@explain_attributes
class Module:
    """A base class for models: it finds the variables among its attributes.

    As tf.Module. Attributes are searched in the order of their names, and so are lists,
    tuples, dicts, modules, metrics and optimizers (once they are built) among them.
    `mpidist.Checkpoint` saves the variables by the names of the attributes, such as
    ``model/dense/w``. Not collective, but for an assignment to an attribute after
    ``Checkpoint.restore(path, partial=True)``, if it restores what is assigned.

    Args:
        name: of the module; None: that of the class, in lower case.

    Example::

        class Dense(mpidist.Module):
            def __init__(self, n):
                super().__init__()
                self.w = mpidist.Variable(np.ones((n, 1)))

            def __call__(self, x):
                return x @ self.w


        with strategy.scope():
            model = Dense(3)
        model(np.ones((1, 3)))  # array([[3.]])
        [v.shape for v in model.trainable_variables]  # [(3, 1)]
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have a class with Keras's method ``call`` call it, unless it says how."""
        super().__init_subclass__(**kwargs)
        if "call" in vars(cls) and not any("__call__" in vars(k) for k in cls.__mro__):
            setattr(cls, "__call__", _call_method)  # noqa: B010 - mypy sees no slot

    # Called before and after something is attached: checkpoints have values for it.
    __told: tuple[Callable[[bool], None], ...] = ()

    def __init__(self, name: str | None = None) -> None:
        self._name = name or type(self).__name__.lower()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. What a checkpoint that was restored has for it, it gets."""
        told = () if isinstance(value, _PLAIN) else self.__told
        for tell in told:
            tell(False)
        super().__setattr__(name, value)
        for tell in told:
            tell(True)

    def __when_attached__(self, call: Callable[[bool], None]) -> None:
        """Have a function called before (False) and after (True) an assignment.

        Before those of earlier calls. Those that are false by now are dropped.
        """
        if call not in self.__told:
            told = call, *filter(None, self.__told)
            object.__setattr__(self, "_Module__told", told)

    @property
    def name(self) -> str:
        """The given name, or that of the class."""
        return self._name

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables, each once."""
        found = self.__checkpoint_objects__().values()
        return tuple(x for x in found if isinstance(x, Variable))

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables whose ``trainable`` is True."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def non_trainable_variables(self) -> tuple[Variable, ...]:
        """The variables whose ``trainable`` is False."""
        return tuple(v for v in self.variables if not v.trainable)

    @property
    def name_scope(self) -> contextlib.AbstractContextManager[None]:
        """A context manager without effect: variable names get no prefix."""
        return contextlib.nullcontext()

    @staticmethod
    def with_name_scope(method: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return ``method`` unchanged: variable names get no prefix."""
        return method

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules in this one, each once."""
        found = (x for _, x in _parts("", self, set()) if isinstance(x, Module))
        return tuple(found)[1:]

    def __checkpoint_objects__(self) -> dict[str, object]:
        """Return what a checkpoint saves, by the names of the attributes.

        The variables, and the optimizers that have not made theirs.
        """
        found: dict[str, object] = {}
        for name, x in _parts("", self, set()):
            if isinstance(x, Module) or _is_built(x):
                continue
            if name in found:
                raise ValueError(f"Module: two of its variables are named {name!r}")
            found[name] = x
        return found


def _call_method(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the method ``call``."""
    return self.call(*args, **kwargs)


def built_optimizers(module: Module) -> list[Any]:
    """Return the optimizers in a module that have made their variables."""
    return [x for _, x in _parts("", module, set()) if _is_built(x)]


def _is_built(value: object) -> bool:
    """Return whether a part of a module is an optimizer that has made its variables."""
    return not isinstance(value, (Variable, Module)) and bool(_variables_of(value))


def _parts(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield what a value contains, each once, with their names.

    Modules, variables, and optimizers, also those without variables.
    """
    found: list[tuple[str, object]] | None = []
    children: list[tuple[str, object]] = []
    if isinstance(value, Module):
        children = sorted(vars(value).items())
    elif isinstance(value, Mapping):
        children = [(str(key), value[key]) for key in sorted(value, key=str)]
    elif isinstance(value, (list, tuple, collections.deque)):
        children = [(str(i), child) for i, child in enumerate(value)]
    elif not isinstance(value, Variable):
        found = _variables_of(value)
        children = found or []
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (Variable, Module)) or (
        found != [] and hasattr(value, "__restore_later__")
    ):
        yield name, value
    for key, child in children:
        yield from _parts(f"{name}/{key}" if name else key, child, seen)


def _variables_of(value: object) -> list[tuple[str, object]] | None:
    """Return the variables of a metric or optimizer, by name or else by number.

    None for an optimizer before it is built, whose checkpoint is restored later.
    """
    try:
        variables = getattr(value, "variables", None)
    except RuntimeError:
        return None if hasattr(value, "__restore_later__") else []
    if not isinstance(variables, (list, tuple)):
        return []
    names = [str(getattr(v, "name", "")) for v in variables]
    if len(set(names)) < len(names):
        names = [str(i) for i in range(len(names))]
    return list(zip(names, variables, strict=True))
