"""A `Call`; the `Report` of each rank if calls differ; what each then raises (`judge`).

The ranks exchange the reports in `reports`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import re
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from mpidist._base import reporting
from mpidist._base.errors import (
    PACKAGE,
    CollectiveMismatchError,
    RemoteTraceback,
    ReplicaError,
    format_exception,
    format_ranks,
    is_of_library,
    on_rank,
)
from mpidist._base.fingerprint import fingerprint as fingerprint

_T = TypeVar("_T")
_CALLERS: Final = ("torch", "jax")  # of mpidist, for the user
_LONGEST_CALL: Final = 360
_LONGEST_SUMMARY: Final = 200
_MOST_GROUPS: Final = 12  # of ranks whose calls differ, in a message
_MOST_TRACES: Final = 3
# Of an exception that is sent to other ranks: characters, and bytes of its pickle.
_LONGEST_TRACE: Final = 100_000
_LARGEST_EXCEPTION: Final = 2**20
ErrorKind = Literal["none", "raised", "invalid", "agreed", "exit"]
Key: TypeAlias = tuple[int, int]
"""Of a variable; the same on all ranks."""


class Site(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str


class _Begun(threading.local):
    """For the thread of asynchronous calls: where the program began the current one."""

    site: Site | None = None


begun: Final = _Begun()


class Call:
    """What a rank is about to do, as a text and as its fingerprint."""

    __slots__ = ("fingerprint", "text")

    def __init__(self, text: str) -> None:
        self.text: str = text
        self.fingerprint: int = fingerprint(text)


@functools.lru_cache(maxsize=1024)
def call_of(text: str) -> Call:
    """Return the call with this text; cached, for texts that are used again."""
    return Call(text)


@dataclasses.dataclass
class Report:
    """What one rank tells the others if a header shows a difference.

    Attributes:
        rank: the sender.
        call: what it was about to do.
        site: where the user's code made the call.
        kind: of its exception. "none": it has none. "raised": the program raised it.
            "invalid": an argument of a call is wrong. "agreed": all ranks have raised
            it already. "exit": it stands for the end of the rank's program.
        trace: the traceback of the exception.
        pickled_error: the exception; b"" if it cannot be pickled.
        exits: whether the exception is a SystemExit.
        exit_code: of the SystemExit.
        depth: how many sections the rank is in.
        joining: whether it is at the end of one.
        written: the keys of variables that an update has written on it.
    """

    rank: int
    call: str
    site: str
    kind: ErrorKind = "none"
    trace: str = ""
    pickled_error: bytes = b""
    exits: bool = False
    exit_code: int | str | None = None
    depth: int = 0
    joining: bool = False
    written: list[Key] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls, rank: int, call: Call, error: BaseException | None, kind: ErrorKind
    ) -> Report:
        """Describe where this rank is, and its exception if it has one."""
        report = cls(rank, call.text, _describe_site(begun.site or user_site()))
        if error is not None:
            report.kind = kind
            report.trace = describe_exception(error)
            report.pickled_error = dump_exception(error)
            if isinstance(error, SystemExit):
                code, report.exits = error.code, True
                if code is not None:
                    report.exit_code = (
                        int(code) if isinstance(code, int) else _text(code)
                    )
                if kind == "raised":  # in a section, whose end says less
                    report.call = (
                        f"sys.exit({'' if code is None else _text(code, repr)})"
                    )
                    report.site = _raised_at(error)
        return report


def describe_exception(error: BaseException) -> str:
    """Return the traceback of an exception, to be sent: not all of a very long text."""
    text = _attempt(lambda: format_exception(error))
    if text is None:  # its __str__ has raised
        return f"{type(error).__qualname__}, which cannot be printed\n"
    if len(text) <= _LONGEST_TRACE:
        return text
    half = _LONGEST_TRACE // 2
    left_out = f"\n... {len(text) - 2 * half:,} characters were not sent ...\n"
    return text[:half] + left_out + text[-half:]


def summarize_exception(error: BaseException) -> str:
    """Return the first line of an exception, and where the user's code raised it."""
    text = "".join(traceback.format_exception_only(error)).partition("\n")[0]
    return f"{text[:_LONGEST_SUMMARY]}{_raised_at(error)}"


def judge(rank: int, reports: list[Report]) -> BaseException:
    """Return the exception that a rank which did not fail itself raises.

    Args:
        rank: this rank.
        reports: one of each rank.
    """
    by_kind: defaultdict[ErrorKind, list[Report]] = defaultdict(list)
    for report in reports:
        by_kind[report.kind].append(report)
    if by_kind["exit"]:
        return _leave_with(rank, by_kind["exit"], reports)
    if by_kind["invalid"]:
        return _repeat(rank, by_kind["invalid"][0])
    if leaving := [report for report in by_kind["raised"] if report.exits]:
        return _leave_with(rank, leaving, reports)
    if failed := by_kind["raised"] or by_kind["agreed"]:
        return _replica_error(rank, failed)
    return CollectiveMismatchError(on_rank(rank, _describe_mismatch(reports)))


def _leave_with(
    rank: int, leaving: list[Report], reports: list[Report]
) -> BaseException:
    """Return what this rank raises if others have called `sys.exit`, or ended."""
    for report in leaving:
        if report.exit_code not in (None, 0):  # "" is an error, and False is not
            if rank == min(one.rank for one in reports if not one.exits):
                reporting.warn(
                    f"mpidist: rank {rank}: rank {report.rank} left the program by "
                    f"sys.exit({report.exit_code!r}); this rank leaves too"
                )
            return SystemExit(report.exit_code)
    # The job would end as if all ranks had done all of their work.
    return CollectiveMismatchError(on_rank(rank, _describe_mismatch(reports)))


def _repeat(rank: int, report: Report) -> BaseException:
    """Return what this rank raises if another one found an error in its arguments."""
    error = load_exception(report.pickled_error, report.trace)
    if error is None:
        return _replica_error(rank, [report])
    who = f"rank {report.rank} raised it{report.site}"
    error.add_note(f"[rank {rank}] raised here because {who}")
    return error


def _replica_error(rank: int, failed: list[Report]) -> ReplicaError:
    by_trace: dict[str, list[int]] = {}
    for report in failed:
        by_trace.setdefault(report.trace, []).append(report.rank)
    shown = list(by_trace.items())[:_MOST_TRACES]
    texts = [f"--- {format_ranks(ranks)} ---\n{trace}" for trace, ranks in shown]
    left_out = len(failed) - sum(len(ranks) for _, ranks in shown)
    if left_out:
        texts.append(f"... and {left_out} more ranks")
    who = format_ranks([report.rank for report in failed])
    traces = "\n".join(texts)
    return ReplicaError(on_rank(rank, f"{who} raised an exception:\n{traces}"))


def _describe_mismatch(reports: list[Report]) -> str:
    groups: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        groups.setdefault((report.call, report.site), []).append(report.rank)
    lines = ["the ranks do not make the same call:"]
    lines += [f"  {line}" for line in describe_groups(groups, ": ", _MOST_GROUPS)]
    lines.append(
        "Every rank must make the same calls in the same order, with the same "
        "operation, dtypes, shapes and structure."
    )
    lines += _remedies(reports)
    return "\n".join(lines)


def describe_groups(
    groups: Mapping[tuple[str, str], list[int]], verb: str, most: int
) -> list[str]:
    """Return a line for each group of ranks that make the same call.

    Args:
        groups: the ranks, by the call and by where the program makes it.
        verb: what comes between the ranks and the call.
        most: how many groups have a line; the smallest ones share one if there are
            more.
    """
    ordered = sorted(groups.items(), key=lambda item: item[1])
    if len(ordered) > most:
        ordered.sort(key=lambda item: len(item[1]), reverse=True)
    shown, others = ordered[:most], ordered[most:]
    calls = _shorten([call for (call, _), _ in shown])
    lines = [
        f"{format_ranks(ranks)}{verb}{call}{site}"
        for call, ((_, site), ranks) in zip(calls, shown, strict=True)
    ]
    if others:
        rest = [rank for _, ranks in others for rank in ranks]
        lines.append(f"{format_ranks(rest)}{verb}{len(others)} other calls")
    return lines


# Calls that programs for other libraries make on one rank, in `if rank == 0:`.
_ON_ONE_RANK: Final = {
    r"(Checkpoint(?:Manager)?\.save)\b": (
        "call it on every rank, outside of `if strategy.replica_id == 0:`; rank 0 "
        "alone writes the files"
    ),
    r"(Checkpoint(?:Manager)?(?:\.restore\w*)?)\b": (
        "call it on every rank, outside of `if strategy.replica_id == 0:`; rank 0 "
        "alone reads the files, and sends the values to all"
    ),
    r"(Strategy\.(?:reduce|gather)|Variable '.*?'\.reading|"
    r"ZeroRedundancyOptimizer[\w ]*\.state_dict)\b": (
        "call it on every rank, before `if strategy.replica_id == 0:`, and use the "
        "result in it"
    ),
}


# By the part of a call in which alone the ranks differ.
_ALIKE: Final = {
    r"no seed: \d+": (
        "The order of a `shuffle` without a seed depends on how many the rank has made "
        "before; give shuffle a seed"
    ),
    r" = .*checksum \w+": (
        "Here, outside of replica functions, the value must be the same on all ranks: "
        "pass what `strategy.reduce` or `strategy.gather` returns, or make the call in "
        "a function for `strategy.run`, where each replica has its own"
    ),
    r" -> [][(){}*, ]+(?= \[#\d+\]$|$)": (
        "Return nests of one structure; of a list whose length differs an array, as in "
        "`return numpy.array(values)`, for `strategy.gather(result, axis=0)`"
    ),
}


def _remedies(reports: list[Report]) -> list[str]:
    """Return what to write for some mistakes."""
    calls = {report.call for report in reports}
    for part, remedy in _ALIKE.items():
        if len(calls) > 1 == len({re.sub(part, "", call) for call in calls}):
            return [remedy]
    if any(" [optimizer #" in call for call in calls):
        return [
            "With `overlap=True` gradients are reduced in `backward()`: on every rank "
            "make the same backward passes in the same order, or write `overlap=False`"
        ]
    for report in reports:
        for pattern, remedy in _ON_ONE_RANK.items():
            match = re.match(pattern, report.call)
            if match is None:
                continue
            others = [re.match(pattern, other.call) for other in reports]
            if all(other is not None and other[1] == match[1] for other in others):
                return []  # they differ in their arguments
            return [f"`{match[1]}` is a call of all ranks: {remedy}."]
    return []


def _shorten(calls: list[str]) -> list[str]:
    """Shorten long texts to their beginning and the first difference."""
    if max(map(len, calls)) <= _LONGEST_CALL:
        return calls
    columns = enumerate(zip(*calls, strict=False))
    length = min(map(len, calls))
    same = next((i for i, column in columns if len({*column}) > 1), length)
    part = _LONGEST_CALL // 3
    start, stop = max(part, same - part), same + part
    gap = " ... " if start > part else ""
    return [
        call[:part] + gap + call[start:stop] + (" ..." if stop < len(call) else "")
        for call in calls
    ]


def dump_exception(error: BaseException) -> bytes:
    """Pickle an exception; return b"" if it cannot be unpickled, or is too large."""
    data = _attempt(lambda: pickle.dumps(error))
    if data is None or len(data) > _LARGEST_EXCEPTION:
        return b""
    # Some can be pickled, but not unpickled.
    return b"" if _attempt(lambda: pickle.loads(data)) is None else data


def load_exception(data: bytes, trace: str) -> BaseException | None:
    """Rebuild an exception of another rank, with that rank's traceback as cause."""
    error = _attempt(lambda: pickle.loads(data)) if data else None
    if not isinstance(error, BaseException):  # or this rank does not have its class
        return None
    error.__cause__ = RemoteTraceback(trace)
    return error


def _text(x: object, how: Callable[[object], str] = str) -> str:
    """Return an object of the program as text; its class if that raises."""
    text = _attempt(lambda: how(x))
    return type(x).__name__ if text is None else text


def _attempt(function: Callable[[], _T]) -> _T | None:
    """Return what code of the program returns; None if it raises anything."""
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException:  # SystemExit too
        return None


def _describe_site(site: Site | None) -> str:
    """Return a place in the user's code, as `` (at file.py:12 in fn)``."""
    if site is None:
        return ""
    return f"  (at {os.path.basename(site.file)}:{site.line} in {site.function})"


def _raised_at(error: BaseException) -> str:
    frames = [*traceback.walk_tb(error.__traceback__)]
    return _describe_site(_innermost(reversed(frames)))


def user_site() -> Site | None:
    """Return where the user's code is that calls this package, if it does."""
    return _innermost(traceback.walk_stack(sys._getframe(1)))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> Site | None:
    """Return the first of the frames that is the user's code."""
    for frame, line in frames:
        code = frame.f_code
        library = str(frame.f_globals.get("__name__")).partition(".")[0] in _CALLERS
        if not (
            library or code.co_filename.startswith(PACKAGE) or is_of_library(frame)
        ):
            return Site(code.co_filename, line, code.co_name)
    return None
