"""`mpidist sbatch`: the batch scripts that it prints. tests/slurm runs them."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest
from launching import ROOT

from mpidist._cli import sbatch_command
from mpidist._cli.speaking import UsageError

SCRIPTS = ROOT / "launch/slurm"
OPTIONS = {
    "srun": "--nodes 2",
    "mpirun": "--nodes 2 --mpirun",
    "gpus": "--nodes 2 --gpus-per-node 2 --cpus-per-task 4",
    "array": "--array 0-3",
    "preemptible": "--nodes 2 --preemptible",
}


@pytest.fixture
def script_of(capsys):
    """Return a function that returns the script for a line of arguments."""

    def script_of(line):
        assert sbatch_command.sbatch(shlex.split(line)) == 0
        return capsys.readouterr().out

    return script_of


def test_the_scripts_of_the_repository_are_what_it_prints(script_of):
    found = {path.stem: path.read_text(encoding="utf-8") for path in SCRIPTS.iterdir()}
    assert set(found) == set(OPTIONS)
    for name, options in OPTIONS.items():
        advice = f"write `mpidist sbatch {options} > launch/slurm/{name}.sbatch`"
        assert found[name] == script_of(options), advice


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "--nodes 3 --ntasks-per-node 8 --cpus-per-task 2 --time 1-12:00:00 "
            "--account physics --partition long --name fit --array 0-9:2%3 "
            "--preemptible -- python -m package.train --title 'two words' --array",
            [
                "#SBATCH --nodes=3",
                "#SBATCH --ntasks-per-node=8",
                "#SBATCH --cpus-per-task=2",
                "#SBATCH --time=1-12:00:00",
                "#SBATCH --account=physics",
                "#SBATCH --partition=long",
                "#SBATCH --job-name=fit",
                "#SBATCH --array=0-9:2%3",
                "#SBATCH --signal=B:USR1@120",
                "#SBATCH --requeue",
                "program=(python -m package.train --title 'two words' --array)",
            ],
        ),
        ("-- python train.py -- -x", ["program=(python train.py -- -x)"]),
        (
            "--gpus-per-node 4",
            ["#SBATCH --gpus-per-node=4", "#SBATCH --ntasks-per-node=4"],
        ),
    ],
)
def test_options_and_program_are_in_the_script(arguments, expected, script_of):
    lines = script_of(arguments).splitlines()
    assert set(expected) <= set(lines)
    assert ("##SBATCH --account=YOUR_ACCOUNT" in lines) == ("physics" not in arguments)
    # SLURM reads its options up to the first command.
    first = next(n for n, line in enumerate(lines) if line and line[0] != "#")
    assert not any("#SBATCH" in line for line in lines[first:])


@pytest.mark.parametrize(
    "options",
    [*OPTIONS.values(), "--mpirun --preemptible --array 1,5 --gpus-per-node 1"],
)
def test_bash_and_shellcheck_accept_them(options, script_of, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(script_of(f"{options} -- python 'a b.py'"))
    for check in (["bash", "-n"], ["shellcheck"]):
        if shutil.which(check[0]):
            command = [*check, path]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nodes 0", "expected --nodes to be at least 1"),
        ("--cpus-per-task -1", "expected --cpus-per-task to be at least 1"),
        ("--ntasks-per-node 0", "expected --ntasks-per-node to be at least 1"),
        ("--gpus-per-node -2", "expected --gpus-per-node to be at least 0, got '-2'"),
        ("--time '1 hour'", "expected --time to be minutes, M:S, H:M:S or D-H:M:S"),
        ("--array all", "expected --array to be indices such as 0-9"),
        ("--name 'my job'", "expected --name to be one word"),
        ("--account 'a;b'", "expected --account to be one word"),
        ("train.py", "unrecognized arguments: train.py"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError) as caught:
        sbatch_command.sbatch(shlex.split(arguments))
    assert message in str(caught.value)
