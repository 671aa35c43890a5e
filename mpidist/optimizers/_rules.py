"""The update formulas: those of torch.optim, with the argument names of Keras."""

from __future__ import annotations

import math
from typing import ClassVar

from mpidist._base.remedies import explain_keywords
from mpidist._base.types import Array
from mpidist.optimizers._arguments import array_functions
from mpidist.optimizers._optimizer import Optimizer
from mpidist.optimizers._schedules import LearningRate
from mpidist.optimizers._state import Block, Numbers


class SGD(Optimizer):
    """Gradient descent, with momentum and weight decay.

    For the gradient g, summed over the replicas, and the learning rate of the step::

        g += weight_decay * w
        m = momentum * m + g
        w -= learning_rate * (g + momentum * m if nesterov else m)

    These are the formulas of ``torch.optim.SGD`` with ``dampening=0`` (Sutskever et
    al. 2013, http://proceedings.mlr.press/v28/sutskever13.html, with the learning rate
    outside the momentum). `of_keras` has it inside, which is equivalent while it is
    constant, and decouples the decay::

        w -= learning_rate * weight_decay * w
        m = momentum * m + learning_rate * g
        w -= learning_rate * g + momentum * m if nesterov else m

    Args:
        learning_rate: a number, or a function of the step (from 0) or of nothing.
        momentum: at least 0 and less than 1; with 0 there is no slot.
        nesterov: whether to use Nesterov momentum.
        weight_decay: the factor of an L2 penalty, added to the gradient.
        clipnorm: if given, each gradient is clipped to this norm, after it is summed
            and before ``weight_decay`` is added. At most one of this and the next two.
        clipvalue: if given, each element of the summed gradients is limited to
            ``-clipvalue`` and ``clipvalue``.
        global_clipnorm: if given, the summed gradients are clipped to this norm of all
            together (`mpidist.optimizers.clip_by_global_norm`).
        shard_state: whether each of n ranks keeps and updates only 1/n of the slots
            (ZeRO-1), with the same results; see `Optimizer`.
        name: default "sgd".

    Raises:
        TypeError, ValueError: for invalid arguments.
        RuntimeError: inside ``merge_fn``, which only rank 0 runs.

    Example, on two replicas::

        with strategy.scope():
            weights = mpidist.Variable(np.array([1.0, 2.0]))
        optimizer = mpidist.optimizers.SGD(learning_rate=0.1, momentum=0.9)
        strategy.run(lambda: optimizer.apply_gradients([(weights / 2, weights)]))
        weights.numpy()  # array([0.9, 1.8])
    """

    _limits: ClassVar = {"momentum": 1.0, "nesterov": None, "weight_decay": math.inf}
    _slots: ClassVar = {"momentum": "momentum"}
    _keras_slots: ClassVar = {"momentum": "velocity"}

    @explain_keywords("SGD")
    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        shard_state: bool = False,
        name: str | None = None,
    ) -> None:
        if nesterov and not momentum:
            raise ValueError("SGD: nesterov=True needs a `momentum` above 0")
        weight_decay = weight_decay or 0.0
        Optimizer.__init__(**locals())

    def _constants(self, step: int, rate: float, decays: bool) -> Numbers:
        momentum, nesterov, decay, *_ = self._settings.values()
        decay *= decays
        return (rate, momentum, float(nesterov), decay, float(self._as_keras))

    @staticmethod
    def _step(w: Array, g: Array, block: Block, constants: Numbers) -> None:
        rate, momentum, nesterov, decay, as_keras = constants
        t, u = block.t, block.u
        if as_keras:
            if decay:
                w *= 1 - rate * decay
            g = array_functions.multiply(g, rate, out=u)
            rate = 1.0
        elif decay:
            array_functions.multiply(w, decay, out=t)
            g = array_functions.add(g, t, out=u)
        if block.slots:
            (m,) = block.slots
            m *= momentum
            m += g
            if nesterov:
                array_functions.multiply(m, momentum, out=t)
                g = array_functions.add(t, g, out=t)
            else:
                g = m
        array_functions.multiply(g, rate, out=t)
        w -= t


class Adam(Optimizer):
    """Adam: steps scaled by running averages of the gradient and its square.

    For the gradient g, summed over the replicas, at step k = 1, 2, ...::

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        m1 = m / (1 - beta_1**k)
        v1 = v / (1 - beta_2**k)
        w -= learning_rate * m1 / (sqrt(v1) + epsilon)

    Kingma and Ba 2015 (https://arxiv.org/abs/1412.6980), algorithm 1, as
    ``torch.optim.Adam``. `of_keras` divides by ``sqrt(v) + epsilon`` and corrects the
    learning rate instead, so its epsilon has more effect in the first steps.

    Args:
        beta_1: decay of the first moment, at least 0 and less than 1.
        beta_2: decay of the second moment, at least 0 and less than 1.
        epsilon: added to the divisor. (torch's default is 1e-8.)
        learning_rate, clipnorm, clipvalue, global_clipnorm, shard_state: as for `SGD`.
        name: default "adam".

    Example::

        rate = mpidist.optimizers.cosine_decay(0.001, decay_steps=1000)
        optimizer = mpidist.optimizers.Adam(rate, beta_2=0.99)
        with strategy.scope():
            weights = mpidist.Variable(np.ones(2))
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
        optimizer.iterations.numpy()  # array(1)
    """

    _limits: ClassVar = {"beta_1": 1.0, "beta_2": 1.0, "epsilon": math.inf}
    _slots: ClassVar = {"momentum": "", "velocity": ""}

    @explain_keywords("Adam")
    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        shard_state: bool = False,
        name: str | None = None,
    ) -> None:
        Optimizer.__init__(**locals())

    def _constants(self, step: int, rate: float, decays: bool) -> Numbers:
        beta_1, beta_2, epsilon, *_ = self._settings.values()
        decay = self._settings.get("weight_decay", 0.0) * decays
        correction = 1 / math.sqrt(1 - beta_2**step)
        return (
            1 - beta_1,
            beta_2,
            correction,
            epsilon * correction if self._as_keras else epsilon,
            rate / (1 - beta_1**step),
            1 - rate * decay,
        )

    @staticmethod
    def _step(w: Array, g: Array, block: Block, constants: Numbers) -> None:
        new_1, beta_2, correction, epsilon, size, keep = constants
        t, (m, v) = block.t, block.slots
        array_functions.subtract(g, m, out=t)
        t *= new_1
        m += t
        v *= beta_2
        array_functions.multiply(g, g, out=t)
        t *= 1 - beta_2
        v += t
        array_functions.sqrt(v, out=t)
        t *= correction
        t += epsilon
        array_functions.divide(m, t, out=t)
        t *= size
        if keep != 1.0:
            w *= keep
        w -= t


class AdamW(Adam):
    """Adam with decoupled weight decay.

    Like `Adam`, with ``w *= 1 - learning_rate * weight_decay`` before the step:
    Loshchilov and Hutter 2019 (https://arxiv.org/abs/1711.05101), algorithm 2, in the
    form of ``torch.optim.AdamW`` and Keras, where the learning rate scales the decay.

    Args:
        weight_decay: the fraction of each weight subtracted per step, in units of the
            learning rate (torch's default is 0.01).
        beta_1, beta_2, epsilon: as for `Adam`.
        learning_rate, clipnorm, clipvalue, global_clipnorm, shard_state: as for `SGD`.
        name: default "adamw".
    """

    _limits: ClassVar = {**Adam._limits, "weight_decay": math.inf}

    @explain_keywords("AdamW")
    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        shard_state: bool = False,
        name: str | None = None,
    ) -> None:
        Optimizer.__init__(**locals())


class RMSprop(Optimizer):
    """RMSprop: gradients are divided by a running average of their magnitude.

    For the gradient g, summed over the replicas::

        v = rho * v + (1 - rho) * g**2
        a = rho * a + (1 - rho) * g                       (if centered)
        d = g / (sqrt(v - a**2 if centered else v) + epsilon)
        m = momentum * m + d                              (if momentum is not 0)
        w -= learning_rate * (m if momentum else d)

    The formulas of ``torch.optim.RMSprop``, with the learning rate outside the momentum
    (Hinton 2012, http://www.cs.toronto.edu/~hinton/coursera/lecture6/lec6.pdf; centered
    in Graves 2013, https://arxiv.org/abs/1308.0850, section 4.2). `of_keras` has
    epsilon inside the root, so that gradients far below ``sqrt(epsilon)``, 3e-4, make
    small steps, and the learning rate inside the momentum::

        d = learning_rate * g / sqrt((v - a**2 if centered else v) + epsilon)
        m = momentum * m + d
        w -= m if momentum else d

    Args:
        rho: decay of the averages, at least 0 and less than 1. (torch's ``alpha``,
            default 0.99.)
        momentum: at least 0 and less than 1; with 0 there is no slot for it.
        epsilon: added to the divisor. (torch's default is 1e-8.)
        centered: whether to divide by the standard deviation.
        learning_rate, clipnorm, clipvalue, global_clipnorm, shard_state: as for `SGD`.
        name: default "rmsprop".
    """

    _limits: ClassVar = {
        "rho": 1.0,
        "momentum": 1.0,
        "epsilon": math.inf,
        "centered": None,
    }
    _slots: ClassVar = {
        "velocity": "",
        "average_gradient": "centered",
        "momentum": "momentum",
    }
    _keras_slots: ClassVar = {"momentum": "increment"}

    @explain_keywords("RMSprop")
    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        shard_state: bool = False,
        name: str | None = None,
    ) -> None:
        Optimizer.__init__(**locals())

    def _constants(self, step: int, rate: float, decays: bool) -> Numbers:
        rho, momentum, epsilon, centered, *_ = self._settings.values()
        return (rate, rho, momentum, epsilon, centered, float(self._as_keras))

    @staticmethod
    def _step(w: Array, g: Array, block: Block, constants: Numbers) -> None:
        rate, rho, momentum, epsilon, centered, as_keras = constants
        t, u, slots = block.t, block.u, block.slots
        v = slots[0]
        v *= rho
        array_functions.multiply(g, g, out=t)
        t *= 1 - rho
        v += t
        if centered:
            a = slots[1]
            array_functions.subtract(g, a, out=t)
            t *= 1 - rho
            a += t
            array_functions.multiply(a, a, out=t)
            array_functions.subtract(v, t, out=t)
            array_functions.maximum(t, 0.0, out=t)  # rounding may make it negative
            v = t
        if as_keras:
            v = array_functions.add(v, epsilon, out=t)
        array_functions.sqrt(v, out=t)
        if not as_keras:
            t += epsilon
        g = array_functions.divide(g, t, out=u)
        if as_keras:
            g = array_functions.multiply(g, rate, out=u)
            rate = 1.0
        if momentum:
            m = slots[-1]
            m *= momentum
            g = array_functions.add(m, g, out=m)
        array_functions.multiply(g, rate, out=t)
        w -= t


class Adagrad(Optimizer):
    """Adagrad: gradients are divided by the root of the sum of all their squares.

    For the gradient g, summed over the replicas, from v = 0::

        v += g**2
        w -= learning_rate * g / (sqrt(initial_accumulator_value + v) + epsilon)

    Duchi et al. 2011 (https://jmlr.org/papers/v12/duchi11a.html), as
    ``torch.optim.Adagrad``. `of_keras` has epsilon inside the root.

    Args:
        initial_accumulator_value: at least 0. (torch's default is 0.)
        epsilon: added to the divisor. (torch's default is 1e-10.)
        learning_rate, clipnorm, clipvalue, global_clipnorm, shard_state: as for `SGD`.
        name: default "adagrad".
    """

    _limits: ClassVar = {"initial_accumulator_value": math.inf, "epsilon": math.inf}
    _slots: ClassVar = {"squares": ""}

    @explain_keywords("Adagrad")
    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        *,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        shard_state: bool = False,
        name: str | None = None,
    ) -> None:
        Optimizer.__init__(**locals())

    def _constants(self, step: int, rate: float, decays: bool) -> Numbers:
        initial, epsilon, *_ = self._settings.values()
        inside = epsilon if self._as_keras else 0.0
        return (rate, initial + inside, epsilon - inside)

    @staticmethod
    def _step(w: Array, g: Array, block: Block, constants: Numbers) -> None:
        rate, inside, outside = constants
        t, (v,) = block.t, block.slots
        array_functions.multiply(g, g, out=t)
        v += t
        array_functions.add(v, inside, out=t)
        array_functions.sqrt(t, out=t)
        t += outside
        array_functions.divide(g, t, out=t)
        t *= rate
        w -= t


class LossScaleOptimizer:
    """A name of Keras for ``isinstance``, which is always False.

    Creating one raises a NotImplementedError, which says what to write.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            "LossScaleOptimizer: slots and steps of float16 variables are float32; "
            "write the optimizer itself, such as `mpidist.optimizers.Adam(...)`"
        )
