"""tf.distribute's Strategy API for NumPy and CuPy arrays, over MPI.

Each MPI rank hosts one replica. Importing this starts no MPI and loads no CuPy; the
first `MPIStrategy` does.
"""

from typing import TYPE_CHECKING

from mpidist import cluster as cluster, experimental as experimental, nest as nest
from mpidist._base.errors import (
    CheckpointError as CheckpointError,
    CollectiveError as CollectiveError,
    CollectiveMismatchError as CollectiveMismatchError,
    CollectiveTimeoutError as CollectiveTimeoutError,
    OutOfSyncError as OutOfSyncError,
    ReplicaError as ReplicaError,
    ReplicaLostError as ReplicaLostError,
)
from mpidist._base.indexed_slices import IndexedSlices as IndexedSlices
from mpidist._base.reduce_op import (
    ReduceOp as ReduceOp,
    get_loss_reduction as get_loss_reduction,
)
from mpidist._base.remedies import publish as _publish
from mpidist._base.variable_enums import (
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)
from mpidist._runtime.context import (
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
    variable_sync_on_read_context as variable_sync_on_read_context,
)
from mpidist._runtime.timelines import timeline as timeline
from mpidist._strategy.average_loss import (
    compute_average_loss as compute_average_loss,
    global_batch_size as global_batch_size,
    scale_regularization_loss as scale_regularization_loss,
)
from mpidist._strategy.contexts import MultiStepContext as MultiStepContext
from mpidist._strategy.cross_device_ops import (
    CollectiveAllReduce as CollectiveAllReduce,
    CrossDeviceOps as CrossDeviceOps,
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReductionToOneDevice as ReductionToOneDevice,
)
from mpidist._strategy.current import (
    experimental_set_strategy as experimental_set_strategy,
    get_cross_replica_context as get_cross_replica_context,
    get_replica_context as get_replica_context,
    get_strategy as get_strategy,
    seed_all as seed_all,
)
from mpidist._strategy.extended import StrategyExtended as StrategyExtended
from mpidist._strategy.mpi_strategy import MPIStrategy as MPIStrategy
from mpidist._strategy.replica_context import ReplicaContext as ReplicaContext
from mpidist._strategy.strategy import (
    CommunicationStatistics as CommunicationStatistics,
    Strategy as Strategy,
)
from mpidist._strategy.tensorflow_names import (
    CentralStorageStrategy as CentralStorageStrategy,
    MirroredStrategy as MirroredStrategy,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    OneDeviceStrategy as OneDeviceStrategy,
    ParameterServerStrategy as ParameterServerStrategy,
    RunOptions as RunOptions,
    TPUStrategy as TPUStrategy,
    maybe_merge_call as maybe_merge_call,
    strategy_supports_no_merge_call as strategy_supports_no_merge_call,
)
from mpidist._values.consistency import check_in_sync as check_in_sync
from mpidist._values.creators import variable_creator_scope as variable_creator_scope
from mpidist._values.distributed import (
    DistributedValues as DistributedValues,
    Mirrored as Mirrored,
    PerReplica as PerReplica,
)
from mpidist._values.module import Module as Module
from mpidist._values.variable import Variable as Variable
from mpidist._version import __version__ as __version__
from mpidist.cluster import MPIClusterResolver as MPIClusterResolver

if TYPE_CHECKING:  # else by `_publish`, when they are first used: they take long
    from mpidist import (
        data as data,
        elastic as elastic,
        losses as losses,
        metrics as metrics,
        optimizers as optimizers,
        summary as summary,
        testing as testing,
    )
    from mpidist._checkpoints import (
        Checkpoint as Checkpoint,
        CheckpointManager as CheckpointManager,
        CheckpointReader as CheckpointReader,
        RestoreStatus as RestoreStatus,
        checkpoints_iterator as checkpoints_iterator,
        latest_checkpoint as latest_checkpoint,
        load_checkpoint as load_checkpoint,
    )
    from mpidist.data import (
        DistributedDataset as DistributedDataset,
        DistributedIterator as DistributedIterator,
        InputContext as InputContext,
        InputOptions as InputOptions,
        InputReplicationMode as InputReplicationMode,
    )

_publish(
    __name__,
    later={
        "_checkpoints": (
            "Checkpoint",
            "CheckpointManager",
            "CheckpointReader",
            "RestoreStatus",
            "checkpoints_iterator",
            "latest_checkpoint",
            "load_checkpoint",
        ),
        "data": (
            "DistributedDataset",
            "DistributedIterator",
            "InputContext",
            "InputOptions",
            "InputReplicationMode",
        ),
        **dict.fromkeys(
            ("elastic", "losses", "metrics", "optimizers", "summary", "testing"), ()
        ),
    },
)
