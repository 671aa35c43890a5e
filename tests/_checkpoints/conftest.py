"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest
from replicas import everywhere, split


@pytest.fixture
def folder(strategy, tmp_path_factory, rank):
    """Return the path of a folder, the same on all ranks."""
    return everywhere(tmp_path_factory.mktemp("checkpoints") if rank == 0 else None)[0]


@pytest.fixture
def alone(new_strategy, rank):
    """Return a strategy of this rank only."""
    return new_strategy(comm=split(rank))
