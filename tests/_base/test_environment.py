"""Environment variables."""

import pytest

from mpidist._base.environment import AllReduceChoice, Environment, read_environment


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("TIMEOUT", ["no number", "-1", "nan", "inf", "1e300"], "a number from 0 to"),
        (
            "ALLREDUCE",
            ["allreduce", "iallreduce:0", "iallgather:65", ":4"],
            "iallreduce:K or",
        ),
        ("COMPRESSION", ["zip"], "one of none, fp16, bf16"),
        ("GUARD", ["perhaps"], "1 or 0"),
        ("TRACE", ["3"], "0, 1 or 2"),
    ],
)
def test_texts_that_are_refused(monkeypatch, name, texts, expected):
    for text in texts:
        monkeypatch.setenv(f"MPIDIST_{name}", text)
        message = f"MPIDIST_{name} is '{text}'; expected {expected}"
        with pytest.raises(ValueError, match=message):
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
        "STAGING_MB": "0.5",
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
        staging_bytes=2**19,
        trace=2,
    )


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("TRACE", "trace", {"": 0, "0": 0, "off": 0, "1": 1, "on": 1, "2": 2}),
        ("STAGING_MB", "staging_bytes", {"": 256 * 2**20, "0": 64 * 1024}),
    ],
)
def test_what_is_left_out_and_the_least(monkeypatch, name, field, values):
    for text, value in values.items():
        monkeypatch.setenv(f"MPIDIST_{name}", text)
        assert getattr(read_environment(), field) == value
