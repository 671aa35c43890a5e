"""Messages and tracebacks."""

import contextlib
import sys

import numpy as np
import pytest
from replicas import SignalError

import mpidist
from mpidist._base import errors


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 1, 2], "ranks 0-2"),
        ([5, 0, 1, 3], "ranks 0-1, 3, 5"),
        ([1, 3], "ranks 1, 3"),
    ],
)
def test_format_ranks(ranks, text):
    assert errors.format_ranks(ranks) == text


def test_tracebacks_show_the_users_frames(monkeypatch):
    def user_code():
        mpidist.experimental_set_strategy("no strategy")

    def text():
        try:
            user_code()
        except TypeError as error:
            return errors.format_exception(error)

    assert "in user_code" in text()
    assert "_strategy/current.py" not in text()
    monkeypatch.setenv("MPIDIST_DEBUG", "1")
    assert "_strategy/current.py" in text()


def handler(number, frame):
    raise SignalError


def handler_of_anything(*args, code=1):
    raise SignalError


@pytest.mark.parametrize("handler", [handler, handler_of_anything])
@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([errors.__file__], True),
        ([errors.__file__, contextlib.__file__], True),
        ([errors.__file__, np.__file__, "<frozen importlib._bootstrap>"], True),
        ([errors.__file__, "<string>"], True),  # of a dataclass of this package
        ([errors.__file__, "program.py"], False),
        ([errors.__file__, contextlib.__file__, "program.py"], False),
        ([errors.__file__, "program.py", contextlib.__file__], False),
        ([errors.__file__, f"{sys.prefix}/lib/site-packages/other.py"], False),
        ([contextlib.__file__], False),
    ],
)
def test_lines_of_libraries_are_as_those_of_the_package_that_called_them(
    files, found, handler
):
    """A signal came to a line of the last file; each has called the next one."""
    call, text = handler, "call(15, sys._getframe())"
    for file in reversed(files):
        names = {"call": call, "sys": sys, "__name__": "mpidist.module"}
        exec(compile(f"def this(): {text}", file, "exec"), names)
        call, text = names["this"], "call()"
    with pytest.raises(SignalError) as raised:
        call()
    assert errors.is_interruption(raised.value) is found
