"""The batch scripts of launch/slurm, on a private SLURM cluster of four nodes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import sys
import time

import hosts
import pytest
import slurm_cluster
from launching import ROOT
from replicas import rarely, with_slow

from mpidist._cli import sbatch_command

SCRIPTS = ROOT / "launch/slurm"
NODES = 4
RANKS = 4  # two on each of two nodes: each start of one takes a while
STEPS = 40

WHO = """\
import os
import mpidist
strategy = mpidist.MPIStrategy()
me = strategy.run(lambda: mpidist.get_replica_context().replica_id_in_sync_group)
ids = strategy.reduce("SUM", me, axis=None)
if strategy.replica_id == 0:
    n = strategy.num_replicas_in_sync
    print("replicas", n, "sum", ids, "threads", os.environ["OMP_NUM_THREADS"],
          "index", os.environ.get("SLURM_ARRAY_TASK_ID"), flush=True)
"""
# Arguments: the folder; "waits": for the signal, before it has a handler; "slowly":
# it takes so long, until it is started again, that it is told before its end.
TRAIN = f"""\
import os, signal, sys, time
import numpy as np
import mpidist

strategy = mpidist.MPIStrategy()
with strategy.scope():
    w = mpidist.Variable(np.zeros(8), aggregation=mpidist.VariableAggregation.MEAN)
checkpoint = mpidist.Checkpoint(w=w)
manager = mpidist.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2)
is_first = not int(os.environ.get("SLURM_RESTART_COUNT", 0))
if "waits" in sys.argv and is_first:
    print("has no handler yet", flush=True)
    while signal.SIGUSR1 not in signal.sigpending():
        time.sleep(0.05)
slowly = "slowly" in sys.argv and is_first
handler = mpidist.experimental.PreemptionCheckpointHandler(None, manager)
say = strategy.replica_id == 0
first = 10 if "regularly" in sys.argv else 1
if say:
    print("begins at step", handler.total_run_calls, flush=True)


def step():
    rng = np.random.default_rng([handler.total_run_calls, strategy.replica_id])
    w.assign(0.9 * w.value() + rng.normal(size=8))


while handler.total_run_calls < {STEPS}:
    handler.run(strategy.run, step)
    if "regularly" in sys.argv and handler.total_run_calls % 10 == 0:
        manager.save(handler.total_run_calls)
    if say:
        print("has step", handler.total_run_calls, flush=True)
    time.sleep(1.0 if slowly and handler.total_run_calls >= first else 0.05)
if say:
    print("result", w.numpy().tobytes().hex(), flush=True)
"""

# CuPy's stand-in finds as many GPUs as a real one would.
ON_GPUS = f"""\
import os, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import numpy as np
import posing, pytest
visible = os.environ["CUDA_VISIBLE_DEVICES"]
xp = posing.install(pytest.MonkeyPatch(), visible.count(",") + 1)
import mpidist
strategy = mpidist.MPIStrategy()
context = mpidist.get_replica_context
total = strategy.run(lambda: context().all_reduce("SUM", xp.ones(3)))
(found,) = strategy.experimental_local_results(total)
name = strategy.extended.worker_devices[strategy.replica_id]
print("GPU of", strategy.replica_id, name, visible, found.get().tolist(), flush=True)
"""

PLACE = """\
import os
from mpidist.cluster import SlurmClusterResolver, this_process
task, me = SlurmClusterResolver(rpc_layer=None), this_process()
found = [task.master(), task.task_id, me.rank, me.local_rank, me.local_size]
said = [os.environ[f"SLURM{n}"] for n in ("D_NODENAME", "_PROCID", "_LOCALID")]
with open(f"place.{me.rank}", "w") as file:
    print(*found, *said, file=file)
"""


# Frames of MPI_Init. Once in some fifty starts on several "nodes" of one machine Open
# MPI crashes in it, when a message arrives early; before any rank has started.
FAULTS_OF_MPI = ("ompi_mpi_init", "internal_Init_thread")
numbers = itertools.count()


def starts_ranks(test):
    """Mark a test as core, and repeat it once if MPI itself has failed in MPI_Init."""

    @pytest.mark.core
    @functools.wraps(test)
    def run(*args, **kwargs):
        try:
            test(*args, **kwargs)
        except (AssertionError, TimeoutError) as error:
            if not any(fault in str(error) for fault in FAULTS_OF_MPI):
                raise
            test(*args, **kwargs)

    return run


@pytest.fixture(scope="module")
def cluster():
    """Return a cluster with the programs in its folder."""
    if not with_slow:
        pytest.skip("slow: MPIDIST_TEST_SLOW=1, as in CI")
    reason = slurm_cluster.why_not()
    if reason:
        assert not os.environ.get("MPIDIST_TEST_SLURM"), reason
        pytest.skip(reason)
    with slurm_cluster.Cluster(NODES) as cluster:
        programs = {"who": WHO, "train": TRAIN, "on_gpus": ON_GPUS, "place": PLACE}
        for name, text in programs.items():
            (cluster.folder / f"{name}.py").write_text(text, encoding="utf-8")
        yield cluster


def _output_of(cluster, script, *arguments, options=(), state="COMPLETED"):
    """Run a batch script until it is in this state; return what it has written."""
    if isinstance(script, str):
        script = SCRIPTS / f"{script}.sbatch"
    job = cluster.submit(script, *arguments, options=options)
    assert cluster.wait(job)["JobState"] == state, cluster.output(job)
    return cluster.output(job)


# --- every script runs ----------------------------------------------------------------

ON_TWO_NODES = ("--nodes=2", "--ntasks-per-node=2")


@pytest.mark.parametrize("name", ["srun", "mpirun"])
@starts_ranks
def test_a_script_starts_a_replica_for_each_task(cluster, name):
    output = _output_of(cluster, name, "who.py", options=ON_TWO_NODES)
    assert f"replicas {RANKS} sum {RANKS * (RANKS - 1) // 2} threads 1" in output
    # Each line says which rank it is from.
    line = next(line for line in output.splitlines() if "replicas" in line)
    assert "0" in line.split("replicas")[0]


@starts_ranks
def test_the_script_for_gpus_gives_each_rank_one(cluster):
    # A node here has two cores; the script asks for eight of a node.
    output = _output_of(cluster, "gpus", "on_gpus.py", options=["--cpus-per-task=1"])
    for rank in range(4):
        place = f"/rank:{rank}/device:GPU:{rank % 2}"
        assert f"GPU of {rank} {place} 0,1 [4.0, 4.0, 4.0]" in output, output


@starts_ranks
def test_the_commands_of_the_guide(cluster):
    """Of docs/guide/slurm.md, as they stand but for the ranks of a node.

    In the place of their programs is a short one.
    """
    folder = cluster.folder / f"guide-{next(numbers)}"
    (folder / "examples").mkdir(parents=True)
    (folder / "launch").symlink_to(ROOT / "launch")
    for name in ("train.py", "examples/train_digits.py"):
        (folder / name).write_text(WHO, encoding="utf-8")
    page = (ROOT / "docs/guide/slurm.md").read_text(encoding="utf-8")
    lines = re.findall(r"^((?:mpidist sbatch|sbatch|srun) .*)$", page, re.M)
    lines = [re.sub(r"--ntasks-per-node \d+", "--ntasks-per-node 2", x) for x in lines]
    printing, short, plain, wide, srun = lines
    assert printing.startswith("mpidist sbatch ")
    python = f'"{sys.executable}" -m'
    one = "--ntasks-per-node 1"  # what the script says is four
    submissions = [
        f"{python} {printing} && {short}",
        plain.replace("sbatch ", f"sbatch {one} ", 1),
        wide,
    ]
    jobs = {}
    for line, ranks in zip(submissions, (4, 2, 8), strict=True):
        printed = cluster.run("sh", "-c", f"cd {folder} && {line}")
        jobs[printed.split()[-1]] = ranks
    if not hosts.is_open_mpi():
        srun = srun.replace("--mpi=pmix", "--mpi=pmi2")  # as the page says
    printed = cluster.run("sh", "-c", f"cd {folder} && {srun}")
    assert "replicas 4 sum 6" in printed
    for job, ranks in jobs.items():
        state = cluster.wait(job)
        output = (folder / f"mpidist-{job}.out").read_text(encoding="utf-8")
        assert state["JobState"] == "COMPLETED", output
        assert f"replicas {ranks} sum {ranks * (ranks - 1) // 2}" in output, output


@starts_ranks
def test_the_jobs_of_an_array_get_their_indices(cluster):
    options = ["--ntasks-per-node=2", "--output=%A_%a.out"]
    job = cluster.submit(SCRIPTS / "array.sbatch", "who.py", options=options)
    for index in range(4):
        path = cluster.folder / f"{job}_{index}.out"
        cluster.until(lambda: path.exists() and "replicas" in path.read_text())  # noqa: B023
        assert f"replicas 2 sum 1 threads 1 index {index}" in path.read_text()


@starts_ranks
def test_an_exception_ends_the_job_with_a_code(cluster):
    (cluster.folder / "bad.py").write_text(
        "import mpidist\nstrategy = mpidist.MPIStrategy()\n"
        "strategy.run(lambda: [1][strategy.replica_id])\n"
    )
    output = _output_of(cluster, "srun", "bad.py", options=ON_TWO_NODES, state="FAILED")
    assert "IndexError: list index out of range" in output


# --- ranks that do not find each other ------------------------------------------------


@starts_ranks
def test_ranks_that_srun_left_alone_raise(cluster):
    """SLURM's default here, as on many sites, is --mpi=none."""
    python = ("python", "who.py")
    srun = ("srun", "-N2", f"-n{RANKS}", "--mpi=none")
    output = cluster.run(*srun, *python, check=False)
    assert "replicas" not in output
    assert f"srun --mpi=none started {RANKS} processes, but to mpi4py" in output
    assert "write `srun --mpi=pm" in output
    assert cluster.run("srun", "-n1", *python, check=False).count("replicas 1") == 1
    allowed = cluster.run(*srun, *python, env={"MPIDIST_ALONE": "1"})
    assert allowed.count("replicas 1") == RANKS
    command = ("python", "-m", "mpidist")
    shown = cluster.run(*srun, *command, "info", check=False)
    assert "1 on 1 node\n" in shown
    assert shown.count("but to mpi4py") == 1, shown
    checked = cluster.run(*srun, *command, "check", check=False)
    assert checked.count("ranks           FAILED") == 1, checked
    assert checked.count("-> SLURM did not tell MPI of the others; write") == 1


@starts_ranks
def test_a_program_in_the_script_itself_may_be_alone(cluster):
    script = cluster.folder / "alone.sh"
    script.write_text("#!/bin/bash\npython who.py\n")
    output = _output_of(cluster, script, options=["--ntasks-per-node=2"])
    assert "replicas 1 sum 0" in output


# --- where the ranks are --------------------------------------------------------------


@starts_ranks
def test_info_names_the_step(cluster):
    kind = "pmix" if hosts.is_open_mpi() else "pmi2"
    srun = ("srun", "-N2", "-n3", f"--mpi={kind}")
    output = cluster.run(*srun, "python", "-m", "mpidist", "info", "--json")
    facts = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]
    (launcher,) = facts["lines"]["launcher"]
    started = f"srun --mpi={kind} started 3 processes, step 0 of SLURM job "
    assert re.fullmatch(rf"{re.escape(started)}\d+", launcher)
    assert len(facts["ranks"]) == 3
    assert facts["problems"] == []
    if cluster.has_names:  # else the nodes are not told apart, or ranks of one node are
        hosts_of_ranks = [one["machine"]["host"] for one in facts["ranks"]]
        assert sorted(map(hosts_of_ranks.count, set(hosts_of_ranks))) == [1, 2]


@starts_ranks
def test_nodes_of_one_name_are_those_that_share_memory():
    """Open MPI finds the ranks of its host by the name that SLURM has for the node.

    All is one machine here, with a name that SLURM does not know.
    """
    open_mpi = hosts.is_open_mpi()
    nodes, kind = ("1", "pmix") if open_mpi else ("2", "pmi2")
    srun = ("srun", f"-N{nodes}", "-n2", f"--mpi={kind}", "python", "-m", "mpidist")
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)  # the fixture `cluster` says where that is an error
    with slurm_cluster.Cluster(int(nodes), own_names=False) as unnamed:
        shown = unnamed.run(*srun, "info")
        checked = unnamed.run(*srun, "check")
    assert "ranks        2 on 1 node\n" in shown
    assert "shared: all ranks are on one node" in shown
    for text in (shown, checked):
        assert "the ranks that share memory are 2, and MPI takes them for 1 + 1" in text
    name = os.uname().nodename.partition(".")[0]
    why = f"this host is {name}, and its NodeName in slurm.conf is node1: Open MPI"
    if not open_mpi:
        why = "several of SLURM's nodes are one machine: is that meant?"
    assert why in checked


@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_the_resolver_finds_the_tasks_of_a_step(cluster, distribution):
    srun = ("srun", "-N3", "-n6", "-m", distribution, "--mpi=none")
    cluster.run(*srun, "python", "place.py")
    for rank in range(6):
        words = (cluster.folder / f"place.{rank}").read_text().split()
        address, task, number, local_rank, local_size, node, said, local = words
        assert (task, number, said) == (str(rank),) * 3
        assert (local_rank, local_size) == (local, "2")
        assert address == f"{node}:{8888 + int(local)}"


# --- jobs that are told to end --------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Return the result of a training that nobody interrupts."""
    results = []

    @starts_ranks
    def run():
        job = _submit_training(cluster, _folder())
        assert cluster.wait(job)["JobState"] == "COMPLETED", cluster.output(job)
        results.append(_result(cluster, job))

    run()
    return results[-1]


def _folder():
    """Return the name of a new folder for checkpoints."""
    return f"checkpoints-{next(numbers)}"


def _submit_training(cluster, folder, *arguments, script=None, options=("--nodes=2",)):
    return cluster.submit(
        script or SCRIPTS / "preemptible.sbatch",
        *("train.py", folder, *arguments),
        options=[*options, "--ntasks-per-node=1"],
    )


def _result(cluster, job):
    output = cluster.output(job)
    (line,) = [line for line in output.splitlines() if " result " in line]
    return line.split(" result ")[1]


def _steps(cluster, job):
    """Return at which step each start of the job began."""
    lines = cluster.output(job).splitlines()
    return [int(line.split()[-1]) for line in lines if "begins at step" in line]


def _continued(cluster, job):
    """Wait until a job is done that was told to end once; return where it went on."""
    state = cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    assert state["JobState"] == "COMPLETED", cluster.output(job)
    assert state["Restarts"] == "1"
    first, second = _steps(cluster, job)
    assert first == 0
    assert second < STEPS
    return second


@pytest.mark.parametrize("launcher", ["srun", rarely("mpirun")])
@starts_ranks
def test_a_job_whose_time_is_up_continues_where_it_was(cluster, undisturbed, launcher):
    script = cluster.folder / f"preemptible-{launcher}.sbatch"
    by_mpirun = ["--mpirun"] if launcher == "mpirun" else []
    with open(script, "w") as file, contextlib.redirect_stdout(file):
        sbatch_command.sbatch(["--nodes", "2", "--preemptible", *by_mpirun])
    job = _submit_training(cluster, _folder(), "slowly", script=script)
    cluster.wait_for_output(job, "has step 1")
    # What --signal=B:USR1@120 does 120 s before the end.
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_for_output(job, "saved")
    assert _continued(cluster, job) > 0
    assert _result(cluster, job) == undisturbed
    assert not list(cluster.folder.glob(".mpidist-saved-*"))


@starts_ranks
def test_a_signal_that_comes_before_the_handler_is_not_lost(cluster, undisturbed):
    job = _submit_training(cluster, _folder(), "waits")
    cluster.wait_for_output(job, "has no handler yet")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert _continued(cluster, job) == 0
    assert _result(cluster, job) == undisturbed


@starts_ranks
def test_a_cancelled_job_saves_and_does_not_come_back(cluster, undisturbed):
    folder = _folder()
    job = _submit_training(cluster, folder, "slowly")
    cluster.wait_for_output(job, "has step 1")
    cluster.run("scancel", "--full", job)
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    cluster.wait_for_output(job, "saved")
    time.sleep(3.0)  # longer than a job that is requeued waits
    state = cluster.state(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0")
    # What it saved is there: another job goes on from it.
    after = _submit_training(cluster, folder)
    assert cluster.wait(after)["JobState"] == "COMPLETED", cluster.output(after)
    assert _steps(cluster, after)[0] > 0
    assert _result(cluster, after) == undisturbed


@starts_ranks
def test_a_job_that_makes_room_for_another_continues(cluster, undisturbed):
    everything = ["--exclusive", f"--nodes={NODES}"]
    job = _submit_training(cluster, _folder(), "slowly", options=everything)
    cluster.wait_for_output(job, "has step 1")
    urgent = ["--partition=urgent", "--nodes=2", "--ntasks-per-node=1"]
    _output_of(cluster, "srun", "who.py", options=urgent)
    assert _continued(cluster, job) > 0


@starts_ranks
def test_a_job_that_loses_a_node_continues_on_others(cluster, undisturbed):
    """Nothing is saved then: it goes on from the last regular checkpoint."""
    if not cluster.has_names:
        pytest.skip("nodes that can be told apart need root")
    job = _submit_training(cluster, _folder(), "regularly", "slowly")
    cluster.wait_for_output(job, "has step 10")

    def nodes():
        listed = cluster.state(job)["NodeList"]
        return cluster.run("scontrol", "show", "hostnames", listed).split()

    lost = nodes()[-1]
    with cluster.without(lost):
        step = _continued(cluster, job)
        assert lost not in nodes()
    assert step in range(10, STEPS, 10)
    assert "saved" not in cluster.output(job)
    assert _result(cluster, job) == undisturbed
