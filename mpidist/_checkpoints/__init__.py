"""Checkpoints: what a run has to go on with, in a directory, always whole."""

from mpidist._checkpoints._checkpoint import Checkpoint as Checkpoint
from mpidist._checkpoints._manager import CheckpointManager as CheckpointManager
from mpidist._checkpoints._preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from mpidist._checkpoints._preemption import TerminationConfig as TerminationConfig
from mpidist._checkpoints._reader import CheckpointReader as CheckpointReader
from mpidist._checkpoints._reader import load_checkpoint as load_checkpoint
