"""Public names: listed, documented, and said to be collective where they are."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import mpidist
from mpidist import (
    cluster,
    data,
    elastic,
    experimental,
    losses,
    metrics,
    nest,
    optimizers,
    summary,
    testing,
)

PREFIXES = {
    mpidist: "",
    cluster: "cluster.",
    data: "data.",
    elastic: "elastic.",
    experimental: "experimental.",
    losses: "losses.",
    metrics: "metrics.",
    nest: "nest.",
    optimizers: "optimizers.",
    summary: "summary.",
    testing: "testing.",
}

# Every rank, or every replica, has to call these; the others any rank by itself.
COLLECTIVE = {
    "timeline",
    "compute_average_loss",
    "global_batch_size",
    "metrics.AUC.result",
    "metrics.Mean.result",
    "metrics.Mean.update_state",
    "metrics.Metric.add_weight",
    "metrics.Metric.reset_state",
    "metrics.Metric.reset_states",
    "metrics.Metric.result",
    "metrics.FBetaScore.result",
    "metrics.FalseNegatives.result",
    "metrics.FalsePositives.result",
    "metrics.IoU.result",
    "metrics.Precision.result",
    "metrics.PrecisionAtRecall.result",
    "metrics.R2Score.result",
    "metrics.Recall.result",
    "metrics.RecallAtPrecision.result",
    "metrics.SensitivityAtSpecificity.result",
    "metrics.SpecificityAtSensitivity.result",
    "metrics.TrueNegatives.result",
    "metrics.TruePositives.result",
    "metrics.RootMeanSquaredError.result",
    "metrics.Sum.result",
    "optimizers.Optimizer.apply_gradients",
    "optimizers.Optimizer.build",
    "CollectiveAllReduce.batch_reduce_implementation",
    "CollectiveAllReduce.reduce_implementation",
    "CrossDeviceOps.batch_reduce",
    "CrossDeviceOps.batch_reduce_implementation",
    "CrossDeviceOps.broadcast",
    "CrossDeviceOps.broadcast_implementation",
    "CrossDeviceOps.reduce",
    "CrossDeviceOps.reduce_implementation",
    "HierarchicalCopyAllReduce.batch_reduce_implementation",
    "DistributedDataset.reduce",
    "DistributedIterator.get_next",
    "DistributedIterator.get_next_as_optional",
    "DistributedIterator.initialize",
    "DistributedIterator.restore",
    "experimental.PreemptionCheckpointHandler",
    "experimental.PreemptionCheckpointHandler.run",
    "experimental.PreemptionCheckpointHandler.save_checkpoint_if_preempted",
    "elastic.State.commit",
    "elastic.run",
    "Checkpoint.restore",
    "Checkpoint.save",
    "Checkpoint.sync",
    "Checkpoint.wait",
    "CheckpointManager",
    "checkpoints_iterator",
    "CheckpointManager.restore_or_initialize",
    "CheckpointManager.save",
    "CheckpointManager.sync",
    "MPIStrategy",
    "MPIStrategy.close",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "maybe_merge_call",
    "MultiStepContext.set_last_step_output",
    "MultiStepContext.set_non_tensor_output",
    "NcclAllReduce.batch_reduce_implementation",
    "ReductionToOneDevice.reduce_implementation",
    "ReplicaContext.all_gather",
    "ReplicaContext.all_gather_async",
    "ReplicaContext.all_reduce",
    "ReplicaContext.all_reduce_async",
    "ReplicaContext.merge_call",
    "testing.ThreadGroup.all_gather",
    "testing.ThreadGroup.barrier",
    "testing.ThreadGroup.broadcast",
    "testing.ThreadGroup.split",
    "Strategy.buffers_like",
    "Strategy.distribute_datasets_from_function",
    "Strategy.experimental_distribute_dataset",
    "Strategy.experimental_distribute_datasets_from_function",
    "Strategy.experimental_distribute_values_from_function",
    "Strategy.experimental_run",
    "Strategy.experimental_run_v2",
    "Strategy.gather",
    "Strategy.make_dataset_iterator",
    "Strategy.make_input_fn_iterator",
    "Strategy.reduce",
    "Strategy.run",
    "StrategyExtended.batch_reduce_to",
    "StrategyExtended.broadcast_to",
    "StrategyExtended.call_for_each_replica",
    "StrategyExtended.experimental_run_steps_on_iterator",
    "StrategyExtended.read_var",
    "StrategyExtended.reduce_to",
    "StrategyExtended.update",
    "StrategyExtended.update_non_slot",
    "Variable",
    "Variable.assign",
    "Variable.assign_add",
    "Variable.assign_sub",
    "Variable.scatter_add",
    "Variable.scatter_div",
    "Variable.scatter_max",
    "Variable.scatter_min",
    "Variable.scatter_mul",
    "Variable.scatter_sub",
    "Variable.scatter_update",
    "check_in_sync",
}


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions, by the name that users write."""
    for module, prefix in PREFIXES.items():
        for name in module.__all__:
            if prefix and name in mpidist.__all__:
                continue  # `mpidist.data` has some that are in `mpidist` itself
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield prefix + name, value


def public_members() -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of the public classes.

    Each under the class that a user meets first: one that is inherited from another
    public class is not repeated, one from a private class is.
    """
    public = {value for _, value in public_objects()}
    for class_name, kind in public_objects():
        if not inspect.isclass(kind):
            continue
        names = {name for c in kind.__mro__ for name in vars(c)}
        for name in sorted(names):
            if name.startswith("_"):
                continue
            owner = next(c for c in kind.__mro__ if name in vars(c))
            if owner.__module__.split(".")[0] != "mpidist":
                continue  # of the standard library or NumPy
            if owner is not kind and owner in public:
                continue
            value = inspect.getattr_static(kind, name)
            if isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            if inspect.isfunction(value) or isinstance(value, property):
                yield f"{class_name}.{name}", value


OBJECTS = dict(public_objects())
MEMBERS = dict(public_members())
CALLABLES = OBJECTS | {k: v for k, v in MEMBERS.items() if inspect.isfunction(v)}


@pytest.mark.parametrize("module", PREFIXES, ids=lambda m: m.__name__)
def test_type_checkers_find_the_public_names(module):
    """They take an imported name for public if it is written `name as name`."""
    found = set()
    body = ast.parse(inspect.getsource(module)).body
    for_types = [x for node in body if isinstance(node, ast.If) for x in node.body]
    for node in [*body, *for_types]:
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname for one in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
    public = {name for name in found if name and name[0].isalpha()}
    if module is mpidist:
        public.add("__version__")
    assert module.__all__ == sorted(public)


def test_public_objects_claim_the_public_name():
    for name, value in OBJECTS.items():
        prefix = name.rpartition(".")[0]
        found = getattr(mpidist, prefix) if prefix else mpidist
        assert value.__module__ == found.__name__, name
        # What it calls itself is where it is found, an older name of it aside.
        assert getattr(found, value.__qualname__) is value, name


def test_public_objects_have_a_docstring():
    for name, value in (OBJECTS | MEMBERS).items():
        doc = inspect.getdoc(value)
        assert doc, f"{name} has no docstring"
        if inspect.isclass(value):
            assert vars(value).get("__doc__"), f"{name} has only its parent's docstring"
        first = doc.splitlines()[0]
        assert first.endswith("."), f"{name}: {first!r} is no sentence"
        assert len(first) <= 79, f"{name}: {first!r} is longer than a line"


def whole_doc(name: str) -> str:
    """Return a docstring, with that of the method which it sends its reader to."""
    doc = inspect.getdoc(CALLABLES[name])
    other = re.search(r"see `(\w+)`", doc)
    if other is not None:
        doc += inspect.getdoc(CALLABLES[f"{name.rpartition('.')[0]}.{other[1]}"])
    return doc


def test_collective_callables_say_so_and_others_do_not():
    said = {x for x in CALLABLES if re.search(r"\bCollective\b", whole_doc(x))}
    assert said == COLLECTIVE


def test_signatures_show_no_addresses():
    for name, value in CALLABLES.items():
        try:
            signature = str(inspect.signature(value))
        except ValueError:  # of an enum, or a class in C
            continue
        assert not re.search(r"<object|0x[0-9a-f]", signature), name


def test_types_of_public_names_can_be_read():
    for name, value in (OBJECTS | MEMBERS).items():
        if isinstance(value, property):
            value = value.fget
        hints = typing.get_type_hints(value)
        assert inspect.isclass(value) or "return" in hints, name


def test_types_of_a_users_class_can_be_read():
    class Mine(metrics.Mean):
        last: Iterator[int]

    hints = typing.get_type_hints(Mine)
    assert hints["last"] == Iterator[int]
    assert hints["_made"] == functools.partial[typing.Self]


def test_errors_are_runtime_errors():
    for name in mpidist.__all__:
        if name.endswith("Error"):
            error = getattr(mpidist, name)
            assert issubclass(error, RuntimeError)
            # A checkpoint is damaged, whoever reads it.
            if error is not mpidist.CheckpointError:
                assert issubclass(error, mpidist.CollectiveError)
