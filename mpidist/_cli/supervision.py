"""A job that this process waits for, and starts again when it has failed.

A launcher may return 0 for a job that has failed. One that outlives ranks does if the
ranks that were killed were the only ones that failed: also if those were all. MPICH's
ends all ranks, and says nothing, if one calls ``os._exit(0)``. So a rank creates a file
when it makes its first strategy, and another one when it comes to its end, if it has
imported mpidist (`job_end.ENDED_FILE`); if none has, the job has failed.

A launcher may also wait for a host that it cannot reach, for minutes, and until then
ignore signals. So a rank that ends the job, or ends without some of the others, creates
a file as well; a launcher that is still there some time after that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Final

from mpidist._runtime.job_end import BEGUN, ENDED_FILE, GAVE_UP

_FORWARDED: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_PR_SET_PDEATHSIG: Final = 1
_KILLED: Final = 128 + signal.SIGKILL
_WITNESS_SECONDS: Final = 0.3
# How long a launcher may need to end the ranks after one has ended the job.
_END_SECONDS: Final = 30.0


@dataclasses.dataclass
class Supervisor:
    """Runs a command until it has succeeded, or was asked to end, or too often.

    Signals are passed on to it, but not those that are ignored, as by nohup; the Ctrl-C
    of a terminal reaches it by itself. It ends with this process. A job that is asked
    to end by a signal is not started again.

    Attributes:
        command: mpirun, and its arguments.
        environment: all of its variables.
        restarts: how many times it is started again.
        outlives_ranks: whether it does, and returns 0.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    restarts: int
    outlives_ranks: bool
    _asked_by: int = 0  # the last signal
    _process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Run it; return the exit code of the last time."""
        self._witness = _start(["sleep", "infinity"])
        heard = [n for n in _FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
        before = {n: signal.signal(n, self._forward) for n in heard}
        try:
            for attempt in range(self.restarts + 1):
                code = self._run_once()
                if code == 0 or self._asked_by or attempt == self.restarts:
                    break
                _say(
                    f"the job ended with code {code}; starting it again, "
                    f"{attempt + 1} of {self.restarts}"
                )
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._witness.kill()
            self._witness.wait()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked_by = number
        if self._process is None:  # see `_run_once`
            return
        if number != signal.SIGINT or not self._reached_the_group():
            self._process.send_signal(number)

    def _reached_the_group(self) -> bool:
        """Return whether a SIGINT was for this process group, and not for this process.

        That of Ctrl-C is, and mpirun must not get it twice: at the second one it kills
        the ranks at once. Python does not say where a signal comes from; but a process
        of the group that does nothing else ends by it.
        """
        try:
            self._witness.wait(_WITNESS_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        self._witness = _start(["sleep", "infinity"])
        return True

    def _run_once(self) -> int:
        with tempfile.TemporaryDirectory(prefix="mpidist-run-") as folder:
            ended = os.path.join(folder, "ended")
            self._process = _start(
                self.command, {**self.environment, ENDED_FILE: ended}
            )
            if self._asked_by:  # while it was being started
                self._process.send_signal(self._asked_by)
            code = self._wait(self._process, ended + GAVE_UP)
            self._process = None
            if code == 0 and not os.path.exists(ended):
                if self.outlives_ranks:
                    _say(
                        "no rank has come to the end of its program: all were killed, "
                        "or none has imported mpidist"
                    )
                    return _KILLED
                if os.path.exists(ended + BEGUN):
                    _say(
                        "no rank has come to the end of its program, although mpirun "
                        "returns 0: one has left it by `os._exit(0)`, for example, or "
                        "a host was lost, and mpirun has ended the others. Leave by "
                        "`sys.exit(0)`"
                    )
                    return 1
        return 128 - code if code < 0 else code

    def _wait(self, process: subprocess.Popen[bytes], gave_up: str) -> int:
        """Wait for mpirun; kill it if it is still there long after a rank gave up."""
        is_late = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_END_SECONDS)
            if is_late and _is_read():
                _say(
                    f"a rank ended the job more than {_END_SECONDS:.0f} s ago, and "
                    "mpirun goes on: perhaps there is a host that it cannot reach. It "
                    "is killed"
                )
                process.kill()
            is_late = os.path.exists(gave_up) and not self.outlives_ranks


def _is_read() -> bool:
    """Return whether what is printed can be written: mpirun may wait for a reader."""
    with contextlib.suppress(OSError, ValueError):  # closed
        return len(select.select([], [1, 2], [], 0)[1]) == 2
    return True


def _start(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)


def _end_with_parent() -> None:
    """Have this process get SIGTERM when its parent is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(text: str) -> None:
    print(f"mpidist run: {text}", file=sys.stderr, flush=True)
