"""Ranks of another host that are killed, and a whole host.

The hosts are namespaces of this machine (`hosts`), and take root.
"""

from __future__ import annotations

import json
import time

import pytest

from tests import launching
from tests.elastic.random_kills import PROGRAM, rows_of

SECONDS = 150.0
# Of Open MPI's daemons, so that they miss each other within seconds.
KEEPALIVE = {
    "PRTE_MCA_oob_tcp_keepalive_time": "2",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "1",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not launching.outlives_ranks(), reason="this MPI ends a job when a rank dies"
    ),
]


def start(machines, settings, **options):
    argv = [PROGRAM, json.dumps(settings)]
    return machines.job(2, argv, env=KEEPALIVE, options=launching.ULFM, **options)


def test_a_job_goes_on_without_the_ranks_of_another_host(make_hosts):
    with start(make_hosts(2), {"kill_in_vote": {"3": 6, "2": 12}}) as job:
        assert job.wait(SECONDS) == 0, job.output()
        rows = rows_of(job.output())
    assert sorted(row["killed"] for row in rows if "killed" in row) == [2, 3]
    rest = [row for row in rows if "right" in row]
    assert sorted(row["rank"] for row in rest) == [0, 1], rows
    assert all(row["right"] and row["size"] == 2 for row in rest), rows


def test_a_lost_host_ends_the_job_which_goes_on_from_its_checkpoint(make_hosts):
    """With it the launcher loses its daemon, and ends the job: its code may be 0."""
    hosts = make_hosts(2)
    folder = hosts.folder / "run"
    settings = {"directory": str(folder), "epochs": 20, "pause": 0.05}
    with start(hosts, settings) as job:
        end = time.monotonic() + SECONDS
        while not [*folder.glob("ckpt-*")]:
            assert time.monotonic() < end, job.output()
            time.sleep(0.02)
        hosts.power_off("node2")
        job.wait(SECONDS)
        assert not rows_of(job.output()), job.output()
    settings |= {"epochs": 2, "pause": 0.0}
    with start(hosts, settings, hosts=["node1"]) as job:
        assert job.wait(SECONDS) == 0, job.output()
        rows = rows_of(job.output())
    assert [row["right"] for row in rows] == [True, True], rows
    assert all(row["steps"] < 18 for row in rows), rows
