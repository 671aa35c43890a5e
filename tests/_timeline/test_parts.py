"""Parts of timelines: one clock, one job, and files that were not finished."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mpidist._timeline import files, plot, summary
from mpidist._timeline.observer import Span
from mpidist._timeline.recorder import (
    END,
    FORMAT,
    PROCESS,
    STRATEGY,
    Recorder,
    event_of,
    metadata,
    part_of,
)


def call(number, start, end, text="all_reduce SUM float64 ()", rank=0, **more):
    fields = {
        "strategy": 1,
        "kind": "call",
        "nbytes": 8,
        "route": "eager",
        "raised": "",
    }
    return Span(
        rank, number=number, start=start, end=end, text=text, **{**fields, **more}
    )


def write(path, rank, events, *, size=2, identity="a", host="", boot="x", end=True):
    """Write a part, as a process on that host would."""
    host = host or f"host{rank}"
    about = {"host": host, "boot": boot, "epoch": 0.0, "format": FORMAT}
    lines = [
        metadata(PROCESS, rank, **about),
        metadata(STRATEGY, rank, 1, identity=identity, rank=rank, size=size),
        *(x if isinstance(x, list) else {**event_of(x), "pid": rank} for x in events),
        *([metadata(END, rank)] if end else []),
    ]
    text = "[\n" + "".join(f"{json.dumps(line)},\n" for line in lines)
    part_of(path, rank).write_text(text, encoding="utf-8")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.json"


def test_a_recorder_writes_what_is_read(path):
    recorder = Recorder(path)
    recorder.open(3)
    recorder.add_strategy(1, "a", 1, 2)
    events = [
        call(1, 1.0, 2.0, rank=3),
        call(2, 2.0, 2.5, rank=3, raised="ValueError"),
    ]
    for event in events:
        recorder.see("end", event)
    (name,) = files.find_parts(path)
    # An event that raised is written at once: the job may end.
    assert files.read_part(name).events == events
    assert not files.read_part(name).complete
    recorder.close()
    recorder.see("end", call(3, 3.0, 4.0))
    found = files.read_part(name)
    assert found.complete
    assert found.events == events
    assert found.rank == 3
    (made,) = found.strategies.values()
    assert (made["identity"], made["rank"], made["size"]) == ("a", 1, 2)


@pytest.mark.parametrize("drift", [0.0, 1e-4])
def test_clocks_of_hosts_become_one(path, drift):
    rng = np.random.default_rng(1)
    ends = np.cumsum(rng.uniform(0.001, 0.1, 2000))
    shifted = 5000.0 + (1 + drift) * ends + rng.exponential(2e-5, 2000)
    write(path, 0, [call(n, e - 5e-4, e) for n, e in enumerate(ends)])
    write(path, 1, [call(n, e - 2e-4, e) for n, e in enumerate(shifted)], boot="y")
    one, two = (files.read_part(name) for name in files.find_parts(path))
    files.align([one, two])
    errors = [b.end - a.end for a, b in zip(one.events, two.events, strict=True)]
    # Exact up to the latencies of messages, and the drift within a window of time.
    assert max(map(abs, errors)) < 5e-4
    assert abs(np.median(errors)) < 5e-5


def test_clocks_of_one_host_are_not_touched(path):
    write(path, 0, [call(1, 1.0, 2.0)])
    write(path, 1, [call(1, 1.5, 7.0)])
    read = [files.read_part(name) for name in files.find_parts(path)]
    files.align(read)
    assert read[1].events == [call(1, 1.5, 7.0, rank=1)]


def test_who_waited_for_whom(path):
    write(path, 0, [call(1, 10.0, 13.1), call(2, 14.0, 15.0, kind="message")])
    write(path, 1, [call(1, 13.0, 13.1), call(2, 13.5, 15.0, kind="message")])
    found = files.load(path)
    waits = [(s.rank, s.number, round(s.waited, 6), s.waited_for) for s in found.spans]
    assert waits == [(0, 1, 3.0, 1), (1, 1, 0.0, -1), (1, 2, 1.5, 0), (0, 2, 0.0, -1)]
    assert found.spans[0].start == 0.0  # from the first event


def test_what_is_left_of_an_earlier_job_is_ignored(path):
    write(path, 2, [call(1, 1.0, 2.0)], size=3, identity="old")
    write(path, 0, [call(1, 1.0, 2.0)])
    write(path, 1, [call(1, 1.0, 2.0)])
    assert sorted(files.load(path).hosts) == [0, 1]
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_a_part_that_was_cut_off(path):
    write(path, 0, [call(1, 1.0, 2.0), call(2, 2.0, 3.0)], end=False)
    write(path, 1, [call(1, 1.0, 2.0)])
    name = part_of(path, 0)
    text = name.read_text()
    name.write_text(text[:-10])
    found = files.load(path)
    assert [s.number for s in found.spans if s.rank == 0] == [1]
    # They stay: the job may still run, or more may be found.
    assert len(files.find_parts(path)) == 2
    name.write_text(text)
    assert [s.number for s in files.load(path).spans if s.rank == 0] == [1, 2]


@pytest.mark.parametrize(
    "text", ["", "{}\n", "[1, 2]\n", "[\nno JSON\n", '[\n{"args": {"format": 1}},\n']
)
def test_other_files_are_no_parts(path, text):
    part_of(path, 0).write_text(text)
    with pytest.raises(
        files.FormatError, match=r"run\.json\.rank0 is not part of a timeline"
    ):
        files.load(path)


def test_a_damaged_part_is_named(path):
    write(path, 0, [[1, 2, 3]])
    with pytest.raises(files.FormatError, match=r"run\.json\.rank0 is damaged"):
        files.load(path)


def test_a_timeline_is_read_as_it_was_written(path):
    write(path, 0, [call(1, 10.0, 13.1), call(2, 14.0, 15.0, raised="ValueError")])
    write(path, 1, [call(1, 13.0, 13.1, text="x " * 100)])
    merged = files.load(path)
    found = files.read(path)
    assert found.hosts == merged.hosts
    for ours, read in zip(merged.spans, found.spans, strict=True):
        assert (read.start, read.end) == pytest.approx((ours.start, ours.end), abs=1e-8)
        assert read.waited == pytest.approx(ours.waited, abs=1e-8)
        assert read.text == ours.text.strip()
        assert (read.kind, read.raised) == (ours.kind, ours.raised)


def test_other_files_are_no_timelines(path):
    for text in ("", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}'):
        path.write_text(text)
        with pytest.raises(files.FormatError, match="not a timeline of mpidist"):
            files.read(path)


@pytest.fixture
def timeline():
    def span(rank, number, start, end, waited=0.0, waited_for=-1):
        text = f"update of v [#{number}]"
        common = {"nbytes": 100, "route": "shared", "text": text}
        some = {"waited": waited, "waited_for": waited_for}
        return Span(rank, 1, "call", number, start, end, **common, **some)

    return files.Timeline(
        {0: "a", 1: "a", 2: "b"},
        [
            span(0, 1, 0.0, 3.0, 2.5, 1),
            span(2, 1, 1.0, 3.0, 1.5, 1),
            span(1, 1, 2.5, 3.0),
            span(1, 2, 4.0, 4.5, 0.25, 0),
            span(0, 2, 4.25, 4.5),
        ],
    )


def test_where_the_time_went(timeline):
    times = summary.times_of(timeline)
    assert times[0] == summary.RankTime(
        waiting=2.5, in_calls=0.75, outside=1.25, caused=0.125, late=1
    )
    assert times[1] == summary.RankTime(
        waiting=0.25, in_calls=0.75, outside=1.0, caused=2.0, late=1
    )
    assert times[2] == summary.RankTime(waiting=1.5, in_calls=0.5)


def test_calls_that_were_begun_are_beside_the_program(tmp_path):
    """They have a thread of their own, and the program's wait for them is a wait."""
    some = {"nbytes": 8, "route": "mpi", "text": "all_reduce"}
    spans = [
        Span(0, 1, "call", 1, 0.0, 1.0, **some),
        Span(0, 1, "call", 2, 2.0, 7.0, **some, waited=1.0, begun=True),
        Span(0, 1, "waits for begun", 0, 6.0, 7.0, 0, "", text="the wait for it"),
    ]
    found = files.Timeline({0: "a"}, spans)
    assert summary.times_of(found)[0] == summary.RankTime(in_calls=2.0, outside=5.0)
    (calls,) = summary.calls_of(found)
    assert calls == spans[:2]
    files.write(found, tmp_path / "run.json")
    assert files.load(tmp_path / "run.json").spans == spans
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["strategy 1", "strategy 1, asynchronous calls"]
    threads = {e["args"]["call"]: e["tid"] for e in events if e["ph"] == "X"}
    assert threads[0] == threads[1] != threads[2]
    pytest.importorskip("matplotlib")
    for number in (1, 3):  # without and with those that were begun
        plot.draw(files.Timeline({0: "a"}, spans[:number]), tmp_path / "run.svg")
        text = (tmp_path / "run.svg").read_text()
        assert (plot._BEGUN.lower() in text) == (number == 3)


def test_the_summary(timeline):
    text = summary.summarize(timeline)
    assert "timeline of 3 ranks on 2 hosts, 4.50 s in all" in text
    assert "slowest: rank 1: each other rank waited 2.00 s for it" in text
    lines = text.splitlines()
    first = lines[lines.index("largest waits:") + 1]
    assert first.split(maxsplit=1)[1] == (
        "2.50 s at 0.00 s: rank 0 for rank 1 in call 1, update of v [#1]"
    )
    assert lines[-1].split(maxsplit=6) == [
        *("2", "6.25", "s", "4.25", "s", "200"),
        "update of v",
    ]


def test_the_summary_of_nothing():
    assert summary.summarize(files.Timeline({0: "a"}, [])) == (
        "timeline of 1 rank: no calls\n"
    )


def test_the_picture(timeline, tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw(timeline, tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text()
    assert text.count("<path") > 10
    with pytest.raises(ValueError, match="xyz"):
        plot.draw(timeline, tmp_path / "run.xyz")
