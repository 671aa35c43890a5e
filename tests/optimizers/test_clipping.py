"""The global norm of gradients, and clipping by it."""

import numpy as np
import pytest

import mpidist
from mpidist.optimizers import clip_by_global_norm


def test_the_norm_is_computed_in_float64():
    x = np.full(70_000, 1e30, np.float32)
    (clipped,), norm = clip_by_global_norm([x], 1.0)
    assert norm == pytest.approx(1e30 * np.sqrt(70_000), rel=1e-6)
    assert clipped.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(clipped.astype(float)), 1, rtol=1e-6)
    assert clip_by_global_norm([], 1.0) == ([], 0.0)
    (clipped,), norm = clip_by_global_norm([np.array([3j, 4.0])], 1.0)
    np.testing.assert_allclose(clipped, [0.6j, 0.8])
    assert norm == 5.0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_norm_that_is_not_finite_gives_nan(bad):
    (a, b), norm = clip_by_global_norm([np.array([1.0, bad]), np.ones(2)], 1.0)
    assert not np.isfinite(norm)
    assert np.isnan(a).all()
    assert np.isnan(b).all()


def test_a_norm_without_a_limit():
    (clipped,), norm = clip_by_global_norm([np.array([3.0, 4.0])], np.inf)
    assert (clipped.tolist(), norm) == ([3.0, 4.0], 5.0)
    (clipped,), _ = clip_by_global_norm([np.array([np.inf, 4.0])], np.inf)
    assert np.isnan(clipped).all()
    w = mpidist.Variable(np.ones(2))
    sgd = mpidist.optimizers.SGD(0.5, global_clipnorm=np.inf)
    sgd.apply_gradients([(np.ones(2), w)])
    assert w.numpy().tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "clip", [np.array(5), np.float32(5), np.array(5.0), mpidist.Variable(5.0)]
)
def test_a_clip_norm_in_an_array(clip):
    (clipped,), norm = clip_by_global_norm([np.array([6.0, 8.0])], clip)
    np.testing.assert_array_equal(clipped, [3.0, 4.0])
    assert norm == 10.0
    sgd = mpidist.optimizers.SGD(float(clip), momentum=np.array(0.5), clipnorm=clip)
    assert sgd.learning_rate == 5.0
    for text in ("momentum=0.5", "clipnorm=5.0"):
        assert text in repr(sgd)


@pytest.mark.parametrize(
    "clip", [0, -1, np.nan, "1", True, np.ones(1), np.array(1j), np.array(True)]
)
def test_a_clip_norm_that_makes_no_sense(clip):
    with pytest.raises((TypeError, ValueError), match="`clip_norm`"):
        clip_by_global_norm([np.ones(2)], clip)
