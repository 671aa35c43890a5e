"""What tests of several replicas share: looking at all of them, without mpidist.

They are the ranks of ``mpirun``, or threads (``@pytest.mark.replicas``).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mpidist
from mpidist import testing
from mpidist._strategy.strategy import group_of

NONE = mpidist.VariableAggregation.NONE
SUM = mpidist.VariableAggregation.SUM
MEAN = mpidist.VariableAggregation.MEAN
FIRST = mpidist.VariableAggregation.ONLY_FIRST_REPLICA
ON_WRITE = mpidist.VariableSynchronization.ON_WRITE
ON_READ = mpidist.VariableSynchronization.ON_READ


def everywhere(x: Any) -> list[Any]:
    """Return the object of each rank, on every rank; not by what is tested."""
    group = threads()
    if group is None:
        from mpi4py import MPI

        return MPI.COMM_WORLD.allgather(x)
    return [pickle.loads(data) for data in group.all_gather(pickle.dumps(x))]


def threads() -> testing.ThreadGroup | None:
    """Return the group of all replicas where they are threads; None under mpirun."""
    try:
        return testing.current_group()
    except RuntimeError:
        return None


def split(color: int, key: int = 0) -> Any:
    """Return the replicas of this color, for ``MPIStrategy(comm=...)``."""
    group = threads()
    if group is None:
        from mpi4py import MPI

        return MPI.COMM_WORLD.Split(color, key)
    return group.split(color, key)


@contextlib.contextmanager
def after_the_others(late: bool) -> Iterator[None]:
    """Begin on the ranks that are late when the same block has ended on all others.

    Instead of a sleep, which is too short where the others come late themselves.
    """
    if late:
        everywhere(None)
    try:
        yield
    finally:
        if not late:
            everywhere(None)


def set_deadline(strategy: mpidist.Strategy, seconds: float) -> None:
    """Give this rank another deadline from now on, and meet the other ranks.

    A strategy that is made with a short one may fail already while it is made.
    """
    guard = group_of(strategy).guard
    guard.timeout_seconds, guard.patience_ms = seconds, int(1000 * seconds)
    everywhere(None)


def raises_everywhere(kind: type[BaseException], call: Callable[[], Any]) -> list[str]:
    """Check that ``call`` raises this very kind on every rank; return the messages."""
    error: BaseException | None = None
    try:
        call()
    except Exception as raised:
        error = raised
    outcomes = everywhere((type(error).__name__, str(error)))
    assert {name for name, _ in outcomes} == {kind.__name__}, outcomes
    return [message for _, message in outcomes]


def own(strategy: mpidist.Strategy, value: Any) -> Any:
    """Return this rank's component of a distributed value."""
    (result,) = strategy.experimental_local_results(value)
    return result


def local(strategy: mpidist.Strategy, fn: Callable[[], Any]) -> Any:
    """Return what ``fn`` returns in this rank's replica."""
    return own(strategy, strategy.run(fn))


def make(strategy: mpidist.Strategy, *args: Any, **kwargs: Any) -> mpidist.Variable:
    with strategy.scope():
        return mpidist.Variable(*args, **kwargs)


def context() -> mpidist.ReplicaContext:
    found = mpidist.get_replica_context()
    assert found is not None
    return found


def merge(strategy: mpidist.Strategy, merge_fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``merge_fn`` in a merge_call of a replica function that does nothing else."""
    return strategy.run(lambda: context().merge_call(merge_fn, args))


def copies_of(strategy: mpidist.Strategy, variable: mpidist.Variable) -> list[Any]:
    """Return the copy of each rank, on every rank, as NumPy arrays."""
    mine = own(strategy, variable)
    mine = mine.get() if hasattr(mine, "get") else mine
    return everywhere(np.array(mine))


def assert_copies(
    strategy: mpidist.Strategy, variable: mpidist.Variable, expected: list[Any]
) -> None:
    found = copies_of(strategy, variable)
    assert len(found) == len(expected)
    for copy, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(copy, want)
        assert copy.dtype == variable.dtype


def assert_mirrored(
    strategy: mpidist.Strategy, variable: mpidist.Variable, expected: Any
) -> None:
    """Check the value on every rank, and that all copies have the same bytes."""
    found = copies_of(strategy, variable)
    assert len({copy.tobytes() for copy in found}) == 1, found
    np.testing.assert_array_equal(found[0], expected)
