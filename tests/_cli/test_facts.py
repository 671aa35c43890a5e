"""What `mpidist info` says of launchers, nodes, cores and devices."""

import pytest

from mpidist._cli import facts, info_command, system_checks
from mpidist._cli.facts import Job, launcher_facts, sizes_text

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "none"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "none, in SLURM job 7"),
        (STEP, "srun --mpi=none started 5 processes, step 3 of SLURM job 7"),
        (
            {**STEP, "SLURM_MPI_TYPE": "pmix"},
            "srun --mpi=pmix started 5 processes, step 3 of SLURM job 7",
        ),
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
    found = launcher_facts(variables)
    assert info_command.launcher_text(found) == text
    by_srun = found["name"].startswith("srun")
    assert found["tasks_per_node"] == ([2, 2, 1] if by_srun else None)
    assert found["slurm_mpi_type"] == (
        variables.get("SLURM_MPI_TYPE", "none") if by_srun else None
    )


def use(allowed, machine=64, quota=None, slurm=None):
    return {"machine": machine, "allowed": allowed, "quota": quota, "slurm": slurm}


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
    assert system_checks.cores_text(ranks) == text


def test_the_cores_of_this_process():
    found = Job().mine["cores"]
    assert 1 <= len(found["allowed"]) <= found["machine"]
    assert found["quota"] is None or found["quota"] > 0


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


def describe(names, gpus, visible, request="auto"):
    """Return the lines of two nodes of two ranks, or of one of one."""
    devices = [f"/rank:{rank}/device:{name}" for rank, name in enumerate(names)]
    ranks = [
        {"gpu": {"gpus": n}, "environment": {"CUDA_VISIBLE_DEVICES": v} if v else {}}
        for n, v in zip(gpus, visible, strict=True)
    ]
    nodes = [[0, 1], [2, 3]] if len(names) == 4 else [[0]]
    return info_command.describe_devices(devices, nodes, ranks, request)


def test_devices_and_why():
    names = ("GPU:0", "GPU:1", "GPU:0", "GPU:1")
    (line,) = describe(names, [2] * 4, [None] * 4)
    assert line == (
        "GPU:0, GPU:1; the rank's number on its node, modulo 2 GPUs that it sees"
    )
    (line,) = describe(names, [2] * 4, ["2,3"] * 4)
    assert line.endswith("sees (CUDA_VISIBLE_DEVICES=2,3)")
    (line,) = describe(("GPU:0",) * 4, [1] * 4, ["0", "1", "0", "1"])
    assert line == (
        "GPU:0 for all ranks; each rank sees its own: CUDA_VISIBLE_DEVICES=0, 1"
    )
    mixed = ("GPU:0", "GPU:1", "CPU:0", "CPU:0")
    first, second = describe(mixed, [2, 2, 0, 0], [None] * 4)
    assert first.startswith("node 0: GPU:0, GPU:1; ")
    assert second == "node 1: CPU:0 for all ranks; no GPU is found"
    (line,) = describe(("CPU:0",), [1], [None], "cpu")
    assert line == "CPU:0; --device cpu"


@pytest.mark.parametrize(
    ("is_on", "text"), [(True, "on, which the native core needs"), (False, "off")]
)
def test_a_free_threaded_python(monkeypatch, is_on, text):
    monkeypatch.setattr(facts.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    monkeypatch.setattr(facts.sys, "_is_gil_enabled", lambda: is_on, raising=False)
    assert facts._python().endswith(f", free-threaded (its GIL is {text})")
