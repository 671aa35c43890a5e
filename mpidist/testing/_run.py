"""`run`: runs a program on thread replicas, and ends it.

Each thread runs the program as a process under ``mpirun`` would, and ends like one:

- *It returns.* It waits until the others have returned, as at the end of a process;
  replicas still waiting in a collective are told that it has left
  (`mpidist._runtime.process_exit.leave`).
- *It raises.* The run is stopped: every wait of the others raises, as `MPI_Abort` ends
  processes. A replica that is not waiting gets a `ReplicaStopped` a second later, which
  Python raises between two lines of its code.
- *It still does not end*, because it is in a call that does not return: it is
  abandoned, and a note on the exception says where it is.
"""

from __future__ import annotations

import contextvars
import ctypes
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from mpidist._agreement.communicator_waits import CommunicatorWaits
from mpidist._base import interactive, threads
from mpidist._base.environment import Environment
from mpidist._base.errors import CollectiveError, RemoteTraceback, on_rank
from mpidist._base.expect import as_int, expect
from mpidist._base.options import CommunicationImplementation, CommunicationOptions
from mpidist._runtime import process_exit
from mpidist.testing._communicator import ThreadCommunicator
from mpidist.testing._group import ThreadGroup, connect
from mpidist.testing._world import Channel, RunStoppedError, World

DEFAULT_TIMEOUT_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 1.0  # between the end of a run and a `ReplicaStopped`
_LEAVE_SECONDS: Final = 5.0  # after that, until a thread is abandoned
_LINES: Final = 100


class ReplicaStopped(BaseException):
    """Raised in a replica that is stopped: another one has failed, or by Ctrl-C."""


class Replica(threads.ThreadReplica):
    """One replica of a run: its thread, and its result.

    Args:
        world: the run.
        channel: the channel of the group of all replicas.
        number: the number of this replica.
        timeout_seconds: the deadline of strategies that do not set one; None: that of
            the environment.
        program: what it runs.
    """

    def __init__(
        self,
        world: World,
        channel: Channel,
        number: int,
        timeout_seconds: float | None,
        program: Callable[[], object],
    ) -> None:
        self.world = world
        self.rank = number
        self.size = world.size
        self.locals = {}
        self.group = ThreadGroup(channel, number, number)
        self.result: object = None
        self.error: BaseException | None = None
        self._timeout = timeout_seconds
        self._program = program
        context = contextvars.copy_context()
        # A daemon: an abandoned thread does not keep the interpreter running.
        self.thread = threading.Thread(
            target=lambda: context.run(self._work),
            name=f"mpidist replica {number} of {world.size}",
            daemon=True,
        )

    def adapt(self, environment: Environment) -> Environment:
        """Return the environment's settings for thread replicas.

        GPU arrays are passed directly: `ThreadCommunicator` accepts them.
        """
        own: dict[str, Any] = {
            "abort": True,  # the other replicas are notified when this one ends
            "cuda_aware": True,
            "timeline": "",  # the program has not ended when a run ends
            "simulated_nodes": 1,
        }
        if environment.implementation is CommunicationImplementation.AUTO:
            own["implementation"] = CommunicationImplementation.DIRECT
        if self._timeout is not None:
            own["timeout_seconds"] = self._timeout
        return dataclasses.replace(environment, **own)

    def group_of_itself(self) -> ThreadGroup:
        """Return a group of this replica alone. Not collective."""
        return ThreadGroup(Channel(self.world, (self.rank,)), 0, self.rank)

    def connect(self, comm: object, waits: CommunicatorWaits) -> ThreadCommunicator:
        """Return a communicator over the replicas of a group. Collective.

        Raises:
            TypeError: if ``comm`` is not a `ThreadGroup` or None.
        """
        group = self.group if comm is None else comm
        if not isinstance(group, ThreadGroup):
            raise TypeError(
                on_rank(
                    self.rank,
                    "MPIStrategy: expected `comm` to be a `mpidist.testing.ThreadGroup`"
                    f" or None, got {comm!r:.80} of type {type(comm).__name__}; "
                    "replicas of `mpidist.testing.run` are threads, between which MPI "
                    "does not work: write `MPIStrategy()` for all of them, or "
                    "`mpidist.testing.current_group().split(color)` for some",
                )
            )
        return connect(group, waits)

    @property
    def has_ended(self) -> bool:
        return self.rank in self.world.ended

    def _work(self) -> None:
        try:
            self._try()
        except ReplicaStopped:
            pass  # a second exception, while it was ending
        while True:
            try:
                self.world.release()
                self.world.add_to(self.world.returned, self.rank)
                self.world.add_to(self.world.ended, self.rank)
                for _ in range(_LINES):
                    pass  # an exception sent earlier is raised here
                return
            except ReplicaStopped:
                pass

    def _try(self) -> None:
        code: str | int | None = None
        try:
            with threads.entered(self):
                try:
                    self.result = self._program()
                except SystemExit as error:
                    code = error.code
                    self.error = error if code else None
                self.world.add_to(self.world.returned, self.rank)
                process_exit.leave(code)
        except BaseException as error:
            self.error = error
            stop_run(error, self)

    def interrupt(self) -> None:
        """Raise `ReplicaStopped` in the thread, between two lines of its code."""
        with self.world.condition:
            if not self.has_ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.thread.ident or 0),
                    ctypes.py_object(ReplicaStopped),
                )

    def where(self) -> str:
        """Return where the thread is, as ``file.py:12 in f``."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None:
            return "its end"
        last = traceback.extract_stack(frame)[-1]
        return f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}"


def current_group() -> ThreadGroup:
    """Return the group of all replicas of the `run` that this thread belongs to.

    Not collective.

    Raises:
        RuntimeError: if called outside a function run by `run`.
    """
    replica = threads.current()
    if not isinstance(replica, Replica):
        raise RuntimeError(
            "mpidist.testing.current_group: expected to be called by the function that "
            "`mpidist.testing.run` runs, in the thread of a replica"
        )
    return replica.group


def stop_run(error: BaseException, replica: Replica | None = None) -> None:
    """Stop the run of a replica that has failed: from now on every wait raises.

    Args:
        error: what it raises.
        replica: the replica; None: that of this thread.
    """
    one = replica or threads.current()
    assert isinstance(one, Replica)
    one.world.stop(f"replica {one.rank} has failed: {_describe(error)}")


def run(
    num_replicas: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
    **kwargs: Any,
) -> list[Any]:
    """Run a program on replicas that are threads of this process, without MPI.

    ``fn`` is the program: each replica calls it, as each process does under
    ``mpirun``. In it ``MPIStrategy()`` is a strategy over all replicas, and everything
    created from it works as under MPI. MPI is neither started nor needed.

    Example::

        def program():
            strategy = mpidist.MPIStrategy()
            return strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None)


        mpidist.testing.run(3, program)  # [3.0, 3.0, 3.0]

    Unlike processes, threads share modules and their globals, the environment, the
    working directory, `numpy.random` without a generator, and the objects that ``fn``
    closes over.

    Args:
        num_replicas: the number of replicas.
        fn: the program.
        args: its positional arguments, the same objects on each replica.
        timeout_seconds: the deadline, in seconds, of strategies that do not set one in
            their options; None: ``MPIDIST_TIMEOUT``.
        kwargs: its keyword arguments.

    Returns:
        The result of each replica, in replica order. ``sys.exit(0)`` gives None.

    Raises:
        BaseException: the exception that a replica raised. If several did: of those
            not caused by another replica's, that of the lowest replica. Notes name the
            replica and the exceptions of the others.
        KeyboardInterrupt: after Ctrl-C, when all replicas have ended.
        TypeError, ValueError: for invalid arguments.
    """
    call, hint = "mpidist.testing.run", "write `run(3, fn)`"
    num_replicas = as_int(call, "num_replicas", num_replicas, least=1, hint=hint)
    expect(callable(fn), call, "`fn` to be callable", fn, hint)
    CommunicationOptions(timeout_seconds=timeout_seconds)  # which checks it
    interactive.hide_own_frames()
    world = World(num_replicas)
    channel = Channel(world, tuple(range(num_replicas)), of_program=True)

    def program() -> object:
        return fn(*args, **kwargs)

    replicas = [
        Replica(world, channel, number, timeout_seconds, program)
        for number in range(num_replicas)
    ]
    try:
        for one in replicas:
            one.thread.start()
        world.wait_until(lambda: bool(world.stopped) or len(world.ended) == world.size)
    except BaseException as error:  # Ctrl-C, or a thread that cannot be started
        world.stop(f"the run was ended by {_describe(error)}")
        _end(world, [one for one in replicas if one.thread.ident is not None])
        raise
    _end(world, replicas)
    failed = [one for one in replicas if one.error is not None]
    if failed:
        raise _error_of(replicas, failed)
    return [one.result for one in replicas]


def _end(world: World, replicas: list[Replica]) -> None:
    """Wait until all have ended; stop those that do not, within the time allowed."""
    end = time.monotonic() + _STOP_SECONDS + _LEAVE_SECONDS
    while not world.wait_until(
        lambda: all(one.has_ended for one in replicas), _STOP_SECONDS
    ):
        if time.monotonic() > end:
            break
        for one in replicas:
            one.interrupt()


def _error_of(replicas: list[Replica], failed: list[Replica]) -> BaseException:
    """Return the exception that `run` raises, with notes about each replica's."""
    first = min(failed, key=lambda one: _distance(one.error))
    error = first.error
    assert error is not None
    same = [one for one in failed if _is_same(one.error, error)]
    which = ", ".join(str(one.rank) for one in same)
    error.add_note(
        f"raised on replica{'' if len(same) == 1 else 's'} {which} of {len(replicas)} "
        "(mpidist.testing.run)"
    )
    for one in failed:
        if one not in same and not is_because_of_others(one.error):
            error.add_note(f"replica {one.rank} raised {_describe(one.error)}")
    for one in replicas:
        if not one.has_ended:
            error.add_note(
                f"replica {one.rank} did not end, and is left behind at {one.where()}"
            )
    return error


def _distance(error: BaseException | None) -> int:
    """Return 0 for an exception of a replica's own, 1 if all raise it, 2 if stopped."""
    told = isinstance(error, (RunStoppedError, ReplicaStopped))
    return is_because_of_others(error) + told


def is_because_of_others(error: BaseException | None) -> bool:
    """Whether a replica raised this since another one had failed, or all together."""
    return isinstance(error, (CollectiveError, ReplicaStopped)) or isinstance(
        getattr(error, "__cause__", None), RemoteTraceback
    )


def _is_same(one: BaseException | None, other: BaseException) -> bool:
    """Whether replicas raised these together, or for the same reason."""
    if isinstance(other, CollectiveError):
        return type(one) is type(other)
    return _describe(one) == _describe(other)


def _describe(error: BaseException | None) -> str:
    return "".join(traceback.format_exception_only(error)).split("\n")[0]
