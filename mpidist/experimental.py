"""What ``tf.distribute`` keeps in its ``experimental`` module."""

from mpidist._agreement.async_calls import CollectiveHandle as CollectiveHandle
from mpidist._base.options import (
    CollectiveHints as CollectiveHints,
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
)
from mpidist._checkpoints import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    TerminationConfig as TerminationConfig,
)
from mpidist._strategy.contexts import ValueContext as ValueContext
from mpidist._strategy.mpi_strategy import (
    CentralStorageStrategy as CentralStorageStrategy,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    ParameterServerStrategy as ParameterServerStrategy,
    TPUStrategy as TPUStrategy,
)

# The older name.
CollectiveCommunication = CommunicationImplementation
