"""Sixty-four processes on four nodes: what they cost, and what users read of them."""

import json
from pathlib import Path

import pytest
from launching import run_ranks
from replicas import long_only

SIZE = 64


@long_only
@pytest.mark.jobs
@pytest.mark.timeout(600)
def test_a_job_of_many_processes(tmp_path):
    result = run_ranks(
        SIZE,
        [Path(__file__).with_name("many_processes_job.py"), tmp_path / "told"],
        timeout=500,
        env={"MPIDIST_SIMULATED_NODES": "4", "MPIDIST_STALL_SECONDS": "8"},
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["size"] == SIZE
    assert found["files"] <= 4  # none for each rank
    lines = found["mismatch"].splitlines()
    assert lines[1].startswith("  ranks 0-9: all_reduce SUM float64 (2,)")
    assert lines[2].startswith("  ranks 10-63: all_reduce SUM float64 (3,)")
    assert len(lines) == 4
    reports = result.stderr.split("REPORT\n")[1:]
    assert any(" did not reach call " in text for text in reports), result.stderr
    assert max(len(text.splitlines()) for text in reports) <= 20, result.stderr
