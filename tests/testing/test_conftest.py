"""The fixtures of this test suite itself."""

import shutil

from launching import ROOT, run_ranks

TESTS = """
import signal
import pytest
from mpi4py import MPI
import mpidist

pytestmark = pytest.mark.mpi


class Told(Exception):
    pass


def total():
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)


def tell(number, frame):
    raise Told


def alone(strategy):
    signal.signal(signal.SIGALRM, tell)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    strategy.run(total)


def test_that_breaks_the_strategy(strategy, rank):
    strategy.run(total)
    if rank == 0:
        with pytest.raises(Told):
            alone(strategy)
        with pytest.raises(mpidist.CollectiveTimeoutError):
            strategy.run(total)
    MPI.COMM_WORLD.Barrier()
    assert not rank


def test_after_it(strategy, size):
    (found,) = strategy.experimental_local_results(strategy.run(total))
    assert found == size == 2


def test_the_same(strategy, new_strategy):
    assert strategy.run(total) is not None
"""


def test_a_broken_strategy_is_replaced(tmp_path):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "no:cacheprovider", "--with-mpi", "-q", "--color=no", "--rootdir"]
    result = run_ranks(
        2,
        ["-m", "pytest", *options, tmp_path, tmp_path / "test_x.py"],
        timeout=100,
        env={"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
    )
    assert "1 failed, 2 passed" in result.stdout, result.stdout + result.stderr
    assert "failed on rank(s) 1 of 2" in result.stdout
    assert result.returncode != 0
