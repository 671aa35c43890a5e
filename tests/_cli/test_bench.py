"""`mpidist bench`: the table on ranks. No time is judged."""

from __future__ import annotations

import itertools
import json
import re
from argparse import ArgumentTypeError

import numpy as np
import pytest
from launching import run_ranks
from replicas import core_by_mpi, slow

from mpidist import _cli
from mpidist._base.names import show_seconds
from mpidist._cli import bench_command
from mpidist._cli.bench_command import CASES
from mpidist._cli.facts import Job, WrongResultError
from mpidist._cli.measuring import (
    Bench,
    Row,
    Timing,
    parse_size,
    show_size,
)

TIMEOUT = 200.0
MIB = 2**20


# --- the whole table --------------------------------------------------------------


@slow
@pytest.mark.core
def test_the_table_has_all_rows(tmp_path):
    path = tmp_path / "r.json"
    argv = ["-m", "mpidist", "bench", "--json", path, "--quick"]
    result = run_ranks(2, argv, timeout=TIMEOUT)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(path.read_text())
    assert (record["format"], record["version"]) == ("mpidist-bench", 3)
    rows = record["rows"]
    assert [(row["work"], row["nbytes"]) for row in rows] == [
        *(("all_reduce", n) for n in (4, 2**10, 2**14, 2**16, 2**18)),
        *(("all_reduce", n * MIB) for n in (1, 4, 16, 64)),
        *(("all_gather", n) for n in (4, 2**10, 2**14, 2**16, MIB, 16 * MIB)),
        ("empty run", None),
        ("empty merge_call", None),
    ]
    assert {row["bench"] for row in rows} == set(CASES)
    for row in rows:
        assert row["ratio"] == row["ours"]["median"] / row["raw"]["median"] > 0
        for timing in (row["raw"], row["ours"]):
            assert 0 < timing["lower"] <= timing["median"] <= timing["upper"]
            assert 1 <= timing["samples"] <= 3
            assert timing["calls"] >= 1
    assert (record["ranks"], record["nodes"]) == (2, 1)
    assert record["software"]["mpi"].split()[0] in ("Open", "MPICH", "Intel")
    assert record["transports"]["host"]["name"] in ("direct", "shared")
    # One rank prints it; and what it prints is what is in the file.
    assert bench_command.header(record) in result.stdout
    assert "One rank" not in result.stdout
    assert len(re.findall(r"^work +bytes +raw ", result.stdout, re.M)) == 1
    ratios = re.findall(r"^\S.* [mu]?s~? +(\d+\.\d\d)$", result.stdout, re.M)
    assert ratios == [f"{row['ratio']:.2f}" for row in rows]
    assert max(map(len, result.stdout.splitlines())) <= 80, result.stdout


def test_some_benchmarks_and_sizes_on_one_rank(tmp_path, capsys):
    path = tmp_path / "r.json"
    words = ["run", "all_reduce", "run", "all_gather", "--sizes", "4B,1MB"]
    assert _cli.main(["bench", "--json", str(path), "--quick", *words]) == 0
    assert "One rank: nothing is communicated" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [(row["bench"], row["nbytes"]) for row in rows] == [
        *(("run", None), ("all_reduce", 4), ("all_reduce", 10**6)),
        *(("all_gather", 4), ("all_gather", 10**6)),
    ]


def test_rows_are_printed_when_they_are_measured():
    """What is printed before a job is ended by a wrong result, is there."""
    program = (
        "from mpidist import _cli\n"
        "from mpidist._cli.measuring import Bench\n"
        "check = Bench.check\n"
        "def wrong(self, work, expected, **calls):\n"
        "    check(self, work, 'wrong' if 'KiB' in work else expected, **calls)\n"
        "Bench.check = wrong\n"
        "_cli.run()\n"
    )
    argv = ["-c", program, "bench", "--quick", "all_reduce"]
    result = run_ranks(2, argv, timeout=TIMEOUT)
    assert result.returncode == 1
    assert re.search(r"^all_reduce +4 B .*\d\.\d\d$", result.stdout, re.M)
    expected = "all_reduce of 1 KiB: mpi4py gave a wrong result on rank 0, 1; nothing"
    assert result.stderr.count(expected) == 1, result.stderr


# --- measuring ----------------------------------------------------------------------


@pytest.fixture
def job():
    made = Job()
    yield made
    made.free()


@pytest.fixture
def bench(job):
    made = Bench(job, quick=True)
    yield made
    made.strategy.close()


@core_by_mpi
def test_calls_take_turns_and_all_ranks_agree(bench):
    seen: list[str] = []
    comm = bench.job.comm

    def call(name):
        return lambda: (seen.append(name), comm.allreduce(1))

    timings = bench.measure([call("a"), call("b")])
    for name, timing in zip("ab", timings, strict=True):
        assert 0 < timing.lower <= timing.median <= timing.upper
        assert seen.count(name) > timing.samples * timing.calls
        assert 1 <= timing.samples <= 3  # it is quick
    assert comm.allgather(timings) == [timings] * bench.job.size
    order = [name for name, _ in itertools.groupby(seen)]
    assert order[:2] == ["a", "b"]
    if timings[0].samples == 3:  # each is first in its turn: ab ba ab
        assert order[-4:] == ["a", "b", "a", "b"]
    done, undone = [], []
    (timing,) = bench.measure([lambda: done.append(1)], lambda: undone.append(1))
    assert timing.calls == 1
    assert len(done) == len(undone) > timing.samples


@pytest.mark.mpi
def test_an_interruption_does_not_set_the_calls_of_a_sample(bench, monkeypatch):
    took = itertools.chain([0.5, 0.5], itertools.repeat(1e-6))
    monkeypatch.setattr(bench, "_sample", lambda *_: next(took))
    (timing,) = bench.measure([lambda: None])
    assert timing.calls > 1


@pytest.mark.mpi
@pytest.mark.parametrize(("seconds", "samples"), [(1e-9, 3), (1e3, 31)])
def test_a_slow_call_gets_fewer_samples_but_not_too_few(job, seconds, samples):
    bench = Bench(job, None, seconds)
    (timing,) = bench.measure([job.comm.Barrier])
    assert timing.samples == samples
    bench.strategy.close()


@core_by_mpi
@pytest.mark.parametrize("expected", [1, [1.0, np.ones(3)]], ids=["number", "list"])
def test_a_wrong_result_on_one_rank_raises_on_all(bench, expected):
    last = bench.job.size - 1
    wrong = 2 if isinstance(expected, int) else [1.0, np.array([1.0, 1.0, 2.0])]

    def replica():
        bench.check("sum", expected, mpi4py=lambda: expected)
        found = wrong if bench.job.rank == last else expected
        bench.check("sum", expected, mpi4py=lambda: expected, mpidist=lambda: found)

    message = f"^sum: mpidist gave a wrong result on rank {last}; nothing was timed"
    with pytest.raises(WrongResultError, match=message):
        bench.strategy.run(replica)


@pytest.mark.mpi
def test_the_numbers_are_what_their_names_say(bench):
    for count in (1, 14, 200_000):
        mine = bench.numbers(count)
        assert mine.dtype == np.float32
        everywhere = bench.job.comm.allgather(mine)
        assert np.array_equal(bench.total(count), np.sum(everywhere, axis=0))
        for rank, numbers in enumerate(everywhere):
            assert np.array_equal(bench.numbers(count, rank), numbers)


@pytest.mark.mpi
def test_work_without_memory_is_left_out_on_all_ranks(job):
    bench = Bench(job)
    assert bench.has_room("a little", 4, copies=2)
    assert bench.notes == []
    assert not bench.has_room("a lot", 2**60, copies=2)
    assert "a lot was left out: it takes 2" in bench.notes[0]
    bench.strategy.close()


# --- rows and units -------------------------------------------------------------------


def test_a_timing_says_if_it_is_noisy():
    steady, noisy = Timing(2.0, 1.9, 2.1, 3, 1), Timing(1.0, 0.9, 1.3, 3, 1)
    assert (steady.is_noisy, noisy.is_noisy) == (False, True)
    assert Row("run", "run", None, steady, noisy).ratio == 0.5


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("4", 4), ("4B", 4), ("4.", 4), (".5KB", 500), ("64KiB", 65536)),
        *(("64 kib", 65536), ("1.5MB", 1_500_000), ("1e+06", 1_000_000)),
        ("1e-3MB", 1000),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "4X", "KiB", "0.1B", "1e", "1e999"])
def test_what_is_no_size(text):
    with pytest.raises(ArgumentTypeError, match="expected a size such as"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((5e-8, "0.05 us"), (8.4e-7, "0.84 us"), (1.234e-5, "12.3 us")),
        *((9.996e-4, "1.00 ms"), (0.1234, "123 ms")),
        *((2.0, "2.00 s"), (1234.0, "1,234 s")),
    ],
)
def test_times_are_shown_with_three_digits(seconds, text):
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(4, "4 B"), (2**16, "64 KiB"), (2**26, "64 MiB"), (437_928_960, "437.9 MB")],
)
def test_sizes_are_shown(nbytes, text):
    assert show_size(nbytes) == text
