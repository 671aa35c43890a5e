"""Data-parallel training of torch modules: parameters, gradients, optimizers.

All of these calls are collective. They are for the program, in
``with strategy.scope():`` or with ``strategy=``, and for functions that `Strategy.run`
calls. Tensors are on the host, or on a GPU that CuPy knows too. `import mpidist` does
not import this module; importing it imports torch.
"""

from mpidist._base.remedies import publish as _publish
from mpidist.torch._batch_norm import SyncBatchNorm as SyncBatchNorm
from mpidist.torch._optimizer import DistributedOptimizer as DistributedOptimizer
from mpidist.torch._sharding import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
from mpidist.torch._tensors import (
    all_reduce as all_reduce,
    all_reduce_gradients as all_reduce_gradients,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
    check_in_sync as check_in_sync,
)

_publish(__name__)
