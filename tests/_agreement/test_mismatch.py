"""What ranks tell each other when they differ."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpidist._agreement import mismatch


@given(st.text(), st.text())
def test_fingerprints_fit_the_header(one, other):
    a, b = mismatch.fingerprint(one), mismatch.fingerprint(other)
    assert 0 <= a < 2**62
    assert np.int64(~a) == ~a
    assert (a == b) == (one == other)


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
