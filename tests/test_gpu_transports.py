"""How GPU buffers go: order of the copies, NCCL, and the choice between the ways.

All of it on host memory that poses as a GPU, whose streams do their work as late as they
may, or as early (tests/posing.py): a copy that nothing waits for gives wrong data.
"""

import dataclasses

import numpy as np
import posing
import pytest
from replicas import context, local, raises_everywhere

import mpidist
from mpidist._options import CommunicationImplementation as Kind
from mpidist._transports import StagedTransport, _devices
from mpidist._transports import _staged as staged_module
from mpidist._transports._devices import Finding, decide

mpi = pytest.mark.mpi
core = pytest.mark.core
PIECE = 64 * 1024


@pytest.fixture(params=["late", "early"])
def cupy(request, monkeypatch):
    monkeypatch.setattr(posing.Stream, "early", request.param == "early")
    monkeypatch.setattr(staged_module, "SMALLEST_PIECE_BYTES", 4096)
    monkeypatch.setenv("MPIDIST_STAGING_MB", str(PIECE / 2**20))
    return posing.install(monkeypatch)


@pytest.fixture(params=["direct", "shared"])
def staged(request, cupy, new_strategy, monkeypatch, size):
    """Give the staged transport of a strategy, over each of those on the host."""
    if request.param == "shared":
        monkeypatch.setenv("MPIDIST_IMPLEMENTATION", "shared")
    strategy = new_strategy(device="gpu")
    transport = strategy._collectives.transports.device
    assert isinstance(transport, StagedTransport)
    assert transport._host.name == ("direct" if size == 1 else request.param)
    return transport


def counting(start, count, dtype="float32"):
    return (np.arange(count) % 8192 + start).astype(dtype)


def on_gpu(cupy, host):
    """Return an array that a kernel has yet to fill, and has filled with others."""
    x = cupy.asarray(np.full_like(host, 77))
    posing.launch(lambda: np.copyto(x._memory, host))
    return x


class Reader:
    """A kernel after the call, on the stream of the call."""

    def __init__(self, x):
        posing.launch(lambda: setattr(self, "seen", x._memory.copy()))

    def get(self):
        posing.Stream.current.synchronize()
        return self.seen


# A single piece; four; as many as it takes; no multiple of anything.
COUNTS = [0, 1, 1000, 16 * 1024, 40_001, 5 * PIECE // 4 + 3]


@mpi
@core
def test_pieces_go_in_the_order_of_the_streams(cupy, staged, rank, size):
    """What kernels write before is sent; what they write to is overwritten after."""
    total = size * (size - 1) / 2
    for count in COUNTS:
        for repeat in range(3):  # slots are used again while copies are under way
            start = rank + 10 * repeat
            send = on_gpu(cupy, counting(start, count))
            receive = cupy.empty(count, np.float32)
            posing.launch(lambda x=receive: x._memory.fill(-1))
            staged.allreduce(send, receive, "SUM")
            sums = Reader(receive)
            posing.launch(lambda x=send: x._memory.fill(-2))  # after it was read
            staged.allreduce_in_place(receive, "MAX")
            again = Reader(receive)
            want = counting(0, count) * size + total + 10 * repeat * size
            np.testing.assert_array_equal(again.get(), want)
            np.testing.assert_array_equal(sums.get(), want)


@mpi
@core
def test_copies_of_one_rank(cupy, staged, rank, size):
    for root in range(size):
        for count in COUNTS:
            x = on_gpu(cupy, counting(rank, count))
            staged.broadcast(x, root)
            seen = Reader(x)
            np.testing.assert_array_equal(seen.get(), counting(root, count))
            x = on_gpu(cupy, counting(rank, count, "int64"))
            staged.reduce(x, "SUM", root)
            seen = Reader(x)
            want = counting(rank, count, "int64")
            if rank == root:
                want = sum(counting(r, count, "int64") for r in range(size))
            np.testing.assert_array_equal(seen.get(), want)
    posing.Stream.current.synchronize()


@mpi
@core
def test_a_broadcast_does_not_overtake_a_kernel(cupy, staged, rank, size):
    """Ranks that only receive wait for the kernels that still use the memory."""
    for count in (1000, 40_001):
        x = cupy.empty(count, np.float32)
        host = counting(5, count)
        posing.launch(lambda x=x: x._memory.fill(-1))
        if rank == 0:
            posing.launch(lambda x=x, host=host: np.copyto(x._memory, host))
        staged.broadcast(x, 0)
        np.testing.assert_array_equal(Reader(x).get(), host)


@mpi
@core
def test_all_gathers_of_unequal_parts(cupy, staged, rank, size):
    for sizes in ([0] * 4, [3, 0, 70_001, 5], [50_000] * 4, [1, 2, 3, 100_000]):
        counts = sizes[:size]
        parts = [counting(r, n, "uint8") for r, n in enumerate(counts)]
        send = on_gpu(cupy, parts[rank])
        receive = cupy.empty(sum(counts), np.uint8)
        posing.launch(lambda x=receive: x._memory.fill(255))
        staged.all_gather(send, receive, counts)
        np.testing.assert_array_equal(Reader(receive).get(), np.concatenate(parts))


@mpi
@core
def test_a_call_on_another_stream_waits_for_the_buffers(cupy, new_strategy, size, rank):
    """Leaves are packed into a buffer that is kept, whichever stream is current."""
    strategy = new_strategy(device="gpu", implementation="STAGED")
    streams = [posing.Stream(non_blocking=True) for _ in range(2)]
    readers = []
    for k in range(6):
        with streams[k % 2]:
            nest = [on_gpu(cupy, counting(k, n)) for n in (10, 30_000)]
            total = local(strategy, lambda nest=nest: context().all_reduce("SUM", nest))
            readers.append((k, streams[k % 2], [Reader(x) for x in total]))
    for k, stream, seen in readers:
        stream.synchronize()
        for one, n in zip(seen, (10, 30_000), strict=True):
            np.testing.assert_array_equal(one.seen, counting(k, n) * size)


@mpi
def test_copies_overlap_mpi(cupy, staged, size, monkeypatch):
    """When MPI has piece k, the copies of k + 1 are queued, and the host waits for k."""
    if size == 1:
        return
    events = []
    for name in ("start_copy_to_host", "start_copy_to_device"):
        known = getattr(staged_module._arrays, name)

        def copy(*args, known=known, name=name):
            events.append(name[11:])
            return known(*args)

        monkeypatch.setattr(staged_module._arrays, name, copy)
    reduce = staged._host.allreduce_in_place
    monkeypatch.setattr(
        staged._host,
        "allreduce_in_place",
        lambda *args: (events.append("mpi"), reduce(*args)),
    )
    x = cupy.zeros(4 * PIECE // 4, np.float32)
    before = posing.ndarray.synchronized
    staged.allreduce_in_place(x, "SUM")
    assert posing.ndarray.synchronized == before  # no stream, only events
    assert events == [
        *("to_host", "to_host", "mpi", "to_device"),
        *("to_host", "mpi", "to_device"),
        *("to_host", "mpi", "to_device"),
        *("mpi", "to_device"),
    ]


@mpi
@core
def test_direct_waits_for_the_stream(cupy, new_strategy, rank, size):
    strategy = new_strategy(device="gpu", implementation="DIRECT")
    direct = strategy._collectives.transports.device
    x = on_gpu(cupy, counting(rank, 1000))
    y = cupy.empty(1000, np.float32)
    posing.launch(lambda: y._memory.fill(-1))
    direct.allreduce(x, y, "MAX")
    np.testing.assert_array_equal(y._memory, counting(size - 1, 1000))
    for call in (
        lambda x: direct.allreduce_in_place(x, "MAX"),
        lambda x: direct.broadcast(x, size - 1),
    ):
        x = on_gpu(cupy, counting(rank, 1000))
        call(x)
        np.testing.assert_array_equal(x._memory, counting(size - 1, 1000))
    x = on_gpu(cupy, counting(rank, 1000))
    direct.reduce(x, "MAX", 0)
    if rank == 0:
        np.testing.assert_array_equal(x._memory, counting(size - 1, 1000))
    part = on_gpu(cupy, counting(rank, 10, "uint8"))
    whole = cupy.empty(10 * size, np.uint8)
    direct.all_gather(part, whole, [10] * size)
    want = np.concatenate([counting(r, 10, "uint8") for r in range(size)])
    np.testing.assert_array_equal(whole._memory, want)
    monkey = strategy._collectives.comm
    monkey.chunk_elements = 7  # broadcasts in place of one large call
    part = on_gpu(cupy, counting(rank + 1, 10, "uint8"))
    whole = cupy.empty(10 * size, np.uint8)
    direct.all_gather(part, whole, [10] * size)
    want = np.concatenate([counting(r + 1, 10, "uint8") for r in range(size)])
    np.testing.assert_array_equal(whole.get(), want)


@mpi
def test_no_pinned_memory_is_told_to_all(cupy, monkeypatch, rank, size):
    def refuse(*args):
        raise MemoryError("no page-locked memory left")

    if rank == size - 1:
        monkeypatch.setattr("sys.modules", {**__import__("sys").modules})
        monkeypatch.setattr(staged_module._arrays, "pinned_empty", refuse)
    raises_everywhere(MemoryError, lambda: mpidist.MPIStrategy(device="gpu"))


@mpi(min_size=2)
def test_arrays_in_different_places(cupy, new_strategy, rank):
    """GPU buffers go in pieces and host buffers do not: that is no collective."""
    strategy = new_strategy(device="gpu")
    x = np.ones(100_000, np.float32)
    mine = x if rank else cupy.asarray(x)
    for call in (
        lambda: context().all_reduce("SUM", mine),
        lambda: context().all_gather(mine, 0),
    ):
        raises_everywhere(
            mpidist.CollectiveMismatchError, lambda call=call: strategy.run(call)
        )
