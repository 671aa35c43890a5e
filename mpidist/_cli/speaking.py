"""One voice for all ranks: arguments, messages and exit codes of the command line.

What is wrong with the arguments all ranks find, before MPI has been started. One of
them says so; and none may end before that, since a launcher that sees a rank fail ends
the others at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Final, NoReturn

from mpidist._bench import UsageError
from mpidist._mpi import communicator, launcher

EXIT_USAGE: Final = 2
_PATIENCE_SECONDS: Final = 10.0
_FORWARD_SECONDS: Final = 0.3


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors and help come from one rank only."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")

    def print_help(self, file: object = None) -> None:
        """Print the help on rank 0."""
        say(self.format_help().rstrip())


def launched_rank() -> int | None:
    """Return this process's rank as its launcher says; None if started alone."""
    launch = launcher.find_launch()
    return None if launch is None else launch.rank


def say(text: str) -> None:
    """Print on rank 0, before MPI has been started or after. Not collective."""
    rank = communicator.world_rank()
    if rank is None:
        rank = launched_rank()
    if not rank:
        print(text, flush=True)


def complain(command: str, message: str) -> None:
    """Print an error on rank 0, and let no rank go before that. Collective."""
    rank = communicator.world_rank()
    if rank is None:
        rank = launched_rank()
    if not rank:
        print(f"{command}: error: {message}", file=sys.stderr, flush=True)
    if rank is None:
        return
    try:
        world = communicator.mpi_module().COMM_WORLD
    except ImportError:
        return
    request = world.Ibarrier()
    end = time.monotonic() + _PATIENCE_SECONDS
    while not request.Test() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(_FORWARD_SECONDS)  # for the launcher to pass the text on
