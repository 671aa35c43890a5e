"""Keywords of TensorFlow's calls, for `remedies`: what to write instead.

Each text follows "unexpected keyword argument 'x'; ", and contains the line to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from mpidist._base.remedy_tables import RANKS


class Keyword(NamedTuple):
    """A keyword argument of TensorFlow that a call here does not have.

    Attributes:
        remedy: what to write instead.
        ignored: whether it is ignored with any value, as it changes no result.
        default: the value that says what is the case here, which is ignored, as None
            and False are.
    """

    remedy: str
    ignored: bool = False
    default: object = None


_SPEED = Keyword("delete it, as in `mpidist.optimizers.Adam(0.001)`", ignored=True)
_DELETE = "delete it, as in `mpidist.Variable(value)`"
_EVERY = "write `if step % 100 == 0: manager.save()`"
_OPTIMIZER: Final[Mapping[str, Keyword]] = {
    "amsgrad": Keyword("write `mpidist.optimizers.Adam(...)` without it"),
    "decay": Keyword(
        "write a function of the step: `learning_rate=lambda step: 0.1 / (1 + 0.01 * "
        "step)`",
        default=0.0,
    ),
    "ema_momentum": Keyword(
        "average the variables after the step, by `average.assign(...)`", ignored=True
    ),
    "ema_overwrite_frequency": Keyword(
        "average the variables after the step, by `average.assign(...)`"
    ),
    "gradient_accumulation_steps": Keyword(
        "add up the gradients, and write `if step % 4 == 0: "
        "optimizer.apply_gradients(...)`",
        default=1,
    ),
    "jit_compile": _SPEED,
    "loss_scale_factor": Keyword(
        "divide the gradients by it, and write `optimizer.apply_gradients(...)`",
        default=1.0,
    ),
    "lr": Keyword("write `learning_rate=`"),
    "use_ema": Keyword(
        "average the variables after the step, by `average.assign(...)`"
    ),
}

KEYWORDS: Final[Mapping[str, Mapping[str, Keyword]]] = {
    "MPIStrategy": {
        "cluster_resolver": Keyword(RANKS),
        "communication": Keyword(
            "write `communication_options=mpidist.experimental.CommunicationOptions("
            "implementation=...)`"
        ),
        "devices": Keyword(
            'write `device="gpu"`, which is this rank\'s GPU: each rank is a replica, '
            "and `mpirun -n N` sets their number"
        ),
        "num_gpus": Keyword(
            "write `mpirun -n N`: each rank is a replica, with a GPU of its own"
        ),
    },
    "Variable": {
        "caching_device": Keyword(_DELETE, ignored=True),
        "collections": Keyword(_DELETE),
        "constraint": Keyword(
            "apply it after the step: `variable.assign(f(variable))`"
        ),
        "experimental_enable_variable_lifting": Keyword(_DELETE, ignored=True),
        "import_scope": Keyword(_DELETE),
        "initializer": Keyword("write the array: `mpidist.Variable(numpy.zeros(3))`"),
        "regularizer": Keyword(
            "add it to the loss, by `mpidist.scale_regularization_loss(loss)`"
        ),
        "use_resource": Keyword(_DELETE, ignored=True),
        "validate_shape": Keyword(
            "its shape is fixed: write `mpidist.Variable(value)`", default=True
        ),
        "variable_def": Keyword(_DELETE),
    },
    "SGD": {**_OPTIMIZER, "amsgrad": Keyword("write `mpidist.optimizers.Adam(...)`")},
    "Adam": {
        **_OPTIMIZER,
        "weight_decay": Keyword(
            "write `mpidist.optimizers.AdamW(weight_decay=...)`", default=0.0
        ),
    },
    "AdamW": _OPTIMIZER,
    "RMSprop": {
        **_OPTIMIZER,
        "weight_decay": Keyword(
            "write `mpidist.optimizers.AdamW(weight_decay=...)`, or add it to the "
            "gradient",
            default=0.0,
        ),
    },
    "Checkpoint.save": {
        "options": Keyword("write `checkpoint.save(path)`"),
        "file_prefix": Keyword("write `checkpoint.save(path)`"),
    },
    "Checkpoint.restore": {
        "options": Keyword("write `checkpoint.restore(path)`"),
        "save_path": Keyword("write `checkpoint.restore(path)`"),
    },
    "CheckpointManager": {
        "checkpoint_interval": Keyword(_EVERY),
        "init_fn": Keyword(
            "write `if manager.restore_or_initialize() is None: initialize()`"
        ),
        "keep_checkpoint_every_n_hours": Keyword(
            "write `max_to_keep=None`, which keeps all"
        ),
        "last_checkpoint_step": Keyword(_EVERY),
        "step_counter": Keyword(_EVERY),
    },
    "CheckpointManager.save": {
        "check_interval": Keyword(_EVERY, default=True),
        "options": Keyword("write `manager.save()`"),
    },
}
"""Keywords that TensorFlow has, by the public name of the call."""
