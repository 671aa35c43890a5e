"""The stand-in for CuPy has what the real package has, where the library uses it.

The real one is known by records (tests/cupy_records): CI has no room for CuPy. Where it
is installed the records are compared with it.
"""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import posing
import pytest
import record_cupy

VERSIONS = [posing.NEWEST, posing.OLDER]
OF_CUPY = ("cupy.ndarray", "cupy.cuda.MemoryPointer")  # it alone makes these
CLASSES = {path.rpartition(".")[2] for path in record_cupy.CLASSES}


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


def parse(text, method=False):
    """Return a signature that tests/record_cupy.py wrote down; of Cython's, too."""
    found = []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in re.split(r",\s*", text.strip()[1:-1]) if text != "()" else []:
        before, equals, _ = part.partition("=")
        name = before.split()[-1]
        if name == "/":
            continue
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        this = kind
        if name.startswith("*"):
            star = name.count("*")
            this = (
                inspect.Parameter.VAR_KEYWORD
                if star > 1
                else inspect.Parameter.VAR_POSITIONAL
            )
            kind = inspect.Parameter.KEYWORD_ONLY
        default = None if equals else inspect.Parameter.empty
        found.append(inspect.Parameter(name.lstrip("*"), this, default=default))
    return inspect.Signature(found[1:] if method else found)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_has_cupys_signatures(stand_in, version):
    """Its parameters have those names and that order; it may lack optional ones."""
    compared = set()
    for path, text in posing.record(version)["signatures"].items():
        if path.rpartition(".")[2].startswith("_"):
            continue
        try:
            thing = stand_in(path)
        except AttributeError:
            continue  # the library does not use it
        mine = list(inspect.signature(thing).parameters.values())
        if "args" in {p.name for p in mine} or path in OF_CUPY:
            continue  # NumPy's function, on the memory of the host
        bound = path.rpartition(".")[0].rpartition(".")[2] in CLASSES
        real = list(parse(text, bound).parameters.values())
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
    used = {name for name in vars(posing.Nccl) if name.startswith("NCCL_")}
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
    recorded = posing.record()  # of another version: what it takes is the same
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
