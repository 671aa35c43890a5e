"""Several hosts: sums over TCP, and what happens when one of them is gone.

The hosts are virtual (`hosts`): namespaces of this machine, which needs root. In these
jobs every wait has a deadline, so a hang is a failure, not a hang of the test.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import hosts as virtual
import on_hosts
import pytest
from job_on_hosts import WIRE_BYTES
from replicas import rarely, slow

JOB = Path(__file__).parents[1] / "job_on_hosts.py"
TIMEOUT = 6.0  # of the strategies, in seconds
LATER = 20.0  # what may be added to it on a machine with much to do
STALL = {"MPIDIST_STALL_SECONDS": "2"}
# Arguments of JOB: a loop until hosts are cut off.
ENDLESS = ("loop", "300000", str(TIMEOUT), "cut", "inner")

# Of a job that has lost a host: docs/guide/launching.md.
FAST_END = {
    "MPIDIST_TIMEOUT_ABORT": "1",
    "MPIDIST_TIMEOUT": "6",
    "PRTE_MCA_oob_tcp_keepalive_time": "2",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "1",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}


def cut_off(hosts, name, ranks, job):
    """Cut a host off when all ranks are in their loop, and tell them."""
    await_files(hosts.folder, "in.*", ranks, 120, job)
    hosts.cut(name)
    (hosts.folder / "cut").touch()


pytestmark = pytest.mark.timeout(400)


def report_of(hosts: virtual.Hosts, command: str, *arguments: Any) -> Any:
    """Return what `mpidist COMMAND --json` says on two ranks of each host."""
    argv = ["-m", "mpidist", command, "--json", *arguments]
    with hosts.job(2, argv) as job:
        assert job.wait(100) == 0, job.output()
        return json.JSONDecoder().raw_decode(job.output())[0]


def sums(hosts: virtual.Hosts, per_host: int | list[int]) -> list[Any]:
    """Check sums on hosts; return what each rank says of itself, in their order."""
    # Of Intel MPI, which a small /dev/shm ends by SIGBUS: docs/mpi.md.
    env = {"I_MPI_FABRICS": "ofi"}
    with hosts.job(per_host, [JOB, hosts.folder, "right"], env=env) as job:
        assert job.wait(100) == 0, job.output()
        lines = re.findall(r"^\[.*\]$", job.output(), re.M)
    return sorted(json.loads(line) for line in lines)


def await_files(folder: Path, pattern: str, count: int, seconds: float, job: Any):
    end = time.monotonic() + seconds
    while len(found := sorted(folder.glob(pattern))) < count:
        assert time.monotonic() < end, f"{pattern}: {found}\n{job.output()}"
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(("count", "per_host"), [(2, 2), rarely(3, 1)])
def test_sums_on_several_hosts(make_hosts, count, per_host):
    hosts = make_hosts(count)
    seen = sums(hosts, per_host)
    size = count * per_host
    assert [(rank, total) for rank, total, *_ in seen] == [
        (rank, size) for rank in range(size)
    ]
    for rank, _, node_ranks, host, moved, _, wire in seen:
        first = rank // per_host * per_host
        assert node_ranks == list(range(first, first + per_host))
        assert host == f"node{rank // per_host + 1}"
        assert moved > 10_000_000  # by the network, not by shared memory
        if (count, per_host) == (2, 2):
            # Each byte leaves a host once: half of its array from each of two ranks.
            assert 1 <= wire / WIRE_BYTES < 1.1


# Of the tests of several ranks those that depend most on where the ranks are; all of
# them: launch/test-hosts.
PART = (
    "tests/_collectives/test_nodes.py::test_sums_are_those_of_the_nodes",
    "tests/_collectives/test_nodes.py::test_nests_that_share_the_memory_of_data_in_progress",
    "tests/_collectives/test_compression.py::test_only_sums_of_floats_are_compressed",
    "tests/_collectives/test_routes.py::test_what_fails_on_one_rank_takes_all_ranks_to_mpi",
    "tests/_collectives/test_buffers_like.py::test_results_are_those_of_ordinary_arrays",
    "tests/_mpi/test_collective_release.py",
    "tests/_checkpoints/test_checkpoint.py",
)


@slow
@pytest.mark.core
def test_a_part_of_the_suite_on_two_hosts(make_hosts):
    hosts = make_hosts(2)
    counts = [2, 2] if virtual.is_open_mpi() else [3, 1]
    arguments = ["-q", "-m", "mpi and core and not one_size", *PART]
    with on_hosts.pytest_on(hosts, counts, arguments) as job:
        assert job.wait(280) == 0, job.output()
    for rank in range(4):
        report = (hosts.folder / f"report.{rank}.xml").read_text()
        numbers = re.search(r'failures="0" skipped="(\d+)" tests="(\d+)"', report)
        assert numbers, report[:1000]
        assert int(numbers[2]) - int(numbers[1]) > 30


@slow
def test_sums_on_hosts_that_differ(make_hosts):
    """One with little memory to share, nothing to write in $HOME, and other paths."""
    odd = ["node2"]
    options = {"shm": {"node2": "8m"}, "read_only_home": odd, "elsewhere": odd}
    seen = sums(make_hosts(2, **options), [1, 2])
    assert [(rank, node_ranks) for rank, _, node_ranks, *_ in seen] == [
        (0, [0]),
        (1, [1, 2]),
        (2, [1, 2]),
    ]
    paths = [path for *_, path, _ in seen]
    assert paths[1:] == ["/tmp/elsewhere/tree/mpidist/__init__.py"] * 2
    assert paths[0] != paths[1]


@slow
@pytest.mark.parametrize(
    "link",
    [
        {"mbits": 1000, "delay_ms": 20},
        {"mbits": 1000, "delay_ms": 1, "lost": 0.01},
        "cut for 5 s",
    ],
    ids=["20 ms", "1 % lost", "cut for 5 s"],
)
def test_sums_are_right_on_bad_links(make_hosts, link):
    hosts = make_hosts(2)
    seconds = 5 if link == "cut for 5 s" else 3
    if isinstance(link, dict):
        hosts.shape(**link)
    with hosts.job(2, [JOB, hosts.folder, "steps", str(seconds)]) as job:
        if link == "cut for 5 s":
            await_files(hosts.folder, "in.*", 4, 120, job)
            hosts.cut("node2")
            time.sleep(5)  # it is what the test is about
            hosts.heal("node2")
        assert job.wait(200) == 0, job.output()
        ends = [json.loads(x) for x in re.findall(r"^\[.*\]$", job.output(), re.M)]
    assert sorted(rank for rank, _ in ends) == [0, 1, 2, 3]
    assert len({steps for _, steps in ends}) == 1


def check_given_up(
    folder: Path, missing: dict[int, str], job: Any, start: float
) -> None:
    """Check that ranks raise in time, name who is missing, and end with their code."""
    await_files(folder, "error.*", len(missing), TIMEOUT + LATER, job)
    await_files(folder, "code.*", len(missing), 2 * LATER, job)
    assert time.monotonic() - start < TIMEOUT + 3 * LATER
    for rank, names in missing.items():
        seconds, text = json.loads((folder / f"error.{rank}").read_text())
        assert seconds < TIMEOUT + LATER
        assert text.startswith(f"[rank {rank}] {names} made no progress in call "), text
        assert (folder / f"code.{rank}").read_text() == "3"


@pytest.mark.parametrize(
    ("elements", "per_host"),
    [rarely(600_000, 2), pytest.param(300_000, 1, marks=pytest.mark.core)],
)
def test_a_black_hole_between_hosts_ends_the_call_everywhere(
    make_hosts, elements, per_host
):
    hosts = make_hosts(2)
    size = 2 * per_host
    arguments = ["loop", str(elements), str(TIMEOUT), "cut"]
    with hosts.job(per_host, [JOB, hosts.folder, *arguments], env=STALL) as job:
        cut_off(hosts, "node2", size, job)
        ranks = ["rank 1", "rank 0"]
        if per_host == 2:
            ranks = ["ranks 2-3"] * 2 + ["ranks 0-1"] * 2
        check_given_up(hosts.folder, dict(enumerate(ranks)), job, time.monotonic())


def test_a_stopped_rank_on_another_host_is_reported(make_hosts):
    hosts = make_hosts(2)
    arguments = ["loop", "600000", str(TIMEOUT), "stop", "3"]
    with hosts.job(2, [JOB, hosts.folder, *arguments], env=STALL) as job:
        await_files(hosts.folder, "in.3", 1, 120, job)
        missing = dict.fromkeys(range(3), "rank 3")
        check_given_up(hosts.folder, missing, job, time.monotonic())
        assert "mpidist: rank 3 made no progress in call" in job.output()


@slow
def test_what_info_and_check_find_on_hosts(make_hosts):
    hosts = make_hosts(2, shm={"node2": "8m"})
    facts = report_of(hosts, "info")
    first, second = facts["lines"]["nodes"]
    assert first.startswith("0: node1: ranks 0-1, ")
    assert second.startswith("1: node2: ranks 2-3, ")
    assert [one["machine"]["host"] for one in facts["ranks"]] == [
        *("node1", "node1", "node2", "node2")
    ]
    interfaces, *settings = facts["lines"]["network"]
    assert interfaces == "eth0"
    assert all("OMPI_MCA_btl_tcp_flags=1, " in text for text in settings)
    assert len(settings) == virtual.is_open_mpi()
    (way,) = facts["lines"]["host arrays"]
    assert "No space left" in way, way  # so all go by MPI
    report = report_of(hosts, "check", "--folder", hosts.folder)
    rows = {row["name"]: row for row in report["checks"]}
    assert rows["shared memory"]["state"] == "note"
    assert re.match(
        r"ranks 2-3: /dev/shm has \d MiB free of 8: too", rows["shared memory"]["text"]
    )
    assert rows["placement"]["text"] == "2 nodes, 2 on each"
    assert "rename is atomic" in rows["folder"]["text"]
    assert rows["all_reduce"]["state"] == "ok"


@pytest.mark.core
def test_hosts_of_one_name_are_told_apart(make_hosts):
    if virtual.is_open_mpi():
        pytest.skip("mpirun of Open MPI starts no ranks on hosts of one name")
    hosts = make_hosts(2, one_name=True)
    facts = report_of(hosts, "info")
    first, second = facts["lines"]["nodes"]
    assert first.startswith("0: node: ranks 0-1, ")
    assert second.startswith("1: node: ranks 2-3, ")
    (way,) = facts["lines"]["host arrays"]
    ways = "only compressed sums; the rest by MPI_Iallreduce and others"
    assert way == f"shared: 2 nodes of few ranks: {ways} (`mpidist docs mpi`)"
    rows = {row["name"]: row for row in report_of(hosts, "check")["checks"]}
    assert rows["placement"]["text"] == "2 nodes, 2 on each"


def test_a_job_whose_host_dies_is_not_done(make_hosts):
    """The exit code does not say it: Open MPI's mpirun returns 0."""
    hosts = make_hosts(2)
    with hosts.job(1, [JOB, hosts.folder, "done"], env=FAST_END) as job:
        await_files(hosts.folder, "in.*", 2, 120, job)
        hosts.power_off("node2")
        job.wait(120)
    assert not (hosts.folder / "done").exists()
    for path in hosts.folder.glob("in.*"):
        path.unlink()
    (hosts.folder / "end").touch()
    with hosts.job(2, [JOB, hosts.folder, "done"], hosts=["node1"]) as job:
        assert job.wait(100) == 0, job.output()
    assert (hosts.folder / "done").exists()


@pytest.mark.core
def test_a_rank_that_is_killed_on_another_host_is_named(make_hosts):
    """Open MPI ends ranks when connections close: later than mpirun finds out why."""
    hosts = make_hosts(2)
    with hosts.job(2, [JOB, hosts.folder, "done"]) as job:
        await_files(hosts.folder, "in.*", 4, 120, job)
        hosts.kill("node2", int((hosts.folder / "in.3").read_text()), signal.SIGKILL)
        code, said = job.wait(60), job.output()
    if virtual.is_open_mpi():
        assert re.search(r"rank 3 with PID \d+ on node node2 exited", said), said
        assert code == 128 + signal.SIGKILL
    else:
        # In one of 20 jobs a rank of the other host crashes in MPI_Test when it sends
        # (mpi4py alone does, too), and hydra may hear of it first: docs/mpi.md.
        assert re.search(r"RUNNING AT node[12]\n", said), said
        assert code != 0


@slow
@pytest.mark.core
def test_mpidist_run_ends_a_job_that_has_lost_a_host(make_hosts):
    """mpirun alone may wait for the host for minutes, and ignore SIGTERM."""
    hosts = make_hosts(1)
    with hosts.job(1, [JOB, hosts.folder, *ENDLESS], supervised=True) as job:
        cut_off(hosts, "node1", 2, job)
        code, said = job.wait(200), job.output()
    assert "mpirun goes on: perhaps there is a host that it cannot reach" in said, said
    assert code == 128 + signal.SIGKILL


@pytest.mark.core
def test_a_black_hole_ends_the_job_if_that_is_asked_for(make_hosts):
    """Ranks abort at their deadline, and mpirun notices that a host is gone."""
    if virtual.is_intel_mpi():
        pytest.skip("its mpirun waits for the host: 170 s and more")
    hosts = make_hosts(2)
    with hosts.job(1, [JOB, hosts.folder, *ENDLESS], env=FAST_END) as job:
        cut_off(hosts, "node2", 2, job)
        job.wait(120)  # Open MPI's mpirun alone: 489 s
        by_rank = "ending the job:" in job.output()
        by_mpirun = "PRTE has lost communication" in job.output()
        assert by_rank or (by_mpirun and virtual.is_open_mpi()), job.output()
        if by_rank:
            assert "rank 1 made no progress in call" in job.output()
