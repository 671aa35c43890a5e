"""The parts of a timeline as files, and the file that they become."""

from __future__ import annotations

from pathlib import Path

from mpidist._timeline import parts as of_parts
from mpidist._timeline import trace_events
from mpidist._timeline.parts import Part
from mpidist._timeline.spans import Timeline, merge


def read_parts(path: Path) -> list[Part]:
    """Return the parts of the last job that recorded ``path``.

    Raises:
        PartError: if a file is no part.
        OSError: if one cannot be read.
    """
    found = [of_parts.read_part(part) for part in of_parts.find_parts(path)]
    return of_parts.of_one_job(found)


def merge_files(path: Path, parts: list[Part]) -> Timeline:
    """Write the timeline ``path`` from its parts; delete these if they are complete.

    Raises:
        OSError: if the timeline cannot be written.
    """
    timeline = merge(parts)
    trace_events.write(timeline, path)
    if of_parts.are_complete(parts):
        for part in of_parts.find_parts(path):
            part.unlink(missing_ok=True)
    return timeline


def load(path: Path) -> Timeline:
    """Return the timeline ``path``, merged from its parts if there are any.

    Raises:
        FormatError, PartError: if a file is something else.
        OSError: if a file is not there, or cannot be read or written.
    """
    if parts := read_parts(path):
        return merge_files(path, parts)
    return trace_events.read(path)
