"""Data-parallel training of torch modules: parameters, gradients, optimizers.

All of these calls are collective. They are for the program, in
``with strategy.scope():`` or with ``strategy=``, and for functions that `Strategy.run`
calls. Tensors are on the host, or on a GPU that CuPy knows too. `import mpidist` does
not import this module; importing it imports torch.
"""

from __future__ import annotations

from mpidist._base.remedies import explain_module
from mpidist.torch._batch_norm import SyncBatchNorm
from mpidist.torch._gradients import all_reduce, all_reduce_gradients
from mpidist.torch._optimizer import DistributedOptimizer
from mpidist.torch._parameters import (
    broadcast_optimizer_state,
    broadcast_parameters,
    check_in_sync,
)
from mpidist.torch._sharding import ZeroRedundancyOptimizer

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "ZeroRedundancyOptimizer",
    "all_reduce",
    "all_reduce_gradients",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_in_sync",
]

explain_module(__name__)
del explain_module
