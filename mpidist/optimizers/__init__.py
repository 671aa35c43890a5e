"""Optimizers for mirrored variables: one fused reduction, then the update.

Gradients are summed over the replicas, so each replica divides its loss by the number
of rows in the whole step; see the guide "Sum or mean".
"""

from __future__ import annotations

from mpidist.optimizers._clipping import clip_by_global_norm
from mpidist.optimizers._optimizer import Optimizer
from mpidist.optimizers._rules import SGD, Adam, AdamW, LossScaleOptimizer, RMSprop
from mpidist.optimizers._schedules import (
    cosine_decay,
    cosine_decay_restarts,
    exponential_decay,
    inverse_time_decay,
    linear_warmup,
    piecewise_constant,
    polynomial_decay,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "LossScaleOptimizer",
    "Optimizer",
    "RMSprop",
    "clip_by_global_norm",
    "cosine_decay",
    "cosine_decay_restarts",
    "exponential_decay",
    "inverse_time_decay",
    "linear_warmup",
    "piecewise_constant",
    "polynomial_decay",
]
