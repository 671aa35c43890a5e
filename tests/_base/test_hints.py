"""Notes on exceptions of code that was written for TensorFlow; torch: with_torch."""

import numpy as np
import pytest
from launching import run_ranks

import mpidist
from mpidist._base.hints import add_hint


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (np.ones(2), "numpy", "leave out `.numpy()`"),
        (np.float64(1), "numpy", "leave out `.numpy()`"),
        (1.5, "numpy", "leave out `.numpy()`"),
        (np.ones(2), "assign", "`variable.assign(new)`"),
        (np.float64(1), "assign_add", "`variable.assign(new)`"),
        (None, "all_reduce", "get_replica_context() returns None"),
        (None, "merge_call", "in a merge_fn call another as it is: `merge_fn("),
    ],
)
def test_hints(owner, name, text):
    with pytest.raises(AttributeError) as caught:
        getattr(owner, name)
    for _ in range(2):  # once, however often it is asked for
        add_hint(caught.value)
    (note,) = caught.value.__notes__
    assert text in note


@pytest.mark.parametrize(
    ("fail", "text"),
    [
        (lambda x: np.sqrt(x), "`strategy.reduce(op, value, axis=None)`"),
        (lambda x: np.concatenate(x), "`strategy.gather(value, axis=0)`"),
        (lambda x: begun() + 1, "`handle.result()`"),
        (lambda x: enter(mpidist.get_strategy()), "`with strategy.scope():`"),
    ],
)
def test_type_errors_of_python_and_numpy(fail, text):
    with pytest.raises(TypeError) as caught:
        fail(mpidist.PerReplica([np.ones(2)]))
    add_hint(caught.value)
    assert text in "".join(getattr(caught.value, "__notes__", ()))


def begun():
    handle = mpidist.get_replica_context().all_reduce_async("SUM", 1.0)
    handle.result()
    return handle


def enter(strategy):
    with strategy:
        pass


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("of its own"),
        AttributeError("x", name="numpy", obj="text"),
        AttributeError("x", name="other", obj=np.ones(2)),
        AttributeError("x", name="append", obj=None),
        KeyError("numpy"),
        TypeError("f() missing 1 required positional argument: 'x'"),
    ],
)
def test_other_exceptions_stay_as_they_are(error):
    add_hint(error)
    assert not hasattr(error, "__notes__")


LINES = {
    "strategy.reduce('SUM', strategy.run(lambda: 1.0), axis=None).numpy()": ".numpy",
    "strategy.run(lambda: v[1:3].assign([1.0, 2.0]))": "`new[1:3] = value`",
    "strategy.run(lambda x, y: x, args=(1.0,))": "`args=batch`",
    "fn = lambda: mpidist.get_replica_context().merge_call(lambda x: x, (1,))\n"
    "strategy.run(fn)": "`merge_fn(strategy, *args)`",
    "strategy.extended.update(v, lambda: None)": "`fn(variable, *args)`",
    "with strategy.scope(): mpidist.get_replica_context().all_reduce('SUM', 1)": (
        "in the function that you pass to `strategy.run`"
    ),
}
PROGRAM = """
import sys
import numpy as np
import mpidist
from mpidist._base.hints import add_hint

strategy = mpidist.MPIStrategy()
with strategy.scope():
    v = mpidist.Variable(np.zeros(4))
for line in sys.argv[1:]:
    try:
        exec(line)
    except Exception as error:
        add_hint(error)
        print(*error.__notes__)
exec(line)
"""


def test_a_program_that_fails_says_so():
    done = run_ranks(1, ["-c", PROGRAM, *LINES], timeout=100)
    for note, text in zip(done.stdout.splitlines(), LINES.values(), strict=True):
        assert note.startswith("mpidist: ")
        assert text in note
    assert done.returncode != 0
    assert "Error: " in done.stderr
    assert text in done.stderr.partition("\nmpidist: ")[2]
