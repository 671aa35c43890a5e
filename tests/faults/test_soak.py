"""Some jobs of the soak; ``launch/soak`` runs any number, for any time."""

from __future__ import annotations

from collections import Counter

import pytest
from faults.soak import run_job
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
