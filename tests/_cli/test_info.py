"""`mpidist info`: what it says of launchers, nodes, cores, devices and settings."""

import json

import pytest
from launching import run_alone

from mpidist import _cli
from mpidist._cli import facts, info_command, system_checks
from mpidist._cli.facts import launcher_text, sizes_text

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
}


@pytest.mark.core
def test_json(monkeypatch, capsys):
    monkeypatch.setenv("MPIDIST_TIMEOUT", "77")
    assert _cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    assert rank["environment"]["MPIDIST_TIMEOUT"] == "77"
    assert rank["most_files"] > rank["files"] > 0
    assert found["problems"] == []
    lines = found["lines"]
    assert lines["guard"][0].endswith("an error after 77 s")
    assert lines["host arrays"] == ["direct: one rank"]


def test_there_can_be_no_strategy(capsys):
    assert _cli.main(["info", "--device", "gpu:999"]) == 1
    out = capsys.readouterr().out
    assert "problems     MPIStrategy cannot be made: " in out
    assert "gpu:999" in out
    done = run_alone("-m", "mpidist", "info", env={"MPIDIST_TIMELINE": "/no/f"})
    assert "problems     MPIStrategy cannot be made: [Errno 2]" in done.stdout
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "none"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "none, in SLURM job 7"),
        ({"PBS_JOBID": "7.host"}, "none, in PBS job 7.host"),
        (STEP, "srun --mpi=none started 5 processes, step 3 of SLURM job 7"),
        (
            {**STEP, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"},
            "mpirun of Open MPI started 8 processes, in SLURM job 7",
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "1"},
            "mpirun of MPICH or Intel MPI started 1 process",
        ),
    ],
)
def test_launchers(variables, text):
    assert launcher_text(variables) == text


def use(allowed, machine=64, quota=None, slurm=None):
    return {"cores": machine, "allowed": allowed, "quota": quota, "slurm": slurm}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([use([0, 1], 2)], "2 of 2 cores"),
        ([use([0], 2), use([1], 2)], "2 of 2 cores, each rank on 1"),
        (
            [use([0, 1]), use([2])],
            "3 of 64 cores (its ranks may run on no others), each rank on 1 to 2",
        ),
        ([use(list(range(64)), quota=2.5)], "3 of 64 cores (by the control group)"),
        ([use(list(range(64)), slurm=8)] * 2, "8 of 64 cores (by SLURM)"),
        ([use([0], slurm=8)], "1 of 64 cores (its ranks may run on no others)"),
    ],
)
def test_cores_that_the_job_has(ranks, text):
    assert system_checks.cores_of(ranks) == (int(text.split()[0]), text)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([3], "1 node"),
        ([2, 2], "2 nodes, 2 on each"),
        ([3, 1], "2 nodes, 3 + 1"),
        ([4] * 8 + [3], "9 nodes, 3 to 4 on each"),
    ],
)
def test_sizes_of_nodes(sizes, text):
    assert sizes_text(sizes) == text


WHY = "the rank's number on its node, modulo 2 GPUs that it sees"


@pytest.mark.parametrize(
    ("names", "gpus", "visible", "request_", "lines"),
    [
        ("GPU:0 GPU:1 GPU:0 GPU:1", 2, "", "auto", [f"GPU:0, GPU:1; {WHY}"]),
        (
            *("GPU:0 GPU:1 GPU:0 GPU:1", 2, "2,3 2,3 2,3 2,3", "auto"),
            [f"GPU:0, GPU:1; {WHY} (CUDA_VISIBLE_DEVICES=2,3)"],
        ),
        (
            *("GPU:0 GPU:0 GPU:0 GPU:0", 1, "0 1 0 1", "auto"),
            ["GPU:0 for all ranks; each rank sees its own: CUDA_VISIBLE_DEVICES=0, 1"],
        ),
        (
            *("GPU:0 GPU:1 CPU:0 CPU:0", 2, "", "auto"),
            [
                f"node 0: GPU:0, GPU:1; {WHY}",
                "node 1: CPU:0 for all ranks; no GPU is found",
            ],
        ),
        ("CPU:0", 1, "", "cpu", ["CPU:0; --device cpu"]),
    ],
)
def test_devices_and_why(names, gpus, visible, request_, lines):
    """Of two nodes of two ranks, or of one of one."""
    devices = [f"/rank:{k}/device:{name}" for k, name in enumerate(names.split())]
    seen = [{"CUDA_VISIBLE_DEVICES": v} for v in visible.split()] or [{}] * len(devices)
    ranks = [{"gpu": {"gpus": gpus}, "environment": one} for one in seen]
    nodes = [[0, 1], [2, 3]] if len(devices) == 4 else [[0]]
    assert info_command.describe_devices(devices, nodes, ranks, request_) == lines


@pytest.mark.parametrize(
    ("is_on", "text"), [(True, "on, which the native core needs"), (False, "off")]
)
def test_a_free_threaded_python(monkeypatch, is_on, text):
    monkeypatch.setattr(facts.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    monkeypatch.setattr(facts.sys, "_is_gil_enabled", lambda: is_on, raising=False)
    assert facts._python().endswith(f", free-threaded (its GIL is {text})")
