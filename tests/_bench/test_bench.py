"""`mpidist bench`: the table on ranks, its parts, and the model. No time is judged."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from launching import run_ranks

from mpidist import _bench, _cli
from mpidist._bench import Aim, Record, Row, Timing

TIMEOUT = 200.0
MIB = 2**20
SMALL = _bench.Effort(0.01, most=3, fewest=1, sample_seconds=1e-5)


# --- the whole table --------------------------------------------------------------


def benched(ranks, path, *arguments):
    argv = ["-m", "mpidist", "bench", "--json", str(path), *arguments]
    return run_ranks(ranks, argv, timeout=TIMEOUT)


@pytest.mark.core
def test_the_table_has_all_rows(tmp_path, capsys):
    path = tmp_path / "r.json"
    result = benched(2, path, "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    record = _bench.read_record(str(path))
    assert [(one.work, one.nbytes) for one in record.rows] == [
        *(("all_reduce", n) for n in (4, 2**10, 2**14, 2**16, 2**18)),
        *(("all_reduce", n * MIB) for n in (1, 4, 16, 64)),
        ("ResNet-50 nest", 4 * 25_557_032),
        ("ResNet-50 nest in buffers_like", 4 * 25_557_032),
        ("20 arrays of 1 KiB", 20 * 2**10),
        *(("all_gather", n) for n in (4, 2**10, 2**14, 2**16, MIB, 16 * MIB)),
        ("empty run", None),
        ("empty merge_call", None),
        ("reduce of a number", None),
        ("update of 20 x 50k floats", 20 * 4 * 50_000),
        ("training step, with a commit", 2 * 4 * 256 * (784 + 10) + 8),
        ("commit", 4 * 2**10),
        ("commit", 4 * MIB),
    ]
    assert {one.bench for one in record.rows} == set(_bench.BENCHES)
    for one in record.rows:
        assert one.ratio == one.ours.median / one.raw.median > 0
        for timing in (one.raw, one.ours):
            assert 0 < timing.lower <= timing.median <= timing.upper
            assert 1 <= timing.samples <= 3
            assert timing.calls >= 1
    facts = record.facts
    assert (facts["ranks"], facts["nodes"]) == (2, 1)
    assert facts["software"]["mpi"].split()[0] in ("Open", "MPICH", "Intel")
    assert facts["transports"]["host"]["name"] in ("direct", "shared")
    if not facts["crowded"]:
        assert all(one.aim is not None for one in record.rows)
    assert "BERT-base was left out: it is too large for a quick run." in record.notes
    # One rank prints it; and what it prints is what is in the file.
    assert _bench.text_of(record) in result.stdout
    assert len(re.findall(r"^work +bytes +raw ", result.stdout, re.M)) == 1
    # The model takes the file.
    assert _cli.main(["bench", "model", "--fit", str(path)]) == 0
    origin = "assumed" if facts["crowded"] else "fitted"
    assert re.search(rf"^--alpha-node .*{origin}$", capsys.readouterr().out, re.M)


@pytest.mark.core
@pytest.mark.parametrize("ranks", [1, 3])
def test_some_benchmarks_and_sizes(tmp_path, ranks):
    path = tmp_path / "r.json"
    what = ["reduce", "all_reduce", "reduce", "all_gather", "--sizes", "4B,1MB"]
    result = benched(ranks, path, *what, "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(row["bench"], row["nbytes"]) for row in rows] == [
        *(("reduce", None), ("all_reduce", 4), ("all_reduce", 10**6)),
        *(("all_gather", 4), ("all_gather", 10**6)),
    ]
    assert ("One rank: nothing is communicated" in result.stdout) == (ranks == 1)
    if ranks == 1:
        assert {row["aim"] for row in rows} == {None}


# --- measuring ----------------------------------------------------------------------


@pytest.fixture
def job():
    made = _bench.Job()
    yield made
    made.free()


@pytest.mark.mpi
@pytest.mark.core
def test_calls_take_turns_and_all_ranks_agree(job):
    seen: list[str] = []

    def call(name):
        return lambda: (seen.append(name), job.comm.allreduce(1))

    timings = _bench.measure(job, [call("a"), call("b")], SMALL)
    for name, timing in zip("ab", timings, strict=True):
        assert 0 < timing.lower <= timing.median <= timing.upper
        assert seen.count(name) > timing.samples * timing.calls
    assert job.comm.allgather(timings) == [timings] * job.size
    order = [name for name, _ in itertools.groupby(seen)]
    assert order[:2] == ["a", "b"]
    if timings[0].samples == 3:  # each is first in its turn: ab ba ab
        assert order[-4:] == ["a", "b", "a", "b"]


@pytest.mark.mpi
def test_a_slow_call_gets_fewer_samples_but_not_too_few(job):
    effort = _bench.Effort(seconds=1e-9, most=50, fewest=3, sample_seconds=1e-6)
    (timing,) = _bench.measure(job, [job.comm.Barrier], effort)
    assert timing.samples == 3
    effort = dataclasses.replace(effort, seconds=1e3, most=5)
    (timing,) = _bench.measure(job, [job.comm.Barrier], effort)
    assert timing.samples == 5


@pytest.mark.mpi
@pytest.mark.core
def test_a_wrong_result_on_one_rank_raises_on_all(job):
    session = _bench.Session(job, None, SMALL)
    last = job.size - 1

    def replica():
        session.check("sum", mpi4py=True, mpidist=True)
        session.check("sum", mpi4py=True, mpidist=job.rank != last)

    expected = f"^sum: mpidist gave a wrong result on rank {last}; nothing was timed"
    with pytest.raises(_bench.WrongResultError, match=expected):
        session.strategy.run(replica)
    session.close()


@pytest.mark.mpi
def test_the_numbers_are_what_their_names_say(job):
    session = _bench.Session(job, None, SMALL)
    for count in (1, 14, 200_000):
        mine = session.numbers(count)
        assert mine.dtype == np.float32
        everywhere = job.comm.allgather(mine)
        assert np.array_equal(session.total(count), np.sum(everywhere, axis=0))
        assert np.array_equal(session.numbers_of_all(count), np.concatenate(everywhere))
    session.close()


@pytest.mark.mpi
def test_work_without_memory_is_left_out_on_all_ranks(job):
    session = _bench.Session(job, None, SMALL)
    assert session.has_room("a little", 4, copies=2)
    assert session.notes == []
    assert not session.has_room("a lot", 2**60, copies=2)
    assert "a lot was left out: it takes 2" in session.notes[0]
    session.close()


@pytest.mark.mpi
def test_a_problem_of_one_rank_is_raised_on_all(job):
    job.require(None)
    last = job.size - 1
    problem = "no file" if job.rank == last else None
    expected = f"^rank {last}: no file$" if job.size > 1 else "^no file$"
    with pytest.raises(_bench.UsageError, match=expected):
        job.require(problem)
    with pytest.raises(_bench.UsageError, match=r"^no file$"):
        job.require("no file")


# --- shapes, units, aims --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "numbers"),
    [
        ("ResNet-50", 161, 25_557_032),  # as torchvision counts them
        ("BERT-base", 199, 109_482_240),  # as Hugging Face counts them
    ],
)
def test_the_shapes_of_known_networks(name, tensors, numbers):
    shapes = _bench.MODELS[name]()
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes) == numbers


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
    [(4, "4 B"), (2**16, "64 KiB"), (2**26, "64 MiB"), (437_928_960, "437.9 MB")],
)
def test_sizes_are_shown(nbytes, text):
    assert _bench.show_size(nbytes) == text


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        (1, 1, [None] * 9),
        (2, 1, [1.0, 1.0, 0.5, 0.75, 0.75, 0.9, 0.9, 0.75, 0.5]),
        (4, 1, [1.3, 0.8, 0.8, 0.8, 0.8, 0.85, 0.85, 0.85, 0.4]),
        (32, 1, [1.0] * 9),
        (2, 2, [1.5, 1.5, 1.5, 1.5, 1.5, 1.1, 1.1, 1.1, 1.1]),
        (4, 2, [1.5, 1.5, 1.5, 1.5, 1.5, 1.1, 1.1, 0.8, 0.8]),
    ],
)
def test_the_aims_of_all_reduce_on_two_cores(ranks, nodes, expected):
    sizes = [4, 2**10, 2**14, 2**16, 2**18, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    aims = [_bench.aim_of("all_reduce", n, ranks, nodes, 2) for n in sizes]
    assert [None if aim is None else aim.factor for aim in aims] == expected


@pytest.mark.parametrize(
    ("kind", "nbytes", "text"),
    [
        ("nest", 10**8, "0.28"),
        ("nest in buffers_like", 10**8, "0.24"),
        ("small_nest", 20480, "1.00"),
        ("all_gather", 2**14, "1.30"),
        ("all_gather", 2**16, "1.00"),
        ("run", 0, "6 us"),
        ("merge_call", 0, "15 us"),
        ("reduce", 0, "raw + 3 us"),
        ("update", 4 * MIB, "1.20"),
        ("elastic", 2 * MIB, "1.03"),
        ("commit", 4 * MIB, "raw + 50 us"),
    ],
)
def test_the_other_aims_are_for_ranks_with_cores_of_their_own(kind, nbytes, text):
    assert str(_bench.aim_of(kind, nbytes, 2, 1, 2)) == text
    assert _bench.aim_of(kind, nbytes, 4, 1, 2) is None
    assert _bench.aim_of(kind, nbytes, 2, 2, 2) is None


def test_an_aim_is_met():
    assert Aim(0.5).is_met(2.0, 1.0)
    assert not Aim(0.5).is_met(2.0, 1.1)
    assert Aim(1.0, 3e-6).is_met(1e-6, 4e-6)
    assert not Aim(0.0, 6e-6).is_met(1e-3, 7e-6)


# --- records and the table ---------------------------------------------------------


def timing(seconds: float, upper: float | None = None) -> Timing:
    return Timing(seconds, seconds, seconds if upper is None else upper, 3, 1)


FACTS = {
    "ranks": 2,
    "nodes": 1,
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
    "transports": {"host": {"name": "shared", "text": "shared: one node"}},
}


def test_a_record_is_shown_and_survives_json(tmp_path):
    rows = [
        Row("all_reduce", "all_reduce", 4, timing(2e-6), timing(1e-6), Aim(0.5)),
        Row("all_reduce", "all_reduce", MIB, timing(1e-3), timing(2e-3), Aim(1.0)),
        Row("run", "empty run", None, timing(1e-6, 2e-6), timing(7e-6), Aim(0, 6e-6)),
        Row("update", "update", 100, timing(1e-6), timing(1e-6), None),
    ]
    record = Record(FACTS, rows, ["a note"])
    path = tmp_path / "r.json"
    path.write_text(record.to_json())
    assert _bench.read_record(str(path)) == record
    stored = json.loads(path.read_text())["rows"]
    assert [row["ratio"] for row in stored] == pytest.approx([0.5, 2.0, 7.0, 1.0])
    assert [row["is_met"] for row in stored] == [True, False, False, None]
    lines = _bench.text_of(record).splitlines()
    assert lines[4].split() == list(_bench.COLUMNS)
    assert [re.split(" {2,}", line) for line in lines[6:10]] == [
        ["all_reduce", "4 B", "2.00 us", "1.00 us", "0.50", "0.50"],
        ["all_reduce", "1 MiB", "1.00 ms", "2.00 ms", "2.00*", "1.00"],
        ["empty run", "1.00 us~", "7.00 us", "7.00*", "6 us"],
        ["update", "100 B", "1.00 us", "1.00 us", "1.00"],
    ]
    assert lines[-3:] == [
        "*: the aim is not reached.",
        "~: the quartiles are more than 30% of the median apart.",
        "a note",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("no json", "cannot be read"),
        ("[]", "is not what `mpidist bench --json` writes"),
        ('{"format": "mpidist-bench", "version": 1}', "has version 1 of the format"),
        ('{"format": "mpidist-bench", "version": 2}', "is damaged"),
        (
            '{"format": "mpidist-bench", "version": 2, "notes": [], "rows": [{}]}',
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


# --- the model --------------------------------------------------------------------

CLUSTER = {
    "alpha": 2e-6,
    "beta": 1e-10,
    "alpha_node": 1e-6,
    "beta_node": 3e-10,
    "alpha_shared": 9e-6,
    "beta_shared": 2e-10,
    "overhead": 5e-6,
}


def predicted(nbytes: int, ranks_per_node: int, ranks: int) -> Any:
    rows = _bench.predict(CLUSTER, [nbytes], ranks_per_node, ranks)
    return rows[-1]


def test_the_model_by_hand_on_one_node():
    n = 2**20
    found = predicted(n, 8, 4)
    assert (found.ranks, found.nodes, found.nbytes) == (4, 1, n)
    rabenseifner = 2 * 2 * 1e-6 + 2 * 3 / 4 * n * 3e-10
    assert found.mpi4py == pytest.approx(rabenseifner)
    copies = 3 / 4 + 5 / 8 + 3 / 4
    assert found.mpidist == pytest.approx(9e-6 + copies * n * 2e-10)


def test_the_model_by_hand_on_several_nodes():
    n = 4
    found = predicted(n, 8, 64)
    assert found.nodes == 8
    doubling = 3 * (1e-6 + n * 3e-10) + 3 * (2e-6 + 8 * n * 1e-10)
    assert found.mpi4py == pytest.approx(doubling)
    on_node = 9e-6 + (1 + 3 * 7 / 2) * n * 2e-10
    header = 3 * (2e-6 + 64 * 1e-10)
    between = 3 * (2e-6 + n * 1e-10)
    assert found.mpidist == pytest.approx(on_node + between + header)


def test_across_nodes_the_result_is_copied_out_as_a_whole():
    n = 2**20
    found = predicted(n, 4, 8)
    between = min(2 * 2e-6 + n * 1e-10, 2e-6 + n * 1e-10)
    header = 2e-6 + 64 * 1e-10
    on_node = 9e-6 + (3 / 4 + 5 / 8 + 1) * n * 2e-10
    assert found.mpidist == pytest.approx(on_node + between + header)


def test_one_rank_on_each_node_goes_by_mpi():
    # The formulas of Thakur, Rabenseifner and Gropp as they are.
    n, p = 2**30, 8
    found = predicted(n, 1, p)
    expected = 2 * 3 * 2e-6 + 2 * (p - 1) / p * n * 1e-10
    assert found.mpi4py == pytest.approx(expected)
    assert found.mpidist == pytest.approx(expected + 5e-6)
    assert predicted(4, 1, p).mpi4py == pytest.approx(3 * (2e-6 + 4e-10))
    times = [predicted(2**20, 16, 2**k).mpidist for k in range(1, 13)]
    assert times == sorted(times)


def measured(nodes: int, local: int, transport: str) -> Record:
    """Return what a run would give if the model were right."""
    rows = []
    for n in [4 * 8**k for k in range(9)]:
        (*_, one) = _bench.predict(CLUSTER, [n], local, nodes * local)
        ours = one.mpidist if transport == "shared" else one.mpi4py + 5e-6
        work = "all_reduce"
        rows.append(Row(work, work, n, timing(one.mpi4py), timing(ours), None))
    facts = {
        **FACTS,
        "ranks": nodes * local,
        "nodes": nodes,
        "transports": {"host": {"name": transport, "text": transport}},
    }
    return Record(facts, rows, [])


@pytest.mark.parametrize(
    ("records", "names"),
    [
        (
            [(1, 4, "shared")],
            ["alpha_node", "beta_node", "alpha_shared", "beta_shared"],
        ),
        (
            [(1, 4, "direct"), (8, 4, "direct")],
            ["alpha", "beta", "alpha_node", "beta_node", "overhead"],
        ),
        ([(8, 1, "direct")], ["alpha", "beta", "overhead"]),
        (
            [(1, 4, "shared"), (8, 4, "shared")],
            [name for name in CLUSTER if name != "overhead"],
        ),
    ],
)
def test_fitting_finds_the_figures(records, names):
    fitted, errors = _bench.fit([measured(*one) for one in records])
    assert set(fitted) == set(names)
    for name in names:
        assert fitted[name] == pytest.approx(CLUSTER[name], rel=1e-6)
    assert max(errors.values()) < 1e-6


def test_fitting_gives_no_negative_figures_and_says_how_far_it_is_off():
    record = measured(1, 2, "shared")
    rows = [  # as no model would have it
        dataclasses.replace(one, raw=timing(1e-3 / k), ours=timing(1e-3 / k))
        for k, one in enumerate(record.rows, 1)
    ]
    fitted, errors = _bench.fit([dataclasses.replace(record, rows=rows)])
    assert min(fitted.values()) >= 0
    assert errors["mpi4py"] > 0.1


@pytest.mark.parametrize(
    ("nodes", "local", "way"), [(8, 1, "direct"), (4, 4, "shared")]
)
def test_a_comparison_has_what_was_measured_and_what_the_figures_say(nodes, local, way):
    record = measured(nodes, local, way)
    figures = {**CLUSTER, "overhead": 5e-6}
    found = _bench.compare(figures, [record])
    assert [(one.ranks, one.nodes, one.nbytes) for one in found] == [
        (nodes * local, nodes, row.nbytes) for row in record.rows
    ]
    for one, row in zip(found, record.rows, strict=True):
        assert one.mpi4py == (row.raw.median, pytest.approx(row.raw.median))
        assert one.mpidist == (row.ours.median, pytest.approx(row.ours.median))
    slower = _bench.compare({**figures, "alpha": 2 * figures["alpha"]}, [record])
    assert slower[0].mpi4py[1] > 1.5 * found[0].mpi4py[1]


def test_the_command_of_a_comparison(capsys, tmp_path):
    path, written = tmp_path / "r.json", tmp_path / "m.json"
    path.write_text(measured(8, 1, "direct").to_json())
    arguments = ["--fit", str(path), "--check", str(path), "--json", str(written)]
    assert _cli.main(["bench", "model", *arguments]) == 0
    text = capsys.readouterr().out
    assert "an all_reduce: measured, and predicted by the figures" in text
    assert len(re.findall(r"^8 +8 .* 1\.00 .* 1\.00$", text, re.M)) == 9, text
    assert len(json.loads(written.read_text())["comparisons"]) == 9
    path.write_text(dataclasses.replace(measured(8, 1, "direct"), rows=[]).to_json())
    assert _cli.main(["bench", "model", "--check", str(path)]) == 2
    assert "--check: no results of all_reduce on two ranks" in capsys.readouterr().err


@pytest.mark.parametrize("facts", [{"ranks": 1}, {"crowded": True}])
def test_fitting_needs_results_of_several_ranks_with_cores(facts):
    record = measured(1, 2, "shared")
    record = dataclasses.replace(record, facts={**record.facts, **facts})
    with pytest.raises(_bench.UsageError, match="no results of all_reduce on two"):
        _bench.fit([record])


def test_the_command_of_the_model(capsys, tmp_path):
    path = tmp_path / "m.json"
    arguments = ["--alpha", "3us", "--beta", "10GB/s", "--ranks-per-node", "4"]
    arguments += ["--ranks", "64", "--sizes", "4B,1MB", "--json", str(path)]
    assert _cli.main(["bench", "model", *arguments]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^--alpha +3.00 us +3e-06 s +given$", text, re.M)
    assert re.search(r"^--overhead .* assumed$", text, re.M)
    whole = json.loads(path.read_text())
    assert whole["figures"]["beta"] == pytest.approx(1e-10)
    rows = whole["predictions"]
    assert [(row["ranks"], row["nodes"]) for row in rows[::2]] == [
        *((2, 1), (4, 1), (8, 2), (16, 4), (32, 8), (64, 16))
    ]
    assert min(row[way] for row in rows for way in ("mpi4py", "mpidist")) > 0
    assert _cli.main(["bench", "model"]) == 0
    assert "\n4,096    256 " in capsys.readouterr().out
