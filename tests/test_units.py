"""Options, buckets, reports and messages, without MPI."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist._agreement import mismatch
from mpidist._base import errors, options
from mpidist._engine import buckets, dtypes
from mpidist.experimental import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)

# --- options ------------------------------------------------------------------------


def test_reduce_op_names_in_any_case():
    for op in mpidist.ReduceOp:
        for name in (op, op.name, op.name.lower(), op.name.title()):
            assert options.as_reduce_op(name, "f") is op
    assert options.as_reduce_op(mpidist.VariableAggregation.SUM, "f") is (
        mpidist.ReduceOp.SUM
    )
    with pytest.raises(ValueError, match="f: 'MAXIMUM' is not a valid ReduceOp"):
        options.as_reduce_op("MAXIMUM", "f")
    with pytest.raises(TypeError, match="expected `reduce_op` to be"):
        options.as_reduce_op(sum, "f")
    with pytest.raises(ValueError, match="NONE"):
        options.as_reduce_op(mpidist.VariableAggregation.NONE, "f")


def test_options_by_name_and_hints():
    assert CommunicationOptions(implementation="direct").implementation is (
        CommunicationImplementation.DIRECT
    )
    assert CollectiveHints(5, 6.0) == CommunicationOptions(5, 6.0)
    assert mpidist.experimental.CollectiveCommunication is CommunicationImplementation
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommunicationOptions().bytes_per_pack = 1


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"bytes_per_pack": -1}, ValueError, "`bytes_per_pack`"),
        ({"bytes_per_pack": 1.5}, TypeError, "`bytes_per_pack`"),
        ({"timeout_seconds": -0.1}, ValueError, "`timeout_seconds`"),
        ({"timeout_seconds": float("nan")}, ValueError, "`timeout_seconds`"),
        ({"timeout_seconds": "1"}, TypeError, "`timeout_seconds`"),
        (
            {"implementation": "MAGIC"},
            ValueError,
            "AUTO, RING, NCCL, DIRECT, SHARED, STAGED",
        ),
        ({"guard": 1}, TypeError, "`guard`"),
        ({"compression": "fp8"}, ValueError, "`compression`"),
        ({"error_feedback": "yes"}, TypeError, "`error_feedback`"),
    ],
)
def test_bad_options(arguments, kind, text):
    with pytest.raises(kind, match=text):
        CommunicationOptions(**arguments)


def test_merge_takes_what_the_other_sets():
    base = CommunicationOptions(10, 20.0, "STAGED", True)
    assert base.merge(None) is base
    assert base.merge(CommunicationOptions()) == base
    assert base.merge(CommunicationOptions(1, 0.0, "DIRECT", False)) == (
        CommunicationOptions(1, 0.0, "DIRECT", False)
    )
    lossy = CommunicationOptions(compression="bf16", error_feedback=True)
    assert base.merge(lossy) == CommunicationOptions(
        10, 20.0, "STAGED", True, "bf16", True
    )
    exact = lossy.merge(CommunicationOptions(compression="none"))
    assert (exact.compression, exact.error_feedback) == ("none", True)
    with pytest.raises(TypeError, match="expected `options`"):
        base.merge({"timeout_seconds": 3})


@pytest.mark.parametrize("text", ["no number", "-1", "nan"])
def test_bad_environment(monkeypatch, text):
    monkeypatch.setenv("MPIDIST_TIMEOUT", text)
    with pytest.raises(ValueError, match="MPIDIST_TIMEOUT"):
        options.read_environment()


def test_environment(monkeypatch):
    for name, value in {
        "ABORT": "0",
        "CUDA_AWARE": "1",
        "GUARD": "off",
        "TIMEOUT": "3.5",
        "STALL_SECONDS": "2",
        "FUSION_MB": "0.5",
        "COMPRESSION": "FP16",
        "ERROR_FEEDBACK": "1",
        "SIMULATED_NODES": "2",
    }.items():
        monkeypatch.setenv(f"MPIDIST_{name}", value)
    assert options.read_environment() == options.Environment(
        abort=False,
        cuda_aware=True,
        guard=False,
        timeout_seconds=3.5,
        stall_seconds=2.0,
        bytes_per_pack=2**19,
        compression="fp16",
        error_feedback=True,
        simulated_nodes=2,
    )
    monkeypatch.setenv("MPIDIST_COMPRESSION", "zip")
    with pytest.raises(ValueError, match="none, fp16, bf16"):
        options.read_environment()
    monkeypatch.setenv("MPIDIST_COMPRESSION", "")
    monkeypatch.setenv("MPIDIST_GUARD", "perhaps")
    with pytest.raises(ValueError, match="MPIDIST_GUARD"):
        options.read_environment()


# --- buckets ------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.sampled_from("fdeilg"),
            st.sampled_from(["SUM", "MAX"]),
        ),
        max_size=30,
    ),
    st.integers(0, 600),
)
def test_every_leaf_is_in_one_place_of_one_bucket(rows, limit):
    leaves = [
        buckets.Leaf(
            (n,), dtypes.reduction(np.dtype(c), mpidist.ReduceOp[op], "f"), False
        )
        for n, c, op in rows
    ]
    made = buckets.plan_buckets(leaves, limit)
    assert sorted(i for b in made for i in b.leaves) == list(range(len(leaves)))
    for bucket in made:
        wire = leaves[bucket.leaves[0]].reduction.wire
        taken = np.zeros(bucket.size, bool)
        for index, offset in zip(bucket.leaves, bucket.offsets, strict=True):
            leaf = leaves[index]
            assert leaf.reduction.wire == wire
            assert leaf.reduction.mpi == leaves[bucket.leaves[0]].reduction.mpi
            assert not taken[offset : offset + leaf.size].any()
            taken[offset : offset + leaf.size] = True
        assert taken.all()
        assert len(bucket.leaves) == 1 or bucket.size * wire.itemsize <= max(
            limit, wire.itemsize
        )


# --- messages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 1, 2], "ranks 0-2"),
        ([5, 0, 1, 3], "ranks 0-1, 3, 5"),
        ([1, 3], "ranks 1, 3"),
    ],
)
def test_format_ranks(ranks, text):
    assert errors.format_ranks(ranks) == text


@given(st.text(), st.text())
def test_fingerprints_fit_the_header(one, other):
    a, b = mismatch.fingerprint(one), mismatch.fingerprint(other)
    assert 0 <= a < 2**62
    assert np.int64(~a) == ~a
    assert (a == b) == (one == other)


def test_exceptions_that_do_not_come_back_from_pickle():
    class StrangeError(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    assert mismatch.dump_exception(StrangeError(1, 2)) == b""
    data = mismatch.dump_exception(KeyError("k"))
    error = mismatch.load_exception(data, "the trace")
    assert type(error) is KeyError
    assert "the trace" in str(error.__cause__)
    assert mismatch.load_exception(b"no pickle", "") is None


def test_tracebacks_show_the_users_frames(monkeypatch):
    def user_code():
        mpidist.experimental_set_strategy("no strategy")

    def text():
        try:
            user_code()
        except TypeError as error:
            return errors.format_exception(error)

    assert "in user_code" in text()
    assert "_strategy/scopes.py" not in text()
    monkeypatch.setenv("MPIDIST_DEBUG", "1")
    assert "_strategy/scopes.py" in text()
