"""Module: an object whose variables are found among its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpidist._values.variable import Variable


class Module:
    """A class to derive from: its variables are those among its attributes.

    As tf.Module. Attributes are searched in the order of their names, in lists, tuples
    and dicts too, and in other modules. `mpidist.Checkpoint` saves the variables by the
    names of the attributes, such as ``model/dense/w``. Not collective.

    Args:
        name: of the module; None: that of the class, in lower case.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or type(self).__name__.lower()

    @property
    def name(self) -> str:
        """The given name, or that of the class."""
        return self._name

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables, each once."""
        return tuple(self.__checkpoint_objects__().values())

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Those of the variables that are trainable."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules in this one, each once."""
        found = (x for _, x in _parts("", self, set()) if isinstance(x, Module))
        return tuple(found)[1:]

    def __checkpoint_objects__(self) -> dict[str, Variable]:
        """Return the variables by the names of the attributes."""
        return {
            name: x for name, x in _parts("", self, set()) if isinstance(x, Variable)
        }


def _parts(
    name: str, value: object, seen: set[int]
) -> Iterator[tuple[str, Variable | Module]]:
    """Yield the modules and variables in a value, each once, with their names."""
    children: Mapping[str, object] = {}
    if isinstance(value, (Variable, Module)):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield name, value
        children = vars(value) if isinstance(value, Module) else {}
    elif isinstance(value, Mapping):
        children = {str(key): child for key, child in value.items()}
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield from _parts(f"{name}/{i}", child, seen)
    for key in sorted(children):
        yield from _parts(f"{name}/{key}" if name else key, children[key], seen)
