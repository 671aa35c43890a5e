"""Environment variables."""

import pytest

from mpidist._base.environment import AllReduceChoice, Environment, read_environment


@pytest.mark.parametrize("text", ["no number", "-1", "nan", "inf", "1e300"])
def test_bad_environment(monkeypatch, text):
    monkeypatch.setenv("MPIDIST_TIMEOUT", text)
    with pytest.raises(ValueError, match="MPIDIST_TIMEOUT"):
        read_environment()


def test_environment(monkeypatch):
    for name, value in {
        "ABORT": "0",
        "CUDA_AWARE": "1",
        "GUARD": "off",
        "TIMEOUT": "3.5",
        "STALL_SECONDS": "2",
        "FUSION_MB": "0.5",
        "ALLREDUCE": "Iallgather:3",
        "COMPRESSION": "FP16",
        "ERROR_FEEDBACK": "1",
        "SIMULATED_NODES": "2",
        "TRACE": "2",
    }.items():
        monkeypatch.setenv(f"MPIDIST_{name}", value)
    assert read_environment() == Environment(
        abort=False,
        cuda_aware=True,
        guard=False,
        timeout_seconds=3.5,
        stall_seconds=2.0,
        bytes_per_pack=2**19,
        allreduce=AllReduceChoice(gathers=True, in_flight=3),
        compression="fp16",
        error_feedback=True,
        simulated_nodes=2,
        trace=2,
    )
    monkeypatch.setenv("MPIDIST_COMPRESSION", "zip")
    with pytest.raises(ValueError, match="none, fp16, bf16"):
        read_environment()
    monkeypatch.setenv("MPIDIST_COMPRESSION", "")
    monkeypatch.setenv("MPIDIST_GUARD", "perhaps")
    with pytest.raises(ValueError, match="MPIDIST_GUARD"):
        read_environment()


@pytest.mark.parametrize("text", ["allreduce", "iallreduce:0", "iallgather:65", ":4"])
def test_unknown_ways_of_reducing(monkeypatch, text):
    monkeypatch.setenv("MPIDIST_ALLREDUCE", text)
    with pytest.raises(ValueError, match=r"MPIDIST_ALLREDUCE is .* iallreduce:K or"):
        read_environment()


@pytest.mark.parametrize(
    ("text", "level"), [("", 0), ("0", 0), ("off", 0), ("1", 1), ("on", 1), ("2", 2)]
)
def test_levels_of_the_trace(monkeypatch, text, level):
    monkeypatch.setenv("MPIDIST_TRACE", text)
    assert read_environment().trace == level
    monkeypatch.setenv("MPIDIST_TRACE", "3")
    with pytest.raises(ValueError, match="MPIDIST_TRACE is '3'; expected 0, 1 or 2"):
        read_environment()
