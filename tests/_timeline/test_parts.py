"""Parts of timelines: one clock, one job, files that were not finished; the command."""

from __future__ import annotations

import concurrent.futures
import json

import numpy as np
import pytest

from mpidist import _cli
from mpidist._timeline import files, plot, recorder as recorder_module, summary
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


def call(number, start, end, rank=0, **more):
    fields = {"strategy": 1, "kind": "call", "nbytes": 8, "route": "eager"}
    fields["text"] = "all_reduce SUM float64 ()"
    return Span(rank, number=number, start=start, end=end, **{**fields, **more})


def write(path, rank, events, *, size=2, identity="a", boot="x", epoch=0.0, end=True):
    """Write a part, as a process on a host would."""
    about = {"host": f"host{rank}", "size": size, "boot": boot, "epoch": epoch}
    about["format"] = FORMAT
    lines = [
        metadata(PROCESS, rank, **about),
        metadata(STRATEGY, rank, 1, identity=identity, rank=rank, size=size),
        *(x if isinstance(x, list) else {**event_of(x), "pid": rank} for x in events),
        *([metadata(END, rank)] if end else []),
    ]
    text = "[\n" + "".join(f"{json.dumps(line)},\n" for line in lines)
    part_of(path, rank).write_text(text, encoding="utf-8")


def parts_of(path):
    return [files.read_part(name) for name in files.find_parts(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.json"


def test_a_recorder_writes_what_is_read(path):
    recorder = Recorder(path)
    recorder.open(3, 4)
    recorder.add_strategy(1, "a", 1, 2)
    events = [call(1, 1.0, 2.0, 3), call(2, 2.0, 2.5, 3, raised="ValueError")]
    for event in events:
        recorder.see("end", event)
    # An event that raised is written at once: the job may end.
    (found,) = parts_of(path)
    assert (found.events, found.complete) == (events, False)
    recorder.close()
    recorder.see("end", call(3, 3.0, 4.0))
    (found,) = parts_of(path)
    assert (found.events, found.complete) == (events, True)
    assert (found.rank, found.size) == (3, 4)
    (made,) = found.strategies.values()
    assert (made["identity"], made["rank"], made["size"]) == ("a", 1, 2)


def test_threads_record_at_once(path, monkeypatch):
    recorder = Recorder(path)
    recorder.open(0, 1)
    calls = range(5000)
    monkeypatch.setattr(recorder_module, "_FLUSH_EVENTS", 1)

    def record(first):
        for number in calls:
            recorder.see("end", call(first + number, 1.0, 2.0))

    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(record, (0, len(calls))))
    recorder.close()
    (found,) = parts_of(path)
    numbers = sorted(span.number for span in found.events)
    assert numbers == list(range(2 * len(calls)))


@pytest.mark.parametrize("drift", [0.0, 1e-4])
def test_clocks_of_hosts_become_one(path, drift):
    rng = np.random.default_rng(1)
    ends = np.cumsum(rng.uniform(0.001, 0.1, 2000))
    shifted = 5000.0 + (1 + drift) * ends + rng.exponential(2e-5, 2000)
    write(path, 0, [call(n, e - 5e-4, e) for n, e in enumerate(ends)])
    write(path, 1, [call(n, e - 2e-4, e) for n, e in enumerate(shifted)], boot="y")
    one, two = parts_of(path)
    files.align([one, two])
    errors = [b.end - a.end for a, b in zip(one.events, two.events, strict=True)]
    # Exact up to the latencies of messages, and the drift within a window of time.
    assert max(map(abs, errors)) < 5e-4
    assert abs(np.median(errors)) < 5e-5


def test_clocks_without_a_call_in_common_go_by_the_time_of_day(path):
    write(path, 0, [call(1, 1.0, 2.0)], epoch=1000.0)
    write(path, 1, [call(2, 5.0, 6.0)], epoch=997.0, boot="y")
    read = parts_of(path)
    files.align(read)
    assert read[1].events == [call(2, 2.0, 3.0, 1)]


def test_clocks_of_one_host_are_not_touched(path):
    write(path, 0, [call(1, 1.0, 2.0)])
    write(path, 1, [call(1, 1.5, 7.0)])
    read = parts_of(path)
    files.align(read)
    assert read[1].events == [call(1, 1.5, 7.0, 1)]


def test_who_waited_for_whom(path):
    """And the merged timeline is read as it was written."""
    write(path, 0, [call(1, 10.0, 13.1), call(2, 14.0, 15.0, kind="message")])
    failed = call(2, 13.5, 15.0, kind="message", raised="ValueError", text="x " * 100)
    write(path, 1, [call(1, 13.0, 13.1), failed])
    merged = files.load(path)
    waits = [(s.rank, s.number, round(s.waited, 6), s.waited_for) for s in merged.spans]
    assert waits == [(0, 1, 3.0, 1), (1, 1, 0.0, -1), (1, 2, 1.5, 0), (0, 2, 0.0, -1)]
    assert merged.spans[0].start == 0.0  # from the first event
    found = files.read(path)
    assert found.hosts == merged.hosts == {0: "host0", 1: "host1"}
    for ours, read in zip(merged.spans, found.spans, strict=True):
        assert (read.start, read.end) == pytest.approx((ours.start, ours.end), abs=1e-8)
        assert read.waited == pytest.approx(ours.waited, abs=1e-8)
        assert read.text == ours.text.strip()
        assert (read.kind, read.raised) == (ours.kind, ours.raised)


def test_what_is_left_of_an_earlier_job_is_ignored(path):
    write(path, 2, [call(1, 1.0, 2.0)], size=3, identity="old")
    write(path, 0, [call(1, 1.0, 2.0)])
    write(path, 1, [call(1, 1.0, 2.0)])
    assert sorted(files.load(path).hosts) == [0, 1]
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_a_wait_in_a_call_that_has_ended_is_counted_once(path):
    """Not so that of a call in which the process was killed."""
    begun = call(0, 1.0, 1.1, kind="waits for begun")
    waits = [call(n, end - 3.0, end, kind="waits") for n, end in ((1, 4.0), (2, 9.0))]
    ended = call(1, 1.0, 5.0)
    section = call(1, 0.5, 5.0, kind="section")
    write(path, 0, [begun, waits[0], ended, section, waits[1]], end=False)
    write(path, 1, [call(1, 4.5, 5.0)], end=False)
    time = summary.times_of(files.load(path))[0]
    assert time == summary.RankTime(waiting=6.5, in_calls=0.5, outside=1.0)


def test_a_part_that_was_cut_off(path):
    write(path, 0, [call(1, 1.0, 2.0), call(2, 2.0, 3.0)], end=False)
    write(path, 1, [call(1, 1.0, 2.0)])
    name = part_of(path, 0)
    text = name.read_text()
    name.write_text(text[:-10])
    assert [s.number for s in files.load(path).spans if s.rank == 0] == [1]
    # They stay: the job may still run, or more may be found.
    assert len(files.find_parts(path)) == 2
    name.write_text(text)
    assert [s.number for s in files.load(path).spans if s.rank == 0] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((x, "not part of a timeline") for x in ("", "{}\n", "[1, 2]\n", "[\nno\n")),
        ('[\n{"args": {"format": 1}},\n', "not part of a timeline"),
        (None, "damaged"),
    ],
)
def test_other_files_are_no_parts(path, text, message):
    write(path, 0, [[1, 2, 3]])
    if text is not None:
        part_of(path, 0).write_text(text)
    with pytest.raises(files.FormatError, match=rf"run\.json\.rank0 is {message}"):
        files.load(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}'])
def test_other_files_are_no_timelines(path, text):
    path.write_text(text)
    with pytest.raises(files.FormatError, match="not a timeline of mpidist"):
        files.read(path)


@pytest.mark.parametrize(
    "damage", [lambda x: x[:-9], lambda x: x[:20] + b"?" * 20 + x[40:], lambda x: b"{}"]
)
def test_a_compressed_timeline_that_is_damaged(path, damage):
    path = path.with_suffix(".json.gz")
    files.write(files.Timeline({0: "a"}, [call(1, 0.0, 1.0)]), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(files.FormatError, match="not a timeline of mpidist"):
        files.read(path)


# --- what is said of a timeline -------------------------------------------------------


@pytest.fixture
def timeline():
    def update(number, start, end, rank, waited=0.0, by=-1):
        more = {"text": f"update of v [#{number}]", "nbytes": 100}
        return call(number, start, end, rank, waited=waited, waited_for=by, **more)

    spans = [
        update(1, 0.0, 3.0, 0, 2.5, 1),
        update(1, 1.0, 3.0, 2, 1.5, 1),
        update(1, 2.5, 3.0, 1),
        update(2, 4.0, 4.5, 1, 0.25, 0),
        update(2, 4.25, 4.5, 0),
    ]
    return files.Timeline({0: "a", 1: "a", 2: "b"}, spans)


def test_the_summary(timeline, path, capsys):
    times = summary.times_of(timeline)
    assert times == {
        0: summary.RankTime(2.5, in_calls=0.75, outside=1.25, caused=0.125, late=1),
        1: summary.RankTime(0.25, in_calls=0.75, outside=1.0, caused=2.0, late=1),
        2: summary.RankTime(1.5, in_calls=0.5),
    }
    files.write(timeline, path)
    assert _cli.main(["timeline", str(path)]) == 0
    lines, errors = capsys.readouterr()
    assert errors == ""
    lines = lines.splitlines()
    assert lines[0] == "timeline of 3 ranks on 2 hosts, 4.50 s in all"
    slowest = "slowest: rank 1: each other rank waited 2.00 s for it; it came last to 1"
    assert f"{slowest} calls" in lines
    first = lines[lines.index("largest waits:") + 1]
    assert first.split(maxsplit=1)[1] == (
        "2.50 s at 0.00 s: rank 0 for rank 1 in call 1, update of v [#1]"
    )
    assert lines[-1].split(maxsplit=6) == [
        *("2", "6.25", "s", "4.25", "s", "200"),
        "update of v",
    ]


def test_the_summary_of_one_rank():
    found = files.Timeline({0: "a"}, [])
    assert summary.summarize(found) == "timeline of 1 rank: no calls\n"
    found.spans.append(call(1, 0.0, 1.0))
    text = summary.summarize(found)
    assert text.startswith("timeline of 1 rank on 1 host, 1.00 s in all\n")
    assert "largest waits:\n  none\n" in text
    assert "slowest" not in text


def test_the_picture(timeline, path, capsys):
    pytest.importorskip("matplotlib")
    files.write(timeline, path)
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    assert _cli.main(["timeline", str(path), "--plot", str(png)]) == 0
    assert png.read_bytes()[:4] == b"\x89PNG"
    plot.draw(timeline, svg)
    assert svg.read_text().count("<path") > 10
    assert _cli.main(["timeline", str(path), "--plot", "run.xyz"]) == 2
    assert "xyz" in capsys.readouterr().err


def test_calls_that_were_begun_are_beside_the_program(path):
    """They have a thread of their own, and the program's wait for them is a wait."""
    spans = [
        call(1, 0.0, 1.0),
        call(2, 2.0, 7.0, waited=1.0, begun=True),
        call(0, 6.0, 7.0, kind="waits for begun", nbytes=0, route=""),
    ]
    found = files.Timeline({0: "a"}, spans)
    assert summary.times_of(found)[0] == summary.RankTime(in_calls=2.0, outside=5.0)
    (calls,) = summary.calls_of(found)
    assert calls == spans[:2]
    files.write(found, path)
    assert files.load(path).spans == spans
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["strategy 1", "strategy 1, asynchronous calls"]
    threads = {e["args"]["call"]: e["tid"] for e in events if e["ph"] == "X"}
    assert threads[0] == threads[1] != threads[2]
    pytest.importorskip("matplotlib")
    picture = path.with_suffix(".svg")
    for number in (1, 3):  # without and with those that were begun
        plot.draw(files.Timeline({0: "a"}, spans[:number]), picture)
        assert (plot._BEGUN.lower() in picture.read_text()) == (number == 3)
