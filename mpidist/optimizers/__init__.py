"""Optimizers for mirrored variables: one fused reduction, then the update.

Gradients are summed over the replicas, so each replica divides its loss by the number
of rows in the whole step; see the guide "Sum or mean".
"""

from mpidist._base.remedies import publish as _publish
from mpidist.optimizers._clipping import clip_by_global_norm as clip_by_global_norm
from mpidist.optimizers._optimizer import Optimizer as Optimizer
from mpidist.optimizers._rules import (
    SGD as SGD,
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    LossScaleOptimizer as LossScaleOptimizer,
    RMSprop as RMSprop,
)
from mpidist.optimizers._schedules import (
    cosine_decay as cosine_decay,
    cosine_decay_restarts as cosine_decay_restarts,
    exponential_decay as exponential_decay,
    inverse_time_decay as inverse_time_decay,
    linear_warmup as linear_warmup,
    piecewise_constant as piecewise_constant,
    polynomial_decay as polynomial_decay,
)

_publish(__name__)
