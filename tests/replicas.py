"""What tests of several replicas share: looking at all of them, without mpidist.

They are the ranks of ``mpirun``, or threads (``@pytest.mark.replicas``).
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from numpy.typing import ArrayLike, DTypeLike

import mpidist
from mpidist import _native, testing
from mpidist._base import reporting
from mpidist._base.types import HostArray, Nest
from mpidist._strategy.strategy import group_of

# What a test takes away on one rank alone does not count: the others would wait for it.
HAS_CORE = _native.available()
needs_core = pytest.mark.skipif(not HAS_CORE, reason="the native core is not built")

NONE = mpidist.VariableAggregation.NONE
SUM = mpidist.VariableAggregation.SUM
MEAN = mpidist.VariableAggregation.MEAN
FIRST = mpidist.VariableAggregation.ONLY_FIRST_REPLICA
ON_WRITE = mpidist.VariableSynchronization.ON_WRITE
ON_READ = mpidist.VariableSynchronization.ON_READ
SHARED = mpidist.experimental.CommunicationImplementation.SHARED
DIRECT = mpidist.experimental.CommunicationImplementation.DIRECT

_ROW_BYTES = 1024  # what ranks exchange in one step
_TESTS = 20
_PAUSE_SECONDS = 0.0001


ON_TWO = (
    pytest.mark.mpi,
    pytest.mark.one_size,
    pytest.mark.replicas(2),
    pytest.mark.usefixtures("two_replicas"),
)
"""The marks of a test of two ranks or replicas."""


def _all_of(*marks: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def mark_with_all(function: Any) -> Any:
        for mark in marks:
            function = mark(function)
        return function

    return mark_with_all


# Of a test under mpirun; as threads too; and of the core semantics.
core_by_mpi = _all_of(pytest.mark.mpi, pytest.mark.core)
on_ranks = _all_of(pytest.mark.mpi, pytest.mark.replicas(2, 3))
core_on_ranks = _all_of(pytest.mark.core, on_ranks)


def everywhere(x: Any) -> list[Any]:
    """Return the object of each rank, on every rank; not by what is tested."""
    group = threads()
    data = pickle.dumps(x)
    rows = gather_on_ranks(data) if group is None else group.all_gather(data)
    return [pickle.loads(row) for row in rows]


def gather_on_ranks(data: bytes) -> list[bytes]:
    """Return the data of each rank of ``mpirun``, on every rank.

    Where there are more ranks than cores, a rank that waits inside MPI uses the core
    that the awaited one needs, until the scheduler takes it away. So it sleeps.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rows = np.zeros((comm.size, _ROW_BYTES), np.uint8)
    mine = np.zeros(_ROW_BYTES, np.uint8)
    head = len(data).to_bytes(8, "little") + data[: _ROW_BYTES - 8]
    mine[: len(head)] = np.frombuffer(head, np.uint8)
    wait_asleep(comm.Iallgather(mine, rows))
    sizes = [int.from_bytes(row[:8].tobytes(), "little") for row in rows]
    if max(sizes) <= _ROW_BYTES - 8:
        return [
            row[8 : 8 + size].tobytes() for row, size in zip(rows, sizes, strict=True)
        ]
    whole = np.empty(sum(sizes), np.uint8)
    wait_asleep(comm.Iallgatherv(np.frombuffer(data, np.uint8), [whole, sizes]))
    ends = np.cumsum(sizes)
    return [
        whole[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)
    ]


def wait_asleep(request: Any) -> None:
    """Wait for a request of mpi4py, and leave the core to the other ranks."""
    for _ in range(_TESTS):
        if request.Test():
            return
    while not request.Test():
        time.sleep(_PAUSE_SECONDS)


def share_memory(strategy: mpidist.Strategy) -> bool:
    """Return whether the replicas are several, and all on one node."""
    comm = group_of(strategy).communicator
    return comm.size > 1 and comm.num_nodes == 1


def on_every_rank_free_memory() -> list[int]:
    """Return the bytes of memory that are free, as each rank sees it."""
    with open("/proc/meminfo", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("MemAvailable"))
    return everywhere(1024 * int(line.split()[1]))


class Traffic:
    """What a strategy has moved since this was made."""

    def __init__(self, strategy: mpidist.Strategy) -> None:
        self._strategy = strategy
        self._before = strategy.communication_statistics()

    def _since(self, field: str) -> collections.Counter[str]:
        now = getattr(self._strategy.communication_statistics(), field)
        return collections.Counter(now) - collections.Counter(
            getattr(self._before, field)
        )

    @property
    def calls(self) -> collections.Counter[str]:
        return self._since("calls")

    @property
    def bytes(self) -> collections.Counter[str]:
        return self._since("bytes")


def watch_peak() -> Callable[[], int]:
    """Return what tells how many bytes more this process has had since."""

    def bytes_of(name: str) -> int:
        with open("/proc/self/status", encoding="ascii") as file:
            (line,) = (line for line in file if line.startswith(name))
        return 1024 * int(line.split()[1])

    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # VmHWM is VmRSS again
    before = bytes_of("VmRSS")
    return lambda: bytes_of("VmHWM") - before


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


def wait_for_reports() -> None:
    """Wait for what mpidist has logged: on a busy machine it does not wait itself."""
    end = time.monotonic() + 60
    while reporting.is_stuck() and time.monotonic() < end:
        time.sleep(0.001)


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
    group_of(strategy).guard.timeout_seconds = seconds
    everywhere(None)


class SignalError(Exception):
    """What the handler of a signal raises, at any place."""


class Outcome(NamedTuple):
    """What a call raised on one rank; "NoneType" is the name where it returned."""

    name: str
    message: str
    notes: str

    @property
    def text(self) -> str:
        return f"{self.message}\n{self.notes}"


def outcomes(call: Callable[[], Any]) -> list[Outcome]:
    """Return what ``call`` raises on each rank, on every rank; SystemExit, too."""
    error: BaseException | None = None
    try:
        call()
    except BaseException as raised:
        error = raised
    notes = "\n".join(getattr(error, "__notes__", []))
    return everywhere(Outcome(type(error).__name__, str(error), notes))


def raises_everywhere(
    kind: type[BaseException], call: Callable[[], Any], *parts: str
) -> list[str]:
    """Check that ``call`` raises this very kind on every rank; return the messages.

    Each of them has these parts.
    """
    rows = outcomes(call)
    assert {row.name for row in rows} == {kind.__name__}, rows
    for part in parts:
        assert all(part in row.message for row in rows), (part, rows)
    return [row.message for row in rows]


def own(strategy: mpidist.Strategy, value: Any) -> Any:
    """Return this rank's component of a distributed value."""
    (result,) = strategy.experimental_local_results(value)
    return result


def local(strategy: mpidist.Strategy, fn: Callable[[], Nest]) -> Nest:
    """Return what ``fn`` returns in this rank's replica."""
    return own(strategy, strategy.run(fn))


def all_reduce(
    strategy: mpidist.Strategy,
    op: str,
    x: Nest,
    options: mpidist.experimental.CommunicationOptions | None = None,
) -> Nest:
    """Return what this rank gets of an all_reduce in a run of its own."""
    return local(strategy, lambda: context().all_reduce(op, x, options))


def from_replicas(strategy: mpidist.Strategy, function: Callable[[int], Any]) -> Any:
    """Return a PerReplica of what ``function`` gives for the replica's number."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: function(context.replica_id_in_sync_group)
    )


def mirrored_of(strategy: mpidist.Strategy, x: Any) -> Any:
    """Return a Mirrored that holds ``x``."""
    return strategy.extended.reduce_to("MAX", strategy.run(lambda: x), np.zeros(1))


def sample(rank: int, count: int, dtype: DTypeLike) -> HostArray:
    """Return a rank's numbers, of all magnitudes: the order of a sum shows."""
    rng = np.random.default_rng([rank, count])
    x = rng.normal(size=count) * 10.0 ** rng.integers(-3, 4, count)
    return x.astype(dtype)


def fuzz_seeds(default: int) -> range:
    """Return those of $MPIDIST_FUZZ: how many, or "from:to"."""
    text = os.environ.get("MPIDIST_FUZZ", "")
    start, colon, stop = text.partition(":")
    if colon:
        return range(int(start), int(stop))
    return range(int(text or default))


is_long = "MPIDIST_FUZZ" in os.environ
long_only = pytest.mark.skipif(not is_long, reason="only in launch/test --long")
# What takes long, and shows what other cases nearly show.
with_slow = is_long or "MPIDIST_TEST_SLOW" in os.environ
slow = pytest.mark.skipif(not with_slow, reason="slow: MPIDIST_TEST_SLOW=1, as in CI")


def rarely(*values: Any) -> Any:
    """Return a slow case of a test."""
    return pytest.param(*values, marks=slow)


def a_third(cases: Sequence[Any]) -> Sequence[Any]:
    """Return every third case; all of them in `launch/test --long`."""
    return cases if is_long else cases[::3]


def no_room(*sizes: object) -> NoReturn:
    raise OSError("no room here")


def make(strategy: mpidist.Strategy, *args: Any, **kwargs: Any) -> mpidist.Variable:
    with strategy.scope():
        return mpidist.Variable(*args, **kwargs)


def context() -> mpidist.ReplicaContext:
    found = mpidist.get_replica_context()
    assert found is not None
    return found


def this_replica() -> int:
    """Return this rank's number, at every level."""
    return mpidist.get_strategy().replica_id


def merge(strategy: mpidist.Strategy, merge_fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``merge_fn`` in a merge_call of a replica function that does nothing else."""
    return strategy.run(lambda: context().merge_call(merge_fn, args))


def copies_of(
    strategy: mpidist.Strategy, variable: mpidist.Variable
) -> list[HostArray]:
    """Return the copy of each rank, on every rank, as NumPy arrays."""
    mine = own(strategy, variable)
    mine = mine.get() if hasattr(mine, "get") else mine
    return everywhere(np.array(mine))


def assert_copies(
    strategy: mpidist.Strategy,
    variable: mpidist.Variable,
    expected: Sequence[ArrayLike],
) -> None:
    found = copies_of(strategy, variable)
    assert len(found) == len(expected)
    for copy, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(copy, want)
        assert copy.dtype == variable.dtype


def assert_mirrored(
    strategy: mpidist.Strategy, variable: mpidist.Variable, expected: ArrayLike
) -> None:
    """Check the value on every rank, and that all copies have the same bytes.

    Those of the rank's own component, and those that are read.
    """
    found = [*copies_of(strategy, variable), *everywhere(variable.numpy())]
    assert len({copy.tobytes() for copy in found}) == 1, found
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(variable.numpy(), expected)
    for copy in found:
        assert (copy.dtype, copy.shape) == (variable.dtype, variable.shape)


def assert_equal_copies(
    strategy: mpidist.Strategy, variables: list[mpidist.Variable]
) -> None:
    """Check that the copies of all ranks are the same, bit for bit."""
    gathered = strategy.gather(
        strategy.run(
            lambda: np.concatenate(
                [np.ravel(v.numpy()).view(np.uint8) for v in variables]
            )[None]
        ),
        axis=0,
    )
    assert (gathered == gathered[0]).all()


def assert_usable(strategy: mpidist.Strategy) -> None:
    """Check calls of every kind after an error, and that all ranks count the same."""
    assert not mpidist.has_strategy()
    n = strategy.num_replicas_in_sync
    total = merge(strategy, lambda s, x: s.reduce("SUM", x, axis=None), np.ones(3))
    np.testing.assert_array_equal(own(strategy, total), np.full(3, float(n)))
    v = make(strategy, np.zeros(2))
    merge(strategy, lambda s: s.extended.update(v, lambda v: v.assign(np.full(2, n))))
    assert_mirrored(strategy, v, [n, n])
    total = all_reduce(strategy, "SUM", np.ones(3))
    np.testing.assert_array_equal(total, np.full(3, float(n)))
    assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) == n
    group = group_of(strategy)
    assert len({*everywhere(group.guard.sequence)}) == 1
    assert len({*everywhere(group.registry.count)}) == 1
    assert not group.guard.sections


def next_communicator() -> int:
    """Return MPI's number of the next communicator: the same, if none is leaked."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    number: int = comm.py2f()
    comm.Free()
    return number
