"""How GPU buffers go: page-locked memory, NCCL, and the choice between the ways.

All of it on host memory that poses as a GPU (tests/posing.py). That no copy and no wait
is missing: tests/_collectives/test_gpu_waits.py.
"""

import functools
import itertools
import threading
import warnings

import numpy as np
import posing
import pytest
from replicas import (
    all_reduce,
    context,
    core_by_mpi,
    local,
    raises_everywhere,
)

import mpidist
from mpidist._base.gpus import Device
from mpidist._collectives import (
    nccl as _nccl,
    resources,
    staged as staged_module,
    transport_choice,
)
from mpidist._collectives.transport_choice import Finding, decide
from mpidist._mpi.buffers import BufferReduction
from mpidist._strategy.strategy import group_of

mpi = pytest.mark.mpi
core = pytest.mark.core
PIECE = 64 * 1024


@pytest.fixture(autouse=True)
def auto(monkeypatch):
    """Whatever launch/test has the suite go by, these tests choose for themselves."""
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)
    monkeypatch.setattr(transport_choice, "_told", set())  # warnings of other tests


@pytest.fixture
def cupy(monkeypatch):
    return posing.install(monkeypatch)


def counting(start, count, dtype="float32"):
    return (np.arange(count) % 8192 + start).astype(dtype)


def on_gpu(cupy, host):
    """Return an array that a kernel has yet to fill, and has filled with others."""
    x = cupy.asarray(np.full_like(host, 77))
    posing.launch(lambda: np.copyto(x.memory, host))
    return x


class Reader:
    """A kernel after the call, on the stream of the call."""

    def __init__(self, x):
        posing.launch(lambda: setattr(self, "seen", x.memory.copy()))

    def get(self):
        posing.Stream.current.synchronize()
        return self.seen


def check(pairs):
    """Compare when all is sent: a rank that raised in between would stop the others."""
    for found, want in pairs:
        np.testing.assert_array_equal(found, want)


@core_by_mpi
def test_a_direct_broadcast_waits_for_the_stream(cupy, new_strategy, rank, size):
    strategy = new_strategy(device="gpu", implementation="DIRECT")
    x = on_gpu(cupy, counting(rank, 1000))
    direct = group_of(strategy).collectives.resources.transports.device
    direct.broadcast(x, size - 1)
    check([(x.memory, counting(size - 1, 1000))])


@mpi
def test_no_pinned_memory_is_told_to_all(cupy, monkeypatch, rank, size):
    def refuse(*args):
        raise MemoryError("no page-locked memory left")

    if rank == size - 1:
        monkeypatch.setattr(staged_module.gpus, "pinned_empty", refuse)
    raises_everywhere(MemoryError, lambda: mpidist.MPIStrategy(device="gpu"))


@mpi
@pytest.mark.parametrize("refused", [False, True])
def test_pinned_memory_grows_once(monkeypatch, new_strategy, rank, size, refused):
    """If there is no more of it on a rank, its arrays pass through other memory."""
    cupy = posing.install(monkeypatch, order="late", seed=rank)
    monkeypatch.setattr(staged_module, "_FIRST_BYTES", PIECE)
    asked, pinned_empty = [], staged_module.gpus.pinned_empty

    def ask(nbytes):
        asked.append(nbytes)
        if refused and rank == size - 1 and len(asked) > 1:
            raise MemoryError("no page-locked memory left")
        return pinned_empty(nbytes)

    monkeypatch.setattr(staged_module.gpus, "pinned_empty", ask)
    strategy = new_strategy(device="gpu", implementation="STAGED")
    for nbytes in (PIECE // 2, 4 * PIECE, 8 * PIECE, PIECE):
        x = on_gpu(cupy, counting(rank, nbytes // 4))
        y = local(strategy, lambda x=x: context().all_reduce("SUM", [x, x[:3]]))
        total = sum(counting(r, nbytes // 4) for r in range(size))
        check([(y[0].get(), total), (y[1].get(), total[:3])])
    if size > 1:
        assert asked == [PIECE, 256 * 2**20]


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


def said_by(make):
    """Return what is made, and the warnings that a user is shown of it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = make()
    # What other tests have left open is told when it is collected, perhaps now.
    seen = [one for one in seen if not issubclass(one.category, ResourceWarning)]
    for one in seen:
        assert one.category is RuntimeWarning
        # Where the program makes the strategy: here, by the fixture.
        assert one.filename.endswith(("conftest.py", "test_gpu_transports.py"))
    return made, [str(one.message) for one in seen]


# --- NCCL -----------------------------------------------------------------------------


@pytest.fixture
def nccl(monkeypatch):
    return posing.Nccl()


@pytest.fixture
def own_gpus(monkeypatch, nccl, size):
    """Each rank has a GPU of its own, and NCCL loads."""
    return posing.install(monkeypatch, num_devices=size, nccl=nccl)


@core_by_mpi
def test_nccl_moves_what_it_has_types_for(own_gpus, nccl, new_strategy, rank, size):
    strategy = new_strategy(implementation="NCCL")
    transports = group_of(strategy).collectives.resources.transports
    assert transports.device.name == "nccl"
    xp = strategy.array_module

    def sum_of(values, op="SUM"):
        nccl.calls.clear()
        x = xp.asarray(values)
        result = all_reduce(strategy, op, x)
        return result.get(), nccl.calls.copy()

    pairs = []
    base = np.arange(1000) % 5 + rank
    for dtype in ("int32", "uint64", "float32", "float64", "complex64", "float16"):
        found, calls = sum_of(base.astype(dtype))
        assert calls == ["allReduce"], dtype
        want = sum((np.arange(1000) % 5 + r) for r in range(size)).astype(dtype)
        pairs.append((found, want))
    for op in ("MIN", "MAX"):
        found, calls = sum_of(base.astype("float32"), op)
        assert calls == ["allReduce"]
        other = (size - 1) * (op == "MAX")
        pairs.append((found, (np.arange(1000) % 5 + other).astype("float32")))
    found, calls = sum_of(np.full(10, 1 + rank, "int16"))
    assert calls == ["allReduce"]  # as int32
    pairs.append((found, np.full(10, size * (size + 1) // 2, "int16")))
    found, calls = sum_of(np.full(10, 1 + rank, "complex128"), "PROD")
    assert calls == [], "NCCL has no such type: staged"
    want = np.prod([1 + r for r in range(size)])
    pairs.append((found, np.full(10, want, "complex128")))
    found, calls = sum_of(np.zeros(0))
    assert calls == []
    check([*pairs, (found, np.zeros(0))])


@core_by_mpi
def test_nccl_copies(own_gpus, nccl, new_strategy, rank, size):
    strategy = new_strategy(implementation="NCCL")
    xp = strategy.array_module
    same = local(strategy, lambda: context().all_gather(xp.full(3, rank), 0))
    unequal = local(
        strategy, lambda: context().all_gather(xp.full((rank, 2), float(rank)), 0)
    )
    value = strategy.run(lambda: xp.full(4, rank + 1.0))
    one = strategy.extended.reduce_to("SUM", value, "/rank:0/device:GPU:0")
    total = strategy.extended.broadcast_to(xp.full(2, 7.0), value)
    found = [same, unequal, total]
    expected = [
        np.repeat(np.arange(size), 3),
        np.repeat(np.arange(size), np.arange(size))[:, None] * np.ones(2),
        np.full(2, 7.0),
    ]
    if rank == 0:
        found.append(one)
        expected.append(np.full(4, size * (size + 1) / 2))
    names = set(nccl.calls)
    check([(x.get(), y) for x, y in zip(found, expected, strict=True)])
    assert {"allGather", "reduce", "broadcast"} <= names
    assert nccl.open == 1
    strategy.close()
    assert nccl.open == 0


@core_by_mpi
def test_nccl_is_queued_on_the_current_stream(own_gpus, new_strategy, rank, size):
    strategy = new_strategy(implementation="NCCL")
    transport = group_of(strategy).collectives.resources.transports.device
    pairs = []
    for stream in (posing.Stream.null, posing.Stream(non_blocking=True)):
        with stream:
            x = on_gpu(own_gpus, counting(rank, 100))
            before = posing.ndarray.synchronized
            transport.allreduce([BufferReduction(None, x, "MAX")])
            assert posing.ndarray.synchronized == before
            pairs.append((Reader(x).get(), counting(size - 1, 100)))
    check(pairs)


@mpi(min_size=2)
@core
def test_an_error_of_nccl_is_told_to_all(own_gpus, nccl, new_strategy, rank, size):
    strategy = new_strategy(implementation="NCCL")
    if rank == size - 1:
        nccl.error = RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")

    def fail():
        context().all_reduce("SUM", strategy.array_module.ones(3))

    try:
        for message in raises_everywhere(RuntimeError, lambda: strategy.run(fail)):
            assert f"an earlier call failed on rank {size - 1}" in message
            assert "unhandled system error" in message
    finally:
        nccl.error = None


@mpi(min_size=2)
@core
@pytest.mark.parametrize("asked", ["AUTO", "NCCL"])
def test_nccl_does_not_connect(
    own_gpus, nccl, new_strategy, monkeypatch, rank, size, asked
):
    """It fails on one rank, and the others wait for that one in NCCL."""
    monkeypatch.setattr(_nccl, "_LONGEST_CONNECT", 0.5)
    if rank == size - 1:
        nccl.refuses = OSError("no socket")
    else:
        nccl.waits = threading.Event()
    reasons = (
        f"NCCL did not connect the ranks (rank {size - 1}: OSError: no socket; ",
        "rank 0: it did not find all ranks within 0.5 s",
    )
    make = functools.partial(new_strategy, implementation=asked)
    if asked == "NCCL":
        texts = raises_everywhere(ValueError, make)
    else:
        strategy, texts = said_by(make)
        transports = group_of(strategy).collectives.resources.transports
        assert transports.device.name == "staged"
        assert len(texts) == (rank == 0)
        texts = [*texts, transports.reason]
    if nccl.waits is not None:
        nccl.waits.set()
    for text, reason in itertools.product(texts, reasons):
        assert reason in text
    assert nccl.open == 0


@mpi(min_size=2)
@core
def test_auto_without_nccl_is_a_warning_on_rank_0(
    monkeypatch, new_strategy, rank, size
):
    posing.install(monkeypatch, num_devices=size, nccl=posing.Nccl(available=False))
    strategy, texts = said_by(new_strategy)
    assert len(texts) == (rank == 0)
    why = "NCCL does not load on rank 0 (CuPy does not find libnccl; `pip install"
    for text in (*texts, group_of(strategy).collectives.resources.transports.reason):
        assert why in text
    assert said_by(new_strategy)[1] == []  # once
    for text in texts:
        assert "GPU arrays go staged" in text
        assert "MPIDIST_IMPLEMENTATION=staged" in text
    # Who has asked for that way is told nothing, and neither is who has another one.
    transport_choice._told.clear()
    assert said_by(lambda: new_strategy(implementation="STAGED"))[1] == []
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    assert said_by(new_strategy)[1] == []


@mpi(min_size=2)
@core
def test_that_warning_as_an_error_is_raised_on_all_ranks(monkeypatch, rank, size):
    """As -W error makes it, on rank 0 as on the others; they are not left waiting."""
    posing.install(monkeypatch, num_devices=size, nccl=posing.Nccl(available=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 0 else "ignore")
        for text in raises_everywhere(RuntimeWarning, mpidist.MPIStrategy):
            assert "NCCL does not load on rank 0" in text


@core_by_mpi
@pytest.mark.parametrize("id_type", [bytes, tuple])
def test_the_id_of_nccl_is_passed_on_as_it_is(
    monkeypatch, new_strategy, id_type, rank, size
):
    """CuPy 14 makes bytes and takes only those; before that it was integers."""
    nccl = posing.Nccl(id_type=id_type)
    xp = posing.install(monkeypatch, num_devices=size, nccl=nccl)
    strategy = new_strategy(implementation="NCCL" if size == 1 else "AUTO")
    assert group_of(strategy).collectives.resources.transports.device.name == "nccl"
    x = xp.full(5, rank + 1.0)
    total = all_reduce(strategy, "SUM", x)
    check([(total.get(), np.full(5, size * (size + 1) / 2))])


@mpi(min_size=2)
@core
def test_rank_0_has_no_id(own_gpus, nccl, monkeypatch, rank):
    def refuse():
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: no interface")

    if rank == 0:
        monkeypatch.setattr(nccl, "get_unique_id", refuse)
    make = functools.partial(new_nccl_strategy, "NCCL")
    for text in raises_everywhere(ValueError, make):
        assert "(rank 0 could not begin: RuntimeError: NCCL_ERROR_SYSTEM" in text


def new_nccl_strategy(implementation):
    options = mpidist.experimental.CommunicationOptions(implementation=implementation)
    return mpidist.MPIStrategy(communication_options=options)


@mpi
def test_the_id_passes_through_the_real_nccl(strategy, rank, size):
    """CuPy and NCCL as they are: without a GPU they come as far as the driver."""
    cupy = pytest.importorskip("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if count:
        pytest.skip("launch/gpu-check has NCCL connect where there are GPUs")
    try:
        _nccl.gpus.nccl_module()
    except ImportError as error:
        pytest.skip(str(error))
    comm = group_of(strategy).communicator
    made, problem = _nccl.connect(comm, Device("cpu"), 30)
    assert made is None
    assert "NcclError: NCCL_ERROR_UNHANDLED_CUDA_ERROR" in problem
    assert "TypeError" not in problem


@mpi(min_size=2)
def test_nccl_for_one_call(own_gpus, nccl, new_strategy, strategy, size):
    """A call may leave NCCL out; to ask for it takes a strategy that has it."""
    x = own_gpus.asarray(np.ones(3))
    automatic = new_strategy()
    assert group_of(automatic).collectives.resources.transports.reason.startswith(
        "nccl: each rank has"
    )
    options = mpidist.experimental.CommunicationOptions(implementation="STAGED")
    nccl.calls.clear()
    staged = all_reduce(automatic, "SUM", x, options)
    assert nccl.calls == []
    np.testing.assert_array_equal(staged.get(), np.full(3, size))
    options = mpidist.experimental.CommunicationOptions(implementation="NCCL")
    direct = new_strategy(implementation="DIRECT")
    for message in raises_everywhere(
        ValueError,
        lambda: direct.run(lambda: context().all_reduce("SUM", x, options)),
    ):
        assert "were not connected by it when the strategy was made" in message


# --- the choice -----------------------------------------------------------------------


def findings(*changes, **common):
    ranks = [{"gpu": f"host-{r} 00"} | change for r, change in enumerate(changes)]
    base = {"wanted": "AUTO", "kind": "gpu"} | common
    return [Finding(**(base | rank)) for rank in ranks]


def nodes_of(found):
    """Return the number of nodes, if each host of the GPUs is one."""
    return len({x.gpu.partition(" ")[0] for x in found})


SAYS = {"queried": "MPIX_Query_cuda_support"}
NO_NCCL = {"no_nccl": "CuPy does not find libnccl"}
ONE_GPU = {"gpu": "host-0 00"}
NEAR = {"gpu": "host-0 01"}
HOST = {"kind": "cpu", "gpu": ""}


@pytest.mark.parametrize(
    ("found", "way", "nccl", "reason"),
    [
        (findings({}, {}), "staged", True, "does not say that it is CUDA-aware"),
        (findings({}, {}, **SAYS), "direct", True, "(MPIX_Query_cuda_support)"),
        (findings({}, SAYS), "staged", True, "does not say that it is CUDA-aware"),
        (findings({}, {}, **NO_NCCL), "staged", "rank 0", "does not say"),
        (findings({}, NO_NCCL), "staged", "rank 1", "does not say"),
        (findings({}, ONE_GPU), "staged", False, "are on one node"),
        (findings(ONE_GPU, ONE_GPU, **SAYS), "staged", False, "are on one node"),
        (findings(ONE_GPU, ONE_GPU, **NO_NCCL), "staged", False, "are on one node"),
        (findings({}, NEAR, **SAYS), "staged", True, "are on one node"),
        (findings({}), "staged", False, "are on one node"),
        (findings({}, **NO_NCCL), "staged", False, "are on one node"),
        (findings({}, wanted="NCCL"), "staged", True, "are on one node"),
        (findings({}, {}, cuda_aware=True), "direct", True, "MPIDIST_CUDA_AWARE=1"),
        (findings({}, {}, cuda_aware=False, **SAYS), "staged", True, "_AWARE=0"),
        (findings({"cuda_aware": True}, {}), "staged", True, "not the same on all"),
        (findings({}, {}, wanted="STAGED", **SAYS), "direct", False, "says it is"),
        (findings({}, {}, wanted="STAGED", **NO_NCCL), "staged", False, "not say"),
        (findings({}, HOST), "staged", False, "some ranks have no GPU"),
        (findings({}, HOST, **SAYS), "staged", False, "some ranks have no GPU"),
        (findings({}, HOST, **NO_NCCL), "staged", False, "some ranks have no GPU"),
        (findings(HOST, HOST), "staged", False, "are on one node"),
        (findings(HOST, HOST, wanted="NCCL"), "staged", False, "are on one node"),
    ],
)
def test_the_choice(found, way, nccl, reason):
    """NCCL is tried or not, or missed on a rank where it would be used."""
    decision = decide(found, nodes_of(found))
    assert (decision.transport, decision.try_nccl) == (way, nccl is True)
    assert reason in decision.reason
    assert decision.mixed == (len({f.kind for f in found}) > 1)
    missing = f"NCCL does not load on {nccl} (CuPy does not find libnccl)"
    assert decision.missing == (missing if isinstance(nccl, str) else "")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (findings({}, HOST, wanted="NCCL"), "rank 1 has its arrays on the host"),
        (findings({}, NO_NCCL, wanted="NCCL"), r"load on rank 1 \(CuPy does not find"),
        (findings({}, ONE_GPU, wanted="NCCL"), "ranks 0 and 1 share a GPU"),
        (findings(HOST, {}, wanted="NCCL"), "TensorFlow would use AUTO"),
        (
            findings({}, {"wanted": "STAGED"}),
            "MPIDIST_IMPLEMENTATION must be the same.*auto on rank 0 and staged on",
        ),
    ],
)
def test_choices_that_can_not_be(found, message):
    with pytest.raises(ValueError, match=message):
        decide(found, nodes_of(found))


@core_by_mpi
@pytest.mark.parametrize(
    ("asked", "variables", "says", "way", "reason"),
    [
        ("AUTO", {}, "", "staged", "staged: all ranks are on one node"),
        ("RING", {}, "", "staged", "staged: all ranks are on one node"),
        ("AUTO", {}, "a query", "staged", "staged: all ranks are on one node"),
        ("AUTO", {"CUDA_AWARE": "0"}, "a query", "staged", "MPIDIST_CUDA_AWARE=0"),
        ("AUTO", {"CUDA_AWARE": "1"}, "", "direct", "MPIDIST_CUDA_AWARE=1"),
        ("STAGED", {"CUDA_AWARE": "1"}, "", "staged", "asked for in the options"),
        ("DIRECT", {"CUDA_AWARE": "0"}, "", "direct", "asked for in the options"),
        ("AUTO", {"IMPLEMENTATION": "direct"}, "", "direct", "asked for"),
        ("STAGED", {"IMPLEMENTATION": "direct"}, "", "staged", "asked for"),
    ],
)
def test_what_a_strategy_takes(
    monkeypatch, new_strategy, asked, variables, says, way, reason
):
    posing.install(monkeypatch)
    monkeypatch.setattr(resources, "query_cuda_support", lambda: says)
    for name, value in variables.items():
        monkeypatch.setenv(f"MPIDIST_{name}", value)
    strategy = new_strategy(device="gpu", implementation=asked)
    transports = group_of(strategy).collectives.resources.transports
    assert transports.device.name == way
    assert reason in transports.reason
    x = strategy.array_module.ones(3)
    total = all_reduce(strategy, "SUM", x)
    np.testing.assert_array_equal(
        total.get(), np.full(3, strategy.num_replicas_in_sync)
    )


@mpi(min_size=2)
@core
def test_a_variable_that_differs_is_an_error_on_all_ranks(monkeypatch, rank):
    monkeypatch.setenv("MPIDIST_IMPLEMENTATION", "staged" if rank else "direct")
    for message in raises_everywhere(ValueError, mpidist.MPIStrategy):
        assert "direct on rank 0 and staged on rank 1" in message
