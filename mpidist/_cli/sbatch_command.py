"""`mpidist sbatch`: prints a batch script for SLURM, from the template `job.sbatch`.

The scripts in `launch/slurm/` are what it prints for five sets of options; a test
compares them.

Facts that the template relies on (each is tried by `tests/slurm/`):

- srun's default for ``--mpi`` is often none, and then each rank is a program of its
  own. Open MPI needs pmix, MPICH pmi2 (or a site's own kind).
- ``--signal=USR1@120`` without ``B:`` goes to the steps: it kills the daemons of Open
  MPI's mpirun, and nothing is saved. With ``B:`` it goes to the script alone, whose
  trap passes it on; srun and both mpiruns forward it to the ranks. That of Intel MPI is
  a shell script, which does not: its mpiexec.hydra does.
- When the first rank has left with a code that is not 0, launchers end the others by
  SIGTERM, and the code of the job is one of the two. So what happened is read from a
  file, never from the code (`mpidist._checkpoints.preemption`).
- A job that makes room for another one has a ``PreemptTime``, and SLURM signals its
  ranks, not the script. Of a job that is cancelled SLURM signals the script, too; it
  must not put itself back into the queue.
- With ``--gpus-per-task`` each rank would see only its own GPU, and ranks of one node
  could not copy from GPU to GPU: so it is ``--gpus-per-node``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mpidist._cli.speaking import Parser, say

ABOUT: Final = "print a batch script for SLURM, which runs a program on many ranks"
_DESCRIPTION: Final = """\
Prints a batch script for SLURM. It works with Open MPI and MPICH: it asks the
environment which MPI it has, and srun which kinds it knows. Without a program
the script takes it from its arguments: sbatch job.sbatch train.py --epochs 3

  mpidist sbatch --nodes 2 --ntasks-per-node 8 --time 1:00:00 -- python train.py
  mpidist sbatch --nodes 2 --gpus-per-node 4 --preemptible -- python train.py
  mpidist sbatch --array 0-9 -- python train.py > job.sbatch; sbatch job.sbatch
"""
_COUNT: Final = "N", re.compile(r"[1-9]\d*"), "at least 1"
_WORD: Final = (
    "NAME",
    re.compile(r"[\w.@%+,-]*"),
    "one word of letters, digits and ._@%+-",
)
_TIME: Final = (
    "TIME",
    re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}"),
    "minutes, M:S, H:M:S or D-H:M:S",
)
_ARRAY: Final = (
    "INDICES",
    re.compile(r"(\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?)?"),
    "indices such as 0-9 or 1,3,5%2",
)
_OPTIONS: Final = (  # name, default, form, help
    ("nodes", "1", _COUNT, "default: 1"),
    ("ntasks-per-node", None, _COUNT, "ranks (default: one for each GPU, else 4)"),
    ("cpus-per-task", "1", _COUNT, "default: 1"),
    ("gpus-per-node", "0", ("N", re.compile(r"\d+"), "at least 0"), "default: 0"),
    ("time", "00:10:00", _TIME, "as sbatch takes it (default: 00:10:00)"),
    ("account", "", _WORD, "default: a line to edit"),
    ("partition", "", _WORD, "default: a line to edit"),
    ("name", "mpidist", _WORD, "default: mpidist"),
    ("array", "", _ARRAY, "a job array, such as 0-9"),
)
_PLACE: Final = re.compile(r"%\{(\w+)\}")
_TEMPLATE: Final = Path(__file__).with_name("job.sbatch")
_RANKS: Final = "4"  # of a node without GPUs


def sbatch(arguments: Sequence[str]) -> int:
    """Run `mpidist sbatch` with these arguments; return the exit code.

    Raises:
        UsageError: if the arguments are wrong.
    """
    parser = Parser("sbatch", _DESCRIPTION, "[OPTIONS] [-- COMMAND [ARGUMENT ...]]")
    for name, default, (metavar, *_), text in _OPTIONS:
        parser.add_argument(f"--{name}", default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--preemptible",
        action="store_true",
        help="save when told to, and continue later: for programs with a "
        "PreemptionCheckpointHandler",
    )
    parser.add_argument(
        "--mpirun", action="store_true", help="start the ranks by mpirun, not by srun"
    )
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    given, others = parser.parse_known_args(words[:split])
    if others:
        text = shlex.join(others)
        parser.error(f"unrecognized arguments: {text} (a program comes after --)")
    values = vars(given)
    for name, _, (_, form, text), _ in _OPTIONS:
        value = values[name.replace("-", "_")]
        if value is not None and not form.fullmatch(value):
            parser.error(f"expected --{name} to be {text}, got {value!r}")
    gpus = values["gpus_per_node"].lstrip("0")  # "" is false in the template
    values["gpus_per_node"] = gpus
    values["ntasks_per_node"] = values["ntasks_per_node"] or gpus or _RANKS
    say(_script_of(values, words[split + 1 :]))
    return 0


def _script_of(values: Mapping[str, Any], program: Sequence[str]) -> str:
    """Return the batch script: the template, filled with the values of the options."""
    kinds = [
        f"an array of jobs, {values['array']}" if values["array"] else "",
        "one GPU for each rank" if values["gpus_per_node"] else "",
        "saves when told to, and continues" if values["preemptible"] else "",
        f"started by {'mpirun' if values['mpirun'] else 'srun'}",
    ]
    texts = {"kinds": ", ".join(filter(None, kinds)), "program": shlex.join(program)}
    return _render(_TEMPLATE.read_text(encoding="utf-8"), {**values, **texts})


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with its values in place of ``%{NAME}``.

    Lines between ``%if NAME`` and ``%else`` or ``%end`` are there if the value is true.
    """
    lines, shown = [], [True]
    for line in template.splitlines():
        word, _, name = line.partition(" ")
        if word == "%if":
            shown.append(bool(values[name]))
        elif word == "%else":
            shown[-1] = not shown[-1]
        elif word == "%end":
            shown.pop()
        elif all(shown):
            lines.append(_PLACE.sub(lambda place: str(values[place[1]]), line))
    return "\n".join(lines)
