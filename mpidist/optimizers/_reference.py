"""How rank 0 identifies an optimizer to the other ranks.

An optimizer is the same object of the program on all ranks. It is identified by the
variable that counts its steps or, before that exists, by its construction number.
Replicas that are threads each have their own count.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Hashable
from typing import Final, TypeVar

from mpidist._base import threads
from mpidist._values.variable import Variable, storage_of

_Known = weakref.WeakValueDictionary[Hashable, "Referable"]
_numbers: Final = threads.ReplicaLocal(lambda: itertools.count(1))
_made: Final = threads.ReplicaLocal[_Known](weakref.WeakValueDictionary)
_built: Final = threads.ReplicaLocal[_Known](weakref.WeakValueDictionary)


class Referable:
    """The base of optimizers: what every rank makes, and a command can refer to."""

    _iterations: Variable | None
    _number: int

    def _register(self) -> None:
        """Make `Reference.find` find this, by the number of its construction."""
        self._iterations = None
        self._number = next(_numbers.get())
        _made.get()[self._number] = self

    def _register_built(self, iterations: Variable) -> None:
        """Make `Reference.find` find this by the variable that counts its steps."""
        self._iterations = iterations
        _built.get()[_identity(iterations)] = self

    def _reference(self) -> Reference:
        return Reference(self._iterations, self._number, self._text)

    @property
    def _text(self) -> str:
        """All settings except the learning rate, the same on all ranks."""
        raise NotImplementedError


T = TypeVar("T", bound=Referable)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a command carries in place of an optimizer."""

    iterations: Variable | None
    number: int
    text: str

    def find(self, kind: type[T], call: str) -> T:
        """Return this rank's optimizer.

        Raises:
            RuntimeError: if this rank has none, or a different one.
        """
        if self.iterations is not None:
            found = _built.get().get(_identity(self.iterations))
        else:
            found = _made.get().get(self.number)
        if not isinstance(found, kind) or found._text != self.text:
            raise RuntimeError(
                f"{call}: the coordinator uses {self.text}, which this rank "
                + ("does not have" if found is None else f"has as {found._text}")
                + "; create optimizers on all ranks, in the same order, or call "
                "`optimizer.build(variables)` before the `merge_call`"
            )
        return found


def _identity(iterations: Variable) -> Hashable:
    storage = storage_of(iterations)
    return (storage.group.number, storage.key)
