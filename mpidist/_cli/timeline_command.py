"""`mpidist timeline`: what a recorded timeline says. It needs no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mpidist._cli.speaking import Parser, UsageError, say
from mpidist._timeline import files, plot, summary

ABOUT: Final = "summarize or draw what MPIDIST_TIMELINE recorded"
_DESCRIPTION: Final = """\
Summarizes a timeline: where the time of each rank went, the rank that the
others waited for, the largest waits, and the calls with the most time. Record
one with

  MPIDIST_TIMELINE=run.json mpirun -n 4 python train.py

and look at every call in https://ui.perfetto.dev (open the file there). If the
job was killed, or rank 0 could not read the parts of all ranks
(run.json.rank*), this merges the parts that are there first.
"""


def timeline(arguments: Sequence[str]) -> int:
    """Run `mpidist timeline` with these arguments; return the exit code.

    Raises:
        UsageError: if the arguments are wrong, or if a file cannot be read or written.
        ImportError: if there is no Matplotlib, with ``--plot``.
    """
    parser = Parser("timeline", _DESCRIPTION)
    parser.add_argument("path", metavar="FILE", help="the timeline")
    parser.add_argument(
        "--plot", metavar="PICTURE", help="draw it to this file (.png, .svg, .pdf)"
    )
    given = parser.parse_args(arguments)
    path = Path(given.path).absolute()
    if not path.exists() and not files.find_parts(path):
        raise UsageError(
            f"expected the file that MPIDIST_TIMELINE named in a job, and there is no "
            f"{path}; run the program with MPIDIST_TIMELINE={given.path}"
        )
    try:
        found = files.load(path)
        if given.plot is not None:
            plot.draw(found, Path(given.plot))
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    say(summary.summarize(found).rstrip("\n"))
    return 0
