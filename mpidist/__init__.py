"""tf.distribute's Strategy API for NumPy and CuPy arrays, over MPI.

Each MPI rank hosts one replica. Importing this starts no MPI and loads no CuPy; the
first `MPIStrategy` does.
"""

from __future__ import annotations

from mpidist import experimental as experimental
from mpidist._checkpoints import Checkpoint as Checkpoint
from mpidist._checkpoints import CheckpointManager as CheckpointManager
from mpidist._checkpoints import CheckpointReader as CheckpointReader
from mpidist._checkpoints import load_checkpoint as load_checkpoint
from mpidist._context import get_replica_context as get_replica_context
from mpidist._context import get_strategy as get_strategy
from mpidist._context import has_strategy as has_strategy
from mpidist._context import in_cross_replica_context as in_cross_replica_context
from mpidist._errors import CheckpointError as CheckpointError
from mpidist._errors import CollectiveError as CollectiveError
from mpidist._errors import CollectiveMismatchError as CollectiveMismatchError
from mpidist._errors import CollectiveTimeoutError as CollectiveTimeoutError
from mpidist._errors import ReplicaError as ReplicaError
from mpidist._extended import StrategyExtended as StrategyExtended
from mpidist._options import ReduceOp as ReduceOp
from mpidist._options import VariableAggregation as VariableAggregation
from mpidist._options import VariableSynchronization as VariableSynchronization
from mpidist._replica import ReplicaContext as ReplicaContext
from mpidist._strategy import CommunicationStatistics as CommunicationStatistics
from mpidist._strategy import MPIStrategy as MPIStrategy
from mpidist._strategy import Strategy as Strategy
from mpidist._strategy import experimental_set_strategy as experimental_set_strategy
from mpidist._values import DistributedValues as DistributedValues
from mpidist._values import Mirrored as Mirrored
from mpidist._values import PerReplica as PerReplica
from mpidist._variables import Variable as Variable
from mpidist._version import __version__ as __version__

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointReader",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationStatistics",
    "DistributedValues",
    "MPIStrategy",
    "Mirrored",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "ReplicaError",
    "Strategy",
    "StrategyExtended",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "load_checkpoint",
]

# Tracebacks and reprs say mpidist.MPIStrategy, not mpidist._strategy.MPIStrategy.
for _name in __all__:
    if hasattr(globals()[_name], "__module__"):
        globals()[_name].__module__ = __name__
for _name in experimental.__all__:
    getattr(experimental, _name).__module__ = experimental.__name__
del _name
