"""What ranks tell each other when they differ."""

import contextlib

import pytest

from mpidist._agreement import mismatch

SAVE = "Checkpoint.save of {'w': float64 (2,)} at 'x'"
RUN = "the end of run(step)"


@pytest.mark.parametrize(
    ("calls", "name", "remedy"),
    [
        ([SAVE, RUN], "Checkpoint.save", "rank 0 alone writes the files"),
        ([RUN, SAVE, SAVE], "Checkpoint.save", "rank 0 alone writes the files"),
        (["CheckpointManager.save as number 3", RUN], "CheckpointManager.save", "wri"),
        (["CheckpointManager('x')", SAVE], "CheckpointManager", "reads the files"),
        (["Checkpoint.restore of {}", RUN], "Checkpoint.restore", "reads the files"),
        (
            ["CheckpointManager.restore_or_initialize of {}", RUN],
            "CheckpointManager.restore_or_initialize",
            "sends the values to all",
        ),
        (["Strategy.reduce SUM float64 ()", RUN], "Strategy.reduce", "before `if"),
        (
            ["ZeroRedundancyOptimizer of Adam.state_dict", RUN],
            "ZeroRedundancyOptimizer of Adam.state_dict",
            "before `if",
        ),
        ([RUN, "Strategy.gather axis=0 float64"], "Strategy.gather", "before `if"),
        (
            ["Variable 'loss'.reading, which all [#3] SUM float64 ()", RUN],
            "Variable 'loss'.reading",
            "use the result in it",
        ),
        ([SAVE, SAVE.replace("x", "y")], "", ""),
        ([RUN, "all_reduce SUM float64 ()"], "", ""),
        (["Strategy.reduce_other", RUN], "", ""),
    ],
)
def test_a_call_of_all_ranks_that_some_make_has_a_remedy(calls, name, remedy):
    reports = [mismatch.Report(i, call, "") for i, call in enumerate(calls)]
    lines = str(mismatch.judge(0, reports)).splitlines()
    hint = lines[-1]
    if not name:
        assert hint.startswith("Every rank must make the same calls")
        return
    assert hint.startswith(f"`{name}` is a call of all ranks: call it on every rank, ")
    assert "`if strategy.replica_id == 0:`" in hint
    assert remedy in hint


def test_exceptions_that_do_not_come_back_from_pickle():
    class StrangeError(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    assert mismatch.dump_exception(StrangeError(1, 2)) == b""
    data = mismatch.dump_exception(KeyError("k"))
    error = mismatch.load_exception(data, "the trace")
    assert type(error) is KeyError
    assert "the trace" in str(error.__cause__)
    assert mismatch.load_exception(b"no pickle", "") is None


def test_ctrl_c_while_an_exception_is_pickled_is_ctrl_c():
    class Slow(Exception):  # noqa: N818
        def __reduce__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mismatch.dump_exception(Slow())


def test_the_place_of_a_call_is_in_the_users_code():
    """Not in Python's library, which may be between it and this package."""
    sites = []
    text = "@manager\ndef block():\n    yield\n    sites.append(user_site())"
    names = {"manager": contextlib.contextmanager, "sites": sites, **vars(mismatch)}
    exec(compile(text, mismatch.__file__, "exec"), names)
    with names["block"]():
        pass
    assert [site.file for site in sites] == [__file__]
