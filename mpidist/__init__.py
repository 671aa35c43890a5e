"""tf.distribute's Strategy API for NumPy and CuPy arrays, over MPI.

Each MPI rank hosts one replica. Importing this starts no MPI and loads no CuPy; the
first `MPIStrategy` does.
"""

from __future__ import annotations

from mpidist import (
    cluster,
    data,
    elastic,
    experimental,
    losses,
    metrics,
    nest,
    optimizers,
    summary,
    testing,
)
from mpidist._base import remedies as _remedies
from mpidist._base.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    OutOfSyncError,
    ReplicaError,
    ReplicaLostError,
)
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.reduce_op import ReduceOp, get_loss_reduction
from mpidist._base.variable_enums import VariableAggregation, VariableSynchronization
from mpidist._checkpoints import (
    Checkpoint,
    CheckpointManager,
    CheckpointReader,
    RestoreStatus,
    latest_checkpoint,
    load_checkpoint,
)
from mpidist._losses import (
    compute_average_loss,
    global_batch_size,
    scale_regularization_loss,
)
from mpidist._runtime.context import (
    has_strategy,
    in_cross_replica_context,
    variable_sync_on_read_context,
)
from mpidist._runtime.timelines import timeline
from mpidist._strategy.contexts import MultiStepContext
from mpidist._strategy.cross_device_ops import (
    CollectiveAllReduce,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from mpidist._strategy.current import (
    experimental_set_strategy,
    get_cross_replica_context,
    get_replica_context,
    get_strategy,
)
from mpidist._strategy.extended import StrategyExtended
from mpidist._strategy.mpi_strategy import MPIStrategy
from mpidist._strategy.replica_context import ReplicaContext
from mpidist._strategy.seeds import seed_all
from mpidist._strategy.strategy import CommunicationStatistics, Strategy
from mpidist._strategy.tensorflow_names import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    RunOptions,
    TPUStrategy,
    maybe_merge_call,
    strategy_supports_no_merge_call,
)
from mpidist._values.consistency import check_in_sync
from mpidist._values.creators import variable_creator_scope
from mpidist._values.distributed import DistributedValues, Mirrored, PerReplica
from mpidist._values.module import Module
from mpidist._values.variable import Variable
from mpidist._version import __version__
from mpidist.cluster import MPIClusterResolver
from mpidist.data import (
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
)

__all__ = [
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointReader",
    "CollectiveAllReduce",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationStatistics",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MPIClusterResolver",
    "MPIStrategy",
    "Mirrored",
    "MirroredStrategy",
    "Module",
    "MultiStepContext",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "OutOfSyncError",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ReplicaError",
    "ReplicaLostError",
    "RestoreStatus",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "check_in_sync",
    "cluster",
    "compute_average_loss",
    "data",
    "elastic",
    "experimental",
    "experimental_set_strategy",
    "get_cross_replica_context",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "global_batch_size",
    "has_strategy",
    "in_cross_replica_context",
    "latest_checkpoint",
    "load_checkpoint",
    "losses",
    "maybe_merge_call",
    "metrics",
    "nest",
    "optimizers",
    "scale_regularization_loss",
    "seed_all",
    "strategy_supports_no_merge_call",
    "summary",
    "testing",
    "timeline",
    "variable_creator_scope",
    "variable_sync_on_read_context",
]

# Tracebacks and reprs say mpidist.MPIStrategy, whatever file it is in.
for _name in __all__:
    if hasattr(globals()[_name], "__module__"):
        globals()[_name].__module__ = __name__
_explained = (
    cluster,
    data,
    experimental,
    losses,
    metrics,
    nest,
    optimizers,
    summary,
)
for _module in (*_explained, elastic, testing):
    for _name in set(_module.__all__) - set(__all__):
        if callable(getattr(_module, _name)):
            getattr(_module, _name).__module__ = _module.__name__
del _module, _name

for _module in _explained:
    _remedies.explain_module(_module.__name__)
_remedies.explain_module(__name__)
del _module, _explained
