"""Optimizers for mirrored variables: one fused reduction, then the update.

Gradients are summed over the replicas, so each replica divides its loss by the number
of rows in the whole step; see the guide "Sum or mean".
"""

from mpidist.optimizers._clipping import clip_by_global_norm as clip_by_global_norm
from mpidist.optimizers._optimizer import Optimizer as Optimizer
from mpidist.optimizers._rules import SGD as SGD
from mpidist.optimizers._rules import Adam as Adam
from mpidist.optimizers._rules import AdamW as AdamW
from mpidist.optimizers._rules import LossScaleOptimizer as LossScaleOptimizer
from mpidist.optimizers._rules import RMSprop as RMSprop
from mpidist.optimizers._schedules import cosine_decay as cosine_decay
from mpidist.optimizers._schedules import cosine_decay_restarts as cosine_decay_restarts
from mpidist.optimizers._schedules import exponential_decay as exponential_decay
from mpidist.optimizers._schedules import inverse_time_decay as inverse_time_decay
from mpidist.optimizers._schedules import linear_warmup as linear_warmup
from mpidist.optimizers._schedules import piecewise_constant as piecewise_constant
from mpidist.optimizers._schedules import polynomial_decay as polynomial_decay
