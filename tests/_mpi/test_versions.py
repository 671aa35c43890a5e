"""Making a strategy: ranks of different software raise together, with both sides."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from launching import mpi_vendor, run_ranks
from replicas import (
    everywhere,
    next_communicator,
    raises_everywhere,
    slow,
    wait_for_reports,
)

import mpidist
from mpidist import CollectiveMismatchError, _native
from mpidist._mpi import collective_release, versions
from mpidist._strategy.strategy import group_of


def texts(*changes):
    """Return the texts of ranks that differ from this one in these things."""
    own = json.loads(versions.write())
    result = []
    for change in changes:
        text = {**own, **change}
        for part in ("must", "about"):
            text[part] = {**own[part], **change.get(part, {})}
        result.append(json.dumps(text).encode())
    return result


def test_ranks_of_one_environment_fit():
    said, error = versions.judge(1, texts({}, {}, {}))
    assert error is None
    assert said == [{"core": _native.available(), "floats": ""}] * 3


def test_the_text_is_plain():
    text = versions.write()
    found = json.loads(text.decode("ascii"))
    assert found["format"] == 2
    assert (found["about"]["core"], found["problem"]) == (_native.available(), "")
    assert set(found["must"]) == {
        "Python",
        "mpidist",
        "NumPy",
        "cloudpickle",
        "byte order",
        "C types",
    }
    assert found["must"]["mpidist"] == mpidist.__version__
    assert found["must"]["cloudpickle"][0].isdigit()
    assert np.__version__.startswith(found["must"]["NumPy"] + ".")


@pytest.mark.parametrize("name", sorted(versions.describe()))
def test_each_thing_that_must_be_equal_is_compared(name):
    given = texts({}, {"must": {name: "another"}}, {})
    own = versions.describe()[name]
    for rank in range(3):
        _, error = versions.judge(rank, given)
        assert type(error) is CollectiveMismatchError
        assert f"[rank {rank}] MPIStrategy(...)" in str(error)
        assert f"{name}: {own} on ranks 0, 2; another on rank 1" in str(error)
        assert "start all ranks from the same environment" in str(error)


def of_format(number, about, **must):
    text = json.loads(versions.write())
    text |= {"format": number, "about": about}
    text["must"] |= must
    return json.dumps(text).encode()


@pytest.mark.parametrize(
    "strange",
    [
        b"",
        b"\x80\x04}\x94.",  # a pickle
        b"[]",
        b'{"format": 2}',
        b'{"format": 2, "must": [], "core": false, "problem": ""}',
        "{}é".encode("latin-1"),
        of_format(3, {}, mpidist="9.0"),
        of_format(1, {}),  # of an older build of the same version
        of_format(1, {"core": True}),
    ],
)
def test_a_text_that_can_not_be_read_differs(strange):
    for ranks in ([*texts({}), strange], [strange, *texts({})]):
        _, error = versions.judge(0, ranks)
        assert type(error) is CollectiveMismatchError
        assert "format of this agreement" in str(error)
    if b"9.0" in strange:
        assert f"mpidist: 9.0 on rank 0; {mpidist.__version__} on rank 1" in str(error)


def test_the_problem_of_one_rank_is_raised_on_all():
    for rank in range(2):
        _, error = versions.judge(rank, texts({}, {"problem": "no luck"}))
        assert type(error) is ValueError
        assert str(error).startswith(f"[rank {rank}] ")
        assert "rank 1 cannot take part: no luck" in str(error)


def test_what_ranks_say_of_themselves_comes_to_all():
    given = [versions.write(more=lambda k=k: {"place": k}) for k in range(2)]
    for rank in range(2):
        said, _ = versions.judge(rank, given)
        assert [one["place"] for one in said] == [0, 1]


def test_what_fails_while_a_rank_looks_at_itself_is_a_problem(monkeypatch):
    def fail():
        raise OSError("a library that does not load")

    monkeypatch.setattr(versions, "floating_point_state", fail)
    _, error = versions.judge(0, [versions.write(), *texts({})])
    assert "OSError: a library that does not load" in str(error)


@pytest.mark.parametrize(
    ("key", "usual", "odd", "told"),
    [
        ("core", True, False, "ranks 1-2 have no native core"),
        (
            *("floats", "", "flushes subnormal numbers to zero"),
            "the processor of ranks 1-2 flushes subnormal numbers to zero, which a",
        ),
    ],
)
def test_what_is_not_the_same_everywhere_is_said_once(caplog, key, usual, odd, told):
    one, other = {"about": {key: usual}}, {"about": {key: odd}}
    given = texts(one, other, other)
    for rank in range(3):
        said, error = versions.judge(rank, given)
        assert ([x[key] for x in said], error) == ([usual, odd, odd], None)
    wait_for_reports()
    assert caplog.text.count(told) == 1
    caplog.clear()
    versions.judge(0, texts(one, one))
    versions.judge(0, texts(other, other))
    assert caplog.text == ""


def test_mpidist_check_compares_them():
    code = """
import sys
from mpi4py import MPI
from mpidist._mpi import versions
from mpidist._cli.main import main
real = versions.describe
if MPI.COMM_WORLD.rank == 1:
    versions.describe = lambda: {**real(), "byte order": "middle"}
sys.exit(main(["check"]))
"""
    result = run_ranks(2, ["-c", code], timeout=100)
    assert result.returncode == 1
    assert "byte order is middle here" in result.stdout
    assert "the ranks do not have the same software" in result.stdout


MANY = """
import os
from mpi4py import MPI
import mpidist
from mpidist._strategy.strategy import group_of

def sockets():
    paths = [os.path.join("/proc/self/fd", x) for x in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(x) and "socket" in os.readlink(x) for x in paths)

before = sockets()
strategy = mpidist.MPIStrategy()
comm, ranks = group_of(strategy).communicator, range(16)
assert comm.all_gather_integers([-comm.rank, 2**62]) == [[-r, 2**62] for r in ranks]
texts = ["x" * (r % 3) for r in ranks]
assert comm.all_gather_objects(texts[comm.rank]) == texts
assert comm.all_gather_objects("") == [""] * 16
opened = comm.all_gather_integers([sockets() - before])
large = [b"x" * (400_000 * (r == 3)) for r in ranks]  # in rows they had 6 MB
assert comm.all_gather_objects(large[comm.rank]) == large
if comm.rank == 0:
    print(max(opened)[0])
"""


@slow
def test_many_ranks_do_not_all_connect_with_each_other():
    env = {"OMPI_MCA_btl": "tcp,self", "MPIDIST_SIMULATED_NODES": "16"}
    result = run_ranks(16, ["-c", MANY], timeout=200, env=env)
    assert result.returncode == 0, result
    opened = int(result.stdout)
    # MPICH opens them when it starts.
    assert 0 < opened <= 8 or mpi_vendor()[0] != "Open MPI"


# --- on several ranks -----------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("who", ["first", "last"])
def test_ranks_that_differ_raise_together(who, strategy, rank, size, monkeypatch):
    if size == 1:
        pytest.skip("of one rank nothing differs")
    before = everywhere(collective_release.count())
    real, handles = versions.describe, []
    odd = 0 if who == "first" else size - 1
    for name in ("Python", "NumPy", "mpidist", "C types"):
        changed = {**real(), name: "1.2.3"}
        with monkeypatch.context() as patch:
            if rank == odd:
                patch.setattr(versions, "describe", lambda changed=changed: changed)
            messages = raises_everywhere(CollectiveMismatchError, mpidist.MPIStrategy)
        for message in messages:
            assert f"{name}: " in message
            assert f"1.2.3 on rank {odd}" in message
            assert real()[name] in message
        handles.append(next_communicator())
    # The duplicates were given back, and there is nothing that is left over.
    assert len({*handles[1:]}) == 1, handles
    assert everywhere(collective_release.count()) == before
    later = mpidist.MPIStrategy()
    assert group_of(later).communicator.rank_infos[0]["core"] == _native.available()
    later.close()


@pytest.mark.mpi
def test_a_setting_that_one_rank_can_not_read_is_told_to_all(
    strategy, rank, size, monkeypatch
):
    with monkeypatch.context() as patch:
        if rank == size - 1:
            patch.setenv("MPIDIST_TIMEOUT", "soon")
        messages = raises_everywhere(ValueError, mpidist.MPIStrategy)
    for message in messages:
        assert f"rank {size - 1} cannot take part" in message
        assert "MPIDIST_TIMEOUT is 'soon'" in message
    assert "MPIDIST_TIMEOUT" not in os.environ
    mpidist.MPIStrategy().close()
