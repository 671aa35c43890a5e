"""What to write instead of code that fails outside of mpidist.

Results are arrays of NumPy, the replica context is None in cross-replica context, torch
raises errors of its own, and Python those of a function that is called with other
arguments, so no class of mpidist could say it (for calls of mpidist itself, not without
a cost for those that are right). It is a note on the exception.
"""

from __future__ import annotations

import contextlib
import traceback
from types import TracebackType
from typing import Final

import numpy as np

from mpidist._base import backend
from mpidist._base.remedies import wrong_call

_CONTEXT: Final = frozenset(
    ("all_reduce", "all_gather", "merge_call", "replica_id_in_sync_group")
)
_ASSIGN: Final = frozenset(("assign", "assign_add", "assign_sub"))
# What a function of the program gets, by the module that calls it.
_MERGE: Final = "`merge_call(merge_fn, args)` calls `merge_fn(strategy, *args)`"
_CALLERS: Final = {
    "mpidist._strategy.operations": "`strategy.run(fn, args)` calls `fn(*args)`; write "
    "`args=(x, y)`, or `args=batch` for a batch that is a tuple (x, y)",
    "mpidist._strategy.replica_context": _MERGE,
    "mpidist._merge.coordinator": _MERGE,
    "mpidist._merge.updates": "`update(variable, fn, args)` calls "
    "`fn(variable, *args)`",
}
_PER_REPLICA: Final = (
    "a PerReplica has a component on each replica: write `strategy.reduce(op, value, "
    "axis=None)`, `strategy.gather(value, axis=0)`, or compute with it in a function "
    "that you pass to `strategy.run`"
)
_OF_PYTHON: Final = {  # and NumPy, by a part of the message
    "operand 'PerReplica' does not support ufuncs": _PER_REPLICA,
    "dispatcher for __array_function__ did not return an iterable": _PER_REPLICA,
    "Strategy' object does not support the context manager protocol": (
        "write `with strategy.scope():`"
    ),
    "'CollectiveHandle'": "write `handle.result()` for the value",
}
_OF_TORCH: Final = (
    "process group has not been initialized",
    "env:// rendezvous",
    *("'RANK'", "'LOCAL_RANK'", "'WORLD_SIZE'"),  # KeyErrors of os.environ
)
_NO_PROCESS_GROUP: Final = (
    "mpidist: MPI connects the ranks, without a process group or torchrun's variables: "
    "write `strategy.replica_id`, `strategy.num_replicas_in_sync`, "
    "`DistributedSampler(data, num_replicas=..., rank=...)`, "
    "`mpidist.torch.all_reduce(x, op)`, and `mpidist.torch.DistributedOptimizer` in "
    "place of DistributedDataParallel (`mpidist docs coming_from`)"
)


def add_hint(error: BaseException) -> None:
    """Add a note to an error whose message does not say what to write."""
    hint = ""
    with contextlib.suppress(Exception):  # of the program's `__repr__`, `__getattr__`
        if isinstance(error, AttributeError) and isinstance(error.name, str):
            hint = _hint(error.obj, error.name)
        elif type(error) is TypeError:
            write = _write_for(str(error), error.__traceback__)
            hint = f"mpidist: {write}" if write else ""
        elif type(error) in (KeyError, RuntimeError, ValueError):
            text = str(error)
            hint = _NO_PROCESS_GROUP if any(x in text for x in _OF_TORCH) else ""
    if hint and hint not in getattr(error, "__notes__", ()):
        error.add_note(hint)


def _write_for(text: str, trace: TracebackType | None) -> str:
    """Return what to write in place of what raised a TypeError of Python or NumPy."""
    if "argument" not in text:
        return next((write for x, write in _OF_PYTHON.items() if x in text), "")
    *_, (frame, _) = traceback.walk_tb(trace)
    names = frame.f_globals
    return _CALLERS.get(names["__name__"]) or wrong_call(text, names)


def _hint(owner: object, name: str) -> str:
    if owner is None and name in _CONTEXT:
        return (
            "mpidist: get_replica_context() returns None in cross-replica context, as "
            "in `with strategy.scope():`; call it in the function that you pass to "
            "`strategy.run`. Here write `strategy.reduce(op, value, axis=None)` or "
            "`strategy.gather(value, axis)`; in a merge_fn call another as it is: "
            "`merge_fn(strategy, value)`"
        )
    if name == "module" and hasattr(owner, "named_parameters"):
        return "mpidist: no wrapper is around a module; leave out `.module`"
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
