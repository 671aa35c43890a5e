"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest
from replicas import split


@pytest.fixture
def alone(new_strategy, rank):
    """Return a strategy of this rank only."""
    return new_strategy(comm=split(rank))
