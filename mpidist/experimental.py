"""What ``tf.distribute`` keeps in its ``experimental`` module."""

from mpidist._agreement.begun import CollectiveHandle as CollectiveHandle
from mpidist._base.options import CollectiveHints as CollectiveHints
from mpidist._base.options import (
    CommunicationImplementation as CommunicationImplementation,
)
from mpidist._base.options import CommunicationOptions as CommunicationOptions
from mpidist._checkpoints import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from mpidist._checkpoints import TerminationConfig as TerminationConfig
from mpidist._strategy.contexts import ValueContext as ValueContext
from mpidist._strategy.tensorflow_names import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from mpidist._strategy.tensorflow_names import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from mpidist._strategy.tensorflow_names import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from mpidist._strategy.tensorflow_names import TPUStrategy as TPUStrategy

# The older name.
CollectiveCommunication = CommunicationImplementation
