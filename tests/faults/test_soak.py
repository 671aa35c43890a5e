"""Some jobs of the soak; ``launch/soak`` runs any number, for any time."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path

import pytest
from faults.soak import run_job
from launching import FILES, NAME_FILES, left_over, run_python
from replicas import slow

# By SIGKILL, by an exception, by sys.exit; by two routes. Seeds that have passed
# once do not find much again.
SEEDS = (4, 5, 9)
ROUNDS = 20


@slow
@pytest.mark.core
@pytest.mark.timeout(300)
def test_jobs_of_random_calls_and_faults(tmp_path):
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += run_job(seed, 3, ROUNDS, tmp_path)
    assert counts["rounds"] == len(SEEDS) * ROUNDS
    assert counts["job killed"] == counts["job raises"] == counts["job exits"] == 1
    assert counts["goes on from a checkpoint"] >= 1
    assert counts["signal"] >= 1


@pytest.mark.core
def test_a_file_that_another_job_leaves_is_not_that_of_this_one():
    name = uuid.uuid4().hex
    program = NAME_FILES + "node.make_file(4096, 4096)"  # as a rank that is killed
    run_python("-c", program, env={FILES: f"{name}-1-"})
    (left,) = left_over(f"{name}-1-", 0)
    try:
        assert left_over(f"{name}-2-", 0) == set()
    finally:
        (Path("/dev/shm") / left).unlink()
