"""Checkpoints: the state needed to continue a run, in a directory, always complete."""

from mpidist._checkpoints.checkpoint import (
    Checkpoint as Checkpoint,
    RestoreStatus as RestoreStatus,
)
from mpidist._checkpoints.directory import (
    checkpoints_iterator as checkpoints_iterator,
    latest_checkpoint as latest_checkpoint,
    load_checkpoint as load_checkpoint,
)
from mpidist._checkpoints.manager import CheckpointManager as CheckpointManager
from mpidist._checkpoints.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    TerminationConfig as TerminationConfig,
)
from mpidist._checkpoints.storage import CheckpointReader as CheckpointReader
