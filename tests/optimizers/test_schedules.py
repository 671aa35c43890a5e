"""Learning rates as functions of the step."""

import numpy as np
import pytest

import mpidist
from mpidist.optimizers import (
    SGD,
    cosine_decay,
    cosine_decay_restarts,
    exponential_decay,
    inverse_time_decay,
    linear_warmup,
    piecewise_constant,
    polynomial_decay,
)


def test_schedules():
    cosine = cosine_decay(0.4, 10, alpha=0.1)
    assert [cosine(0), cosine(10), cosine(99)] == pytest.approx([0.4, 0.04, 0.04])
    assert cosine(5) == pytest.approx(0.4 * 0.55)
    steps = piecewise_constant([2, 5], [1.0, 0.5, 0.1])
    assert [steps(k) for k in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.1]
    warm = linear_warmup(steps, 4)
    assert [warm(k) for k in range(5)] == [0.25, 0.5, 0.75, 0.5, 0.5]
    assert linear_warmup(0.3, 2)(0) == 0.15
    w = mpidist.Variable(np.zeros(1))
    optimizer = SGD(steps)
    rates = []
    for _ in range(7):
        rates.append(optimizer.learning_rate)
        optimizer.apply_gradients([(np.ones(1), w)])
    assert rates == [steps(k) for k in range(7)]
    np.testing.assert_allclose(w.numpy(), -sum(rates))


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (lambda: 0.5, [0.5, 0.5]),
        (lambda rate=0.5: rate, [0.5, 0.5]),  # as in a loop that makes optimizers
        (lambda **settings: 0.5, [0.5, 0.5]),
        (lambda step: 1.0 + step, [1.0, 2.0]),
        (lambda step, base=1.0: base + step, [1.0, 2.0]),
        (lambda *arguments: 1.0 + arguments[0], [1.0, 2.0]),
    ],
)
def test_a_function_is_given_the_step_if_it_needs_it(rate, expected):
    w = mpidist.Variable(np.zeros(1))
    optimizer = SGD(rate)
    rates = []
    for _ in expected:
        rates.append(optimizer.learning_rate)
        optimizer.apply_gradients([(np.ones(1), w)])
    assert rates == expected


def test_schedules_of_keras():
    """The numbers are those of the formulas of Keras' pages."""
    steps = [0, 3, 5, 10, 13]

    def rates(schedule):
        return pytest.approx([schedule(step) for step in steps])

    expected = [0.4 * 0.5 ** (k / 5) for k in steps]
    assert rates(exponential_decay(0.4, 5, 0.5)) == expected
    assert rates(exponential_decay(0.4, 5, 0.5, True)) == [0.4, 0.4, 0.2, 0.1, 0.1]
    expected = [0.4 / (1 + 0.5 * k / 5) for k in steps]
    assert rates(inverse_time_decay(0.4, 5, 0.5)) == expected
    staircase = inverse_time_decay(0.4, 5, 1.0, staircase=True)
    assert rates(staircase) == [0.4, 0.4, 0.2, 0.4 / 3, 0.4 / 3]
    linear = polynomial_decay(0.4, 10, 0.1)
    assert rates(linear) == [0.4, 0.31, 0.25, 0.1, 0.1]
    square = polynomial_decay(0.4, 10, 0.0, power=2.0)
    assert rates(square) == [0.4, 0.4 * 0.49, 0.1, 0.0, 0.0]
    cycle = polynomial_decay(0.4, 10, 0.0, cycle=True)
    assert rates(cycle) == [0.4, 0.28, 0.2, 0.0, 0.4 * 0.35]
    for make in (exponential_decay, inverse_time_decay):
        with pytest.raises(ValueError, match=f"{make.__name__}: .*`decay_steps`"):
            make(0.1, 0, 0.5)
    with pytest.raises(ValueError, match=r"polynomial_decay: .*`decay_steps`"):
        polynomial_decay(0.1, -1)


@pytest.mark.parametrize("wrong", [None, "0.1", [0.1]])
def test_what_is_no_number_is_refused_when_a_schedule_is_made(wrong):
    decays = exponential_decay, inverse_time_decay, polynomial_decay, cosine_decay
    numbers = [
        *(lambda x, f=f: f(x, 10, 0.5) for f in decays),
        *(lambda x, f=f: f(0.1, 10, x) for f in decays),
        lambda x: cosine_decay_restarts(x, 10),
        lambda x: polynomial_decay(0.1, 10, power=x),
        lambda x: cosine_decay_restarts(0.1, 10, m_mul=x),
        lambda x: piecewise_constant([x], [1.0, 2.0]),
        lambda x: piecewise_constant([3], [1.0, x]),
        lambda x: piecewise_constant(None, x),
        lambda x: linear_warmup(x, 2),
        lambda x: cosine_decay(0.1, 10, warmup_target=0.2, warmup_steps=x),
    ]
    for make in numbers:
        with pytest.raises(TypeError, match=r"[a-z_]+: expected (lists of )?numbers, "):
            make(wrong)


@pytest.mark.parametrize("rate", [np.nan, "x", None])
def test_a_schedule_that_gives_no_number_changes_nothing(rate):
    w = mpidist.Variable(np.ones(1))
    optimizer = SGD(lambda step: 0.1 if step == 0 else rate)
    optimizer.apply_gradients([(np.ones(1), w)])
    with pytest.raises((TypeError, ValueError), match="at step 1: expected"):
        optimizer.apply_gradients([(np.ones(1), w)])
    assert int(optimizer.iterations) == 1
    np.testing.assert_allclose(w.numpy(), 0.9)
    if rate is None:
        with pytest.raises(TypeError, match="the function for `learning_rate` to retu"):
            optimizer.apply_gradients([(np.ones(1), w)])


def test_cosines_that_warm_up_and_restart():
    """The formulas of keras/src/optimizers/schedules/learning_rate_schedule.py."""
    warm = cosine_decay(0.1, 10, 0.2, warmup_target=0.5, warmup_steps=4)
    assert [warm(k) for k in (0, 2, 4)] == pytest.approx([0.1, 0.3, 0.5])
    assert [warm(k) for k in (9, 14, 99)] == pytest.approx([0.3, 0.1, 0.1])
    with pytest.raises(ValueError, match="linear_warmup"):
        cosine_decay(0.1, 10, warmup_steps=4)
    again = mpidist.optimizers.cosine_decay_restarts(1.0, 4, 2.0, 0.5, 0.1)
    half = 0.5 * (1 + np.cos(np.pi / 4))
    assert [again(k) for k in (0, 1, 2)] == pytest.approx([1, 0.9 * half + 0.1, 0.55])
    # As in Keras: of the factors, alpha has none.
    assert [again(k) for k in (4, 8, 12)] == pytest.approx([0.55, 0.325, 0.325])
    again = mpidist.optimizers.cosine_decay_restarts(1.0, 1, 1.0, 0.5)
    assert again(3) == 0.125
    assert again(10**12) == 0.0  # at once
    with pytest.raises(ValueError, match="`t_mul` to be 1"):
        mpidist.optimizers.cosine_decay_restarts(1.0, 4, 0.5)
