"""One update: a function that changes a variable, and the arguments of its call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from mpidist._base import nest
from mpidist._base.expect import expect
from mpidist._base.types import Nest
from mpidist._runtime.dispatch import check_arguments
from mpidist._values.distributed import Mirrored, PerReplica, argument_of
from mpidist._values.locality import differs
from mpidist._values.variable import Variable, storage_of

# A user's function: `Any` is what it takes.
UpdateFunction: TypeAlias = Callable[..., Any]

# Types of arguments that a function receives unchanged.
_AS_THEY_ARE: Final = frozenset(
    (np.ndarray, float, int, bool, str, type(None), np.float32, np.float64)
)
_SAME: Final = _AS_THEY_ARE | {Mirrored}  # and that are the same on all replicas


class Update(NamedTuple):
    """A call of `StrategyExtended.update` or `update_non_slot`.

    Attributes:
        var: the variable; None for `update_non_slot`.
        fn: the function.
        args: its further positional arguments.
        kwargs: its keyword arguments; None: none.
        grouped: whether the results are the same on all ranks.
    """

    var: Variable | None
    fn: UpdateFunction
    args: Sequence[Nest]
    kwargs: Mapping[str, Nest] | None
    grouped: bool

    def describe(self) -> str:
        """Return its name, for messages."""
        var, fn = self.var, self.fn
        if var is None:
            name = getattr(fn, "__qualname__", type(fn).__qualname__)
            return f"update_non_slot({name})"
        return f"update of Variable {var.name!r} [#{storage_of(var).key[0]}]"

    def check(self) -> bool:
        """Raise if its arguments are wrong.

        Returns:
            Whether the function gets a value of each replica's own.

        Raises:
            TypeError, ValueError: as `StrategyExtended.update` says.
        """
        var, fn, args, kwargs, _ = self
        is_usual = kwargs is None and callable(fn) and type(args) is tuple
        if is_usual and _SAME.issuperset(map(type, args)):
            return False
        expect(callable(fn), "update", "`fn` to be a function", fn)
        check_arguments("update", args, {} if kwargs is None else kwargs)
        own = False
        for leaf in self.leaves():
            own = own or isinstance(leaf, PerReplica)
            on_read = isinstance(leaf, Variable) and differs(leaf)
            if on_read and var is not None and not differs(var):
                raise ValueError(
                    f"update: got {leaf!r} among the arguments, whose copies would "
                    "make those of the mirrored variable differ; pass its value: "
                    "`strategy.extended.read_var(variable)`"
                )
        return own

    def leaves(self) -> list[Nest]:
        """Return the leaves of all arguments."""
        return nest.flatten((tuple(self.args), self.kwargs))[0]

    def run(self) -> Nest:
        """Call the function with this rank's components, and return its result."""
        own: list[Nest] = [] if self.var is None else [self.var]
        for x in self.args:
            if type(x) is Mirrored:
                x = x.value()
            elif type(x) not in _AS_THEY_ARE:
                x = nest.map_structure(argument_of, x)
            own.append(x)
        if not self.kwargs:
            return self.fn(*own)
        return self.fn(*own, **nest.map_structure(argument_of, self.kwargs))

    def unreduced(self) -> str:
        """Say which arguments differ by replica, and what to write."""
        named = {f"args[{i}]": x for i, x in enumerate(self.args)}
        named |= {f"kwargs[{key!r}]": x for key, x in (self.kwargs or {}).items()}
        own = [
            name
            for name, x in named.items()
            if any(isinstance(leaf, PerReplica) for leaf in nest.flatten(x)[0])
        ]
        if own:
            return (
                f" ({' and '.join(own)} not reduced: pass `strategy.extended.reduce_to("
                "op, value, variable)`)"
            )
        return (  # called in a replica function
            " (arguments of each replica's own: reduce them first, by `mpidist."
            "get_replica_context().all_reduce(op, value)`)"
        )
