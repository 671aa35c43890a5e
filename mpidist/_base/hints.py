"""What to write instead of attributes that arrays, numbers and None do not have.

Results are arrays of NumPy, and the replica context is None in cross-replica context,
so no class of mpidist could say it. It is a note on the uncaught exception.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mpidist._base import backend

_CONTEXT: Final = frozenset(
    ("all_reduce", "all_gather", "merge_call", "replica_id_in_sync_group")
)
_ASSIGN: Final = frozenset(("assign", "assign_add", "assign_sub"))


def add_hint(error: BaseException) -> None:
    """Add a note to an AttributeError of code that was written for TensorFlow."""
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        hint = _hint(error.obj, error.name)
        if hint and hint not in getattr(error, "__notes__", ()):
            error.add_note(hint)


def _hint(owner: object, name: str) -> str:
    if owner is None and name in _CONTEXT:
        return (
            "mpidist: get_replica_context() returns None in cross-replica context, as "
            "in `with strategy.scope():`; call it in the function that you pass to "
            "`strategy.run`. Here write `strategy.reduce(op, value, axis=None)` or "
            "`strategy.gather(value, axis)`"
        )
    if backend.is_device_array(owner) and name == "numpy":
        return "mpidist: results are arrays of CuPy; write `x.get()`"
    if not isinstance(owner, (np.ndarray, np.generic, int, float)):
        return ""
    if name == "numpy":
        return "mpidist: results are NumPy's arrays and numbers; leave out `.numpy()`"
    if name in _ASSIGN:
        return (
            "mpidist: an element or slice of a variable is an array, and changing it "
            "would change one copy only; write `new = variable.numpy()`, `new[1:3] = "
            "value`, `variable.assign(new)`"
        )
    return ""
