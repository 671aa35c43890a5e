"""The fault matrix: what can go wrong, what then happens, and the test that shows it.

`docs/reliability.md` has these rows; ``python -m tests.faults`` runs them.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A fault.

    Attributes:
        kind: the part of the table that it is in.
        fault: what goes wrong, on one rank unless it says otherwise.
        result: how it ends on each rank.
        afterwards: what the strategy is good for: "usable", "unusable", "job ends".
        test: the test, as ``file::function``.
    """

    kind: str
    fault: str
    result: str
    afterwards: str
    test: str


_GUARD = "tests/_agreement/test_guard.py::test_"
_EXIT = "tests/_runtime/test_process_exit.py::test_"
_FORK = "tests/_runtime/test_forked_child.py::test_"
_EXCEPTIONS = "tests/faults/test_exceptions.py::test_"
_JOBS = "tests/faults/test_jobs.py::test_"
_MISMATCH = "`CollectiveMismatchError` on all"
_RAISES = "its own exception; `ReplicaError` on the others"
_TIMEOUT = "`CollectiveTimeoutError` on the others, at once"


def _rows(kind: str, prefix: str, rows: list[tuple[str, str, str, str]]) -> list[Case]:
    return [
        Case(kind, fault, result, afterwards, prefix + test)
        for fault, result, afterwards, test in rows
    ]


CASES = [
    *_rows(
        "Calls that differ",
        _GUARD,
        [
            ("another shape", _MISMATCH, "usable", "another_shape"),
            ("another dtype", _MISMATCH, "usable", "another_dtype"),
            ("another operation", _MISMATCH, "usable", "another_operation"),
            ("another structure", _MISMATCH, "usable", "another_structure"),
            ("another call", _MISMATCH, "usable", "another_verb"),
            ("other options of a call", _MISMATCH, "usable", "other_options"),
            ("another axis", _MISMATCH, "usable", "all_gather_of_another_axis"),
            ("a call fewer", _MISMATCH, "usable", "one_all_reduce_fewer"),
            ("a call more", _MISMATCH, "usable", "one_all_reduce_more"),
            (
                "a merge_call fewer or more",
                _MISMATCH,
                "usable",
                "one_merge_call_fewer_or_more",
            ),
            ("another variable", _MISMATCH, "usable", "another_variable"),
            ("another replica function", _MISMATCH, "usable", "another_function"),
            (
                "another branch of the program",
                _MISMATCH,
                "usable",
                "run_on_some_ranks_and_reduce_on_others",
            ),
            (
                "another structure of results",
                _MISMATCH,
                "usable",
                "results_of_another_structure",
            ),
            (
                "plain values that differ",
                _MISMATCH,
                "usable",
                "plain_values_that_differ",
            ),
        ],
    ),
    *_rows(
        "Exceptions",
        _GUARD,
        [
            (
                "in a replica function",
                _RAISES,
                "usable",
                "a_replica_function_that_raises",
            ),
            (
                "in all replica functions",
                "its own on each",
                "usable",
                "all_replicas_raise",
            ),
            ("in merge_fn", "the same on all", "usable", "merge_fn_that_raises"),
            (
                "in the function of an update",
                "an error on all; the copies of the variable are equal",
                "usable",
                "the_function_of_update_raises_on_one_rank",
            ),
            (
                "sys.exit in an update",
                "all leave with its code",
                "job ends",
                "sys_exit_in_the_function_of_update",
            ),
            ("bad arguments", "the same error on all", "usable", "bad_leaves"),
            (
                "that cannot be pickled",
                _RAISES,
                "usable",
                "an_exception_that_can_not_be_pickled",
            ),
            (
                "that cannot be printed",
                _RAISES,
                "usable",
                "an_exception_that_can_not_be_printed",
            ),
        ],
    ),
    *_rows(
        "Exceptions",
        _EXCEPTIONS,
        [
            (
                "whose pickling or printing leaves the program",
                _RAISES,
                "usable",
                "an_exception_that_leaves_the_program_when_it_is_sent",
            ),
            (
                "with 20 MB of text",
                "its own; a part of the text on the others",
                "usable",
                "an_exception_with_much_text",
            ),
            (
                "Ctrl-C that the program catches",
                _TIMEOUT,
                "unusable",
                "ctrl_c_that_the_program_catches",
            ),
            (
                "a signal's exception in a replica context that the program entered",
                _TIMEOUT,
                "unusable",
                "an_exception_in_a_context_that_was_entered",
            ),
            (
                "a rank that gives up after its part of a call",
                "the call's result; `CollectiveTimeoutError` in the next call",
                "unusable",
                "a_rank_that_gives_up_after_its_part_of_a_call_does_not_end_it",
            ),
            (
                "Ctrl-C in merge_fn",
                "`KeyboardInterrupt` on all",
                "usable",
                "ctrl_c_in_merge_fn_is_raised_by_all",
            ),
            (
                "RecursionError inside a call",
                _TIMEOUT,
                "unusable",
                "a_recursion_error_inside_a_call",
            ),
            (
                "MemoryError while a variable is made, saved or restored",
                "`MemoryError`; the others with it, or `CollectiveTimeoutError`",
                "unusable, but for a save and a restore",
                "a_memory_error_where_the_ranks_no_longer_wait_for_each_other",
            ),
        ],
    ),
    *_rows(
        "Exceptions",
        "tests/faults/test_every_line.py::test_",
        [
            (
                "a signal's exception at any line of a call",
                _TIMEOUT,
                "unusable",
                "an_exception_at_any_line_is_told",
            ),
            (
                "a signal's exception or a MemoryError, at any line of a restore",
                "an error on all; all variables are restored, or none on any rank",
                "unusable, or usable",
                "a_restore_is_all_or_nothing_whatever_line_raises",
            ),
        ],
    ),
    *_rows(
        "Exceptions",
        "tests/faults/test_kept_strategy.py::test_",
        [
            (
                "each kind of error that all ranks share, then calls of 30 kinds",
                "the same results as of a new strategy",
                "usable",
                "calls_of_every_kind_are_right_after_each_error",
            ),
        ],
    ),
    *_rows(
        "Exceptions",
        "tests/",
        [
            (
                "another process fills /dev/shm",
                "the right result",
                "usable",
                "faults/test_jobs.py::test_shared_memory_that_others_have_filled",
            ),
            (
                "no memory for what broadcast_to, merge_fn or an update sends",
                "`MemoryError` on all",
                "usable",
                "_mpi/test_buffers.py::test_no_memory_on_one_rank_is_raised_on_all",
            ),
            (
                "no memory for the result of a reduction",
                "`MemoryError` on all",
                "usable",
                "_collectives/test_routes.py::test_a_rank_without_memory_tells_all",
            ),
            (
                "no memory for the result of a gather",
                "`MemoryError` on all",
                "usable",
                "_collectives/test_reduce_gather.py::test_all_gather_without_memory_on_one_rank",
            ),
            (
                "a signal's exception in a wait",
                _TIMEOUT,
                "unusable",
                "_collectives/test_routes.py::test_a_signal_ends_a_wait_and_the_others_are_told",
            ),
        ],
    ),
    *_rows(
        "Processes",
        _JOBS,
        [
            (
                "SIGKILL before a header, in data, in merge_fn, in a save",
                "the launcher ends the job; no partial checkpoint",
                "job ends",
                "a_rank_that_is_killed_ends_the_job",
            ),
            (
                "the constructor of a strategy, not called, or too late",
                "`CollectiveTimeoutError` on the others; the next one goes on with it",
                "made by the next call",
                "a_constructor_that_timed_out_leaves_nothing_after_the_next_one",
            ),
            (
                "SIGSTOP, and SIGCONT before the deadline",
                "the right result",
                "usable",
                "a_rank_that_is_stopped_and_goes_on_in_time",
            ),
            (
                "SIGSTOP for longer than the deadline",
                "`CollectiveTimeoutError` on all, which name the rank",
                "unusable",
                "a_rank_that_is_stopped_for_longer_than_the_deadline",
            ),
        ],
    ),
    *_rows(
        "Processes",
        _EXIT,
        [
            (
                "an exception that nobody catches",
                "one traceback; MPI_Abort",
                "job ends",
                "an_uncaught_exception_on_one_rank_ends_the_job",
            ),
            ("sys.exit(3)", "all leave with code 3", "job ends", "sys_exit"),
            (
                "leaves early, by the end of the program",
                _MISMATCH,
                "job ends",
                "a_rank_that_ends_while_the_others_wait_for_it",
            ),
        ],
    ),
    *_rows(
        "Processes",
        "tests/_runtime/test_termination.py::test_",
        [
            (
                "Ctrl-C, SIGTERM",
                "`finally` blocks run; one line; [the launcher's code]"
                "(guide/launching.md#ctrl-c-and-sigterm)",
                "job ends",
                "the_job_ends_with_one_line_and_all_finally_blocks",
            ),
        ],
    ),
    *_rows(
        "Processes",
        _EXIT,
        [
            (
                "an exception in a thread that uses a strategy",
                "one traceback; MPI_Abort",
                "job ends",
                "a_thread_that_uses_the_strategy_ends_the_job_when_it_raises",
            ),
        ],
    ),
    *_rows(
        "Calls that were begun",
        "tests/_strategy/test_async.py::test_",
        [
            ("they differ", _MISMATCH, "usable", "calls_that_differ"),
            ("fewer on one rank", _MISMATCH, "usable", "a_rank_that_begins_fewer"),
            (
                "an exception after some of them",
                _RAISES,
                "usable",
                "an_exception_on_one_rank_with_calls_begun",
            ),
            (
                "bad arguments",
                "the same error on all, of `result()` or the next call",
                "usable",
                "where_an_error_is_raised",
            ),
        ],
    ),
    *_rows(
        "Calls that were begun",
        "tests/faults/test_",
        [
            (
                "a rank that does not come",
                "`CollectiveTimeoutError` on all, which name the rank",
                "unusable",
                "begun_calls.py::test_a_rank_that_does_not_come",
            ),
            ("Ctrl-C", _TIMEOUT, "unusable", "begun_calls.py::test_ctrl_c"),
            (
                "a rank leaves: by its end, sys.exit, an exception",
                "as without begun calls",
                "job ends",
                "begun_calls.py::test_a_program_that_ends",
            ),
            (
                "SIGKILL",
                "the launcher ends the job",
                "job ends",
                "jobs.py::test_a_rank_that_is_killed_ends_the_job",
            ),
        ],
    ),
    *_rows(
        "Checkpoints",
        "tests/_checkpoints/test_",
        [
            (
                "the disk is full",
                "`OSError` on all; the older checkpoint is whole",
                "usable",
                "checkpoint.py::test_a_file_system_that_refuses_is_told_to_all",
            ),
            (
                "read-only, over quota, a rename that fails or says so",
                "`OSError` on all; the older checkpoint is whole, or the newer one",
                "usable",
                "checkpoint.py::test_a_file_system_that_refuses_is_told_to_all",
            ),
            (
                "the folder is deleted during a save",
                "`FileNotFoundError` on all",
                "usable",
                "checkpoint.py::test_a_folder_that_is_deleted_during_a_save",
            ),
            (
                "a save with `wait=False` that fails",
                "its error, on all, where it is waited for; at the end the job fails",
                "usable",
                "background.py::test_who_waits_for_it_and_raises_its_error",
            ),
            (
                "copies of a variable that differ",
                "`CollectiveMismatchError` on all, which names the rank",
                "usable",
                "checkpoint.py::test_copies_that_have_drifted_are_found",
            ),
            (
                "damaged files",
                "`CheckpointError` on all; nothing is changed",
                "usable",
                "reader.py::test_damage_is_told_to_all_ranks",
            ),
            (
                "a malformed manifest with the right checksum",
                "`CheckpointError` that names it; the manager skips it",
                "usable",
                "reader.py::test_malformed_manifests_with_the_right_checksum",
            ),
            (
                "files changed in any way, by a fuzzer",
                "`CheckpointError`; nothing executed, nothing large allocated",
                "usable",
                "hostile.py::test_changed_files_are_refused_or_say_the_same",
            ),
            (
                "leftovers of killed saves fill the disk",
                "they are deleted before the next save",
                "usable",
                "manager.py::test_what_killed_jobs_have_left_is_deleted_before_a_save",
            ),
            (
                "every byte of a checkpoint, flipped",
                "`CheckpointError` that names the file and the array",
                "usable",
                "reader.py::test_every_flipped_byte_is_found_and_named",
            ),
            (
                "a FIFO, a device or a directory in place of a file",
                "`CheckpointError`",
                "usable",
                "reader.py::test_files_that_are_not_regular_are_refused",
            ),
            (
                "a process killed before each system call of a save",
                "the older or the newer checkpoint, whole",
                "job ends",
                "killed_saves.py::test_killed_before_every_system_call_of_a_save",
            ),
            (
                "a process killed again and again while it saves without pause",
                "the older or the newer checkpoint, whole; what is left does not grow",
                "job ends",
                "killed_saves.py::test_a_process_that_is_killed_again_and_again",
            ),
            (
                "a job killed at any time while it saves",
                "the older or the newer checkpoint, whole",
                "job ends",
                "killed_saves.py::test_a_job_that_is_killed_at_any_time",
            ),
        ],
    ),
    *_rows(
        "Numbers",
        "tests/_mpi/test_buffers.py::test_",
        [
            (
                "sums and products beyond the range of an integer dtype",
                "they wrap, as in NumPy, by MPI and by shared memory alike",
                "usable",
                "integers_wrap_as_in_numpy",
            ),
        ],
    ),
    *_rows(
        "Forked children",
        _FORK,
        [
            (
                "a child makes a collective call",
                "`RuntimeError` in the child",
                "usable",
                "calls_of_a_child_are_errors_and_what_it_writes_is_its_own",
            ),
            (
                "a child leaves by sys.exit, an exception, os._exit",
                "its own exit code; nothing on the ranks",
                "usable",
                "how_a_child_ends_is_its_own",
            ),
            (
                "a fork inside run, merge_fn or an update",
                "`RuntimeError` in the child",
                "usable",
                "a_child_of_a_replica_function",
            ),
            (
                "workers (fork) that a dataset uses",
                "the right data",
                "usable",
                "workers_that_read_data",
            ),
        ],
    ),
    *_rows(
        "Settings",
        _JOBS,
        [
            (
                "a variable MPIDIST_* that cannot be read",
                "`ValueError` on all, which names it",
                "usable",
                "settings_of_one_rank_that_can_not_be_read",
            ),
            (
                "the same, before MPI runs",
                "`ValueError` on all",
                "usable",
                "settings_that_can_not_be_read_before_mpi_runs",
            ),
        ],
    ),
]


def table(verdicts: dict[str, dict[str, str]] | None = None) -> str:
    """Return the matrix as a table in Markdown.

    Args:
        verdicts: for each MPI the verdicts by test; None: without such columns, and
            with the faults of a kind that end alike in one row.
    """
    heads = ["kind", "fault, on one rank", "how it ends", "the strategy"]
    cases = sorted(CASES, key=lambda case: _KINDS.index(case.kind))
    rows: list[list[str]]
    if verdicts is None:
        alike: dict[tuple[str, str, str], list[str]] = {}
        for case in cases:
            key = (case.kind, case.result, case.afterwards)
            alike.setdefault(key, []).append(case.fault)
        rows = [
            [kind, "; ".join(faults), result, afterwards]
            for (kind, result, afterwards), faults in alike.items()
        ]
    else:
        heads += verdicts
        rows = [
            [*case[:4], *(by.get(case.test, "not run") for by in verdicts.values())]
            for case in cases
        ]
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_KINDS = list(dict.fromkeys(case.kind for case in CASES))

if __name__ == "__main__":
    print(table(), end="")
