"""Fixtures and reports for tests that run on one process and on several ranks.

Under ``mpirun -n N python -m pytest --with-mpi --only-mpi`` every rank runs every test.
Rank 0 reports; a test that fails on any rank fails on all, and rank 0 shows why. A
rank that hangs is ended by pytest-timeout, which ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import one_gpu
import pytest
from launching import RANK_VARIABLES
from replicas import HAS_CORE, everywhere, wait_asleep

import mpidist
from mpidist._base import threads
from mpidist._collectives import node as node_module, nodes as nodes_module
from mpidist._strategy.strategy import group_of
from mpidist.testing import each_replica

pytest_plugins = ["pytest_mpidist"]

LAUNCHED = any(name in os.environ for name in RANK_VARIABLES)
RANK = next((int(os.environ[n]) for n in RANK_VARIABLES if n in os.environ), 0)


# What modules import to start programs.
_STARTERS = (
    "subprocess",
    "launching",
    "run_ranks",
    "run_alone",
    "run_job",
    "sides",
    "hosts",
    "Hosts",
    "slurm_cluster",
    "job_on_hosts",
)


def _under_mpi(config: pytest.Config) -> bool:
    return LAUNCHED and bool(config.getoption("--with-mpi"))


if LAUNCHED:
    # Where pytest makes its folders for `tmp_path`: one for each rank. It prunes those
    # of earlier runs when it ends, and ranks that do so at the same moment fail
    # ("Directory not empty", after the last test).
    _parent = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    _folder = tempfile.mkdtemp(prefix=f"mpidist-tests-rank-{RANK}-", dir=_parent)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = _folder
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell starts what is in the background with Ctrl-C ignored: tests that send
        # it would wait for ever.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if RANK and _under_mpi(config) and reporter is not None:
        # Rank 0 speaks for all; what this one would say is kept for a crash.
        config.stash[_quiet] = io.StringIO()
        reporter._tw._file = config.stash[_quiet]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without tests for this run, which take time to import."""
    if _under_mpi(config):
        needed = r"\bmark\.(mpi|gpu)\b|\b(core_by_mpi|on_ranks|core_on_ranks)\b"
    elif re.search(r"\band jobs\b", config.option.markexpr):
        needed = rf"(?m)^(?:from|import) .*\b(?:{'|'.join(_STARTERS)})\b"
    else:
        return None
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if re.search(needed, text) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deal",
        metavar="K/N",
        help="deal tests into N hands, and run hand K: of each test that also runs as "
        "threads (mark replicas) a third of the cases, one at least, each in one hand; "
        "the cases of each other test, of which every hand gets one at least; tests "
        "that run once only (mark one_size) are in every hand",
    )
    parser.addoption(
        "--fewer-threads",
        action="store_true",
        help="run tests with several numbers of replicas, which are threads, in all "
        "cases on the largest number, in a third, one at least, on each other one; of "
        "cases that differ in `implementation` and `nodes` in one",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what is not for this number of ranks, or this run's hand or threads."""
    if _under_mpi(config):
        from mpi4py import MPI

        if MPI.COMM_WORLD.size != 2:
            one_size = [x for x in items if x.get_closest_marker("one_size")]
            _leave_out(config, items, {x.nodeid for x in one_size})
    if config.getoption("--fewer-threads"):
        _keep_fewer_threads(config, items)
    hand = config.getoption("--deal")
    if not hand:
        return
    number, hands = map(int, hand.split("/"))
    if not 1 <= number <= hands:
        raise pytest.UsageError(f"--deal {hand}: K is a number from 1 to N")
    dealt: dict[str, list[pytest.Item]] = {}
    kept: set[str] = set()
    for item in items:
        if item.get_closest_marker("one_size"):
            kept.add(item.nodeid)
        else:
            dealt.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in dealt.values():
        # By what they are called: by their order one hand might get all of one value.
        cases.sort(key=_number_of)
        if cases[0].get_closest_marker("replicas"):
            mine = [x for x in cases[::3] if _number_of(x) % hands == number - 1]
        else:
            mine = cases[number - 1 :: hands] or cases[:1]
        kept.update(case.nodeid for case in mine)
    _leave_out(config, items, {item.nodeid for item in items} - kept)


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], left_out: set[str]
) -> None:
    config.hook.pytest_deselected(items=[i for i in items if i.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


# Arguments of tests that are nothing to threads, which have one way to move data.
_OF_PROCESSES = ("implementation", "nodes")


def _keep_fewer_threads(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_test: dict[str, dict[int, list[pytest.Item]]] = {}
    seen: set[str] = set()
    left_out: set[str] = set()
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        number = params.get("number_of_replicas")
        if number:
            test = item.nodeid.partition("[")[0]
            kept = [v for k, v in params.items() if k not in _OF_PROCESSES]
            case = f"{test} {kept}" if len(kept) < len(params) else item.nodeid
            if case in seen:
                left_out.add(item.nodeid)
            else:
                seen.add(case)
                by_test.setdefault(test, {}).setdefault(number, []).append(item)
    for sizes in by_test.values():
        for number in sizes.keys() - {max(sizes)}:
            cases = sorted(sizes[number], key=_number_of)
            left_out |= {x.nodeid for x in cases} - {x.nodeid for x in cases[::3]}
    _leave_out(config, items, left_out)


def _number_of(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what the collection of tests has made out of each later `gc.collect`.

    Ranks collect garbage as differently as they can: some at once, the others hardly
    ever. What a rank still has must not decide which collective calls it makes.
    """
    gc.freeze()
    if _under_mpi(session.config):
        gc.set_threshold(1_000_000 if RANK % 2 else 300, 1, 1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of modules that start programs: they take the longest."""
    module = getattr(item, "module", None)
    if any(hasattr(module, name) for name in _STARTERS):
        item.add_marker(pytest.mark.jobs)


_quiet = pytest.StashKey[io.StringIO]()


def pytest_report_header(config: pytest.Config) -> str | None:
    if not _under_mpi(config):
        return None
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].split(",")[0]
    return f"mpi: {MPI.COMM_WORLD.size} ranks, {library}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Make a test that fails on one rank fail on all, with that rank's report.

    Ranks exchange after set-up, since all have to be in a call or none, and after the
    call. What fails afterwards on one rank fails the next test on all.
    """
    report = yield
    if not _is_shared(item.config) or item.get_closest_marker("mpi") is None:
        return report
    text = f"{report.longreprtext}\n" if report.failed else ""
    if report.when == "teardown":
        if text:
            _untold.append(f"--- after {item.nodeid}\n{text}")
        return report
    text += "".join(_untold)
    _untold.clear()
    failures = _failures(item.nodeid, text)
    if failures:
        report.outcome = "failed"
        report.longrepr = failures
    return report


def _end_as_failed() -> None:
    """Keep the code of a failed run whose rank leaves without MPI_Finalize.

    mpidist does not see it, since pytest raises SystemExit instead of calling sys.exit.
    """
    if _status and _had_broken:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


atexit.register(_end_as_failed)  # runs after what is registered later: mpidist's wait


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail on all ranks if something failed on one after its last test."""
    global _status
    _status = int(exitstatus)
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if _is_shared(session.config) and exitstatus in ended:
        failures = _failures("", "".join(_untold))
        if failures:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            if not RANK:
                print(failures, file=sys.stderr, flush=True)


def _is_shared(config: pytest.Config) -> bool:
    """Return whether other ranks run the same tests."""
    if not _under_mpi(config):
        return False
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.size > 1)


_report_comm: Any = None  # of mpi4py
_shared: list[mpidist.MPIStrategy] = []  # what `strategy` returns, in this process
_is_broken = False  # on some rank, after the last test; the same on all ranks
_had_broken = False  # whether it ever was
_status = 0  # of pytest, at its end
_untold: list[str] = []  # what failed on this rank, and the others do not know yet


def _failures(nodeid: str, text: str) -> str:
    """Return what failed on which ranks, on all; "" if nothing did. Collective.

    Args:
        nodeid: the test; it has to be the same on all ranks.
        text: what failed on this rank, or "".
    """
    global _report_comm, _is_broken, _had_broken
    from mpi4py import MPI

    if _report_comm is None:
        _report_comm = MPI.COMM_WORLD.Dup()
    # One message if all is well: with more ranks than cores each takes its time.
    test = zlib.crc32(nodeid.encode())
    broken = any(group_of(one).guard.broken for one in _shared)
    largest = np.array([bool(text), test, -test, broken])
    wait_asleep(_report_comm.Iallreduce(MPI.IN_PLACE, largest, MPI.MAX))
    failed, most, least, _is_broken = largest
    _had_broken = _had_broken or _is_broken
    if not failed and most == -least:
        return ""
    outcomes = _report_comm.allgather((nodeid, text))
    if most != -least:
        print(f"ranks run different tests: {outcomes}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(70)
    texts = [(rank, text) for rank, (_, text) in enumerate(outcomes) if text]
    ranks = ", ".join(str(rank) for rank, _ in texts)
    parts = [f"failed on rank(s) {ranks} of {len(outcomes)}"]
    parts += [f"--- [rank {rank}] ---\n{text}" for rank, text in texts[:2]]
    return "\n".join(parts)


@each_replica
@pytest.fixture
def strategy() -> mpidist.MPIStrategy:
    """A strategy over all ranks, which tests share and leave usable.

    If one of them breaks it (a rank gave up waiting), the next one gets a new one: it
    has failed, and not those after it.
    """
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=60)
    if threads.current() is not None:
        return mpidist.MPIStrategy(communication_options=options)
    if _is_broken:
        _shared.clear()
    if not _shared:
        _shared.append(mpidist.MPIStrategy(communication_options=options))
    return _shared[0]


@each_replica
@pytest.fixture
def new_strategy() -> Iterator[Callable[..., mpidist.MPIStrategy]]:
    """Make strategies that are closed after the test."""
    made: list[mpidist.MPIStrategy] = []

    def make(**options: Any) -> mpidist.MPIStrategy:
        arguments = {k: options.pop(k) for k in ("comm", "device") if k in options}
        options.setdefault("timeout_seconds", 60)
        asked = str(options.get("implementation", "")).rpartition(".")[2].upper()
        if asked == "SHARED" and not HAS_CORE:
            pytest.skip("needs the native core")
        made.append(
            mpidist.MPIStrategy(
                communication_options=mpidist.experimental.CommunicationOptions(
                    **options
                ),
                **arguments,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def on_gpus() -> Iterator[one_gpu.StrategiesOnGpus]:
    """Strategies on a real GPU, for tests marked gpu."""
    strategies = one_gpu.StrategiesOnGpus()
    yield strategies
    strategies.close()


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that returns a file, which one of all workers of this run makes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def built(name: str, make: Callable[[Path], object]) -> Path:
        path, part = folder / name, folder / f"{name}.part"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(part)
                part.rename(path)
        return path

    return built


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Any]]:
    """A function that makes `hosts.Hosts` of its arguments, which end with the test."""
    import hosts

    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    if " " in sys.prefix:
        # Its remote shell gets the path of Open MPI without quotes.
        pytest.skip("mpirun starts no other host from a path with a blank in it")
    with contextlib.ExitStack() as made:

        def make(count: int, **options: Any) -> hosts.Hosts:
            return made.enter_context(contextlib.closing(hosts.Hosts(count, **options)))

        yield make


@pytest.fixture
def rank(strategy: mpidist.MPIStrategy) -> int:
    return strategy.replica_id


@pytest.fixture
def one_node(strategy: mpidist.MPIStrategy) -> None:
    """For tests of what ranks do with memory that all of them share."""
    if group_of(strategy).communicator.num_nodes > 1:
        pytest.skip("these ranks are on several hosts")


@pytest.fixture(params=[2, 3, 4])
def nodes(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    strategy: mpidist.MPIStrategy,
) -> list[list[int]]:
    """The nodes that the ranks play: for each a list of its ranks.

    Several machines are several nodes as they are.
    """
    everyone = everywhere(group_of(strategy).communicator.node_ranks)
    machines = sorted(list(x) for x in {*map(tuple, everyone)})
    count = request.param - (len(machines) > 1)  # that each machine plays
    if not 0 < count <= max(map(len, machines)):
        pytest.skip("more nodes than ranks, or fewer than hosts")
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", str(count))
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)
    found = []
    for ranks in machines:
        of_rank = [k * count // len(ranks) for k in range(len(ranks))]
        found += [
            [rank for rank, node in zip(ranks, of_rank, strict=True) if node == k]
            for k in dict.fromkeys(of_rank)
        ]
    return found


@pytest.fixture
def by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nodes of few ranks sum large arrays in their memory, too."""
    monkeypatch.setattr(nodes_module, "LEAST_RANKS", 1)


@pytest.fixture
def on_nodes(
    nodes: list[list[int]],
    new_strategy: Callable[..., mpidist.MPIStrategy],
    monkeypatch: pytest.MonkeyPatch,
    by_nodes: None,
) -> Callable[..., mpidist.MPIStrategy]:
    """Make strategies that reduce by nodes, whatever the sizes, in small pieces."""
    monkeypatch.setattr(nodes_module, "LEAST_BYTES", 1)
    shared = mpidist.experimental.CommunicationImplementation.SHARED
    monkeypatch.setattr(node_module, "_AREA_BETWEEN_NODES", 256 * 1024)
    return lambda **options: new_strategy(implementation=shared, **options)


@pytest.fixture
def two_replicas(size: int) -> None:
    if size != 2:
        pytest.skip("for two replicas")


@pytest.fixture
def size(strategy: mpidist.MPIStrategy) -> int:
    return strategy.num_replicas_in_sync


@pytest.fixture
def last(size: int) -> int:
    """The rank that does something else than the others."""
    return size - 1


@pytest.fixture
def same_folder(rank: int, tmp_path: Path) -> Path:
    """A folder of rank 0's, on all ranks."""
    folder: Path = everywhere(tmp_path)[0]
    if not all(everywhere(folder.is_dir())):
        pytest.skip("the hosts of these ranks share no temporary folder")
    return folder


@pytest.fixture
def folder(strategy: Any, tmp_path_factory: pytest.TempPathFactory, rank: int) -> Any:
    """Return the path of a folder, the same on all ranks."""
    return everywhere(tmp_path_factory.mktemp("shared") if rank == 0 else None)[0]


@pytest.fixture
def torch() -> Any:
    """Return torch, with one thread for each rank."""
    module = pytest.importorskip("torch")
    module.set_num_threads(1)
    return module


@pytest.fixture
def jax() -> Any:
    """Return JAX."""
    return pytest.importorskip("jax")


@pytest.fixture
def mt(torch: Any) -> Any:
    """Return mpidist.torch."""
    import mpidist.torch

    return mpidist.torch


@pytest.fixture
def mj(jax: Any) -> Any:
    """Return mpidist.jax."""
    import mpidist.jax

    return mpidist.jax
