"""Reduction operations, and options."""

import dataclasses

import numpy as np
import pytest

import mpidist
from mpidist._base import reduce_op
from mpidist.experimental import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)


def test_reduce_op_names_in_any_case():
    for op in mpidist.ReduceOp:
        for name in (op, op.name, op.name.lower(), op.name.title()):
            assert reduce_op.as_reduce_op(name, "f") is op
    assert reduce_op.as_reduce_op(mpidist.VariableAggregation.SUM, "f") is (
        mpidist.ReduceOp.SUM
    )
    with pytest.raises(ValueError, match="f: 'MAXIMUM' is not a valid ReduceOp"):
        reduce_op.as_reduce_op("MAXIMUM", "f")
    with pytest.raises(ValueError, match='; write "MEAN"'):
        reduce_op.as_reduce_op("avg", "f")
    with pytest.raises(TypeError, match="; the operation comes first"):
        reduce_op.as_reduce_op(np.ones(2), "f")
    with pytest.raises(TypeError, match="expected `reduce_op` to be"):
        reduce_op.as_reduce_op(sum, "f")
    with pytest.raises(ValueError, match="NONE"):
        reduce_op.as_reduce_op(mpidist.VariableAggregation.NONE, "f")


def test_options_by_name_and_hints():
    assert CommunicationOptions(implementation="direct").implementation is (
        CommunicationImplementation.DIRECT
    )
    with pytest.warns(DeprecationWarning, match="write `mpidist.experimental.Comm"):
        assert CollectiveHints(5, 6.0) == CommunicationOptions(5, 6.0)
    assert mpidist.experimental.CollectiveCommunication is CommunicationImplementation
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommunicationOptions().bytes_per_pack = 1


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"bytes_per_pack": -1}, ValueError, "got -1; write 0 for the default"),
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
