"""The output of all ranks as one: arguments, messages and exit codes.

All ranks find errors in the arguments before MPI has been started, and one of them
prints the message. No rank may end before that, since a launcher that sees a rank fail
ends the others at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Final, NoReturn

from mpidist._base.options import LARGEST_NUMBER
from mpidist._mpi import launcher, library

EXIT_USAGE: Final = 2
_WAIT_SECONDS: Final = 10.0
_FORWARD_SECONDS: Final = 0.3  # in which the launcher forwards the output
_ALONE_SECONDS: Final = 2.0  # a launcher may end all processes when the first one fails


class UsageError(Exception):
    """The user has to change the command; all ranks raise the same error."""


class Parser(argparse.ArgumentParser):
    """The argument parser of a command; its errors and help come from one rank only.

    Args:
        command: the name of the command.
        description: printed as it is.
        usage: after the name of the command; "": what argparse makes of the arguments.
    """

    def __init__(self, command: str, description: str, usage: str = "") -> None:
        name = f"mpidist {command}".strip()
        super().__init__(
            prog=name,
            usage=f"{name} {usage}" if usage else None,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # Python 3.14's: to the ranks of Open MPI a pipe looks like a terminal.
        self.color = False

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")

    def print_help(self, file: object = None) -> None:
        """Print the help on rank 0."""
        say(self.format_help().rstrip())


def positive_seconds(text: str) -> float:
    """Return the seconds that an argument means."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= LARGEST_NUMBER:
            return seconds
    message = f"expected seconds above 0, such as 1.5, got {text!r}"
    raise argparse.ArgumentTypeError(message)


def launched_rank() -> int | None:
    """Return this process's rank according to its launcher; None if it has none."""
    launch = launcher.find_launch()
    return None if launch is None else launch.rank


def _speaker() -> int | None:
    """Return this process's rank: that of its launcher, if to MPI it is alone."""
    rank = library.world_rank()
    alone = rank is not None and library.world_size() == 1
    return launched_rank() if rank is None or alone else rank


def say(text: str) -> None:
    """Print on rank 0, whether MPI has been started or not. Not collective."""
    if not _speaker():
        print(text, flush=True)


def let_the_first_speak() -> None:
    """Wait, on others than rank 0, where no barrier can: MPI connects no ranks."""
    if _speaker():
        time.sleep(_ALONE_SECONDS)


def complain(command: str, message: str) -> None:
    """Print an error on rank 0, and return on no rank before that. Collective."""
    if not _speaker():
        print(f"{command}: error: {message}", file=sys.stderr, flush=True)
    if library.world_rank() is None and launched_rank() is None:
        return
    try:
        world = library.mpi_module().COMM_WORLD
    except ImportError:
        return
    request = world.Ibarrier()
    end = time.monotonic() + _WAIT_SECONDS
    while not request.Test() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(_FORWARD_SECONDS)
