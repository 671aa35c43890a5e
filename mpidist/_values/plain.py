"""Variables made outside every scope: each process has one of its own."""

from __future__ import annotations

import warnings

from mpidist._base.errors import level_of_caller
from mpidist._base.threads import ReplicaLocal
from mpidist._base.variable_enums import VariableAggregation
from mpidist._runtime.context import Frame, Level
from mpidist._values.attributes import Attributes

_names: ReplicaLocal[list[str]] = ReplicaLocal(list)  # of what a warning has named


def check_write(attributes: Attributes, on_read: bool, how: str, frame: Frame) -> None:
    """Warn once, or raise, if replicas write one: its scope may have been forgotten.

    Args:
        attributes: of the variable.
        on_read: whether it is ON_READ, which says that each replica has its own value.
        how: the name of the method of `Variable`.
        frame: where it is called.

    Raises:
        RuntimeError: if it has an aggregation, which nothing would do.
    """
    if frame.level is not Level.REPLICA or frame.group.num_replicas == 1:
        return
    call = f"Variable {attributes.name!r}.{how}: this variable was made outside every"
    if attributes.aggregation is not VariableAggregation.NONE:
        raise RuntimeError(
            f"{call} scope, so each process has one of its own, and nothing would "
            f"combine the replicas' values by {attributes.aggregation.name}; make it "
            "in `with strategy.scope():`, or with aggregation=NONE if each process is "
            "to have its own"
        )
    if on_read or _names.get():
        return
    _names.get().append(attributes.name)
    warnings.warn(
        f"[rank {frame.group.replica_id}] {call} scope, so each of the "
        f"{frame.group.num_replicas} replicas writes one of its own, and their values "
        "may differ; make it in `with strategy.scope():`, or with synchronization="
        '"ON_READ" if each process is to have its own',
        RuntimeWarning,
        stacklevel=level_of_caller(),
    )
