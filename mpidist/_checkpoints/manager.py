"""CheckpointManager: keeps a number of checkpoints in a directory, and finds them."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable
from typing import Any, Final

from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import threads
from mpidist._base.errors import CheckpointError, warn_caller
from mpidist._base.expect import as_int, as_path, expect
from mpidist._base.remedies import explain_attributes, explain_keywords
from mpidist._checkpoints import replace, storage
from mpidist._checkpoints.checkpoint import Checkpoint, objects_of
from mpidist._checkpoints.directory import Entry, scan, warn_of_skipped
from mpidist._runtime.interruptions import tells
from mpidist._values.variable import Variable

# The highest number by directory and name: several managers may have the same.
_highest: Final[threads.ReplicaLocal[dict[tuple[str, str], int]]] = (
    threads.ReplicaLocal(dict)
)


@explain_attributes
class CheckpointManager:
    """Saves numbered checkpoints in a directory, and finds the newest complete one.

    The directory contains ``ckpt-1``, ``ckpt-2`` and so on. The oldest one of
    ``max_to_keep`` is deleted only after a new one is complete. Checkpoints beyond that
    number, and files that killed jobs have left, are deleted before. Only rank 0 reads
    the directory; it sends the result to all ranks. The newest checkpoint is the one
    that was saved last, regardless of its number.

    Collective: creating a manager reads the newest checkpoint, to verify it.

    Args:
        checkpoint: the checkpoint to save.
        directory: the path of the directory, which need not exist. That of rank 0
            counts, and only rank 0 uses it. Others may pass one of their own, as
            programs for TensorFlow must; it stays empty.
        max_to_keep: the number of checkpoints to keep; None keeps all.
        checkpoint_name: the prefix of the names in the directory.
        format: the format of the array file, as for `Checkpoint.save`.
        step_counter: the variable that ``checkpoint_interval`` counts.
        checkpoint_interval: `save` does nothing before the counter, the same on all
            ranks, has grown by this number since the last checkpoint; None: it always
            saves.
        init_fn: a function that `restore_or_initialize` calls if there is no
            checkpoint.

    Raises:
        TypeError, ValueError: if an argument is invalid; on all ranks.

    Example::

        with strategy.scope():
            step = mpidist.Variable(0)
        checkpoint = mpidist.Checkpoint(step=step)
        manager = mpidist.CheckpointManager(checkpoint, "run", max_to_keep=3)
        manager.restore_or_initialize()  # None
        while int(step) < 2:
            step.assign_add(1)
            path = manager.save()
    """

    @explain_keywords("CheckpointManager")
    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        checkpoint_name: str = "ckpt",
        format: storage.FileFormat = "npz",
        *,
        step_counter: Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
    ) -> None:
        """Read the directory. Collective, at program level."""
        expect(
            isinstance(checkpoint, Checkpoint),
            "CheckpointManager",
            "`checkpoint` to be a `mpidist.Checkpoint`",
            checkpoint,
            "write `CheckpointManager(mpidist.Checkpoint(weights=weights), directory)`",
        )
        self._objects = objects_of(checkpoint)
        call = self._objects.call("CheckpointManager")
        call.wait_for_save()
        with call.guard.checking(call.name):
            _check_arguments(
                max_to_keep, checkpoint_name, checkpoint_interval, step_counter
            )
            storage.check_format({}, format)
            given_directory = as_path(call.name, directory)
        self._checkpoint = checkpoint
        self._max_to_keep = max_to_keep
        self._name = checkpoint_name
        self._format = format
        self._interval, self._counter = checkpoint_interval, step_counter
        self._init_fn = init_fn
        self._saved_step: int | None = None
        call.agree(f"(max_to_keep={max_to_keep}, checkpoint_name={checkpoint_name!r})")

        def look() -> tuple[str, str, tuple[list[Entry], int]]:
            place = directory = os.path.abspath(given_directory)
            while not os.path.exists(place):
                place = os.path.dirname(place)
            what = "a directory, or a path where one can be made"
            fits, error = os.path.isdir(place), NotADirectoryError
            expect(fits, call.name, what, place, "a file is there", error=error)
            return given_directory, directory, scan(directory, checkpoint_name)

        used, self._directory, found = call.on_rank_0(look)
        self._entries, highest = found
        self._is_new = highest < 0
        self._highest = _highest.get()
        self._highest[self._directory, checkpoint_name] = max(highest, 0)
        # A program of TensorFlow may delete its own directory on ranks other than 0.
        is_used = given_directory == used
        self._own_directory = self._directory if is_used else given_directory
        self._make_own_directory()

    def _make_own_directory(self) -> None:
        """Make what a program of TensorFlow deletes after each save."""
        if self._own_directory != self._directory:
            with contextlib.suppress(OSError):
                os.makedirs(self._own_directory, exist_ok=True)

    def __repr__(self) -> str:
        return (
            f"<mpidist.CheckpointManager of {self._directory!r}: "
            f"{len(self._entries)} checkpoints, max_to_keep={self._max_to_keep}>"
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint to save."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The directory's absolute path; on a rank that passed its own, that one."""
        return self._own_directory

    @property
    def checkpoints(self) -> list[str]:
        """The absolute paths of the kept checkpoints, in the order of their saving."""
        return [entry.path for entry in self._entries]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest complete checkpoint; None if there is none.

        As of the creation of this manager, including checkpoints it has saved since;
        those saved with ``wait=False`` after a call that has waited for them, such as
        `Checkpoint.wait`.
        """
        return self._entries[-1].path if self._entries else None

    @property
    def checkpoint_interval(self) -> int | None:
        """The argument ``checkpoint_interval``."""
        return self._interval

    def _step(self) -> int | None:
        """Return the value of the counter, if there is an interval."""
        return None if self._interval is None else int(self._counter or 0)

    def sync(self) -> None:
        """Wait for a save with ``wait=False``. Collective; as `Checkpoint.wait`."""
        self._checkpoint.wait()

    @tells("CheckpointManager.save", operator.attrgetter("_objects.group"))
    @explain_keywords("CheckpointManager.save")
    def save(
        self,
        checkpoint_number: object = None,
        wait: bool = True,
        *,
        check_interval: bool = True,
    ) -> str | Any:
        """Save a new checkpoint, then delete the oldest. Collective.

        At program level. Before writing it deletes what killed jobs have left, and all
        but the newest ``max_to_keep`` checkpoints, which may have filled the disk.

        Args:
            checkpoint_number: an int or a variable, such as the step; None: the
                highest number plus 1.
            wait: False: a thread of rank 0 writes it, as for `Checkpoint.save`. Of one
                kept checkpoint the one before stays, too, until the next save.
            check_interval: False: save it before ``checkpoint_interval`` is over, too.

        Returns:
            Its path; None if nothing was saved, because ``checkpoint_interval`` is not
            over, or the counter has not changed since the last checkpoint. The type
            includes ``Any`` for type checkers: without an interval no test for None is
            needed.

        Raises:
            CollectiveMismatchError: if the ranks' counters, or those of their last
                checkpoints, differ.
            OSError: as for `Checkpoint.save`; also its other errors.
        """
        name = "CheckpointManager.save"
        call = self._objects.call(name)
        step, last = call.attempt(self._step), self._saved_step
        if step is not None:
            call.agree(f" with a step_counter of {step}, {last} at the last checkpoint")
            least = self._interval if check_interval else 1
            if last is not None and step - last < (least or 1):
                return None
        call.wait_for_save()
        self._make_own_directory()
        numbers, own = self._highest, (self._directory, self._name)
        number = numbers[own] + 1
        if checkpoint_number is not None:
            number = call.attempt(lambda: _as_number(checkpoint_number))
        path = os.path.join(self._directory, f"{self._name}-{number}")
        latest = self._entries[-1].saved_at if self._entries else 0
        others = [entry for entry in self._entries if entry.number != number]
        most = self._max_to_keep
        kept = others if most is None else others[max(len(others) + 1 - most, 0) :]
        if not wait:  # `latest_checkpoint` names it until the ranks have waited
            kept = kept or others[-1:]
        excess = [] if most is None else others[:-most]

        def tidy(entries: list[Entry]) -> None:
            """Delete these checkpoints, and what killed jobs have left."""
            replace.clean(self._directory, f"{self._name}-*")
            for entry in entries:
                _delete(entry.path, name)

        def around(write: Callable[[int], int]) -> int:
            tidy(excess)  # before the save too: its disk may be full of them
            saved_at = write(latest)
            tidy(others[: len(others) - len(kept)])
            return saved_at

        def ended(saved_at: int | None) -> None:
            if saved_at is None:
                self._saved_step = last
                self._entries = [x for x in self._entries if x not in excess]
            else:
                self._entries = [*kept, Entry(saved_at, number, path)]
                numbers[own] = max(numbers[own], number)

        saved = self._objects.save(
            path,
            self._format,
            name,
            wait=bool(wait),
            details=f" as number {number}",
            around=around,
            ended=ended,
        )
        self._saved_step = step
        return saved

    @tells("restore_or_initialize", operator.attrgetter("_objects.group"))
    def restore_or_initialize(self) -> str | None:
        """Restore the newest complete checkpoint, if there is one. Collective.

        At program level. Damaged checkpoints are skipped, with a warning on rank 0. But
        training does not begin anew where there is no other one.

        Returns:
            Its path; None if there is no checkpoint, and then nothing has changed.

        Raises:
            CheckpointError: if it does not match the objects, or all are damaged.
        """
        name = "CheckpointManager.restore_or_initialize"
        self._objects.call(name).wait_for_save()
        self._is_new &= not self._entries
        while self._entries:
            path = self._entries[-1].path
            try:
                restore = self._objects.read(path, False, name)
            except (CheckpointError, FileNotFoundError) as error:
                if isinstance(error, CheckpointError) and not error.damaged:
                    raise
                text, call = str(error), self._objects.call(name)
                call.on_rank_0(lambda: warn_of_skipped(path, text))  # noqa: B023
                self._entries.pop()
            else:
                assert restore is not None
                # Outside the `try`: an exception in a user's `restore` is no reason to
                # start from the beginning.
                restore()
                self._saved_step = self._step()
                return path
        if not self._is_new:
            raise CheckpointError(
                f"{name}: all checkpoints in {self._directory!r} are damaged, as the "
                "warnings of rank 0 say; remove them to begin anew"
            )
        init_fn, guard = self._init_fn, self._objects.group.guard

        def initialize(section: SectionResult) -> None:
            section.kind = "raised"
            if init_fn is not None:
                init_fn()

        run_section(guard, Call(f"the end of {name}"), initialize)
        return None


def forget_interval(manager: CheckpointManager) -> None:
    """Have the next `save` save, whatever its `checkpoint_interval`."""
    manager._saved_step = None


def _delete(path: str, call: str) -> None:
    try:
        replace.remove(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        warn_caller(f"{call}: the old checkpoint {path!r} cannot be deleted: {error}")


def _as_number(given: object) -> int:
    x: Any = given  # what has `numpy()`, and what that returns, is the user's
    if not isinstance(given, int) and hasattr(given, "numpy"):
        x = given.numpy()
    kind = "an int, or a variable of an integer dtype and shape ()"
    return as_int("CheckpointManager.save", "checkpoint_number", x, least=0, kind=kind)


def _check_arguments(
    max_to_keep: object, name: object, interval: object, counter: object
) -> None:
    call = "CheckpointManager"
    if max_to_keep is not None:
        as_int(call, "max_to_keep", max_to_keep, least=1, hint="None keeps all")
    is_name = isinstance(name, str) and name and os.sep not in name
    expected = "`checkpoint_name` to be a name without a slash"
    expect(is_name, call, expected, name, error=ValueError)
    if interval is not None:
        as_int(call, "checkpoint_interval", interval, least=1, hint="None always saves")
        expected = "`step_counter` to be a `mpidist.Variable`"
        hint = "write `step_counter=optimizer.iterations`"
        expect(isinstance(counter, Variable), call, expected, counter, hint)
