"""`mpidist sbatch`: the batch scripts that it prints. tests/slurm runs them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from mpidist import _cli
from mpidist._cli import sbatch_command
from mpidist._cli.speaking import UsageError

SCRIPTS = Path(__file__).resolve().parents[2] / "launch/slurm"
OPTIONS = {
    "srun": "--nodes 2",
    "mpirun": "--nodes 2 --mpirun",
    "gpus": "--nodes 2 --gpus-per-node 2 --cpus-per-task 4",
    "array": "--array 0-3",
    "preemptible": "--nodes 2 --preemptible",
}


def _print(capsys, *arguments):
    assert sbatch_command.sbatch(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", OPTIONS)
def test_the_scripts_of_the_repository_are_what_it_prints(name, capsys):
    path = SCRIPTS / f"{name}.sbatch"
    assert path.read_text(encoding="utf-8") == _print(capsys, *OPTIONS[name].split()), (
        f"write `mpidist sbatch {OPTIONS[name]} > launch/slurm/{name}.sbatch`"
    )


def test_there_are_no_other_scripts():
    assert {path.stem for path in SCRIPTS.iterdir()} == set(OPTIONS)


def test_options_and_program_are_in_the_script(capsys):
    script = _print(
        capsys,
        *("--nodes", "3", "--ntasks-per-node", "8", "--cpus-per-task", "2"),
        *("--time", "1-12:00:00", "--account", "physics", "--partition", "long"),
        *("--name", "fit", "--array", "0-9:2%3", "--preemptible"),
        *("--", "python", "-m", "package.train", "--title", "two words", "--array"),
    )
    lines = script.splitlines()
    for line in (
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
    ):
        assert line in lines
    assert "YOUR_" not in script
    # SLURM reads its options up to the first command.
    first = next(n for n, line in enumerate(lines) if line and line[0] != "#")
    assert not any("#SBATCH" in line for line in lines[first:])


def test_a_command_without_options(capsys):
    assert _cli.main(["sbatch", "--", "python", "train.py", "--", "-x"]) == 0
    assert "\nprogram=(python train.py -- -x)\n" in capsys.readouterr().out


def test_with_gpus_there_is_a_rank_for_each(capsys):
    script = _print(capsys, "--gpus-per-node", "4")
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "#SBATCH --ntasks-per-node=4\n" in script


@pytest.mark.parametrize(
    "options",
    [*OPTIONS.values(), "--mpirun --preemptible --array 1,5 --gpus-per-node 1"],
)
def test_bash_and_shellcheck_accept_them(options, capsys, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(_print(capsys, *shlex.split(options), "--", "python", "a b.py"))
    checks = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        checks.append(["shellcheck"])
    for check in checks:
        result = subprocess.run(
            [*check, path], capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "expected --nodes to be at least 1"),
        (["--cpus-per-task", "-1"], "expected --cpus-per-task to be at least 1"),
        (["--ntasks-per-node", "0"], "expected --ntasks-per-node to be at least 1"),
        (
            ["--gpus-per-node", "-2"],
            "expected --gpus-per-node to be at least 0, got '-2'",
        ),
        (["--time", "1 hour"], "expected --time to be minutes, M:S, H:M:S or D-H:M:S"),
        (["--array", "all"], "expected --array to be indices such as 0-9"),
        (["--name", "my job"], "expected --name to be one word"),
        (["--account", "a;b"], "expected --account to be one word"),
        (["train.py"], "unrecognized arguments: train.py"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError) as caught:
        sbatch_command.sbatch(arguments)
    assert message in str(caught.value)
