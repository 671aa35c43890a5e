"""What a program is, and the list of all of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

Expected = Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Difference:
    """That the two sides differ on purpose, and what each gives on ``n`` replicas.

    Attributes:
        reason: why, for the reader of the report; one or two sentences.
        tensorflow: from the number of replicas, what TensorFlow gives.
        mpidist: what mpidist gives.
    """

    reason: str
    tensorflow: Expected
    mpidist: Expected


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        section: the heading that it stands under in the report.
        name: unique.
        what: one line that says what it does.
        function: takes an `adapter.Adapter`; returns a nest of plain values, arrays,
            and what `Adapter.replicas`, `Adapter.coordinator` and `Adapter.attempt`
            give.
        difference: None where the results have to be equal.
    """

    section: str
    name: str
    what: str
    function: Callable[[Any], Any]
    difference: Difference | None = None


PROGRAMS: dict[str, Program] = {}


def differs(
    reason: str, *, tensorflow: Expected | Any, mpidist: Expected | Any
) -> Difference:
    """Declare a difference; what is no function of ``n`` is the same for every n."""
    return Difference(reason, _expected(tensorflow), _expected(mpidist))


def _expected(value: Expected | Any) -> Expected:
    if inspect.isfunction(value):
        return value

    def same(n: int) -> Any:
        return value

    return same


class Section:
    """Adds programs under one heading; its methods are decorators."""

    def __init__(self, title: str) -> None:
        self.title = title

    def add(
        self,
        name: str,
        what: str,
        function: Callable[[Any], Any],
        difference: Difference | None = None,
    ) -> None:
        """Add a program that was made, and not written."""
        if name in PROGRAMS:
            raise ValueError(f"two programs have the name {name!r}")
        PROGRAMS[name] = Program(self.title, name, what, function, difference)

    def program(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Add a program that gives equal results on both sides."""
        self.add(function.__name__, what_of(function), function)
        return function

    def differs(
        self, reason: str, *, tensorflow: Expected | Any, mpidist: Expected | Any
    ) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Add a program whose results differ on purpose."""

        def decorate(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
            difference = differs(reason, tensorflow=tensorflow, mpidist=mpidist)
            self.add(function.__name__, what_of(function), function, difference)
            return function

        return decorate


def what_of(function: Callable[..., Any]) -> str:
    """Return the first paragraph of the docstring, on one line."""
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"program {function.__name__!r} has no docstring")
    return " ".join(text.split("\n\n")[0].split())
