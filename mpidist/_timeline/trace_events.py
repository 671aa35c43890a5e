"""A timeline as a file that Perfetto and Chrome show, and back.

Source of the format: Google, "Trace Event Format" (2016), complete events (phase X) and
metadata events (phase M). Times in the file are in microseconds. A process is a rank; a
thread is a strategy of it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from mpidist._timeline.observer import Span
from mpidist._timeline.spans import Timeline

_LONGEST_NAME: Final = 60
_MICROSECONDS: Final = 1e6


class FormatError(ValueError):
    """A file is not a timeline of mpidist."""


def write(timeline: Timeline, path: Path) -> None:
    """Write a timeline; compressed, if the name ends in ".gz".

    Raises:
        OSError: if it cannot be written.
    """
    with _open(path, "wt") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": {"source": "mpidist"},\n')
        file.write('"traceEvents": [\n')
        separator = ""
        for event in _events_of(timeline):
            file.write(f"{separator}{json.dumps(event)}")
            separator = ",\n"
        file.write("\n]}\n")


def _events_of(timeline: Timeline) -> Iterator[dict[str, Any]]:
    strategies = sorted({(span.rank, span.strategy) for span in timeline.spans})
    for rank, host in sorted(timeline.hosts.items()):
        name = {"name": f"rank {rank} on {host}", "host": host}
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": name}
        order = {"sort_index": rank}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": order}
    for rank, number in strategies:
        name = {"name": f"strategy {number}"}
        where = {"pid": rank, "tid": number}
        yield {"ph": "M", "name": "thread_name", **where, "args": name}
    for span in timeline.spans:
        yield _event_of(span)


def _event_of(span: Span) -> dict[str, Any]:
    text = " ".join(span.text.split())
    args: dict[str, Any] = {
        "call": span.number,
        "text": text,
        "bytes": span.nbytes,
        "route": span.route,
    }
    if span.waited_for >= 0:
        args["waited for rank"] = span.waited_for
    if span.waited:
        args["waited us"] = round(span.waited * _MICROSECONDS, 3)
    if span.raised:
        args["raised"] = span.raised
    return {
        "ph": "X",
        "name": text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}...",
        "cat": span.kind,
        "pid": span.rank,
        "tid": span.strategy,
        "ts": round(span.start * _MICROSECONDS, 3),
        "dur": round(span.seconds * _MICROSECONDS, 3),
        "args": args,
    }


def read(path: Path) -> Timeline:
    """Read a timeline that `write` wrote.

    Raises:
        FormatError: if it is none.
        OSError: if it cannot be read.
    """
    try:
        with _open(path, "rt") as file:
            content = json.load(file)
        hosts, spans = {}, []
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                spans.append(_span_of(event))
            elif event["name"] == "process_name":
                hosts[event["pid"]] = event["args"]["host"]
    except (ValueError, TypeError, KeyError, EOFError, gzip.BadGzipFile) as error:
        raise FormatError(
            f"{path} is not a timeline of mpidist ({type(error).__name__}: {error})"
        ) from None
    return Timeline(hosts, spans)


def _span_of(event: dict[str, Any]) -> Span:
    args = event["args"]
    start = event["ts"] / _MICROSECONDS
    return Span(
        rank=event["pid"],
        strategy=event["tid"],
        kind=event["cat"],
        number=args["call"],
        start=start,
        end=start + event["dur"] / _MICROSECONDS,
        nbytes=args["bytes"],
        route=args["route"],
        raised=args.get("raised", ""),
        text=args["text"],
        waited=args.get("waited us", 0.0) / _MICROSECONDS,
        waited_for=args.get("waited for rank", -1),
    )


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8", compresslevel=6)  # type: ignore[return-value]  # a text file, by its mode
    return open(path, mode, encoding="utf-8")
