"""Learning rates as functions of the step."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence

from mpidist._base import backend

LearningRate = float | Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class _CosineDecay:
    initial: float
    steps: int
    alpha: float

    def __call__(self, step: int) -> float:
        done = min(step, self.steps) / self.steps
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.initial * ((1 - self.alpha) * cosine + self.alpha)


@dataclasses.dataclass(frozen=True)
class _PiecewiseConstant:
    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, step: int) -> float:
        return self.values[bisect.bisect_left(self.boundaries, step)]


@dataclasses.dataclass(frozen=True)
class _ExponentialDecay:
    initial: float
    steps: int
    rate: float
    staircase: bool

    def __call__(self, step: int) -> float:
        return self.initial * float(self.rate ** _periods(self, step))


@dataclasses.dataclass(frozen=True)
class _InverseTimeDecay:
    initial: float
    steps: int
    rate: float
    staircase: bool

    def __call__(self, step: int) -> float:
        return self.initial / (1 + self.rate * _periods(self, step))


def _periods(decay: _ExponentialDecay | _InverseTimeDecay, step: int) -> float:
    return step // decay.steps if decay.staircase else step / decay.steps


@dataclasses.dataclass(frozen=True)
class _PolynomialDecay:
    initial: float
    steps: int
    end: float
    power: float
    cycle: bool

    def __call__(self, step: int) -> float:
        steps = self.steps
        if self.cycle:
            steps *= max(1, math.ceil(step / self.steps))
        left = 1 - min(step, steps) / steps
        return (self.initial - self.end) * float(left**self.power) + self.end


@dataclasses.dataclass(frozen=True)
class _LinearWarmup:
    learning_rate: LearningRate
    steps: int

    def __call__(self, step: int) -> float:
        if callable(self.learning_rate):
            rate = self.learning_rate(step)
        else:
            rate = self.learning_rate
        return rate * min(1.0, (step + 1) / self.steps)


def cosine_decay(
    initial_learning_rate: float, decay_steps: int, alpha: float = 0.0
) -> Callable[[int], float]:
    """Return a schedule that falls along half a cosine, and then is constant.

    ``initial * ((1 - alpha) * (1 + cos(pi * step / decay_steps)) / 2 + alpha)``, like
    Keras' ``CosineDecay`` (Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983).

    Args:
        initial_learning_rate: the learning rate at step 0.
        decay_steps: from this step on it is ``alpha * initial_learning_rate``; greater
            than 0.
        alpha: the last learning rate as a fraction of the first.

    Raises:
        ValueError: if ``decay_steps`` is not greater than 0.
    """
    _check_steps("cosine_decay", "decay_steps", decay_steps)
    return _CosineDecay(float(initial_learning_rate), decay_steps, float(alpha))


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
    _check_steps("exponential_decay", "decay_steps", decay_steps)
    return _ExponentialDecay(
        float(initial_learning_rate), decay_steps, float(decay_rate), bool(staircase)
    )


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
    _check_steps("inverse_time_decay", "decay_steps", decay_steps)
    return _InverseTimeDecay(
        float(initial_learning_rate), decay_steps, float(decay_rate), bool(staircase)
    )


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
    _check_steps("polynomial_decay", "decay_steps", decay_steps)
    initial, end = float(initial_learning_rate), float(end_learning_rate)
    return _PolynomialDecay(initial, decay_steps, end, float(power), bool(cycle))


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
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"piecewise_constant: expected {len(boundaries) + 1} `values` for "
            f"{len(boundaries)} `boundaries`, got {len(values)}"
        )
    if list(boundaries) != sorted(set(boundaries)):
        raise ValueError(
            f"piecewise_constant: expected `boundaries` to increase, got "
            f"{list(boundaries)}"
        )
    rates = tuple(float(value) for value in values)
    return _PiecewiseConstant(tuple(boundaries), rates)


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
    _check_steps("linear_warmup", "warmup_steps", warmup_steps)
    return _LinearWarmup(learning_rate, warmup_steps)


def _check_steps(call: str, argument: str, steps: int) -> None:
    if not steps > 0:
        raise ValueError(f"{call}: expected `{argument}` to be above 0, got {steps!r}")


def check_rate(rate: object, expected: str) -> float:
    """Return a learning rate as a float.

    Args:
        rate: the learning rate.
        expected: the beginning of the message, up to "expected".

    Raises:
        TypeError, ValueError: if it is not a finite number, 0 or more.
    """
    number = backend.as_real(rate)
    if number is None:
        raise TypeError(
            f"{expected} `learning_rate` to be a number or a function of the step, "
            f"got {rate!r:.80} of type {type(rate).__name__}"
        )
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"{expected} `learning_rate` to be finite and 0 or more, got {rate!r}"
        )
    return number
