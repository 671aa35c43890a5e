"""The parts of `mpidist bench`: contests, shapes, units, the model, tables."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from mpidist import _bench
from mpidist._bench import Contestant, Effort, Parameters, Record, Result, Timing

QUICK = Effort(repeats=3, seconds=0.01, sample_seconds=1e-5)


# --- contests ---------------------------------------------------------------------


@pytest.fixture
def job():
    made = _bench.Job()
    yield made
    made.free()


@pytest.mark.mpi
@pytest.mark.core
def test_a_contest_times_each_contestant_and_all_ranks_agree(job):
    seen: list[str] = []

    def contestant(name: str) -> Contestant:
        def call() -> int:
            seen.append(name)
            return job.comm.allreduce(1)

        return Contestant(name, call, lambda result: result == job.size)

    timings = _bench.measure(job, "test", [contestant("a"), contestant("b")], QUICK)
    assert list(timings) == ["a", "b"]
    for name, timing in timings.items():
        assert 0 < timing.lower <= timing.median <= timing.upper
        assert timing.samples == QUICK.repeats
        assert seen.count(name) > timing.samples * timing.calls
    assert job.comm.allgather(timings) == [timings] * job.size
    # They take turns, and each begins in its turn.
    order = [name for name, _ in itertools.groupby(seen)]
    assert order.index("b") == 1
    assert order[-4:] == ["a", "b", "a", "b"] or order[-3:] == ["b", "a", "b"]


@pytest.mark.mpi
def test_a_call_is_made_in_its_context_and_prepared_after_the_check(job):
    events = []

    def within(body):
        events.append("in")
        body()
        events.append("out")

    one = Contestant(
        "a",
        lambda: events.append("call"),
        lambda result: events.append("check") is None,
        within,
        lambda: events.append("prepare"),
    )
    _bench.measure(job, "test", [one], QUICK)
    assert events[:6] == ["in", "call", "out", "check", "prepare", "in"]
    assert events[-1] == "out"
    assert events.count("check") == 1


@pytest.mark.mpi
def test_a_wrong_result_on_one_rank_raises_on_all_and_times_nothing(job):
    calls = []
    last = job.size - 1
    one = Contestant("ours", lambda: calls.append(1), lambda _: job.rank != last)
    with pytest.raises(_bench.WrongResultError, match=f"ours gave.* on rank {last};"):
        _bench.measure(job, "sum of 4 B", [one], QUICK)
    assert calls == [1]


@pytest.mark.mpi
def test_a_slow_contestant_gets_fewer_samples_but_not_too_few(job):
    one = Contestant("slow", lambda: job.comm.barrier(), lambda _: True)
    effort = Effort(repeats=50, seconds=1e-9, sample_seconds=1e-6)
    assert _bench.measure(job, "test", [one], effort)["slow"].samples == 3
    effort = Effort(repeats=1, seconds=1e-9, sample_seconds=1e-6)
    assert _bench.measure(job, "test", [one], effort)["slow"].samples == 1


@pytest.mark.mpi
def test_a_problem_of_one_rank_is_raised_on_all(job):
    job.require(None)
    last = job.size - 1
    problem = "no torch" if job.rank == last else None
    expected = f"^rank {last}: no torch$" if job.size > 1 else "^no torch$"
    with pytest.raises(_bench.UsageError, match=expected):
        job.require(problem)
    with pytest.raises(_bench.UsageError, match=r"^no torch$"):
        job.require("no torch")


# --- shapes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "numbers"),
    [
        ("resnet50", 161, 25_557_032),  # as torchvision counts them
        ("bert", 199, 109_482_240),  # as Hugging Face counts them
        ("mlp", 6, 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10),
    ],
)
def test_the_shapes_of_known_networks(name, tensors, numbers):
    shapes = _bench.MODELS[name]()
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes) == numbers


# --- units ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4", 4), ("4B", 4), ("64KiB", 65536), ("64 kib", 65536), ("1.5MB", 1_500_000)],
)
def test_sizes(text, nbytes):
    assert _bench.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "4X", "KiB", "0.1B", "1e"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="expected a size such as"):
        _bench.parse_size(text)


def test_times_and_bandwidths():
    assert _bench.parse_seconds("2us") == pytest.approx(2e-6)
    assert _bench.parse_seconds("1.5e-6") == 1.5e-6
    assert _bench.parse_seconds_per_byte("12.5GB/s") == pytest.approx(8e-11)
    assert _bench.parse_seconds_per_byte("1GiB/s") == pytest.approx(2.0**-30)
    assert _bench.parse_seconds_per_byte("8e-11") == 8e-11
    for text in ("", "2 years", "-1us"):
        with pytest.raises(ValueError, match="expected a time"):
            _bench.parse_seconds(text)
    for text in ("0GB/s", "GB/s", "fast", "5 B/h"):
        with pytest.raises(ValueError, match="expected a bandwidth"):
            _bench.parse_seconds_per_byte(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.4e-7, "0.84 us"),
        (1.234e-5, "12.3 us"),
        (9.996e-4, "1.00 ms"),
        (0.1234, "123 ms"),
        (2.0, "2.00 s"),
        (1234.0, "1,234 s"),
        (5e-8, "50.0 ns"),
    ],
)
def test_times_are_shown_with_three_digits(seconds, text):
    assert _bench.show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(4, "4 B"), (2**16, "64 KiB"), (2**26, "64 MiB"), (102_228_128, "102.2 MB")],
)
def test_sizes_are_shown(nbytes, text):
    assert _bench.show_size(nbytes) == text


# --- the model --------------------------------------------------------------------

CLUSTER = Parameters(
    alpha=2e-6,
    beta=1e-10,
    alpha_node=1e-6,
    beta_node=3e-10,
    alpha_shared=9e-6,
    beta_shared=2e-10,
    overhead=5e-6,
)


def predicted(nbytes: int, ranks_per_node: int, ranks: int) -> dict[str, Any]:
    rows = _bench.predict(CLUSTER, [nbytes], ranks_per_node, ranks)
    return {one.transport: one for one in rows if one.ranks == ranks}


def test_the_model_by_hand_on_one_node():
    n = 2**20
    found = predicted(n, 8, 4)
    rabenseifner = 2 * 2 * 1e-6 + 2 * 3 / 4 * n * 3e-10
    assert found["mpi4py"].seconds == pytest.approx(rabenseifner)
    assert found["mpi4py"].algorithm == "Rabenseifner"
    header = 2 * (1e-6 + 64 * 3e-10)
    assert found["direct"].seconds == pytest.approx(rabenseifner + header + 5e-6)
    copies = 3 / 4 + 5 / 8 + 3 / 4
    assert found["shared"].seconds == pytest.approx(9e-6 + copies * n * 2e-10)


def test_the_model_by_hand_on_several_nodes():
    n = 4
    found = predicted(n, 8, 64)
    assert found["mpi4py"].nodes == 8
    doubling = 3 * (1e-6 + n * 3e-10) + 3 * (2e-6 + 8 * n * 1e-10)
    assert found["mpi4py"].seconds == pytest.approx(doubling)
    on_node = 9e-6 + (1 + 3 * 7 / 2) * n * 2e-10
    header = 3 * (2e-6 + 64 * 1e-10)
    assert found["shared"].seconds == pytest.approx(
        on_node + 3 * (2e-6 + n * 1e-10) + header
    )


def test_across_nodes_the_result_is_copied_out_as_a_whole():
    n = 2**20
    found = predicted(n, 4, 8)["shared"]
    between = 2 * 2e-6 + 2 * 1 / 2 * n * 1e-10
    doubling = 2e-6 + n * 1e-10
    header = 2e-6 + 64 * 1e-10
    on_node = 9e-6 + (3 / 4 + 5 / 8 + 1) * n * 2e-10
    assert found.seconds == pytest.approx(on_node + min(between, doubling) + header)


def test_the_model_takes_the_fastest_algorithm_and_rings_for_large_arrays():
    # One rank on a node: the formulas of Thakur, Rabenseifner and Gropp as they are.
    n, p = 2**30, 8
    found = predicted(n, 1, p)["mpi4py"]
    factor = 2 * (p - 1) / p * n * 1e-10
    assert found.seconds == pytest.approx(2 * 3 * 2e-6 + factor)
    assert found.algorithm == "Rabenseifner"
    assert predicted(4, 1, p)["mpi4py"].algorithm == "recursive doubling"
    # Steps of powers of two are the price of another number of ranks.
    times = [predicted(2**20, 16, 2**k)["shared"].seconds for k in range(1, 13)]
    assert times == sorted(times)


def record(nodes: int, local: int, transport: str, parameters: Parameters) -> Record:
    """Return what a run would give if the model were right."""
    results = []
    for nbytes in [4 * 8**k for k in range(9)]:
        timings = {}
        for name, kind in (("mpi4py in place", "mpi4py"), ("mpidist", transport)):
            seconds = next(
                one.seconds
                for one in _bench.predict(parameters, [nbytes], local, nodes * local)
                if one.ranks == nodes * local and one.transport == kind
            )
            timings[name] = Timing(seconds, seconds, seconds, 3, 1)
        results.append(
            Result(
                "all_reduce",
                _bench.show_size(nbytes),
                nbytes,
                "mpi4py in place",
                ("mpidist",),
                timings,
            )
        )
    facts = {
        "ranks": nodes * local,
        "nodes": nodes,
        "crowded": False,
        "date": "today",
        "machine": {"cores": 8, "processor": "A"},
        "software": {
            "mpidist": "0",
            "mpi": "M 1",
            "mpi4py": "4",
            "numpy": "2",
            "python": "3",
        },
        "transports": {"host": {"name": transport, "text": transport}},
    }
    return Record(facts, results, ["a note"])


def test_fitting_finds_the_parameters_of_a_node():
    found = _bench.fit([record(1, 4, "shared", CLUSTER)], Parameters())
    assert set(found.fitted) == {
        "alpha_node",
        "beta_node",
        "alpha_shared",
        "beta_shared",
    }
    for name in found.fitted:
        value = getattr(found.parameters, name)
        assert value == pytest.approx(getattr(CLUSTER, name), rel=1e-6)
    assert found.parameters.alpha == Parameters().alpha
    assert max(found.errors.values()) < 1e-6


def test_fitting_finds_the_network_and_the_overhead():
    records = [record(1, 4, "direct", CLUSTER), record(8, 4, "direct", CLUSTER)]
    found = _bench.fit(records, Parameters())
    assert set(found.fitted) == {
        *("alpha", "beta", "alpha_node", "beta_node", "overhead")
    }
    for name in found.fitted:
        value = getattr(found.parameters, name)
        assert value == pytest.approx(getattr(CLUSTER, name), rel=1e-6)


def test_fitting_gives_no_negative_parameters_and_says_how_far_it_is_off():
    data = record(1, 2, "shared", CLUSTER)
    for i, one in enumerate(data.results):  # as no model would have it
        for name, timing in one.timings.items():
            one.timings[name] = dataclasses.replace(timing, median=1e-3 / (i + 1))
    found = _bench.fit([data], Parameters())
    assert min(dataclasses.astuple(found.parameters)) >= 0
    assert found.errors["mpi4py"] > 0.1


def test_fitting_needs_results_of_several_ranks():
    with pytest.raises(_bench.UsageError, match="no results of all_reduce on two"):
        _bench.fit([Record({"ranks": 1, "nodes": 1}, [], [])], Parameters())


# --- records and tables ---------------------------------------------------------------


def test_a_record_survives_json(tmp_path):
    one = record(1, 2, "shared", CLUSTER)
    path = tmp_path / "r.json"
    path.write_text(one.to_json())
    again = _bench.read_record(str(path))
    assert again == one
    first = json.loads(path.read_text())["results"][0]["timings"]
    assert first["mpi4py in place"]["ratio"] == 1.0
    assert first["mpidist"]["bytes_per_second"] == pytest.approx(
        4 / first["mpidist"]["median"]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can not be read"),
        ("no json", "can not be read"),
        ("[]", "is not what `mpidist bench --json` writes"),
        ('{"format": "mpidist-bench", "version": 99}', "has version 99"),
        ('{"format": "mpidist-bench", "version": 1}', "is damaged"),
        (
            '{"format": "mpidist-bench", "version": 1, "notes": [], "results": [{}]}',
            "is damaged",
        ),
    ],
)
def test_files_that_are_no_records(tmp_path, text, message):
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(_bench.UsageError, match=message):
        _bench.read_record(str(path))


def test_tables_have_times_ratios_and_notes():
    one = record(1, 2, "shared", CLUSTER)
    noisy = one.results[1].timings
    noisy["mpidist"] = dataclasses.replace(noisy["mpidist"], upper=1.0)
    text = _bench.text_of(one)
    ours, raw = one.results[0].timings["mpidist"], one.results[0].timings
    shown = _bench.show_seconds(ours.median)
    row = next(line for line in text.splitlines() if line.startswith("4 B"))
    ratio = ours.median / raw["mpi4py in place"].median
    assert shown in row
    assert f" {ratio:.2f} " in row
    assert "us~" in text
    assert "a note" in text
    markdown = _bench.markdown_of(one, "all_reduce")
    assert markdown.startswith("| all_reduce | mpi4py in place | mpidist | ratio |")
    assert len(markdown.splitlines()) == 2 + len(one.results)
    assert _bench.markdown_of(one, "nest") == ""


def test_ratios_are_to_the_baseline():
    timings = {"mpi4py": Timing(2.0, 2.0, 2.0, 1, 1), "mpidist": Timing(1, 1, 1, 1, 1)}
    result = Result("nest", "x", 10, "mpi4py", ("mpidist",), timings)
    assert result.ratio("mpidist") == 0.5
    assert result.bytes_per_second("mpidist") == 10.0
    assert result.share_of_copy("mpidist") is None
    assert np.isclose(result.ratio("mpi4py"), 1)
