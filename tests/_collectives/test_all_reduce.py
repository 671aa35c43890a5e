"""All-reduces and all-gathers, whatever an array is like on one of the ranks."""

import functools
import re

import numpy as np
import pytest
from replicas import all_reduce, context, local

import mpidist
from mpidist._base.reduce_op import COMBINE

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.replicas(2, 3)]


class Subclass(np.ndarray):
    pass


def at_address(x, remainder):
    """Return a copy whose address, divided by 16, leaves this remainder."""
    memory = np.zeros(x.nbytes + 16, np.uint8)
    start = (remainder - memory.ctypes.data) % 16
    copy = memory[start:][: x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def forms_of(x):
    return {
        "plain": x,
        "strided": np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x[()],
        "transposed": x.T.copy().T,
        "read-only": np.broadcast_to(x, x.shape),
        "subclass": x.view(Subclass),
        # mpi4py has no datatype for it: as `numpy.frombuffer` makes arrays.
        "not aligned": at_address(x, 5),
        # Which NumPy calls aligned, also for complex numbers of 16 bytes.
        "aligned as its parts": at_address(x, 8),
    }


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize(
    ("implementation", "nodes"),
    [("AUTO", "1"), ("AUTO", "2"), ("AUTO", "3"), ("DIRECT", "2")],
)
@pytest.mark.usefixtures("by_nodes")
def test_each_rank_may_have_an_array_in_a_form_of_its_own(
    monkeypatch, new_strategy, nodes, implementation, guard
):
    """And options that change nothing: the ranks go different ways through one call."""
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", nodes)
    strategy = new_strategy(implementation=implementation, guard=guard)
    for shape, dtype in (
        ((), "f8"),
        ((50,), "c16"),
        ((40, 50), "f8"),
        ((300, 200), "c16"),
    ):
        check_forms(strategy, shape, dtype)


def check_forms(strategy, shape, dtype):
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=50)
    step = 1j if dtype == "c16" else 1
    base = np.arange(np.prod(shape)).reshape(shape)
    parts = [np.asarray(base + r * step, dtype) for r in range(size)]
    total, x = sum(parts), parts[rank]
    forms = forms_of(x)
    for name in ["plain", *forms]:
        for odd in {0, size - 1}:
            mine, how = (forms[name], options) if rank == odd else (x, None)

            def call(mine=mine, how=how):
                single = context().all_reduce("SUM", mine, how)
                pair = context().all_reduce("SUM", [mine, x], how)
                gathered = context().all_gather(mine, 0, how) if x.ndim else None
                return [single, *pair], context().all_reduce("MEAN", mine), gathered

            sums, mean, gathered = local(strategy, call)
            for found in sums:
                np.testing.assert_array_equal(found, total, err_msg=name)
            np.testing.assert_allclose(mean, total / size)
            if x.ndim:
                np.testing.assert_array_equal(gathered, np.concatenate(parts))


INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize(
    ("implementation", "nodes"), [("AUTO", "1"), ("AUTO", "2"), ("DIRECT", "2")]
)
@pytest.mark.usefixtures("by_nodes")
def test_integers_are_combined_as_in_numpy(
    monkeypatch, new_strategy, nodes, implementation
):
    """Sums and products wrap; all numbers are ordered.

    Open MPI saturates sums of 8 and 16 bits, in most elements; some MPIs compare
    unsigned integers as if they were signed.
    """
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", nodes)
    strategy = new_strategy(implementation=implementation)
    for dtype in INTEGERS:
        check_integers(strategy, dtype)


def check_integers(strategy, dtype):
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    limits = np.iinfo(dtype)
    edges = [
        [limits.max - k, limits.min + k, limits.max // 2 + k, 3] for k in range(size)
    ]
    for count in (1, 20, 3_000, 100_000):
        parts = [np.resize(np.array(x, dtype), count) for x in edges]
        for op, function in COMBINE.items():
            want = functools.reduce(function, parts)
            for _ in range(2):  # the second time by the plan
                found = all_reduce(strategy, op, parts[rank])
                assert found.dtype == dtype
                np.testing.assert_array_equal(found, want)


def test_two_bytes_are_not_taken_for_the_bfloat16_of_a_call_before(strategy, size):
    """Their kind and size are those of bfloat16."""
    x = np.ones(8, pytest.importorskip("ml_dtypes").bfloat16)
    for tree in (x, [x, x]):
        for _ in range(2):  # the second time by the plan
            found = np.asarray(all_reduce(strategy, "SUM", tree))
            np.testing.assert_array_equal(found, np.full(found.shape, size, x.dtype))
        for dtype, write in (
            ("V2", "as"),
            ([("a", "i1"), ("b", "i1")], "['a']"),
            ("M8[s]", 'view("int64")'),
        ):
            other = np.zeros(16, "i1").view(dtype)
            text = f"cannot be communicated.*Write `x.?{re.escape(write)}"
            text += "" if tree is x else r".*leaf \[0\]"
            with pytest.raises(TypeError, match=text):
                all_reduce(strategy, "SUM", other if tree is x else [other, other])
