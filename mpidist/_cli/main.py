"""The command `mpidist`: its sub-commands, and its exit code."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

import mpidist
from mpidist._cli import (
    bench_command,
    check_command,
    docs_command,
    info_command,
    run_command,
    sbatch_command,
    timeline_command,
)
from mpidist._cli.facts import WrongResultError
from mpidist._cli.speaking import EXIT_USAGE, Parser, UsageError, complain, say

_COMMANDS: Final[dict[str, tuple[Callable[[Sequence[str]], int], str]]] = {
    "run": (run_command.run, run_command.ABOUT),
    "sbatch": (sbatch_command.sbatch, sbatch_command.ABOUT),
    "info": (info_command.info, info_command.ABOUT),
    "check": (check_command.check, check_command.ABOUT),
    "bench": (bench_command.bench, bench_command.ABOUT),
    "timeline": (timeline_command.timeline, timeline_command.ABOUT),
    "docs": (docs_command.docs, docs_command.ABOUT),
}
_DESCRIPTION: Final = (
    "tf.distribute's Strategy API for NumPy, CuPy, torch and JAX, over MPI."
)
_EPILOG: Final = "\n".join(
    [
        "commands:",
        *(f"  {key:<8} {about}" for key, (_, about) in _COMMANDS.items()),
        "",
        "`run` and `sbatch` start ranks; `timeline` and `docs` need none. Start the",
        "others under mpirun or srun: they describe the ranks that they run on.",
        "`mpidist COMMAND --help` says more.",
    ]
)
_EXIT_WRONG: Final = 1


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code. Collective."""
    name = "mpidist"
    try:
        parser = Parser("", _DESCRIPTION)
        parser.epilog = _EPILOG
        parser.add_argument("--version", action="store_true", help="print the version")
        parser.add_argument("command", nargs="?", metavar="COMMAND")
        words = list(arguments)
        # By hand: argparse drops a "--" that follows the command.
        end = next((n for n, word in enumerate(words, 1) if word[:1] != "-"), None)
        given = parser.parse_args(words[:end])
        if given.version:
            say(f"mpidist {mpidist.__version__}")
            return 0
        if given.command is None:
            parser.print_help()
            return 0
        if given.command not in _COMMANDS:
            known, got = ", ".join(_COMMANDS), repr(given.command)
            close = difflib.get_close_matches(given.command, _COMMANDS, 1)
            hint = f"; did you mean `mpidist {close[0]}`?" if close else ""
            parser.error(f"expected one of {known}, got {got}{hint}")
        name = f"mpidist {given.command}"
        return _COMMANDS[given.command][0](words[end:])
    except (UsageError, WrongResultError, ImportError) as error:
        complain(name, str(error))
        return EXIT_USAGE if isinstance(error, UsageError) else _EXIT_WRONG


def run() -> None:
    """Run the command line of this process, and end it. Collective."""
    try:
        code = main(sys.argv[1:])
    except BrokenPipeError:  # as in `mpidist docs porting | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    # Looked up now: mpidist may have replaced it by a function of its own.
    sys.exit(code)
