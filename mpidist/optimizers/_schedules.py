"""Learning rates as functions of the step."""

from __future__ import annotations

import bisect
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Self

from mpidist._base.backend import as_number, as_positive, as_real
from mpidist._base.expect import expect
from mpidist._values.variable import Variable

Rate = float | Callable[[int], float]
LearningRate = Rate | Callable[[], float]
"""What users may give; `of_step` makes a function of the step of the last."""


class AssignableRate(float):
    """The learning rate of an optimizer, a number with the method of Keras."""

    def __new__(cls, rate: float, assign: Callable[[LearningRate], None]) -> Self:
        """Make one, given a function that sets that of the optimizer."""
        made = super().__new__(cls, rate)
        made._assign = assign
        return made

    _assign: Callable[[LearningRate], None]

    def assign(self, value: LearningRate | Variable) -> None:
        """Set the learning rate, to the present value if ``value`` is a Variable."""
        self._assign(float(value) if isinstance(value, Variable) else value)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def of_step(rate: Callable[..., float]) -> Callable[[int], float]:
    """Return a function of the step, given one of that or, as in Keras, of nothing.

    One whose parameters have defaults is of nothing, such as ``lambda r=rate: r``.
    """
    try:
        parameters = inspect.signature(rate).parameters.values()
    except (TypeError, ValueError):  # of a function of C
        return rate
    if any(x.default is x.empty and x.kind is not x.VAR_KEYWORD for x in parameters):
        return rate
    return functools.partial(_at_any_step, rate)


def _at_any_step(rate: Callable[[], float], step: int) -> float:
    return rate()


# Functions of this module with their constants: these can be pickled, closures cannot.


def _cosine(
    initial: float,
    steps: int,
    alpha: float,
    target: float,
    warmup_steps: float,
    step: int,
) -> float:
    if step < warmup_steps:
        return initial + (target - initial) * step / warmup_steps
    left = min(step - warmup_steps, steps) / steps
    return target * ((1 - alpha) * (0.5 * (1 + math.cos(math.pi * left))) + alpha)


def _restarting(
    initial: float, steps: int, longer: float, smaller: float, alpha: float, step: int
) -> float:
    left, period, begin = float(step), float(steps), 1.0
    if longer == 1.0:
        number, left = divmod(left, period)
        begin = smaller**number
    while left >= period:
        left, period, begin = left - period, period * longer, begin * smaller
    cosine = 0.5 * (1 + math.cos(math.pi * left / period))
    return initial * ((1 - alpha) * begin * cosine + alpha)


def _periods(steps: int, staircase: bool, step: int) -> float:
    return step // steps if staircase else step / steps


def _exponential(
    initial: float, steps: int, rate: float, staircase: bool, step: int
) -> float:
    return initial * float(rate ** _periods(steps, staircase, step))


def _inverse_time(
    initial: float, steps: int, rate: float, staircase: bool, step: int
) -> float:
    return initial / (1 + rate * _periods(steps, staircase, step))


def _polynomial(
    initial: float, steps: int, end: float, power: float, cycle: bool, step: int
) -> float:
    if cycle:
        steps *= max(1, math.ceil(step / steps))
    left = 1 - min(step, steps) / steps
    return (initial - end) * float(left**power) + end


def _piecewise(boundaries: list[float], values: list[float], step: int) -> float:
    return values[bisect.bisect_left(boundaries, step)]


def _warming_up(learning_rate: Rate, steps: int, step: int) -> float:
    rate = learning_rate(step) if callable(learning_rate) else learning_rate
    return rate * min(1.0, (step + 1) / steps)


def _numbers(call: str, *given: float) -> list[float]:
    for x in given:
        expect(as_real(x) is not None, call, "numbers", x)
    return [*map(float, given)]


def cosine_decay(
    initial_learning_rate: float,
    decay_steps: int,
    alpha: float = 0.0,
    *,
    warmup_target: float | None = None,
    warmup_steps: int = 0,
) -> Callable[[int], float]:
    """Return a schedule that falls along half a cosine, and then is constant.

    ``initial * ((1 - alpha) * (1 + cos(pi * step / decay_steps)) / 2 + alpha)``, like
    Keras' ``CosineDecay`` (Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983).

    Args:
        initial_learning_rate: the learning rate at step 0.
        decay_steps: from this step on it is ``alpha * initial_learning_rate``; greater
            than 0.
        alpha: the last learning rate as a fraction of the largest.
        warmup_target: if given, the largest learning rate: it rises there linearly
            from ``initial_learning_rate``, and falls in the ``decay_steps`` after that.
        warmup_steps: in how many steps it rises.

    Raises:
        ValueError: if ``decay_steps`` is not greater than 0, or there are
            ``warmup_steps`` without a target.
    """
    call = "cosine_decay"
    as_positive(call, "decay_steps", decay_steps)
    if warmup_target is None:
        if warmup_steps:
            raise ValueError(
                f"{call}: expected `warmup_target` with `warmup_steps`, got None; "
                "write `linear_warmup(cosine_decay(...), warmup_steps)`, or the target"
            )
        warmup_target = initial_learning_rate
    numbers = initial_learning_rate, alpha, warmup_target, warmup_steps
    initial, end, target, warmup = _numbers(call, *numbers)
    return functools.partial(_cosine, initial, decay_steps, end, target, warmup)


def cosine_decay_restarts(
    initial_learning_rate: float,
    first_decay_steps: int,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: float = 0.0,
) -> Callable[[int], float]:
    """Return a schedule that falls along half a cosine again and again.

    Like Keras' ``CosineDecayRestarts`` (Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983).

    Args:
        initial_learning_rate: the learning rate at step 0.
        first_decay_steps: the length of the first period; greater than 0.
        t_mul: each period is longer than the one before by this factor, 1 or more.
        m_mul: the height from which it falls, above the end of the period, is
            multiplied by this from one period to the next.
        alpha: the end of each period as a fraction of ``initial_learning_rate``.

    Raises:
        ValueError: if ``first_decay_steps`` is not greater than 0, or ``t_mul`` is
            less than 1.
    """
    call = "cosine_decay_restarts"
    as_positive(call, "first_decay_steps", first_decay_steps)
    longer = as_number(call, "t_mul", t_mul, lambda x: x >= 1, "1 or more")
    initial, smaller, end = _numbers(call, initial_learning_rate, m_mul, alpha)
    return functools.partial(
        _restarting, initial, first_decay_steps, longer, smaller, end
    )


def exponential_decay(
    initial_learning_rate: float,
    decay_steps: int,
    decay_rate: float,
    staircase: bool = False,
) -> Callable[[int], float]:
    """Return a schedule that is multiplied by a factor in each period.

    ``initial * decay_rate ** (step / decay_steps)``, like Keras' ``ExponentialDecay``.

    Args:
        initial_learning_rate: the learning rate at step 0.
        decay_steps: the number of steps of a period; greater than 0.
        decay_rate: the factor.
        staircase: whether it changes at the end of each period only.

    Raises:
        ValueError: if ``decay_steps`` is not greater than 0.
    """
    call = "exponential_decay"
    as_positive(call, "decay_steps", decay_steps)
    initial, rate = _numbers(call, initial_learning_rate, decay_rate)
    return functools.partial(_exponential, initial, decay_steps, rate, staircase)


def inverse_time_decay(
    initial_learning_rate: float,
    decay_steps: int,
    decay_rate: float,
    staircase: bool = False,
) -> Callable[[int], float]:
    """Return a schedule that falls like 1 over the step.

    ``initial / (1 + decay_rate * step / decay_steps)``, like Keras'
    ``InverseTimeDecay``.

    Args:
        initial_learning_rate: the learning rate at step 0.
        decay_steps: the number of steps of a period; greater than 0.
        decay_rate: how fast it falls.
        staircase: whether it changes at the end of each period only.

    Raises:
        ValueError: if ``decay_steps`` is not greater than 0.
    """
    call = "inverse_time_decay"
    as_positive(call, "decay_steps", decay_steps)
    initial, rate = _numbers(call, initial_learning_rate, decay_rate)
    return functools.partial(_inverse_time, initial, decay_steps, rate, staircase)


def polynomial_decay(
    initial_learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> Callable[[int], float]:
    """Return a schedule that falls to an end along a power of the remaining steps.

    ``(initial - end) * (1 - step / decay_steps) ** power + end``, then constant, like
    Keras' ``PolynomialDecay``; with ``power=1`` it is linear.

    Args:
        initial_learning_rate: the learning rate at step 0.
        decay_steps: the step from which on it is ``end_learning_rate``; greater than 0.
        end_learning_rate: the last learning rate.
        power: the exponent.
        cycle: whether, beyond ``decay_steps``, these are replaced by the next multiple
            of them, so that it rises there and falls again.

    Raises:
        ValueError: if ``decay_steps`` is not greater than 0.
    """
    call = "polynomial_decay"
    as_positive(call, "decay_steps", decay_steps)
    initial, end, _ = _numbers(call, initial_learning_rate, end_learning_rate, power)
    return functools.partial(_polynomial, initial, decay_steps, end, power, cycle)


def piecewise_constant(
    boundaries: Sequence[int], values: Sequence[float]
) -> Callable[[int], float]:
    """Return a step function, like Keras' ``PiecewiseConstantDecay``.

    ``values[0]`` up to and including step ``boundaries[0]``, then ``values[1]`` up to
    and including ``boundaries[1]``, and so on; then the last value.

    Args:
        boundaries: step numbers, strictly increasing.
        values: learning rates, one more than ``boundaries``.

    Raises:
        ValueError: if the boundaries do not increase, or the number of values is wrong.
    """
    call = "piecewise_constant"
    for x in (boundaries, values):
        expect(hasattr(x, "__len__"), call, "lists of numbers", x)
    limits, rates = _numbers(call, *boundaries), _numbers(call, *values)
    if len(rates) != len(limits) + 1:
        raise ValueError(
            f"{call}: expected {len(limits) + 1} `values` for {len(limits)} "
            f"`boundaries`, got {len(rates)}"
        )
    if limits != sorted(set(limits)):
        raise ValueError(
            f"{call}: expected `boundaries` to increase, got {[*boundaries]}"
        )
    return functools.partial(_piecewise, limits, rates)


def linear_warmup(
    learning_rate: LearningRate, warmup_steps: int
) -> Callable[[int], float]:
    """Return a schedule that increases linearly to another one.

    In step k of the first ``warmup_steps`` the learning rate is
    ``(k + 1) / warmup_steps`` times ``learning_rate``. For large batches on many ranks
    (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 2.2).

    Args:
        learning_rate: a number or a schedule, which starts at the same step 0.
        warmup_steps: from this step on it is ``learning_rate``; greater than 0.

    Raises:
        ValueError: if ``warmup_steps`` is not greater than 0.
    """
    call = "linear_warmup"
    as_positive(call, "warmup_steps", warmup_steps)
    rate = of_step(learning_rate) if callable(learning_rate) else learning_rate
    if not callable(rate):
        _numbers(call, rate)
    return functools.partial(_warming_up, rate, warmup_steps)
