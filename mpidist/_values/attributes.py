"""The attributes of a variable, and the check of the arguments that give them."""

from __future__ import annotations

import dataclasses
import enum

from mpidist._base.variable_enums import VariableAggregation, VariableSynchronization


@dataclasses.dataclass(frozen=True)
class Attributes:
    """The name of a variable, and how its copies are combined."""

    name: str
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    def __str__(self) -> str:
        return (
            f"Variable {self.name!r} ({self.synchronization.name}, "
            f"aggregation={self.aggregation.name})"
        )


def _member(kind: type[enum.Enum], value: object) -> object:
    """Return the member of an enumeration for a name (case-insensitive)."""
    if isinstance(value, str):
        return kind.__members__.get(value.upper(), value)
    return value


def check_attributes(
    trainable: object, name: object, synchronization: object, aggregation: object
) -> Attributes:
    """Return the attributes for the arguments of `Variable` of these names.

    Raises:
        TypeError, ValueError: if they are not as `Variable` says.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"Variable: expected `name` to be a str, got {name!r}")
    synchronization = _member(VariableSynchronization, synchronization)
    aggregation = _member(VariableAggregation, aggregation)
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            "Variable: expected `synchronization` to be a `mpidist."
            f"VariableSynchronization` (AUTO, ON_WRITE or ON_READ), got "
            f"{synchronization!r}"
        )
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(
            "Variable: expected `aggregation` to be a `mpidist.VariableAggregation` "
            f"(NONE, SUM, MEAN or ONLY_FIRST_REPLICA), got {aggregation!r}"
        )
    name = name or "Variable"
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"Variable {name!r}: `NONE` variable synchronization mode is not "
            "supported; write AUTO, ON_WRITE or ON_READ"
        )
    on_read = synchronization is VariableSynchronization.ON_READ
    return Attributes(
        name=name,
        trainable=not on_read if trainable is None else bool(trainable),
        synchronization=(
            synchronization if on_read else VariableSynchronization.ON_WRITE
        ),
        aggregation=aggregation,
    )
