"""The exceptions of mpidist, and how their messages begin.

::

    RuntimeError
    |-- CheckpointError               a checkpoint is damaged, or does not fit
    `-- CollectiveError
        |-- CollectiveMismatchError   the ranks called different things
        |-- CollectiveTimeoutError    a rank did not come
        |-- OutOfSyncError            copies of a variable differ
        |-- ReplicaError              another rank raised
        `-- ReplicaLostError          the process of a rank has died

All other exceptions of mpidist are built-in: ``TypeError`` and ``ValueError``
for invalid arguments, ``RuntimeError`` for a call in the wrong context.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, TypeVar

import numpy as np

from mpidist._base.environment import debugging

# The folder of the package: this file is in one of its rooms.
PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# Their lines count as this package's where it has called them.
_LIBRARIES: Final = (
    "<frozen ",
    os.path.join(os.path.dirname(os.__file__), ""),
    os.path.join(os.path.dirname(np.__file__), ""),
)
_WRITTEN: Final = ("mpidist.", "namedtuple_")
_AT_ANY_LINE: Final = (KeyboardInterrupt, MemoryError, RecursionError)
_TOLD: Final = "_known_to_all_ranks"
_E = TypeVar("_E", bound=BaseException)


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or does not fit the objects.

    Raised on every rank; nothing was changed. The message names the file and the
    array, or lists what does not fit.

    Attributes:
        damaged: whether the file is at fault, so that another checkpoint may work.
    """

    damaged: bool = False


def damaged_checkpoint(message: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    error = CheckpointError(message)
    error.damaged = True
    return error


class CollectiveError(RuntimeError):
    """Base class of the errors that all ranks of a strategy raise together."""


class CollectiveMismatchError(CollectiveError):
    """The ranks did not make the same call, or not with the same arrays.

    Raised on every rank, before anything has changed. The message lists, for each
    group of ranks, what that group called. The strategy can be used afterwards.
    """


class CollectiveTimeoutError(CollectiveError):
    """Some ranks did not arrive at a collective within ``timeout_seconds``.

    The message names the missing ranks. The strategy that timed out is no longer
    usable; the arrays of each rank are unchanged.
    """


class OutOfSyncError(CollectiveError):
    """Copies that should be equal on all ranks are not.

    Raised on every rank: by `mpidist.check_in_sync`, and by the first step of a
    training with `mpidist.torch` or `mpidist.jax` for parameters that differ. The
    message names them and the ranks that drifted. The strategy can be used afterwards.
    """


class ReplicaError(CollectiveError):
    """Another rank raised while this one was waiting for it.

    The message holds that rank's traceback. The rank that failed raises its own
    exception, unchanged. The strategy can be used afterwards.
    """


class ReplicaLostError(CollectiveError):
    """The process of a replica has died, and the job goes on without it.

    Raised on every surviving rank, in the call that it is in or in its next one, in
    jobs that outlive a process (``mpirun --with-ft ulfm`` of Open MPI). The strategy is
    then no longer usable: every call on it raises this error, and `close` is local. The
    program can create a new one on the surviving ranks.

    Args:
        message: the text of the error.
        replicas: see the attribute.
        call: see the attribute.

    Attributes:
        replicas: the ids of the replicas in the strategy that are known to be lost;
            empty on a rank that was only told by another one that some are.
        call: the call that this rank was in.
    """

    def __init__(
        self, message: str, replicas: tuple[int, ...] = (), call: str = ""
    ) -> None:
        super().__init__(message)
        self.replicas: tuple[int, ...] = replicas
        self.call: str = call


class RemoteTraceback(Exception):  # noqa: N818 - not an error, but the cause of one
    """Carries a traceback that was printed on another rank, as a ``__cause__``."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def on_rank(rank: int, message: str) -> str:
    """Prefix a message with the rank that raises it."""
    return f"[rank {rank}] {message}"


def warn_caller(text: str) -> None:
    """Warn, at the first line outside of this package: the program's, which calls it.

    For what the program can change; `mpidist._base.reporting.warn` is for the rest.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back and (
        frame.f_code.co_filename.startswith(PACKAGE) or is_of_library(frame)
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def format_exception(error: BaseException) -> str:
    """Return the traceback of ``error`` as text, without the frames of this package.

    Users look for their own code. All frames are shown with ``MPIDIST_DEBUG=1``, and if
    there are no others.
    """
    report = traceback.TracebackException.from_exception(error)
    for one in () if debugging() else chain(report):
        kept = [frame for frame in one.stack if not frame.filename.startswith(PACKAGE)]
        if kept:
            one.stack = traceback.StackSummary.from_list(kept)
    return "".join(report.format())


def chain(error: Any) -> list[Any]:
    """Return an exception, or a report of one, and those that it came from."""
    found: list[Any] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and not any(one is other for other in found):
            found.append(one)
            waiting += [one.__cause__, one.__context__]
    return found


def told_by(error: BaseException) -> str | None:
    """Return ``by`` of `as_told`; None if it is not known that all ranks know of it."""
    return error.__dict__.get(_TOLD)


def as_told(error: _E, by: str) -> _E:
    """Note on an exception that all ranks of the communicator ``by`` know of it."""
    error.__dict__[_TOLD] = by
    return error


def is_interruption(error: BaseException) -> bool:
    """Return whether an exception came to a line of this package from outside.

    Or of NumPy or Python's library, which it has called. Any line may be the one: of a
    handler of a signal, which raises; of Ctrl-C; without memory or frames. Exceptions
    of the functions that users pass are none, unless these are a library's own, nor are
    those that this package raises about its arguments. What is raised while such an
    exception ends a block counts as it.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if _interrupts(one):
            return True
        seen.add(id(one))
        one = one.__context__
    return False


def _interrupts(error: BaseException) -> bool:
    trace, before = error.__traceback__, None
    here = False  # whether the frame before is of this package, or of its library
    while trace is not None:
        frame = trace.tb_frame
        if here and before is not None:
            # A handler gets the frame that it interrupts, perhaps among its `*args`.
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount
            count += bool(code.co_flags & inspect.CO_VARARGS)
            given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
            given += [y for x in given if type(x) is tuple for y in x]
            if any(x is before for x in given):
                return True
        name = frame.f_code.co_filename
        here = name.startswith(PACKAGE) or (here and is_of_library(frame))
        before, trace = frame, trace.tb_next
    return here and isinstance(error, _AT_ANY_LINE)


def is_of_library(frame: FrameType) -> bool:
    """Return whether a frame is of Python's library, also written by it, or NumPy's."""
    name = frame.f_code.co_filename
    if name == "<string>":  # of `dataclasses` and `NamedTuple`, for this package
        return str(frame.f_globals.get("__name__")).startswith(_WRITTEN)
    installed = f"-packages{os.sep}"  # in Python's library
    return any(
        name.startswith(folder) and installed not in name.removeprefix(folder)
        for folder in _LIBRARIES
    )


def format_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ``rank 2`` or ``ranks 0-2, 5`` for a list of ranks."""
    spans = []
    # The difference of a rank and its place is the same in a run of ranks.
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda x: x[1] - x[0]):
        first, *others = (rank for _, rank in run)
        spans.append(f"{first}-{others[-1]}" if others else str(first))
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(spans)}"


def by_value(values: Sequence[Any], say: Callable[[Any], str] = str) -> str:
    """Return a line for each value, with the ranks that have it; none for None."""
    groups = ranks_by(values)
    groups.pop(None, None)
    return "\n".join(f"  {format_ranks(r)}: {say(v)}" for v, r in groups.items())


def ranks_by(values: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value, by the value."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups
