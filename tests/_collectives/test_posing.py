"""The stand-in for CuPy has what the real package has, where the library uses it.

The real one is known by records (tests/cupy_records): CI has no room for CuPy. Where it
is installed the records are compared with it.
"""

import inspect
import json
import pathlib
import subprocess
import sys

import cupy_names
import numpy as np
import posing
import pytest
import record_cupy

from mpidist._collectives import nccl as _nccl

VERSIONS = [posing.NEWEST, posing.OLDER]
# What only NumPy's arrays have, and is asked only of those.
OF_THE_HOST = {
    "ctypes": "memory of a pool",
    "to_device": "a stage of a data set",
}
# What the stand-in does without.
NOT_POSED = {"cupy.from_dlpack": "takes memory of a GPU from another library"}


@pytest.fixture
def stand_in(monkeypatch):
    """Return the thing of the stand-in that has a path in CuPy."""
    modules = {"cupy": posing.install(monkeypatch, nccl=posing.Nccl())}
    modules |= {name: sys.modules[name] for name in ("cupyx", "cupy.cuda.nccl")}
    classes = {
        "cupy.ndarray": posing.ndarray(np.zeros((3, 4), np.float32)),
        "cupy.ndarray.flags": posing.ndarray(np.zeros(3)).flags,
        "cupy.cuda.Event": posing.Event(),
        "cupy.cuda.Stream": posing.Stream.null,
        "cupy.cuda.Device": posing._Device(0),
        "cupy.cuda.MemoryPointer": posing._MemoryPointer(0),
        "cupy.cuda.nccl.NcclCommunicator": posing.NcclCommunicator,
    }

    def find(path):
        if path in modules:
            return modules[path]
        owner, _, name = path.rpartition(".")
        return getattr(classes[owner] if owner in classes else find(owner), name)

    yield find
    posing.finish_all()


def test_the_sources_are_read():
    """Some uses of every kind are found, so that the rest can be believed."""
    paths = {use.path for use in cupy_names.uses()}
    assert {
        "cupyx.empty_pinned",
        "cupy.stack",
        "cupy.cuda.Device.pci_bus_id",
        "cupy.cuda.Event",
        "cupy.cuda.Event.synchronize",
        "cupy.cuda.MemoryPointer.ptr",
        "cupy.cuda.Stream.ptr",
        "cupy.cuda.nccl.NcclCommunicator",
        "cupy.cuda.nccl.NcclCommunicator.allGather",
        "cupy.cuda.nccl.get_unique_id",
        "cupy.cuda.runtime.getDeviceCount",
        "cupy.ndarray.get",
        "cupy.ndarray.set",
    } <= paths
    calls = {use.path: use for use in cupy_names.uses() if use.positional >= 0}
    assert calls["cupy.cuda.nccl.NcclCommunicator.reduce"].positional == 7
    assert calls["cupy.cuda.Event"].keywords == ("disable_timing",)
    assert {"reshape", "view", "nbytes"} <= set(cupy_names.array_attributes())


@pytest.mark.parametrize("version", VERSIONS)
def test_cupy_has_what_is_used(version):
    names = posing.record(version)["names"]
    missing = [u for u in cupy_names.uses() if u.name not in names.get(u.owner, ())]
    assert missing == []
    of_arrays = cupy_names.array_attributes()
    unknown = {n: w for n, w in of_arrays.items() if n not in names["cupy.ndarray"]}
    assert set(unknown) == set(OF_THE_HOST), unknown


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_fit_the_signatures(version):
    signatures = posing.record(version)["signatures"]
    compared = 0
    for use in cupy_names.uses():
        text = signatures.get(use.path)
        if use.positional < 0 or text is None:
            continue
        method = use.owner.rpartition(".")[2] in cupy_names.CLASSES
        signature = cupy_names.parse(text, method)
        words = dict.fromkeys(use.keywords)
        try:
            signature.bind(*[None] * use.positional, **words)
        except TypeError as error:
            pytest.fail(f"{use.where}: {use.path}{text}: {error}")
        compared += 1
    assert compared > 30


def test_the_stand_in_has_what_is_used(stand_in):
    for path in {use.path for use in cupy_names.uses()} - set(NOT_POSED):
        stand_in(path)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_has_cupys_signatures(stand_in, version):
    """Its parameters have those names and that order; it may lack optional ones."""
    compared = set()
    for path in {use.path for use in cupy_names.uses()} - set(NOT_POSED):
        text = posing.record(version)["signatures"].get(path)
        thing = stand_in(path)
        if text is None or not callable(thing):
            continue
        mine = list(inspect.signature(thing).parameters.values())
        if "args" in {p.name for p in mine}:
            continue  # NumPy's function, on the memory of the host
        bound = path.rpartition(".")[0].rpartition(".")[2] in cupy_names.CLASSES
        real = list(cupy_names.parse(text, bound).parameters.values())
        if "NcclCommunicator." in path:
            mine = mine[1:]  # a function of the class, with `self`
        if version == posing.OLDER and path.endswith("NcclCommunicator"):
            mine = mine[: len(real)]
        assert [p.name for p in mine] == [p.name for p in real[: len(mine)]], path
        assert all(p.default is not p.empty for p in real[len(mine) :]), path
        for p, q in zip(mine, real, strict=False):
            assert (p.default is p.empty) == (q.default is q.empty), (path, p)
        compared.add(path)
    assert {"cupy.ndarray.get", "cupyx.empty_pinned"} <= compared
    assert "cupy.cuda.nccl.NcclCommunicator.broadcast" in compared


def test_the_numbers_of_nccl():
    constants = posing.record()["constants"]
    used = {name for name, _ in _nccl._TYPES.values()}
    used |= {f"NCCL_{op}" for op in ("SUM", "PROD", "MIN", "MAX")}
    assert used <= set(constants)
    assert {name: getattr(posing.Nccl, name) for name in used} == {
        name: constants[name] for name in used
    }


@pytest.mark.parametrize(
    ("version", "id_type"), [(posing.NEWEST, bytes), (posing.OLDER, tuple)]
)
def test_the_types_of_nccl(version, id_type, monkeypatch):
    """Ids that CuPy takes are taken, others refused with the same words."""
    nccl = posing.Nccl(id_type=id_type)
    nccl.refuses = OSError("this one is taken")
    found, recorded = record_cupy.types_of_nccl(nccl), posing.record(version)["nccl"]
    assert found == recorded


@pytest.mark.parametrize("version", VERSIONS)
def test_the_types_of_arrays(version):
    x = posing.ndarray(np.zeros((3, 4), np.float32))
    assert record_cupy.types_of_array(x) == posing.record(version)["array"]
    assert record_cupy.refusals(x) == posing.record(version)["refusals"]


def test_names_that_cupy_lacks_are_refused():
    x = posing.ndarray(np.zeros(3))
    assert not posing.known("cupy", "spacing")
    with pytest.raises(AttributeError, match="no attribute 'newbyteorder'"):
        x.newbyteorder()
    with pytest.raises(TypeError):
        np.spacing(x)
    with pytest.raises(TypeError):
        np.busday_count(x, x)


def test_the_records_are_those_of_the_real_package(tmp_path):
    """In a process of its own: where CuPy is imported the library takes notice."""
    script = pathlib.Path(record_cupy.__file__)
    found = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=False
    )
    if "No module named 'cupy'" in found.stderr:
        pytest.skip("CuPy is not installed: the records are taken for it")
    if "has no attribute 'get_unique_id'" in found.stderr:
        pytest.skip("CuPy does not find libnccl: pip install nvidia-nccl-cu12")
    assert found.returncode == 0, found.stderr
    (path,) = tmp_path.iterdir()
    real = json.loads(path.read_text())
    if (posing.RECORDS / path.name).exists():
        assert real == posing.record(path.stem)
        return
    recorded = posing.record()  # of another version: what is used is the same
    for use in cupy_names.uses():
        assert use.name in real["names"][use.owner], use
        if use.path in recorded["signatures"] and use.positional >= 0:
            assert real["signatures"][use.path] == recorded["signatures"][use.path]
    for fact in ("array", "refusals", "nccl"):
        assert real[fact] == recorded[fact]


# --- the order of work ------------------------------------------------------------


def streams():
    blocking, free = posing.Stream(), posing.Stream(non_blocking=True)
    return {"null": posing.Stream.null, "blocking": blocking, "free": free}


@pytest.mark.parametrize(
    ("first", "second", "ordered"),
    [
        ("null", "blocking", True),
        ("blocking", "null", True),
        ("null", "free", False),
        ("free", "null", False),
        ("blocking", "free", False),
        ("blocking", "blocking", True),  # one stream
        ("free", "free", True),
    ],
)
def test_what_is_ordered_between_streams(monkeypatch, first, second, ordered):
    """All orders that there may be are there, and no other."""
    seen = set()
    for seed in range(40):
        posing.install(monkeypatch, order="random", seed=seed)
        done, on = [], streams()
        on[first].queue(lambda done=done: done.append(1))
        on[second].queue(lambda done=done: done.append(2))
        for _ in range(20):
            posing.driver.pass_time()
        posing.finish_all()
        seen.add(tuple(done))
    assert seen == ({(1, 2)} if ordered else {(1, 2), (2, 1)})


@pytest.mark.parametrize("order", ["late", "early", "random"])
def test_events_order_streams(monkeypatch, order):
    for seed in range(20):
        posing.install(monkeypatch, order=order, seed=seed)
        done, on = [], streams()
        event = posing.Event()
        on["free"].wait_event(event)  # which was not recorded: that is past
        on["null"].queue(lambda done=done: done.append(1))
        on["null"].record(event)
        on["free"].wait_event(event)
        on["null"].queue(lambda done=done: done.append(3))
        on["null"].record(event)  # changes nothing for who waits already
        on["free"].queue(lambda done=done: done.append(2))
        on["free"].synchronize()
        assert done.index(1) < done.index(2)
        if order == "late":
            assert done == [1, 2]
        event.synchronize()
        assert sorted(done) == [1, 2, 3]


def test_an_event_on_the_null_stream_waits_for_blocking_streams(monkeypatch):
    posing.install(monkeypatch)
    done, on = [], streams()
    on["blocking"].queue(lambda: done.append("blocking"))
    on["free"].queue(lambda: done.append("free"))
    on["null"].synchronize()  # of which CUDA's manual says nothing
    assert done == []
    on["null"].record().synchronize()
    assert done == ["blocking"]


def test_page_locked_memory_belongs_to_others_when_it_is_let_go(monkeypatch):
    xp = posing.install(monkeypatch)
    x = xp.zeros(8, np.uint8)
    host = posing.empty_pinned(8, "u1")
    host[...] = 5
    x.set(host)
    del host  # the copy is still to come
    assert x.get().tolist() == [0xDD] * 8


def test_results_of_nccl_are_written_late(monkeypatch, strategy):
    """A call returns before: what nothing waits for is not there."""
    if strategy.num_replicas_in_sync > 1:
        pytest.skip("one rank shows it")
    nccl = posing.Nccl()
    xp = posing.install(monkeypatch, nccl=nccl)
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    x, y = xp.full(3, 2.0, np.float32), xp.zeros(3, np.float32)
    where = [a.data.ptr for a in (x, y)]
    communicator.allReduce(*where, 3, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)
    assert y.memory.tolist() == [0, 0, 0]
    assert y.get().tolist() == [2, 2, 2]
    communicator.destroy()
