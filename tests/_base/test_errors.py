"""Messages and tracebacks."""

import pytest

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
