"""The commands of the guides for clusters: each is run, here or by tests named here."""

import re
import shlex
import sys

import hosts
import pytest
from launching import ROOT, find_mpirun, run_command

PAGES = ("launching", "slurm", "gpus", "troubleshooting")
LINE = re.compile(r"^(?:\$ )?((?:mpirun|srun|sbatch|mpidist|export) .*)$", re.M)
README = "tests/project/test_readme.py"
CLI = "tests/_cli/test_on_ranks.py"
SLURM = "tests/slurm/test_batch_jobs.py"
HOSTS = "tests/_collectives/test_hosts.py"
GPU = "tests/_collectives/test_gpu_transports.py"

# Who runs the others: patterns, a file of tests, and a text of that file. Blocks with
# output, and `mpidist run`, are run as they stand by README.
ELSEWHERE = [
    (r"mpirun -n 2 python (none|where|finish|visible)\.py", README, "def mpirun("),
    (r"mpidist run -n 2 examples/hello\.py", README, "def mpidist_run("),
    (r"mpirun -n 2 mpidist bench --quick", "tests/_cli/test_bench.py", '"--quick"]'),
    (r"mpirun -n \d mpidist check.*", CLI, 'run("check", "check"'),
    (r"mpirun -n \d mpidist info", CLI, 'run("info", "info"'),
    (r"sbatch .*", SLURM, "def test_the_commands_of_the_guide("),
    (r"mpidist sbatch --nodes 2 --nt.*", SLURM, "def test_the_commands_of_the_guide("),
    (r"srun -n 4 --mpi=pmix .*", SLURM, "def test_the_commands_of_the_guide("),
    (r"srun -n 4 mpidist check", SLURM, 'cluster.run(*srun, *command, "check"'),
    (r"export PRTE_MCA_oob_tcp_keepalive_.*", HOSTS, '"PRTE_MCA_oob_tcp_keepalive_'),
    (r"export MPIDIST_STALL_SECONDS=5", HOSTS, '"MPIDIST_STALL_SECONDS"'),
    (r"export MPIDIST_CUDA_AWARE=0", GPU, "MPIDIST_CUDA_AWARE"),
    (r"export MPIDIST_TRACE=1", "tests/_timeline/test_trace.py", "MPIDIST_TRACE"),
]
# It takes four GPUs on a node, and as many cores as eight for each of them.
NOT_AS_IT_STANDS = [
    (r"mpidist sbatch .*--gpus-per-node 4 .*", SLURM, "def test_the_script_for_gpus_"),
]


def commands() -> list[str]:
    """Return the commands in code blocks of the pages, each once."""
    found = []
    for page in PAGES:
        text = (ROOT / f"docs/guide/{page}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```(?:sh|console|text)\n(.*?)^```", text, re.M | re.S)
        found += LINE.findall("\n".join(blocks))
    return list(dict.fromkeys(found))


HELLO = [line for line in commands() if re.fullmatch(r"mpirun .* examples/.*", line)]
OF_OPEN_MPI = [line for line in HELLO if line.startswith("mpirun --")]
OF_MPICH = [line for line in HELLO if not line.startswith(("mpirun --", "mpirun -n"))]
OF_BOTH = [line for line in HELLO if line.startswith("mpirun -n")]


HELLO_OF_MPI = """
from mpi4py import MPI
print(f"hello from replica {MPI.COMM_WORLD.rank}\\n", end="", flush=True)
"""


def test_each_command_is_run():
    assert len(OF_OPEN_MPI) >= 4
    assert len(OF_MPICH) >= 3
    assert len(OF_BOTH) == 1
    for line in commands():
        if line in HELLO:
            continue
        tests = [
            (path, text)
            for pattern, path, text in ELSEWHERE + NOT_AS_IT_STANDS
            if re.fullmatch(pattern, line)
        ]
        assert tests, f"no test runs {line!r}"
        for path, text in tests:
            assert text in (ROOT / path).read_text(encoding="utf-8"), (line, path)


@pytest.mark.core
def test_the_commands_run(tmp_path):
    open_mpi = hosts.is_open_mpi()
    slots = "localhost slots=4\n" if open_mpi else "localhost:4\n"
    (tmp_path / "hosts.txt").write_text(slots)
    # What the program does without these options: tests/project/test_examples.py.
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "hello.py").write_text(HELLO_OF_MPI)
    lines = OF_BOTH + (OF_OPEN_MPI if open_mpi else OF_MPICH)
    for line in lines:
        words = [find_mpirun(), *shlex.split(line)[1:]]
        words[words.index("python")] = sys.executable
        done = run_command(words, 100, cwd=tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        ranks = int(re.search(r"-n (\d+)", line)[1])
        assert done.stdout.count("hello from replica") == ranks, line
