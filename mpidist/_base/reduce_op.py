"""`ReduceOp`: the operations of reductions."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from mpidist._base.variable_enums import VariableAggregation

# Any: it may be annotated with NumPy's arrays or CuPy's, and take only these.
ReduceFunction: TypeAlias = Callable[[Any, Any], Any]
"""An associative function of two arrays, which returns one of their shape and dtype."""


class ReduceOp(enum.Enum):
    """How the values of the replicas are combined.

    ``SUM`` and ``MEAN`` are those of ``tf.distribute.ReduceOp``; ``MIN``, ``MAX``
    and ``PROD`` are additional. Names are accepted in place of members, in upper or
    lower case. ``mpidist docs porting`` has the table of dtypes and operations.

    Example::

        value = strategy.run(lambda: 3.0)
        strategy.reduce(mpidist.ReduceOp.MEAN, value, axis=None)  # 3.0
        strategy.reduce("MEAN", value, axis=None)  # 3.0
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @classmethod
    def from_variable_aggregation(cls, aggregation: VariableAggregation) -> ReduceOp:
        """Return the operation that aggregates a variable's updates.

        Args:
            aggregation: ``VariableAggregation.SUM`` or ``MEAN``.

        Raises:
            ValueError: if it is another aggregation.
        """
        if aggregation is VariableAggregation.SUM:
            return cls.SUM
        if aggregation is VariableAggregation.MEAN:
            return cls.MEAN
        raise ValueError(
            f"`VariableAggregation.{aggregation.name}` has no `ReduceOp`; only SUM "
            "and MEAN have one"
        )


Reduction: TypeAlias = ReduceOp | str | ReduceFunction


MPIOp = Literal["SUM", "PROD", "MIN", "MAX"]
"""How two values become one, by the name that MPI, NCCL and the core have for it."""

COMBINE: Final[dict[MPIOp, np.ufunc]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
}


class Rule(NamedTuple):
    """What an operation does; `mpidist docs architecture` says what else one needs.

    Attributes:
        combining: what it does with two values at a time. A mean is a sum, divided.
        numpy: the function of NumPy and CuPy that does it with the array of a replica.
        idempotent: whether values that are the same on all replicas give that value.
    """

    combining: MPIOp
    numpy: Literal["sum", "prod", "min", "max"]
    idempotent: bool


RULES: Final = {
    ReduceOp.SUM: Rule("SUM", "sum", idempotent=False),
    ReduceOp.MEAN: Rule("SUM", "sum", idempotent=True),
    ReduceOp.MIN: Rule("MIN", "min", idempotent=True),
    ReduceOp.MAX: Rule("MAX", "max", idempotent=True),
    ReduceOp.PROD: Rule("PROD", "prod", idempotent=False),
}

_FUNCTIONS: Final = (
    "; functions are for `all_reduce(function, value)` in a replica function, and for "
    "`strategy.reduce(function, value, axis=None)`"
)
REDUCE_OPS: Final = {op.name: op for op in ReduceOp}
"""By name."""


def as_reduce_op(value: object, call: str) -> ReduceOp:
    """Return the `ReduceOp` that a user means.

    Args:
        value: a `ReduceOp`, its name in any case, or `VariableAggregation` SUM or
            MEAN (the StrategyExtended page of TensorFlow writes those).
        call: the name of the calling function, for the message.

    Raises:
        ValueError: if the name is unknown.
        TypeError: if the value has another type.
    """
    if isinstance(value, ReduceOp):
        return value
    if isinstance(value, str):
        op = REDUCE_OPS.get(value) or REDUCE_OPS.get(value.upper())
        if op is None:
            raise ValueError(
                f"{call}: {value!r} is not a valid ReduceOp; expected one of "
                f"{', '.join(REDUCE_OPS)}{_hint(value)}"
            )
        return op
    if isinstance(value, VariableAggregation):
        return ReduceOp.from_variable_aggregation(value)
    hint = _hint(str(value))
    if not hint and hasattr(value, "dtype"):
        hint = "; the operation comes first: `(op, value)`"
    elif not hint and callable(value):
        hint = _FUNCTIONS
    raise TypeError(
        f"{call}: expected `reduce_op` to be a `mpidist.ReduceOp` or its name, got "
        f"{value!r:.80} of type {type(value).__name__}{hint}"
    )


def check_function(function: ReduceFunction, call: str) -> None:
    """Check that a function is not one that combines the elements of one array.

    Raises:
        TypeError: if it is; the message says which operation was meant.
    """
    whole = {name: getattr(np, name.lower()) for name in REDUCE_OPS}
    for name, known in [*whole.items(), ("SUM", sum)]:
        if function is known:
            raise TypeError(
                f"{call}: expected a function of two arrays, got one that combines the "
                f'elements of one; write "{name}"'
            )


def _hint(text: str) -> str:
    """Say what another library's operation is called here."""
    name = text.rpartition(".")[2].upper()
    name = {"AVG": "MEAN", "AVERAGE": "MEAN", "PRODUCT": "PROD"}.get(name, name)
    return f'; write "{name}"' if name in REDUCE_OPS else ""


def get_loss_reduction() -> ReduceOp:
    """Return SUM: losses that were divided by the global batch size are added.

    Not collective.
    """
    return ReduceOp.SUM
