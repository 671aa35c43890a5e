"""What ``tf.distribute`` keeps in its ``experimental`` module."""

from __future__ import annotations

from mpidist._agreement.begun import CollectiveHandle
from mpidist._base.options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from mpidist._checkpoints import PreemptionCheckpointHandler, TerminationConfig
from mpidist._strategy.contexts import ValueContext
from mpidist._strategy.tensorflow_names import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
    TPUStrategy,
)

# The older name.
CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHandle",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
]
