"""A job for test_hosts: all-reduces on several hosts, with a fault in the middle.

    job_on_hosts.py FOLDER right
    job_on_hosts.py FOLDER steps SECONDS
    job_on_hosts.py FOLDER done
    job_on_hosts.py FOLDER loop ELEMENTS TIMEOUT [stop RANK | cut]

Each rank writes what it saw to a file of FOLDER: ``error.RANK`` what was raised, and
after how many seconds; ``code.RANK`` the exit code of its process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpidist._strategy.strategy import group_of

CALLS = 8
WIRE_BYTES = 16 * 2**20  # of an array whose bytes between hosts are counted
CODE = 3


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    if what == "right":
        right()
    elif what == "steps":
        steps(folder, float(sys.argv[3]))
    elif what == "done":
        done(folder)
    elif "inner" in sys.argv:
        loop(folder, *sys.argv[3:])
    else:
        # A process of its own, whose exit code somebody sees who does not depend on it.
        # MPICH's launcher speaks to its ranks by an open file.
        command = [sys.executable, *sys.argv, "inner"]
        code = subprocess.call(command, close_fds=False)
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
        write(folder / f"code.{rank}", str(code))


def write(path: Path, text: str) -> None:
    """Write a file that the test waits for: it sees all of it, or nothing."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    unfinished.rename(path)


def right() -> None:
    import mpidist

    strategy = mpidist.MPIStrategy()
    comm: Any = group_of(strategy).communicator
    size, rank = comm.size, comm.rank

    def reduce(x: Any) -> Any:
        context = mpidist.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", x)

    kinds = ("float32", "float64", "int8", "uint16", "complex64")
    cases = [(kind, n) for kind in kinds for n in (1, 3, 500, 20_000, 300_000)]
    for dtype, count in [*cases, ("float32", 3_000_001)]:
        parts = [(np.arange(count) % 11 + k + 50).astype(dtype) for k in range(size)]
        for _ in range(2):
            given = strategy.run(reduce, args=(parts[rank],))
            (found,) = strategy.experimental_local_results(given)
            want = parts[0].copy()
            for part in parts[1:]:
                want = want + part
            np.testing.assert_array_equal(found, want)
            assert found.dtype == want.dtype
    moved = sent()
    meet = np.zeros(1)
    strategy.run(reduce, args=(meet,))
    before = sent()
    for x in (meet, np.ones(WIRE_BYTES // 4, np.float32), meet):
        strategy.run(reduce, args=(x,))
    wire = sent() - before
    host = os.uname().nodename
    facts = [rank, size, comm.node_ranks, host, moved, mpidist.__file__, wire]
    print(json.dumps(facts), flush=True)


def sent() -> int:
    """Return how many bytes this host has sent."""
    return int(Path("/proc/net/dev").read_text().split("eth0:")[1].split()[8])


def steps(folder: Path, seconds: float) -> None:
    """Add arrays of many sizes for some seconds, and check each sum."""
    import mpidist

    strategy = mpidist.MPIStrategy()
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    start = time.monotonic()

    def step(number: int) -> bool:
        context = mpidist.get_replica_context()
        assert context is not None
        for count in (1, 300, 20_000, 100_000):
            base = np.arange(count, dtype=np.float32) % 11 + number % 7
            found = context.all_reduce("SUM", base + rank)
            want = base * size + size * (size - 1) / 2
            np.testing.assert_array_equal(found, want)
        late = time.monotonic() - start > seconds
        return bool(context.all_reduce("MAX", int(late)))

    number, ended = 0, False
    while not ended:
        (ended,) = strategy.experimental_local_results(
            strategy.run(step, args=(number,))
        )
        number += 1
        write(folder / f"in.{rank}", str(number))
    print(json.dumps([rank, number]), flush=True)


def done(folder: Path) -> None:
    """Work until a file is there; then rank 0 writes that all is done."""
    import mpidist

    strategy = mpidist.MPIStrategy()

    def step() -> Any:
        context = mpidist.get_replica_context()
        assert context is not None
        return context.all_reduce("MIN", float((folder / "end").exists()))

    ended = False
    while not ended:
        strategy.run(step)
        write(folder / f"in.{strategy.replica_id}", str(os.getpid()))
        (least,) = strategy.experimental_local_results(strategy.run(step))
        ended = bool(least)
    strategy.run(lambda: None)  # all ranks are here
    if strategy.replica_id == 0:
        write(folder / "done", "")


def loop(folder: Path, elements: str, timeout: str, fault: str, *more: str) -> None:
    import mpidist
    from mpidist._mpi.buffers import BufferCollectives

    options = mpidist.experimental.CommunicationOptions(timeout_seconds=float(timeout))
    strategy = mpidist.MPIStrategy(communication_options=options)
    rank = strategy.replica_id
    # Two arrays: the data of one are moved by the core, where nothing can interfere.
    x = [np.ones(int(elements), np.float32), np.ones(2**18, np.float32)]

    def reduce() -> Any:
        context = mpidist.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", x)

    for _ in range(CALLS):
        strategy.run(reduce)
    start_collectives = BufferCollectives.start

    def interfere(*args: Any) -> Any:
        """In the middle of the data of a call: all ranks are in it."""
        BufferCollectives.start = start_collectives  # type: ignore[method-assign]
        write(folder / f"in.{rank}", str(os.getpid()))
        if fault == "cut":
            while not (folder / "cut").exists():
                time.sleep(0.01)
        elif rank == int(more[0]):
            os.kill(os.getpid(), signal.SIGSTOP)
        return start_collectives(*args)

    BufferCollectives.start = interfere  # type: ignore[method-assign, assignment]
    start = time.monotonic()
    try:
        strategy.run(reduce)
        assert BufferCollectives.start is start_collectives, "moved by the core"
        while True:
            strategy.run(reduce)
    except mpidist.CollectiveTimeoutError as error:
        seconds = time.monotonic() - start
        write(folder / f"error.{rank}", json.dumps([seconds, str(error)]))
        sys.exit(CODE)


if __name__ == "__main__":
    main()
