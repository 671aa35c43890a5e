"""What ``tf.distribute`` keeps in its ``experimental`` module."""

from typing import TYPE_CHECKING

from mpidist._agreement.async_calls import CollectiveHandle as CollectiveHandle
from mpidist._base.options import (
    CollectiveHints as CollectiveHints,
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
)
from mpidist._base.remedies import publish as _publish
from mpidist._strategy.contexts import ValueContext as ValueContext
from mpidist._strategy.tensorflow_names import (
    CentralStorageStrategy as CentralStorageStrategy,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    ParameterServerStrategy as ParameterServerStrategy,
    TPUStrategy as TPUStrategy,
)

if TYPE_CHECKING:  # else by `_publish`
    from mpidist._checkpoints import (
        PreemptionCheckpointHandler as PreemptionCheckpointHandler,
        TerminationConfig as TerminationConfig,
    )

# The older name.
CollectiveCommunication = CommunicationImplementation

_publish(
    __name__,
    later={"_checkpoints": ("PreemptionCheckpointHandler", "TerminationConfig")},
)
