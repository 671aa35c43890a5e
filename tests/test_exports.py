"""Public names: listed, documented, and said to be collective where they are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import mpidist
from mpidist import experimental

NOT_EXPORTED = {"annotations"}  # from __future__

# Every rank, or every replica, has to call these.
COLLECTIVE = {
    "experimental.PreemptionCheckpointHandler",
    "experimental.PreemptionCheckpointHandler.run",
    "experimental.PreemptionCheckpointHandler.save_checkpoint_if_preempted",
    "Checkpoint.restore",
    "Checkpoint.save",
    "CheckpointManager",
    "CheckpointManager.restore_or_initialize",
    "CheckpointManager.save",
    "MPIStrategy",
    "MPIStrategy.close",
    "ReplicaContext.all_gather",
    "ReplicaContext.all_reduce",
    "ReplicaContext.merge_call",
    "Strategy.experimental_distribute_values_from_function",
    "Strategy.experimental_run_v2",
    "Strategy.gather",
    "Strategy.reduce",
    "Strategy.run",
    "StrategyExtended.batch_reduce_to",
    "StrategyExtended.broadcast_to",
    "StrategyExtended.call_for_each_replica",
    "StrategyExtended.reduce_to",
    "StrategyExtended.update",
    "Variable",
    "Variable.assign",
    "Variable.assign_add",
    "Variable.assign_sub",
}
# Any rank may call these by itself. Properties are all of this kind.
LOCAL = {
    "experimental.TerminationConfig",
    "Checkpoint",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointReader.verify",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationStatistics",
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "ReduceOp",
    "ReduceOp.from_variable_aggregation",
    "ReplicaContext",
    "ReplicaError",
    "Strategy",
    "Strategy.communication_statistics",
    "Strategy.experimental_local_results",
    "Strategy.scope",
    "StrategyExtended",
    "Variable.numpy",
    "Variable.read_value",
    "Variable.value",
    "Mirrored.numpy",
    "Mirrored.value",
    "VariableAggregation",
    "VariableSynchronization",
    "experimental.CollectiveCommunication",
    "experimental.CollectiveHints",
    "experimental.CommunicationImplementation",
    "experimental.CommunicationOptions",
    "experimental.CommunicationOptions.merge",
    "experimental.ValueContext",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "load_checkpoint",
}


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions, by the name that users write."""
    for module, prefix in ((mpidist, ""), (experimental, "experimental.")):
        for name in module.__all__:
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


@pytest.mark.parametrize("module", [mpidist, experimental], ids=lambda m: m.__name__)
def test_all_is_sorted_and_complete(module):
    assert module.__all__ == sorted(module.__all__)
    assert len(module.__all__) == len(set(module.__all__))
    public = {name for name in vars(module) if not name.startswith("_")}
    if module is mpidist:
        public.add("__version__")
    assert set(module.__all__) == public - NOT_EXPORTED


@pytest.mark.parametrize("name", OBJECTS)
def test_public_objects_claim_the_public_name(name):
    value = OBJECTS[name]
    module = "mpidist.experimental" if name.startswith("experimental.") else "mpidist"
    assert value.__module__ == module
    # What it calls itself is where it is found, an older name of it aside.
    found = mpidist if module == "mpidist" else experimental
    assert getattr(found, value.__qualname__) is value


@pytest.mark.parametrize("name", OBJECTS | MEMBERS)
def test_public_objects_have_a_docstring(name):
    doc = inspect.getdoc((OBJECTS | MEMBERS)[name])
    assert doc, f"{name} has no docstring"
    value = OBJECTS.get(name)
    if inspect.isclass(value):
        assert "__doc__" in vars(value), f"{name} has only its parent's docstring"
        assert vars(value)["__doc__"], f"{name} has no docstring"
    first = doc.splitlines()[0]
    assert first.endswith("."), f"{name}: {first!r} is no sentence"
    assert len(first) <= 79, f"{name}: {first!r} is longer than a line"


def test_every_public_callable_is_classified():
    assert not COLLECTIVE & LOCAL
    assert set(CALLABLES) == COLLECTIVE | LOCAL


def whole_doc(name: str) -> str:
    """Return a docstring, with that of the method which it sends its reader to."""
    doc = inspect.getdoc(CALLABLES[name])
    other = re.search(r"see `(\w+)`", doc)
    if other is not None:
        doc += inspect.getdoc(CALLABLES[f"{name.rpartition('.')[0]}.{other[1]}"])
    return doc


@pytest.mark.parametrize("name", sorted(COLLECTIVE))
def test_collective_callables_say_so(name):
    assert re.search(r"\bCollective\b", whole_doc(name))


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_local_callables_do_not_say_that_they_are_collective(name):
    assert not re.search(r"\bCollective\b", whole_doc(name))


def test_errors_are_runtime_errors():
    for name in mpidist.__all__:
        if name.endswith("Error"):
            error = getattr(mpidist, name)
            assert issubclass(error, RuntimeError)
            # A checkpoint is damaged, whoever reads it.
            if error is not mpidist.CheckpointError:
                assert issubclass(error, mpidist.CollectiveError)
