"""What all ranks do if a header shows a difference: they exchange reports.

What a report says, and what a rank raises because of all reports, is in `mismatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpidist._agreement.breakdown import Breakdown, Payload
from mpidist._agreement.call_state import CallState
from mpidist._agreement.mismatch import Call, ErrorKind, Key, Report, judge
from mpidist._base.errors import as_told
from mpidist._mpi.any_communicator import AnyCommunicator


class Reports:
    """Exchanges reports, and repairs what an update has done on some ranks only.

    Args:
        comm: the ranks.
        call_state: the sections that this rank is in.
        breakdown: what happens if that fails.

    Attributes:
        failures: how often ranks have differed; it changes on all ranks, or on none.
        calls: the texts of the calls of all ranks, when they differed last.
        undo: called if the ranks differ and updates are in progress: undoes what they
            have written to variables, if the values before are kept, and returns their
            keys.
        repair: makes the copies of variables, given by their keys, equal again after
            an update that has failed. Collective.
    """

    def __init__(
        self, comm: AnyCommunicator, call_state: CallState, breakdown: Breakdown
    ) -> None:
        self._comm = comm
        self._call_state = call_state
        self._breakdown = breakdown
        self.failures: int = 0
        self.calls: set[str] = set()
        self.undo: Callable[[], list[Key]] | None = None
        self.repair: Callable[[Sequence[Key]], None] | None = None

    def exchange(
        self,
        call: Call,
        error: BaseException | None = None,
        kind: ErrorKind = "none",
        *,
        joining: bool = False,
    ) -> tuple[BaseException, bool]:
        """Tell all ranks where this one is, and why. Collective.

        Args:
            call: of the header that shows a difference.
            error: what this rank raised.
            kind: of that error.
            joining: whether this rank is at the end of a section.

        Returns:
            The exception that this rank raises; and whether all are at the end of the
            same section.
        """
        state = self._call_state
        sections = state.sections
        with Payload(self._breakdown, state, call.text):
            self.failures += 1
            report = Report.of(self._comm.rank, call, error, kind)
            report.depth, report.joining = len(sections), joining
            if self.undo is not None:
                report.written = self.undo()
                self.undo = None
            reports = self._comm.all_gather_objects(report)
            self.calls = {report.call for report in reports}
            found = judge(self._comm.rank, reports) if error is None else error
            as_told(found, self._comm.identity)
            # A section that some rank has not entered has no end that all ranks come
            # to: until this rank leaves it, the calls in it raise.
            for level in range(min(report.depth for report in reports), len(sections)):
                sections[level] = state.deserted = found
                state.blocked = True
            # All ranks are here now, whatever each was about to do: the only moment at
            # which an update that some of them did not make can be undone.
            written = sorted({key for report in reports for key in report.written})
            if written and self.repair is not None:
                self.repair(written)
        same = all(one.joining and one.depth == len(sections) for one in reports)
        return found, same
