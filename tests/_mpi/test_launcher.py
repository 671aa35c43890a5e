"""What the launcher says of this process; programs that are alone and should not be."""

import importlib
import sys

import pytest
from launching import run_alone

from mpidist._mpi.launcher import Launch, describe_alone, find_launch

# What each launcher sets, as measured: the batch script of a job has SLURM_NTASKS, and
# no variable of a step; under mpirun in a job those of SLURM are its daemon's.
SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
}
STEP = {**SLURM_JOB, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (SLURM_JOB, None),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"},
            ("mpirun of Open MPI", 1, 3),
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            ("mpirun of MPICH or Intel MPI", 0, 2),
        ),
        (STEP, ("srun --mpi=none", 2, 4)),
        ({"PMI_RANK": "no number", "PMI_SIZE": ""}, None),
        ({**TORCHRUN, **STEP}, ("torchrun", 1, 2, 1)),
        ({**TORCHRUN, "ACCELERATE_X": ""}, ("accelerate launch", 1, 2, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ("torchrun", 1, 2)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", **TORCHRUN},
            ("mpirun of Open MPI", 1, 3),
        ),
    ],
)
def test_launchers(variables, expected):  # more of them: test_this_process
    found = find_launch(variables)
    if expected is None:
        assert found is None or found.size is None
    else:
        assert found == Launch(*expected)


@pytest.mark.parametrize(
    ("launcher", "library", "cure"),
    [
        ("srun --mpi=none", "Open MPI v5.0.11, package: x", "`srun --mpi=pmix`"),
        ("srun --mpi=none", "MPICH Version:      5.0.2\nMPICH", "`srun --mpi=pmi2`"),
        ("mpirun of Open MPI", "MPICH Version: 5.0.2", "use the mpirun of the env"),
        ("torchrun", "Open MPI v5.0.11", "`mpirun -n 4 python train.py` or `mpidist"),
    ],
)
def test_the_text_says_what_to_write(monkeypatch, launcher, library, cure):
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py"])
    text = describe_alone(Launch(launcher, 2, 4), library)
    assert text.startswith(f"{launcher} started 4 processes")
    assert cure in text
    assert "\n" not in text


def run(program, **variables):
    return run_alone("-c", f"import mpidist\n{program}", env=variables)


def test_a_program_that_is_alone_and_should_not_be():
    # This process looks like a rank then, but was not launched as the program's.
    importlib.import_module("mpi4py.MPI")
    step = {**STEP, "SLURM_PROCID": "3"}
    done = run("mpidist.MPIStrategy()", **step)
    assert done.returncode == 1
    assert "process 3: srun --mpi=none started 4 processes" in done.stderr
    assert "MPIDIST_ALONE=1" in done.stderr
    in_scope = "with mpidist.get_strategy().scope() as one:\n  print(one)"
    done = run(in_scope, **step)
    assert done.returncode == 1
    assert "scope: process 3: the launcher started 4 processes" in done.stderr
    assert "write `strategy = mpidist.MPIStrategy()`" in done.stderr
    both = f"{in_scope}\nprint(mpidist.MPIStrategy())"
    on_threads = "print(mpidist.testing.run(2, mpidist.MPIStrategy)[1])"
    with_mpi = f"{on_threads}\nfrom mpi4py import MPI\n{in_scope}\n"
    with_mpi += "print(mpidist.MPIStrategy(MPI.COMM_SELF))"
    for allowed, lines in (
        (run(both, **step, MPIDIST_ALONE="1"), 2),
        (run(both, **SLURM_JOB), 2),
        (run(with_mpi, **step), 3),
    ):
        assert allowed.returncode == 0, allowed.stderr
        assert allowed.stdout.count("\n") == lines
        assert all("replica" in line for line in allowed.stdout.splitlines())


def test_variables_of_copies_of_a_program_are_a_warning():
    # This process looks like a rank then, but was not launched as the program's.
    importlib.import_module("mpi4py.MPI")
    variables = "v, w = mpidist.Variable(1.0), mpidist.Variable(2.0)"
    first = {**STEP, "SLURM_PROCID": "0"}
    done = run(variables, **first)
    assert done.returncode == 0
    assert done.stderr.count("the launcher started 4 processes, but there is no") == 1
    for quiet in (
        run(variables, **{**STEP, "SLURM_PROCID": "3"}),
        run(variables, **first, MPIDIST_ALONE="1"),
        run(variables, **SLURM_JOB),
        run(f"from mpi4py import MPI\n{variables}", **first),
        run("mpidist.testing.run(2, lambda: mpidist.Variable(1.0))", **first),
    ):
        assert (quiet.returncode, quiet.stderr) == (0, "")


def test_a_program_of_torchrun(tmp_path):
    """Without torch: with the variables that it sets for each process."""
    program = tmp_path / "prog.py"
    program.write_text("import mpidist\n\nmpidist.MPIStrategy()\n")
    done = run_alone(sys.executable, program, env=TORCHRUN)
    assert done.returncode == 1
    assert "process 1: torchrun started 2 processes" in done.stderr
    assert "`mpirun -n 2 python prog.py` or `mpidist run -n 2 prog.py`" in done.stderr
    one = {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}
    assert run("mpidist.MPIStrategy()", **one).returncode == 0


def test_mpidist_check_says_so_once():
    """Each is a job of its own: the one that the launcher calls rank 0 speaks."""
    for rank in ("0", "2"):
        done = run_alone("-m", "mpidist", "check", env=STEP | {"SLURM_PROCID": rank})
        assert (done.returncode, done.stderr) == (1, "")
        if rank == "0":
            assert "srun --mpi=none started 4 processes" in done.stdout
            assert "this should not happen" not in done.stdout
        else:
            assert done.stdout == ""
