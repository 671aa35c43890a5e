"""`mpidist sbatch`: prints a batch script for SLURM.

The scripts in `launch/slurm/` are what it prints for five sets of options; a test
compares them.

Facts that the scripts rely on (each is tried by `tests/slurm/`):

- srun's default for ``--mpi`` is often none, and then each rank is a program of its
  own. Open MPI needs pmix, MPICH pmi2 (or a site's own kind).
- ``--signal=USR1@120`` without ``B:`` goes to the steps: it kills the daemons of Open
  MPI's mpirun, and nothing is saved. With ``B:`` it goes to the script alone, whose
  trap passes it on; srun and both mpiruns forward it to the ranks.
- When the first rank has left with a code that is not 0, launchers end the others by
  SIGTERM, and the code of the job is one of the two. So what happened is read from a
  file, never from the code (`mpidist._checkpoints.preemption`).
- A job that makes room for another one has a ``PreemptTime``, and SLURM signals its
  ranks, not the script. Of a job that is cancelled SLURM signals the script, too; it
  must not put itself back into the queue.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Sequence
from typing import Final

from mpidist._cli.speaking import Parser, say

ABOUT: Final = "print a batch script for SLURM, which runs a program on many ranks"
_DESCRIPTION: Final = """\
Prints a batch script for SLURM. It works with Open MPI and MPICH: it asks the
environment which MPI it has, and srun which kinds it knows. Without a program the
script takes it from its arguments: sbatch job.sbatch train.py --epochs 3

  mpidist sbatch --nodes 2 --ntasks-per-node 16 --time 1:00:00 -- python train.py
  mpidist sbatch --nodes 2 --gpus-per-node 4 --preemptible -- python train.py
  mpidist sbatch --array 0-9 -- python train.py > job.sbatch; sbatch job.sbatch
"""
_TIME: Final = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_ARRAY: Final = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
_WORD: Final = re.compile(r"[\w.@%+,-]*")
_DEFAULT_PROGRAM: Final = "examples/train_digits.py"
_WARNING_SECONDS: Final = 120


@dataclasses.dataclass(frozen=True)
class Options:
    """What a batch script asks of SLURM, and what it runs.

    Attributes:
        nodes: their number.
        ntasks_per_node: ranks on each; with GPUs one for each GPU.
        cpus_per_task: cores of a rank.
        gpus_per_node: 0: none.
        time: the limit, as sbatch takes it.
        account: who pays; "" for a line to edit.
        partition: where; "" for a line to edit.
        name: of the job.
        array: indices of a job array, as sbatch takes them; "" for one job.
        preemptible: whether it saves when told to, and continues later.
        mpirun: whether mpirun starts the ranks, in place of srun.
        program: the command; empty: the script's arguments, after ``python``.
    """

    nodes: int = 1
    ntasks_per_node: int = 4
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    time: str = "00:10:00"
    account: str = ""
    partition: str = ""
    name: str = "mpidist"
    array: str = ""
    preemptible: bool = False
    mpirun: bool = False
    program: tuple[str, ...] = ()


def sbatch(arguments: Sequence[str]) -> int:
    """Run `mpidist sbatch` with these arguments; return the exit code.

    Raises:
        UsageError: if the arguments are wrong.
    """
    parser = Parser(
        prog="mpidist sbatch",
        usage="mpidist sbatch [OPTIONS] [-- COMMAND [ARGUMENT ...]]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--ntasks-per-node",
        type=int,
        metavar="N",
        help="ranks on each node (default: one for each GPU, 4 without GPUs)",
    )
    parser.add_argument(
        "--cpus-per-task", type=int, default=1, metavar="N", help="default: 1"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, default=0, metavar="N", help="default: 0"
    )
    parser.add_argument(
        "--time", default=Options.time, help="as sbatch takes it (default: 00:10:00)"
    )
    parser.add_argument("--account", default="", help="default: a line to edit")
    parser.add_argument("--partition", default="", help="default: a line to edit")
    parser.add_argument("--name", default=Options.name, help="default: mpidist")
    parser.add_argument(
        "--array", default="", metavar="INDICES", help="a job array, such as 0-9"
    )
    parser.add_argument(
        "--preemptible",
        action="store_true",
        help="save when told to, and continue later: for programs with a "
        "`mpidist.experimental.PreemptionCheckpointHandler`",
    )
    parser.add_argument(
        "--mpirun", action="store_true", help="start the ranks by mpirun, not by srun"
    )
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:split])
    tasks = given.ntasks_per_node
    if tasks is None:
        tasks = given.gpus_per_node or Options.ntasks_per_node
    for name in ("nodes", "cpus_per_task"):
        if getattr(given, name) < 1:
            parser.error(f"expected --{name.replace('_', '-')} to be at least 1")
    if tasks < 1 or given.gpus_per_node < 0:
        parser.error("expected --ntasks-per-node to be at least 1, and no GPUs below 0")
    if not _TIME.fullmatch(given.time):
        parser.error(
            f"expected --time to be minutes, M:S, H:M:S or D-H:M:S, got {given.time!r}"
        )
    if given.array and not _ARRAY.fullmatch(given.array):
        parser.error(
            f"expected --array to be indices such as 0-9 or 1,3,5%2, got "
            f"{given.array!r}"
        )
    for name in ("account", "partition", "name"):
        if not _WORD.fullmatch(getattr(given, name)):
            parser.error(
                f"expected --{name} to be one word of letters, digits and ._@%+-, got "
                f"{getattr(given, name)!r}"
            )
    fields = {**vars(given), "ntasks_per_node": tasks}
    say(script_of(Options(**fields, program=tuple(words[split + 1 :]))).rstrip("\n"))
    return 0


def script_of(options: Options) -> str:
    """Return the batch script."""
    parts = [
        _head(options),
        _environment(options),
        _launch_by_mpirun(options) if options.mpirun else _launch_by_srun(),
        _run_preemptible() if options.preemptible else _run(),
    ]
    return "\n".join(parts)


def _head(options: Options) -> str:
    kinds = [
        f"an array of jobs, {options.array}" if options.array else "",
        "one GPU for each rank" if options.gpus_per_node else "",
        "saves when told to, and continues" if options.preemptible else "",
        f"started by {'mpirun' if options.mpirun else 'srun'}",
    ]
    log = "%x-%A_%a.out" if options.array else "%x-%j.out"
    lines = [
        "#!/usr/bin/env bash",
        f"# An mpidist program on SLURM: {', '.join(filter(None, kinds))}.",
        "# To change: the account and partition, if the cluster asks for them (remove "
        "the first #);",
        "# nodes, ranks on each node (ntasks-per-node) and the time limit; and below, "
        "the modules or",
        "# the environment that Python needs.",
        f"#SBATCH --account={options.account}"
        if options.account
        else "##SBATCH --account=YOUR_ACCOUNT",
        f"#SBATCH --partition={options.partition}"
        if options.partition
        else "##SBATCH --partition=YOUR_PARTITION",
        f"#SBATCH --job-name={options.name}",
        f"#SBATCH --nodes={options.nodes}",
        f"#SBATCH --ntasks-per-node={options.ntasks_per_node}",
        f"#SBATCH --cpus-per-task={options.cpus_per_task}",
    ]
    if options.gpus_per_node:
        # Not --gpus-per-task: then each rank sees only its own GPU, and ranks of one
        # node cannot copy from GPU to GPU.
        lines.append(f"#SBATCH --gpus-per-node={options.gpus_per_node}")
    lines.append(f"#SBATCH --time={options.time}")
    if options.array:
        lines.append(f"#SBATCH --array={options.array}")
    if options.preemptible:
        lines += [f"#SBATCH --signal=B:USR1@{_WARNING_SECONDS}", "#SBATCH --requeue"]
    lines += [f"#SBATCH --output={log}", "#SBATCH --open-mode=append", ""]
    return "\n".join(lines)


def _environment(options: Options) -> str:
    if options.program:
        program = f"program=({shlex.join(options.program)})"
    else:
        program = (
            f'if (($# == 0)); then set -- {_DEFAULT_PROGRAM}; fi\nprogram=(python "$@")'
        )
    index = (
        "# Each job of the array has its SLURM_ARRAY_TASK_ID in the environment of all "
        "ranks.\n"
        if options.array
        else ""
    )
    return f"""\
set -euo pipefail

# The environment that was active at sbatch time travels with the job; else .venv.
# Jobs of several nodes need an MPI that knows the network: the site's, as a rule.
if [[ -z ${{VIRTUAL_ENV:-}}${{CONDA_PREFIX:-}} && -f .venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source .venv/bin/activate
fi

{index}{program}

# A rank's threads use its cores; srun does not take --cpus-per-task over by itself.
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}
which='import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI; print(MPI.get_vendor()[0])'
library=$(python -c "$which")
"""


def _launch_by_srun() -> str:
    return """\
# By what srun tells the ranks of each other. Its default is often none, with which each
# rank is alone: so the default is used only if this MPI understands it.
case $library in
  'Open MPI') wanted=(pmix) ;;
  *) wanted=(pmi2 cray_shasta pmix) ;;
esac
default=$(scontrol show config | sed -n 's/^MpiDefault *= *//p')
known=" $default $(srun --mpi=list 2>&1 | tr -s '[:space:],:' ' ') "
kind=''
for name in "${wanted[@]}"; do
  if [[ $name == "$default" ]]; then kind=$name; fi
  if [[ -z $kind && $known == *" $name "* ]]; then kind=$name; fi
done
if [[ -z $kind ]]; then
  echo "$library needs srun --mpi=${wanted[0]}, and this SLURM has:$known" >&2
  exit 1
fi
launch=(srun --mpi="$kind" --kill-on-bad-exit=1 --label)
"""


def _launch_by_mpirun(options: Options) -> str:
    per_node = options.ntasks_per_node
    return f"""\
# mpirun asks SLURM for the nodes. Each line of output is labelled by its rank.
launch=(mpirun -n "$SLURM_NTASKS")
case $library in
  'Open MPI') launch+=(--tag-output) ;;
  *) launch+=(-ppn "${{SLURM_NTASKS_PER_NODE:-{per_node}}}" -prepend-rank) ;;
esac
"""


def _run() -> str:
    return """\
echo "$library on $SLURM_JOB_NODELIST: ${launch[*]} ${program[*]}"
exec "${launch[@]}" "${program[@]}"
"""


def _run_preemptible() -> str:
    return """\
# SLURM tells this script before the time is up (USR1, by --signal), and when the job is
# cancelled (TERM). The script passes that on as USR1; the ranks save at the same step,
# and then rank 0 creates a file.
export MPIDIST_SAVED_FILE=${SLURM_SUBMIT_DIR:-$PWD}/.mpidist-saved-$SLURM_JOB_ID
rm -f "$MPIDIST_SAVED_FILE"
pid='' time_is_up='' told_to_end=''
# shellcheck disable=SC2329 # the traps call it
tell() { if [[ -n $pid ]]; then kill -USR1 "$pid" 2>/dev/null || :; fi; }
trap 'time_is_up=1; tell' USR1
trap 'told_to_end=1; tell' TERM

# Until Python handles the signal it has to wait (coreutils before 8.31 cannot do that).
block=(env --block-signal=USR1)
if ! "${block[@]}" true 2>/dev/null; then block=(); fi
echo "start ${SLURM_RESTART_COUNT:-0}: $library on $SLURM_JOB_NODELIST:" \\
  "${launch[*]} ${program[*]}"
"${launch[@]}" "${block[@]}" "${program[@]}" &
pid=$!
while kill -0 "$pid" 2>/dev/null; do wait "$pid" || :; done # a signal ends `wait` early
code=0
wait "$pid" || code=$? # which bash remembers
pid=''
# The file counts, not the code: launchers end the ranks when the first one leaves.
if [[ -e $MPIDIST_SAVED_FILE ]]; then
  rm -f "$MPIDIST_SAVED_FILE"
  echo "saved"
  # Again later, unless the job was cancelled. (At a preemption SLURM signals the ranks,
  # and would start the job again by itself at the end of the grace time.)
  job=$(scontrol -o show job "$SLURM_JOB_ID") || job=''
  if [[ -z $told_to_end && (-n $time_is_up || $job == *" PreemptTime=2"*) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  trap - USR1 TERM
  sleep 60 & # SLURM ends this script
  wait
fi
exit "$code"
"""
