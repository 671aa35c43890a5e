"""tf.distribute's Strategy API for NumPy and CuPy arrays, over MPI.

Each MPI rank hosts one replica. Importing this starts no MPI and loads no CuPy; the
first `MPIStrategy` does.
"""

from mpidist import cluster as cluster
from mpidist import data as data
from mpidist import elastic as elastic
from mpidist import experimental as experimental
from mpidist import losses as losses
from mpidist import metrics as metrics
from mpidist import nest as nest
from mpidist import optimizers as optimizers
from mpidist import summary as summary
from mpidist import testing as testing
from mpidist._base.errors import CheckpointError as CheckpointError
from mpidist._base.errors import CollectiveError as CollectiveError
from mpidist._base.errors import CollectiveMismatchError as CollectiveMismatchError
from mpidist._base.errors import CollectiveTimeoutError as CollectiveTimeoutError
from mpidist._base.errors import OutOfSyncError as OutOfSyncError
from mpidist._base.errors import ReplicaError as ReplicaError
from mpidist._base.errors import ReplicaLostError as ReplicaLostError
from mpidist._base.indexed_slices import IndexedSlices as IndexedSlices
from mpidist._base.reduce_op import ReduceOp as ReduceOp
from mpidist._base.reduce_op import get_loss_reduction as get_loss_reduction
from mpidist._base.remedies import publish as _publish
from mpidist._base.variable_enums import VariableAggregation as VariableAggregation
from mpidist._base.variable_enums import (
    VariableSynchronization as VariableSynchronization,
)
from mpidist._checkpoints import Checkpoint as Checkpoint
from mpidist._checkpoints import CheckpointManager as CheckpointManager
from mpidist._checkpoints import CheckpointReader as CheckpointReader
from mpidist._checkpoints import RestoreStatus as RestoreStatus
from mpidist._checkpoints import latest_checkpoint as latest_checkpoint
from mpidist._checkpoints import load_checkpoint as load_checkpoint
from mpidist._losses import compute_average_loss as compute_average_loss
from mpidist._losses import global_batch_size as global_batch_size
from mpidist._losses import scale_regularization_loss as scale_regularization_loss
from mpidist._runtime.context import has_strategy as has_strategy
from mpidist._runtime.context import (
    in_cross_replica_context as in_cross_replica_context,
)
from mpidist._runtime.context import (
    variable_sync_on_read_context as variable_sync_on_read_context,
)
from mpidist._runtime.timelines import timeline as timeline
from mpidist._strategy.contexts import MultiStepContext as MultiStepContext
from mpidist._strategy.cross_device_ops import (
    CollectiveAllReduce as CollectiveAllReduce,
)
from mpidist._strategy.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mpidist._strategy.cross_device_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from mpidist._strategy.cross_device_ops import NcclAllReduce as NcclAllReduce
from mpidist._strategy.cross_device_ops import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from mpidist._strategy.current import (
    experimental_set_strategy as experimental_set_strategy,
)
from mpidist._strategy.current import (
    get_cross_replica_context as get_cross_replica_context,
)
from mpidist._strategy.current import get_replica_context as get_replica_context
from mpidist._strategy.current import get_strategy as get_strategy
from mpidist._strategy.extended import StrategyExtended as StrategyExtended
from mpidist._strategy.mpi_strategy import MPIStrategy as MPIStrategy
from mpidist._strategy.replica_context import ReplicaContext as ReplicaContext
from mpidist._strategy.seeds import seed_all as seed_all
from mpidist._strategy.strategy import (
    CommunicationStatistics as CommunicationStatistics,
)
from mpidist._strategy.strategy import Strategy as Strategy
from mpidist._strategy.tensorflow_names import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from mpidist._strategy.tensorflow_names import MirroredStrategy as MirroredStrategy
from mpidist._strategy.tensorflow_names import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpidist._strategy.tensorflow_names import OneDeviceStrategy as OneDeviceStrategy
from mpidist._strategy.tensorflow_names import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from mpidist._strategy.tensorflow_names import RunOptions as RunOptions
from mpidist._strategy.tensorflow_names import TPUStrategy as TPUStrategy
from mpidist._strategy.tensorflow_names import maybe_merge_call as maybe_merge_call
from mpidist._strategy.tensorflow_names import (
    strategy_supports_no_merge_call as strategy_supports_no_merge_call,
)
from mpidist._values.consistency import check_in_sync as check_in_sync
from mpidist._values.creators import variable_creator_scope as variable_creator_scope
from mpidist._values.distributed import DistributedValues as DistributedValues
from mpidist._values.distributed import Mirrored as Mirrored
from mpidist._values.distributed import PerReplica as PerReplica
from mpidist._values.module import Module as Module
from mpidist._values.variable import Variable as Variable
from mpidist._version import __version__ as __version__
from mpidist.cluster import MPIClusterResolver as MPIClusterResolver
from mpidist.data import DistributedDataset as DistributedDataset
from mpidist.data import DistributedIterator as DistributedIterator
from mpidist.data import InputContext as InputContext
from mpidist.data import InputOptions as InputOptions
from mpidist.data import InputReplicationMode as InputReplicationMode

_publish(__name__)
