"""The two calls that make a distributed dataset, of the strategy of this test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mpidist


@pytest.fixture
def distribute(strategy: mpidist.Strategy) -> Callable[..., Any]:
    return strategy.experimental_distribute_dataset


@pytest.fixture
def from_function(strategy: mpidist.Strategy) -> Callable[..., Any]:
    return strategy.distribute_datasets_from_function
