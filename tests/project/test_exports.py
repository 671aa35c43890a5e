"""Public names: listed, documented, and said to be collective where they are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import mpidist
from mpidist import cluster, data, elastic, experimental, optimizers, testing

PREFIXES = {
    mpidist: "",
    cluster: "cluster.",
    data: "data.",
    elastic: "elastic.",
    experimental: "experimental.",
    optimizers: "optimizers.",
    testing: "testing.",
}
NOT_EXPORTED = {"annotations"}  # from __future__

# Every rank, or every replica, has to call these.
COLLECTIVE = {
    "timeline",
    "compute_average_loss",
    "global_batch_size",
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
    "Checkpoint.wait",
    "CheckpointManager",
    "CheckpointManager.restore_or_initialize",
    "CheckpointManager.save",
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
# Any rank may call these by itself. Properties are all of this kind.
LOCAL = {
    "CollectiveAllReduce",
    "experimental.TerminationConfig",
    "CentralStorageStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointReader",
    "CheckpointReader.verify",
    "experimental.CollectiveHandle",
    "experimental.CollectiveHandle.done",
    "experimental.CollectiveHandle.result",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationStatistics",
    "CrossDeviceOps",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "MPIClusterResolver",
    "MPIClusterResolver.cluster_spec",
    "MPIClusterResolver.master",
    "DistributedDataset",
    "DistributedDataset.cardinality",
    "DistributedDataset.describe",
    "DistributedIterator",
    "DistributedIterator.state",
    "InputContext",
    "InputContext.get_per_replica_batch_size",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "Mirrored.numpy",
    "Mirrored.value",
    "MultiStepContext",
    "NcclAllReduce",
    "OutOfSyncError",
    "PerReplica",
    "ReduceOp",
    "ReduceOp.from_variable_aggregation",
    "ReductionToOneDevice",
    "RestoreStatus",
    "RestoreStatus.assert_consumed",
    "RestoreStatus.assert_existing_objects_matched",
    "RestoreStatus.assert_nontrivial_match",
    "RestoreStatus.expect_partial",
    "RunOptions",
    "strategy_supports_no_merge_call",
    "ReplicaContext",
    "ReplicaError",
    "ReplicaLostError",
    "Strategy",
    "Strategy.colocate_vars_with",
    "Strategy.communication_statistics",
    "Strategy.experimental_local_results",
    "Strategy.group",
    "Strategy.print",
    "Strategy.experimental_make_numpy_dataset",
    "Strategy.scope",
    "Strategy.unwrap",
    "StrategyExtended",
    "StrategyExtended.colocate_vars_with",
    "StrategyExtended.experimental_make_numpy_dataset",
    "StrategyExtended.non_slot_devices",
    "StrategyExtended.value_container",
    "StrategyExtended.variable_created_in_scope",
    "Variable.is_initialized",
    "Variable.numpy",
    "Variable.read_value",
    "Variable.ref",
    "Variable.value",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster.ClusterResolver",
    "cluster.ClusterResolver.cluster_spec",
    "cluster.ClusterResolver.master",
    "cluster.ClusterResolver.num_accelerators",
    "cluster.ClusterSpec",
    "cluster.ClusterSpec.as_dict",
    "cluster.ClusterSpec.job_tasks",
    "cluster.ClusterSpec.num_tasks",
    "cluster.ClusterSpec.task_address",
    "cluster.ClusterSpec.task_indices",
    "cluster.Process",
    "cluster.SimpleClusterResolver",
    "cluster.SimpleClusterResolver.cluster_spec",
    "cluster.SlurmClusterResolver",
    "cluster.SlurmClusterResolver.cluster_spec",
    "cluster.SlurmClusterResolver.get_task_info",
    "cluster.TFConfigClusterResolver",
    "cluster.TFConfigClusterResolver.cluster_spec",
    "cluster.UnionResolver",
    "cluster.UnionResolver.cluster_spec",
    "cluster.expand_hostlist",
    "cluster.expand_tasks_per_node",
    "cluster.this_process",
    "data.ArraySpec",
    "data.AutoShardPolicy",
    "data.AutotuneOptions",
    "data.Dataset",
    "data.Dataset.apply",
    "data.Dataset.as_numpy_iterator",
    "data.Dataset.assert_cardinality",
    "data.Dataset.batch",
    "data.Dataset.cache",
    "data.Dataset.cardinality",
    "data.Dataset.concatenate",
    "data.Dataset.enumerate",
    "data.Dataset.filter",
    "data.Dataset.flat_map",
    "data.Dataset.from_generator",
    "data.Dataset.from_tensor_slices",
    "data.Dataset.from_tensors",
    "data.Dataset.interleave",
    "data.Dataset.list_files",
    "data.Dataset.map",
    "data.Dataset.options",
    "data.Dataset.padded_batch",
    "data.Dataset.prefetch",
    "data.Dataset.range",
    "data.Dataset.reduce",
    "data.Dataset.repeat",
    "data.Dataset.shard",
    "data.Dataset.shuffle",
    "data.Dataset.skip",
    "data.Dataset.take",
    "data.Dataset.take_while",
    "data.Dataset.unbatch",
    "data.Dataset.with_options",
    "data.Dataset.zip",
    "data.DatasetIterator",
    "data.DatasetIterator.get_next",
    "data.DatasetIterator.get_next_as_optional",
    "data.DatasetIterator.restore",
    "data.DatasetIterator.state",
    "data.DistributeOptions",
    "data.OptimizationOptions",
    "data.Optional",
    "data.Optional.get_value",
    "data.Optional.has_value",
    "data.Options",
    "data.Options.merge",
    "data.ThreadingOptions",
    "data.OutOfRangeError",
    "experimental.CollectiveCommunication",
    "experimental.CollectiveHints",
    "experimental.CommunicationImplementation",
    "experimental.CommunicationOptions",
    "experimental.CommunicationOptions.merge",
    "experimental.ValueContext",
    "experimental_set_strategy",
    "get_cross_replica_context",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "optimizers.Adam",
    "optimizers.AdamW",
    "optimizers.Optimizer",
    "optimizers.Optimizer.exclude_from_weight_decay",
    "optimizers.RMSprop",
    "optimizers.SGD",
    "optimizers.exponential_decay",
    "optimizers.inverse_time_decay",
    "optimizers.polynomial_decay",
    "optimizers.clip_by_global_norm",
    "optimizers.cosine_decay",
    "optimizers.linear_warmup",
    "optimizers.piecewise_constant",
    "testing.ReplicaStopped",
    "testing.ThreadGroup",
    "testing.current_group",
    "testing.each_replica",
    "testing.run",
    "variable_creator_scope",
    "variable_sync_on_read_context",
    "elastic.State",
    "latest_checkpoint",
    "load_checkpoint",
    "seed_all",
    "scale_regularization_loss",
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
def test_all_is_sorted_and_complete(module):
    # As ruff sorts them: SGD, in capitals, before Adam.
    assert module.__all__ == sorted(module.__all__, key=lambda n: (not n.isupper(), n))
    assert len(module.__all__) == len(set(module.__all__))
    # "@": names that pytest adds to the modules whose assertions it rewrites.
    public = {name for name in vars(module) if not name.startswith(("_", "@"))}
    if module is mpidist:
        public.add("__version__")
    assert set(module.__all__) == public - NOT_EXPORTED


@pytest.mark.parametrize("name", OBJECTS)
def test_public_objects_claim_the_public_name(name):
    value = OBJECTS[name]
    prefix = name.rpartition(".")[0]
    found = getattr(mpidist, prefix) if prefix else mpidist
    assert value.__module__ == found.__name__
    # What it calls itself is where it is found, an older name of it aside.
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


def test_collective_callables_say_so_and_others_do_not():
    said = {
        name
        for name in COLLECTIVE | LOCAL
        if re.search(r"\bCollective\b", whole_doc(name))
    }
    assert said == set(COLLECTIVE)


def test_errors_are_runtime_errors():
    for name in mpidist.__all__:
        if name.endswith("Error"):
            error = getattr(mpidist, name)
            assert issubclass(error, RuntimeError)
            # A checkpoint is damaged, whoever reads it.
            if error is not mpidist.CheckpointError:
                assert issubclass(error, mpidist.CollectiveError)
