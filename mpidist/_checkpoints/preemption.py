"""PreemptionCheckpointHandler: saves a last checkpoint before the job is ended.

A batch system sends a signal to a job some time before it kills it. Not all ranks get
the signal, and not at the same step. So at each step all ranks agree, with a number in
one header of the guard (`Guard.agree_on`), whether one of them was signalled.
If so, all save at that step, and exit.

How a batch script learns that they have saved. The exit code does not tell: when the
first rank has left, launchers end the others, by SIGTERM, and return one of the codes.
So rank 0 creates the file that ``MPIDIST_SAVED_FILE`` names, after all have saved and
before any leaves; and the signals are ignored from then on.

A signal may come before this handler exists, while Python still imports. Batch scripts
start ranks with the signal blocked (``env --block-signal``), which is inherited: it
stays pending, and the handler unblocks it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, Final

from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import run_section
from mpidist._base import threads
from mpidist._base.errors import warn_caller
from mpidist._base.expect import expect
from mpidist._base.remedies import explain_attributes
from mpidist._checkpoints.checkpoint import Checkpoint, objects_of
from mpidist._checkpoints.manager import CheckpointManager, forget_interval

# Launchers differ in what they pass on: MPICH's mpirun ends at SIGUSR2, NCCL is said to
# use SIGUSR1. So each of them will do.
_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_EXIT_CODE: Final = 42  # the same as TensorFlow's
_GO_ON, _TOLD, _TIME_IS_UP = range(3)
_Handler = Callable[[int, FrameType | None], object] | int | None
_COUNTER: Final = "total_run_calls"
_CALL: Final = "PreemptionCheckpointHandler"


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """What `PreemptionCheckpointHandler` does when the job is asked to end.

    Attributes:
        termination_watcher_fn: called at each step, on each rank; returns whether the
            job is to end. In addition to the signals SIGTERM, SIGUSR1 and SIGUSR2.
        exit_fn: called on all ranks when the checkpoint is complete; None:
            ``sys.exit(42)``, which tells a job script to restart the job.
        grace_period: seconds to continue before saving; 0 saves at the next step.
        save_fn: called on all ranks in place of the manager's `save`. If it raises on
            one rank, all raise, and none exits.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None


@explain_attributes
class PreemptionCheckpointHandler:
    """Saves a checkpoint on all ranks, at the same step, when any is asked to end.

    The signals are SIGTERM, SIGUSR1 and SIGUSR2; one rank that gets one is enough.
    (``mpidist sbatch --preemptible`` prints a SLURM script that sends it.) Creating the
    handler restores the newest checkpoint, and installs handlers for these signals.

    When all have saved and this process is about to exit, it ignores these signals:
    launchers end the ranks by them once the first one has left.

    Collective: all ranks create it, at program level, in the main thread. Replicas that
    are threads (`mpidist.testing`) get no signals: use ``termination_watcher_fn``
    there.

    Args:
        cluster_resolver: accepted and ignored; MPI provides the ranks.
        checkpoint_or_checkpoint_manager: a `CheckpointManager`; or a `Checkpoint`, of
            which the newest is kept in ``checkpoint_dir``. The number of calls of `run`
            is saved with it, as ``total_run_calls``.
        checkpoint_dir: the directory, if a `Checkpoint` is given; else it is ignored.
        termination_config: a `TerminationConfig`.

    Raises:
        TypeError, ValueError: if an argument is invalid.
        CheckpointError: if the newest checkpoint does not match.

    Example::

        with strategy.scope():
            weights = mpidist.Variable(np.zeros(2))
        manager = mpidist.CheckpointManager(mpidist.Checkpoint(weights=weights), "run")
        handler = mpidist.experimental.PreemptionCheckpointHandler(None, manager)
        while handler.total_run_calls < 3:
            handler.run(lambda: weights.assign_add(np.ones(2)))
        weights.numpy()  # array([3., 3.])
    """

    def __init__(
        self,
        cluster_resolver: object,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        """Restore the newest checkpoint, and watch for signals. Collective."""
        config = (
            TerminationConfig() if termination_config is None else termination_config
        )
        expect(
            isinstance(config, TerminationConfig),
            _CALL,
            "`termination_config` to be a `mpidist.experimental.TerminationConfig`",
            config,
        )
        watches = threads.current() is None
        if watches and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{_CALL}: expected to be created in the main thread, the only one in "
                "which Python handles signals"
            )
        manager: object = checkpoint_or_checkpoint_manager
        if isinstance(manager, Checkpoint) and checkpoint_dir is not None:
            manager = CheckpointManager(manager, checkpoint_dir, max_to_keep=1)
        if not isinstance(manager, CheckpointManager):
            raise TypeError(
                f"{_CALL}: expected a `mpidist.CheckpointManager`, or a "
                f"`mpidist.Checkpoint` and `checkpoint_dir`, got {manager!r:.80} and "
                f"checkpoint_dir={checkpoint_dir!r}"
            )
        self._config = config
        self._manager = manager
        self._objects = objects_of(manager.checkpoint)
        self._calls = 0
        taken = self._objects.by_name.get(_COUNTER)
        if not (taken is None or isinstance(taken, SimpleNamespace)):
            raise ValueError(
                f"{_CALL}: the checkpoint has an object {_COUNTER!r}, the name by "
                "which the handler saves its number of calls; give it another name"
            )
        put = functools.partial(setattr, self, "_calls")
        counter = SimpleNamespace(state=lambda: self._calls, restore=put)
        self._objects.by_name[_COUNTER] = counter
        manager.restore_or_initialize()
        self._told_at: float | None = None
        self._previous: dict[int, _Handler] = {}
        if watches:
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._told)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    @property
    def total_run_calls(self) -> int:
        """The number of calls of `run`, including those in earlier runs."""
        return self._calls

    def run(
        self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Save and exit if any rank was asked to end, otherwise call the function.

        Collective: all ranks call it for each step, at program level. In addition to
        the function's own communication, it costs one header.

        Args:
            distributed_train_function: one step of training, such as a function that
                calls `Strategy.run`.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            The result of the function.
        """
        self.save_checkpoint_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self._calls += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and exit if any rank was asked to end. Collective, like `run`.

        For loops that do not call `run`: call it between two steps.

        Args:
            args: positional arguments for the function that saves.
            kwargs: keyword arguments for the function that saves.
        """
        call = self._objects.call(_CALL)
        state = call.attempt(self._look)
        call.guard.agree_on(Call(call.name), largest=state)
        state = call.guard.largest
        if state != _GO_ON:
            self._told()
        if state != _TIME_IS_UP:
            return
        try:
            call.wait_for_save()
        except Exception as error:  # of an earlier save; this one may succeed
            if call.guard.broken:
                raise
            text = f"{call.name}: an earlier save has failed: {error}"
            call.on_rank_0(lambda: warn_caller(text))
        forget_interval(self._manager)
        save = self._config.save_fn or self._manager.save
        # Not in the strategy's scope: the user's function may use another strategy.
        end = Call(f"{call.name}, taking part")
        run_section(call.guard, end, lambda _: save(*args, **kwargs))
        call.wait_for_save()
        call.on_rank_0(_tell_the_batch_script)
        self._told_at = None
        if self._config.exit_fn is not None:
            for number, previous in self._previous.items():
                with contextlib.suppress(TypeError):  # None: not set from Python
                    signal.signal(number, previous)
            self._previous = {}
            self._config.exit_fn()
        else:
            for number in self._previous:  # of launchers, when the first rank leaves
                signal.signal(number, signal.SIG_IGN)
            sys.exit(_EXIT_CODE)

    def _look(self) -> int:
        watcher = self._config.termination_watcher_fn
        if self._told_at is None and watcher is not None and watcher():
            self._told()
        if self._told_at is None:
            return _GO_ON
        waited = time.monotonic() - self._told_at
        return _TIME_IS_UP if waited >= (self._config.grace_period or 0.0) else _TOLD

    def _told(self, number: int = 0, frame: FrameType | None = None) -> None:
        if self._told_at is None:
            self._told_at = time.monotonic()


def _tell_the_batch_script() -> None:
    """Create the file that ``MPIDIST_SAVED_FILE`` names."""
    name = os.environ.get("MPIDIST_SAVED_FILE")
    if name:
        with open(name, "w", encoding="utf-8"):
            pass
