"""`Variable.ref`: a key for a variable in dicts and sets."""

from __future__ import annotations

from typing import Generic, TypeVar

_V = TypeVar("_V")


class Reference(Generic[_V]):
    """An object that is equal to another one if both are of the same variable."""

    def __init__(self, variable: _V) -> None:
        self._variable = variable

    def deref(self) -> _V:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Reference):
            return self._variable is other._variable
        return NotImplemented

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"
