"""Options and environment variables."""

import dataclasses

import pytest

import mpidist
from mpidist._base import options
from mpidist.experimental import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)


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
        "TRACE": "2",
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
        trace=2,
    )
    monkeypatch.setenv("MPIDIST_COMPRESSION", "zip")
    with pytest.raises(ValueError, match="none, fp16, bf16"):
        options.read_environment()
    monkeypatch.setenv("MPIDIST_COMPRESSION", "")
    monkeypatch.setenv("MPIDIST_GUARD", "perhaps")
    with pytest.raises(ValueError, match="MPIDIST_GUARD"):
        options.read_environment()


@pytest.mark.parametrize(
    ("text", "level"), [("", 0), ("0", 0), ("off", 0), ("1", 1), ("on", 1), ("2", 2)]
)
def test_levels_of_the_trace(monkeypatch, text, level):
    monkeypatch.setenv("MPIDIST_TRACE", text)
    assert options.read_environment().trace == level
    monkeypatch.setenv("MPIDIST_TRACE", "3")
    with pytest.raises(ValueError, match="MPIDIST_TRACE is '3'; expected 0, 1 or 2"):
        options.read_environment()
