"""What a replica context checks: where it is used, and the arrays of begun calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from mpidist._base import backend, checksums, nest
from mpidist._base.environment import debugging
from mpidist._base.types import Nest
from mpidist._runtime import context

_IN_UPDATE: Final = (
    "It cannot communicate: make the call before `update`, and pass the result in its "
    "`args`"
)
_REDUCE: Final = "Write `strategy.reduce(op, value, axis=None)` here"
_GATHER: Final = "Write `strategy.gather(value, axis)` here"
_INSTEAD: Final = {
    "all_reduce": _REDUCE,
    "all_reduce_async": _REDUCE,
    "all_gather": _GATHER,
    "all_gather_async": _GATHER,
    "merge_call": "Here the function can be called as it is: `merge_fn(strategy, ...)`",
}


# Any: a `ReplicaContext`, whose module imports this one.
def require_current(own: Any, call: str) -> None:
    """Raise unless a replica context is that of the code which makes a call.

    Raises:
        RuntimeError: if it is not.
    """
    frame = context.current()
    if frame.replica_context is own:
        return
    if frame.replica_context is None:
        in_update = frame.level is context.Level.UPDATE
        raise RuntimeError(
            f"ReplicaContext.{call}: Need to be inside `call_for_each_replica()`: "
            f"this code runs {frame.level.value}. "
            f"{_IN_UPDATE if in_update else _INSTEAD[call]}"
        )
    what = f"ReplicaContext: another context of {own.strategy} is current"
    if frame.group.strategy is not own.strategy:
        what = f"Strategy objects: {frame.group} is not {own.strategy}"
    raise RuntimeError(
        f"ReplicaContext.{call}: Mismatching {what}; write "
        f"`mpidist.get_replica_context().{call}(...)`"
    )


def checker(name: str, value: Nest) -> Callable[[], None] | None:
    """Return a function that raises if a nest has changed since.

    None without ``MPIDIST_DEBUG``, and for a nest that the call refuses.
    """

    def digests() -> list[str]:
        arrays = [x for x in nest.flatten(value)[0] if backend.is_array(x)]
        return [checksums.summarize(backend.as_array(x, name)[0]) for x in arrays]

    def check() -> None:
        if digests() != before:
            raise RuntimeError(
                f"{name}: its `value` has changed since the call was begun, before "
                "`result()`: on some rank the result may have parts of both values; "
                "write to another array, or pass a copy"
            )

    if debugging():
        with contextlib.suppress(Exception):  # which the call raises, too
            before = digests()
            return check
    return None
