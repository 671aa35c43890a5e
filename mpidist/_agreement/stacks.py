"""Where a rank is that the others miss: its Python stack, asked for by a signal.

A rank that waits for long cannot ask by MPI: the missing rank may be in an endless
loop, a lock, or in C code that does not return. So each process lets `faulthandler`
write its stack to a file in memory when it gets a signal, which needs none of its
cooperation, and the first waiting rank of the same machine sends that signal and reads
the file (``/proc/<pid>/fd``). If it does not answer, the message has what Linux says
about the process: it was stopped, for example.

Linux gives a signal of a process to its main thread, if that does not block it.

Sending is safe: a signal goes only to a process that catches it. The handler stays
until the process ends, since others may ask late. Python repeats system calls that it
has interrupted.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mpidist._base.environment import debugging
from mpidist._base.errors import format_ranks
from mpidist._base.machine import boot_id, status_of
from mpidist._base.types import record

# A real-time signal that neither glibc nor MPI launchers or SLURM use.
_OFFSET: Final = 13
_ANSWER_SECONDS: Final = 0.5
_SETTLE_SECONDS: Final = 0.02
_QUIET_READS: Final = 5  # it is written piece by piece
_MOST_RANKS: Final = 4  # that are asked, of all machines together
_FEWEST_LINES: Final = 3  # of one that is asked
_STATES: Final = {
    "T": "its process is stopped (by SIGSTOP, or by a terminal)",
    "t": "its process is stopped by a debugger",
    "Z": "its process has ended",
    "": "its process has ended",
    "D": "its process is in the kernel, waiting for a disk or a network file system",
}
_OURS: Final = f'File "{Path(__file__).parents[1]}{os.sep}'

_file = -1  # of this process, once it answers


@record
class Process:
    """A process that may be asked.

    Attributes:
        machine: identifies its machine and PID namespace.
        pid: its process ID there.
        file: the descriptor of its file; -1: it does not answer.
        host: the name of the machine.
        start: when it began, in ticks of the machine's clock; -1: unknown.
    """

    machine: str
    pid: int
    file: int
    host: str
    start: int = -1


def rank_info() -> dict[str, Any]:
    """Return what this rank tells the others, and let it answer signals."""
    status = status_of(os.getpid())
    return {
        "namespace": _machine(),
        "pid": os.getpid(),
        "stack_file": _answer_signals(),
        "start": status.start if status else -1,
    }


class Stacks:
    """The processes of a communicator, as those that can be asked.

    Args:
        rank: this one.
        rank_infos: what the ranks have told each other (`rank_info`), with the names
            of their hosts.

    Attributes:
        processes: of all ranks.
    """

    def __init__(self, rank: int, rank_infos: list[dict[str, Any]]) -> None:
        self._rank = rank
        keys = ("namespace", "pid", "stack_file", "host", "start")
        self.processes: list[Process] = [
            Process(*(info[key] for key in keys)) for info in rank_infos
        ]

    def report(
        self, waiting: Sequence[int], missing: Sequence[int], most_lines: int
    ) -> str:
        """Return where ranks of this machine are; "" if another rank tells that.

        Args:
            waiting: the ranks that wait.
            missing: the ranks that they miss.
            most_lines: how long the text may be.
        """
        here = self._machine_of(self._rank)
        first = [rank for rank in waiting if self._machine_of(rank) == here][:1]
        machines = {self._machine_of(rank) for rank in waiting}
        asked = [rank for rank in missing if self._machine_of(rank) in machines]
        asked = asked[:_MOST_RANKS]
        ours = [rank for rank in asked if self._machine_of(rank) == here]
        if not here or first != [self._rank] or not ours:
            return ""
        groups: dict[str, list[int]] = {}
        for rank in ours:
            groups.setdefault(_where(self.processes[rank]), []).append(rank)
        most = max(_FEWEST_LINES, (most_lines - 1) // len(groups))
        texts = [self._describe(ranks, where, most) for where, ranks in groups.items()]
        if len(missing) > len(asked) and asked[0] in ours:
            texts.append(f"and {len(missing) - len(asked)} more ranks, not asked")
        return "\n".join(texts)

    def _machine_of(self, rank: int) -> str:
        return self.processes[rank].machine

    def _describe(self, ranks: list[int], where: str, most_lines: int) -> str:
        pids = ", ".join(str(self.processes[rank].pid) for rank in ranks)
        host = self.processes[ranks[0]].host
        lines = where.split("\n")
        if len(lines) > most_lines:
            left_out = len(lines) - most_lines + 1
            lines[most_lines - 1 :] = [f"  ... and {left_out} more"]
        verb, noun = ("is", "process") if len(ranks) == 1 else ("are", "processes")
        return (
            f"where {format_ranks(ranks)} {verb} ({noun} {pids} on {host}):"
            + "\n".join(lines)
        )


def _where(process: Process) -> str:
    """Return where a process is, for the same line or, as a stack, for the next."""
    if stack := ask(process):
        return f"\n{stack}"
    status = status_of(process.pid)
    return f" {_STATES.get(status.state if status else '', 'it does not answer')}"


def _machine() -> str:
    """Return what identifies this machine and PID namespace; "" if nothing does."""
    boot = boot_id()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


def _signal() -> int:
    return signal.SIGRTMIN + _OFFSET


def _answer_signals() -> int:
    """Let this process answer; return the descriptor of its file, or -1."""
    global _file
    if _file >= 0 or sys.platform != "linux":
        return _file
    try:
        if signal.getsignal(_signal()) is not signal.SIG_DFL or _catches(os.getpid()):
            return -1  # the program uses it
        file = os.memfd_create("mpidist-stack")
        faulthandler.register(_signal(), file=file, all_threads=False, chain=False)
        _file = file
    except (OSError, ValueError, RuntimeError):
        return -1
    return _file


def _catches(pid: int) -> bool:
    """Whether a process has a handler for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace")
    except OSError:
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.M)
    return found is not None and bool(int(found[1], 16) >> (_signal() - 1) & 1)


def ask(process: Process) -> str:
    """Return the stack of the main thread of a process; "" if it does not answer."""
    if process.file < 0 or not _catches(process.pid):
        return ""
    answer = b""
    try:
        with open(f"/proc/{process.pid}/fd/{process.file}", "rb", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            os.kill(process.pid, _signal())
            deadline = time.monotonic() + _ANSWER_SECONDS
            quiet = 0
            while time.monotonic() < deadline and (quiet < _QUIET_READS or not answer):
                time.sleep(_SETTLE_SECONDS)
                more = file.readall()
                answer += more
                quiet = 0 if more else quiet + 1
    except OSError:  # it has ended
        return ""
    return _frames_in(answer.decode("utf-8", "replace"))


def _frames_in(text: str) -> str:
    """Return the frames in what `faulthandler` has written, after its last title.

    There are two if another rank asks at the same time.

    Args:
        text: perhaps not all of it: a process may end while it writes.
    """
    frames = text[: text.rfind("\n") + 1].rpartition("first):\n")[2].splitlines()
    own = [line for line in frames if _OURS not in line]  # as in tracebacks
    if own and not debugging():
        frames = own
    return "\n".join(frames)
