"""SlurmClusterResolver and this_process, with the variables that SLURM sets.

The variables are those that were seen under srun, mpirun and in a batch script of SLURM
22.05; tests/slurm has the real ones.
"""

import os
import platform

import pytest
from replicas import everywhere

from mpidist.cluster import Process, SlurmClusterResolver, this_process

GIVEN_BY_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_", "CUDA_")
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_JOB_NODELIST": "n[09-10]",
    "SLURM_TASKS_PER_NODE": "3,2",
}
STEP = {
    **JOB,
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[09-10]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_MPI_TYPE": "pmix",
    "PMIX_RANK": "4",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
BY_MPIRUN = {
    **STEP,
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ADDRESSES = ["n09:8888", "n09:8889", "n09:8890", "n10:8888", "n10:8889"]


@pytest.fixture
def given(monkeypatch):
    """Return a function that sets these variables, and no other of launchers."""
    for name in list(os.environ):
        if name.startswith(GIVEN_BY_LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/nonexistent")  # no nvidia-smi

    def give(variables, **more):
        for name, value in {**variables, **more}.items():
            monkeypatch.setenv(name, value)

    return give


# --- the step -------------------------------------------------------------------------


def test_a_task_of_a_step_without_gpus(given):
    given(STEP)
    resolver = SlurmClusterResolver()
    assert resolver.get_task_info() == (None, None)
    assert resolver.cluster_spec().as_dict() == {"worker": ADDRESSES}
    assert resolver.get_task_info() == ("worker", 4)
    assert resolver.master() == "grpc://n10:8889"
    assert resolver.master("worker", 0, "x") == "x://n09:8888"
    assert resolver.num_accelerators() == {}
    assert SlurmClusterResolver(gpus_per_task=0).num_accelerators() == {}
    resolver = SlurmClusterResolver()
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://n09:8889"  # of what was set, as in TensorFlow
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_batch_script_is_none_of_its_tasks(given):
    given(JOB)
    resolver = SlurmClusterResolver(port_base=100, rpc_layer=None)
    hosts = [f"{one.split(':')[0]}:{int(one[-2:]) + 12}" for one in ADDRESSES]
    assert resolver.cluster_spec().as_dict() == {"worker": hosts}
    assert resolver.get_task_info() == (None, None)
    assert resolver.master() == ""
    assert resolver.master("worker", 3) == "n10:100"


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [
        *((x, "n09 n09 n09 n10 n10") for x in ("block", "block:cyclic")),
        *((x, "n09 n10 n09 n10 n09") for x in ("cyclic", "cyclic:block,NoPack")),
        ("plane=2", "n09 n09 n10 n10 n09"),
    ],
)
def test_distributions(given, distribution, hosts):
    given(STEP, SLURM_DISTRIBUTION=distribution, SLURM_DIST_PLANESIZE="2")
    tasks = SlurmClusterResolver().cluster_spec().job_tasks("worker")
    assert [task.split(":")[0] for task in tasks] == hosts.split()


@pytest.mark.parametrize(
    ("jobs", "cluster", "mine"),
    [
        (
            {"worker": 3, "ps": 2},  # in the order of their names
            {"ps": ADDRESSES[:2], "worker": ADDRESSES[2:]},
            ("worker", 2),
        ),
        ({"ps": 1}, {"ps": ADDRESSES[:1]}, (None, None)),
    ],
)
@pytest.mark.parametrize("tasks_per_node", [None, {"n09": 3, "n10": 2}])
def test_jobs_get_their_tasks(given, jobs, cluster, mine, tasks_per_node):
    """What is given needs no variables."""
    given({"SLURM_PROCID": "4", "SLURM_STEP_NODELIST": "n[09-10]"})
    if tasks_per_node is None:
        with pytest.raises(RuntimeError, match="SLURM_STEP_TASKS_PER_NODE not found"):
            SlurmClusterResolver(jobs)
        given(STEP)
    resolver = SlurmClusterResolver(jobs, tasks_per_node=tasks_per_node)
    assert resolver.cluster_spec().as_dict() == cluster
    assert resolver.get_task_info() == mine


def test_tasks_per_node_may_be_given(given):
    given(STEP, SLURM_PROCID="1")
    for counts, hosts in (
        (1, ["n09:8888", "n10:8888"]),
        ({"n09": 1, "n10": 2}, ["n09:8888", "n10:8888", "n10:8889"]),
    ):
        spec = SlurmClusterResolver(tasks_per_node=counts).cluster_spec()
        assert spec.job_tasks("worker") == hosts


@pytest.mark.parametrize(
    ("variables", "arguments", "visible", "each"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, {}, "1", 1),
        ({"SLURM_GPUS_ON_NODE": "6"}, {}, "2,3", 2),
        ({"SLURM_GPUS_ON_NODE": "2"}, {}, None, 0),  # fewer than tasks
        ({"CUDA_VISIBLE_DEVICES": "3,5,7"}, {}, "5", 1),
        ({"CUDA_VISIBLE_DEVICES": "3", "SLURM_GPUS_ON_NODE": "3"}, {}, "3", 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, "", 0),
        ({}, {"gpus_per_node": 3}, "1", 1),
        ({}, {"gpus_per_node": 8, "gpus_per_task": 2}, "2,3", 2),
        ({"CUDA_VISIBLE_DEVICES": "3,5,7"}, {"auto_set_gpu": False}, "3,5,7", 1),
    ],
)
def test_the_gpus_of_a_task(given, monkeypatch, variables, arguments, visible, each):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given({**STEP, **variables})
    resolver = SlurmClusterResolver(**arguments)
    for _ in range(2):  # the second time it is set already
        resolver.cluster_spec()
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert resolver.num_accelerators() == ({"GPU": each} if each else {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("variables", "arguments", "kind", "message"),
    [
        ({}, {}, RuntimeError, "SLURM_JOB_NODELIST not found in envir"),
        (
            {"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5"},
            *({}, RuntimeError, "SLURM_STEP_NODELIST not found"),
        ),
        (STEP, {"jobs": {"worker": 6}}, RuntimeError, "6 tasks but only 5 were ass"),
        (
            *(STEP, {"gpus_per_node": 2, "gpus_per_task": 1}, RuntimeError),
            "Requested more GPUs per node than avail",
        ),
        (STEP, {"gpus_per_task": -1}, ValueError, "expected numbers of GPUs from 0"),
        (STEP, {"tasks_per_node": 1}, ValueError, "task 4, and the nodes have 2"),
        (
            {**STEP, "SLURM_DISTRIBUTION": "arbitrary"},
            *({}, RuntimeError, "arbitrary does not say"),
        ),
        (
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "3"},
            *({}, ValueError, "number of tasks for each of the nodes"),
        ),
        (
            *(STEP, {"tasks_per_node": {"n09": 3}}, ValueError),
            r"each of the nodes \['n09', 'n10'\], got \[3, 0\]",
        ),
        (BY_MPIRUN, {}, RuntimeError, r"Open MPI, .* daemons, .*MPIStrategy\(\)\."),
    ],
)
def test_errors(given, variables, arguments, kind, message):
    given(variables)
    with pytest.raises(kind, match=message):
        SlurmClusterResolver(**arguments)


# --- this_process ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("", 0, 1, 0, 1, 0)),
        (JOB, ("", 0, 1, 0, 1, 0)),
        (STEP, ("srun --mpi=pmix", 4, 5, 1, 2, 1)),
        (BY_MPIRUN, ("mpirun of Open MPI", 5, 6, 1, 2, None)),
        (
            {
                **STEP,
                "PMI_RANK": "3",
                "PMI_SIZE": "6",
                "MPI_LOCALRANKID": "1",
                "MPI_LOCALNRANKS": "2",
                "SLURM_MPI_TYPE": "none",
            },
            ("mpirun of MPICH or Intel MPI", 3, 6, 1, 2, None),
        ),
        (
            {**STEP, "PMI_RANK": "4", "PMI_SIZE": "5", "SLURM_MPI_TYPE": "pmi2"},
            ("srun --mpi=pmi2", 4, 5, 1, 2, 1),
        ),
        (
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "?"},
            ("srun --mpi=pmix", 4, 5, 1, None, 1),
        ),
        ({"PMIX_RANK": "1"}, ("a launcher with PMIx", 1, 1, None, None, None)),
    ],
)
def test_this_process(given, monkeypatch, variables, expected):
    monkeypatch.setattr("mpidist._mpi.library.world_rank", lambda: None)
    given(variables)
    assert this_process() == Process(*expected, platform.node())


@pytest.mark.mpi
def test_mpi_comes_first(strategy, rank, size):
    found = this_process()
    assert (found.rank, found.size) == (rank, size)
    # The launcher's own, which need not be in the order of the ranks.
    assert sorted(everywhere(found.local_rank)) == list(range(size))
    assert found.local_size == size
    assert found.host == platform.node()
