"""Names that mpidist does not have, for `remedies`: what to write instead.

Each text follows "has no attribute 'x'; ", and contains the line to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STRATEGY: Final = "write `mpidist.MPIStrategy()`"
RANKS: Final = (
    "the launcher tells MPI about the ranks: write `mpidist.MPIStrategy()`, whose "
    "`strategy.cluster_resolver` describes them"
)
_CLUSTER: Final = (
    "it is in `mpidist.cluster`: write `mpidist.cluster.SlurmClusterResolver()`; "
    "`mpidist.MPIStrategy()` needs none"
)
_NO_SERVERS: Final = (
    "there are no parameter servers over MPI, every rank computes: write "
    "`mpidist.MPIStrategy()`"
)
_NO_GRAPH: Final = (
    "there are no graphs: delete it, and call the function, as in "
    "`strategy.run(step, args=(batch,))`"
)
_IN_REPLICA: Final = "write `mpidist.get_replica_context().{}` in the replica function"
_REDUCE: Final = (
    'write `mpidist.get_replica_context().all_reduce("SUM", value)` in a replica '
    'function, or `strategy.reduce("SUM", value, axis=None)` outside'
)
_GATHER: Final = (
    "write `mpidist.get_replica_context().all_gather(value, axis=0)` in a replica "
    "function, or `strategy.gather(value, axis=0)` outside"
)
_BROADCAST: Final = (
    "write `mpidist.Variable(value)` in `strategy.scope()`, which has rank 0's value "
    "on all ranks, or `strategy.extended.broadcast_to(value, destinations=value)`"
)
_BARRIER: Final = "collective calls wait for all ranks: write `strategy.run(lambda: 0)`"
_INPUT: Final = "write `strategy.experimental_distribute_dataset(dataset)`"
_SAVE: Final = "write `checkpoint.save(path)`"
_RESTORE: Final = "write `checkpoint.restore(path)`"
_LOAD: Final = "write `mpidist.load_checkpoint(path)`, a mapping of names to arrays"
_EXTENDED: Final = "write `strategy.extended.{}`"
_COMPONENT: Final = (
    'a PerReplica has a component on each replica: write `strategy.reduce("SUM", '
    "value, axis=None)`, or `strategy.experimental_local_results(value)[0]` for this "
    "rank's"
)
_OTHER_OPTIMIZER: Final = (
    "write `mpidist.optimizers.Adam(...)` or another of this module; for other "
    "formulas sum the gradients with "
    '`mpidist.get_replica_context().all_reduce("SUM", grads)` '
    "and apply them by `strategy.extended.update` in a merge_call"
)
_STATE: Final = (
    "write `mpidist.Checkpoint(optimizer=optimizer)`, or assign to the variables of "
    "`optimizer.variables`"
)
_STEP: Final = (
    "compute the gradients, and write "
    "`optimizer.apply_gradients(zip(gradients, variables))`"
)

_GUEST: Final = (
    "{} does that: write `{}`; `strategy.experimental_distribute_dataset` and "
    "`strategy.distribute_datasets_from_function` take any iterable of batches"
)
_MIX: Final = _GUEST.format(
    "grain", "grain.MapDataset.mix([one, two], weights=[0.5, 0.5])"
)
_BUCKETS: Final = _GUEST.format(
    "torch's DataLoader, from lists of row numbers,",
    "torch.utils.data.DataLoader(rows, batch_sampler=batches, collate_fn=pad)",
)
_PAD: Final = "write `dataset.padded_batch(n)`"
_DATA: Final = {
    "CsvDataset": (
        'write `Dataset.from_tensor_slices(numpy.loadtxt(path, delimiter=","))`'
    ),
    "DatasetSpec": "write `dataset.element_spec`",
    "FixedLengthRecordDataset": (
        "write `Dataset.from_tensor_slices(numpy.memmap(path, dtype)"
        ".reshape(-1, length))`"
    ),
    "Iterator": "write `mpidist.data.DatasetIterator`",
    "NumpyIterator": "write `dataset.as_numpy_iterator()`",
    "TFRecordDataset": _GUEST.format(
        "webdataset for tar files, or grain for ArrayRecord files,",
        "webdataset.WebDataset(urls).decode()` or "
        "`grain.sources.ArrayRecordDataSource(paths)",
    ),
    "TensorSpec": "write `mpidist.data.ArraySpec(shape, dtype)`",
    "TextLineDataset": (
        "write `Dataset.from_generator(open, args=(path,))`, or for several files "
        "`Dataset.list_files(pattern, shuffle=False).interleave(lambda path: "
        "Dataset.from_generator(open, args=(path,)))`"
    ),
    "bucket_by_sequence_length": _BUCKETS,
    "choose_from_datasets": _MIX,
    "dense_to_ragged_batch": _PAD,
    "dense_to_sparse_batch": _PAD,
    "experimental": (
        "write `mpidist.data.AUTOTUNE` or `mpidist.data.AutoShardPolicy`, without "
        "`experimental`"
    ),
    "from_sparse_tensor_slices": "write `Dataset.from_tensor_slices(matrix.toarray())`",
    "get_single_element": "write `next(iter(dataset))`",
    "group_by_window": _BUCKETS,
    "ignore_errors": "write `dataset.map(fn)`; let `fn` handle its exceptions",
    "load": 'write `Dataset.from_tensor_slices(numpy.load(path, mmap_mode="r"))`',
    "prefetch_to_device": (
        "write `dataset.prefetch(n)`: a distributed dataset comes on the GPU"
    ),
    "ragged_batch": _PAD,
    "random": (
        "write `Dataset.range(n).map(lambda i: numpy.random.default_rng([seed, i])"
        ".integers(2**32))`"
    ),
    "rebatch": "write `dataset.unbatch().batch(n)`",
    "rejection_resample": _MIX,
    "sample_from_datasets": _MIX,
    "save": "write `numpy.save(path, array)`",
    "scan": "write `Dataset.from_generator(fn)`; let `fn` keep the state",
    "service": _GUEST.format(
        "grain",
        "grain.MapDataset.source(rows).to_iter_dataset().mp_prefetch("
        "grain.MultiprocessingOptions(num_workers=4))",
    ),
    "shuffle_and_repeat": "write `dataset.shuffle(seed=1).repeat(n)`",
    "snapshot": (
        "write `dataset.cache()`, in memory; on disk `numpy.save(path, array)`, then "
        '`numpy.load(path, mmap_mode="r")`'
    ),
    "sparse_batch": _PAD,
    "unique": "write `numpy.unique(x)`, before `from_tensor_slices`",
    "window": (
        "write `Dataset.from_tensor_slices(numpy.lib.stride_tricks"
        ".sliding_window_view(x, size, axis=0))`"
    ),
}

ATTRIBUTES: Final[Mapping[str, Mapping[str, str]]] = {
    "mpidist": {
        "CentralStorageStrategy": _NO_SERVERS,
        "CheckpointOptions": "write `checkpoint.save(path)` without options",
        "ClusterCoordinator": _NO_SERVERS,
        "ClusterResolver": _CLUSTER,
        "ClusterSpec": _CLUSTER,
        "DistributedGradientTape": _REDUCE,
        "DistributedOptimizer": (
            "write `mpidist.optimizers.SGD(...)`, whose `apply_gradients` sums the "
            "gradients of all replicas"
        ),
        "DistributedVariable": (
            "write `mpidist.Variable`; `variable.synchronization` distinguishes the "
            "kinds"
        ),
        "GradientTape": (
            "mpidist does not differentiate: write the gradient, or take it from "
            "autograd, JAX or torch, and sum it by `optimizer.apply_gradients(...)`"
        ),
        "MirroredVariable": (
            "write `mpidist.Variable`; it is mirrored if its `synchronization` is "
            "ON_WRITE"
        ),
        "Module": (
            "write a class with an attribute `variables`, a list of "
            "`mpidist.Variable`, which `mpidist.Checkpoint(model=model)` saves"
        ),
        "OneDeviceStrategy": 'write `mpidist.MPIStrategy(device="cpu")`, on one rank',
        "ParameterServerStrategy": _NO_SERVERS,
        "PerReplicaSpec": (
            "no function is traced, so none is needed: `dataset.element_spec` "
            "describes the elements of a dataset"
        ),
        "PerWorkerValues": (
            "every rank is a worker: write "
            "`strategy.experimental_distribute_values_from_function(fn)`"
        ),
        "RemoteValue": _NO_SERVERS,
        "Saver": "write `mpidist.Checkpoint(weights=weights)`",
        "Server": "the launcher starts the ranks: write `mpirun -n 4 python x.py`",
        "SyncOnReadVariable": (
            'write `mpidist.Variable(value, synchronization="ON_READ", '
            'aggregation="SUM")`'
        ),
        "SimpleClusterResolver": _CLUSTER,
        "SlurmClusterResolver": _CLUSTER,
        "TFConfigClusterResolver": _CLUSTER,
        "TPUStrategy": _STRATEGY,
        "allgather": _GATHER,
        "all_gather": _GATHER,
        "allreduce": _REDUCE,
        "all_reduce": _REDUCE,
        "barrier": _BARRIER,
        "broadcast": _BROADCAST,
        "broadcast_object": _BROADCAST,
        "broadcast_parameters": _BROADCAST,
        "broadcast_variables": _BROADCAST,
        "checkpoints_iterator": "write `mpidist.latest_checkpoint(path)` in a loop",
        "cluster_resolver": _CLUSTER,
        "coordinator": _NO_SERVERS,
        "distribute": "write `mpidist` itself: `mpidist.ReduceOp`",
        "function": _NO_GRAPH,
        "get_checkpoint_state": "write `mpidist.latest_checkpoint(directory)`",
        "init": _STRATEGY,
        "init_process_group": _STRATEGY,
        "jax": "write `import mpidist.jax`",
        "keras": "write `mpidist.optimizers.SGD(...)`, and array code for layers",
        "list_variables": _LOAD,
        "load_variable": _LOAD,
        "local_rank": (
            "write `mpidist.MPIStrategy()`, which chooses the GPU by it; "
            "`strategy.array_module` is NumPy or CuPy"
        ),
        "losses": "write array code, and `mpidist.compute_average_loss(losses)`",
        "metrics": (
            'write `mpidist.Variable(0.0, synchronization="ON_READ", '
            'aggregation="SUM")`, as in examples/custom_training_loop.py'
        ),
        "nn": "write `mpidist.compute_average_loss(losses)`, and array code",
        "rank": "write `strategy.replica_id`",
        "saved_model": "write `mpidist.Checkpoint(weights=weights).save(path)`",
        "shutdown": "write `strategy.close()`, or nothing: the end of the program does",
        "size": "write `strategy.num_replicas_in_sync`",
        "summary": (
            "write the logs on one rank, in `if strategy.replica_id == 0:`, with "
            "`tensorboardX` or another library"
        ),
        "torch": "write `import mpidist.torch`",
        "train": "write `mpidist.Checkpoint(...)` and `mpidist.CheckpointManager(...)`",
    },
    "mpidist.experimental": {
        "AutoShardPolicy": "write `mpidist.data.AutoShardPolicy`",
        "CentralStorageStrategy": _NO_SERVERS,
        "ParameterServerStrategy": _NO_SERVERS,
        "PreemptionWatcher": (
            "write `mpidist.experimental.PreemptionCheckpointHandler(None, manager)`, "
            "which watches signals itself"
        ),
        "TPUStrategy": _STRATEGY,
        "coordinator": _NO_SERVERS,
        "partitioners": _NO_SERVERS,
        "rpc": "write `strategy.run(fn)`: all ranks are one program",
        "set_strategy": "write `mpidist.experimental_set_strategy(strategy)`",
    },
    "mpidist.cluster": {
        "GCEClusterResolver": RANKS,
        "KubernetesClusterResolver": RANKS,
        "TPUClusterResolver": RANKS,
    },
    "mpidist.data": _DATA,
    "Dataset": _DATA,
    "mpidist.optimizers": {
        **dict.fromkeys(
            ("Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Lamb", "Lion"),
            _OTHER_OPTIMIZER,
        ),
        **dict.fromkeys(("Muon", "Nadam"), _OTHER_OPTIMIZER),
        "CosineDecay": "write `mpidist.optimizers.cosine_decay(0.1, decay_steps)`",
        "CosineDecayRestarts": (
            "write `lambda step: mpidist.optimizers.cosine_decay(0.1, 100)(step % 100)`"
        ),
        "ExponentialDecay": (
            "write `mpidist.optimizers.exponential_decay(0.1, decay_steps, decay_rate)`"
        ),
        "InverseTimeDecay": (
            "write `mpidist.optimizers.inverse_time_decay(0.1, decay_steps, "
            "decay_rate)`"
        ),
        "LearningRateSchedule": (
            "any function of the step is one, or an object with `__call__(step)`: "
            "write `learning_rate=lambda step: 0.1 / (1 + step)`"
        ),
        "PiecewiseConstantDecay": (
            "write `mpidist.optimizers.piecewise_constant(boundaries, values)`"
        ),
        "PolynomialDecay": (
            "write `mpidist.optimizers.polynomial_decay(0.1, decay_steps)`"
        ),
        "schedules": (
            "write `mpidist.optimizers.cosine_decay(0.1, decay_steps)`; also "
            "`exponential_decay`, `inverse_time_decay`, `piecewise_constant`, "
            "`polynomial_decay`, `linear_warmup`, and any function of the step"
        ),
        "LossScaleOptimizer": (
            "slots and steps of float16 variables are float32: write "
            "`mpidist.optimizers.Adam(...)` itself"
        ),
        "clip_by_norm": "write `mpidist.optimizers.SGD(clipnorm=...)`",
        "clip_by_value": "write `mpidist.optimizers.SGD(clipvalue=...)`",
        "deserialize": "write the class, as in `mpidist.optimizers.Adam(...)`",
        "experimental": "write `mpidist.optimizers.Adam(...)`",
        "get": "write the class, as in `mpidist.optimizers.Adam(...)`",
        "legacy": "write `mpidist.optimizers.Adam(...)`",
        "serialize": "write `repr(optimizer)` for its settings",
    },
    "Strategy": {
        "all_gather": _GATHER,
        "all_reduce": _REDUCE,
        "allgather": _GATHER,
        "allreduce": _REDUCE,
        "barrier": _BARRIER,
        "batch_reduce": _EXTENDED.format(
            "batch_reduce_to(reduce_op, value_destination_pairs)"
        ),
        "bcast": _BROADCAST,
        "broadcast": _BROADCAST,
        "call_for_each_replica": "write `strategy.run(fn, args=args)`",
        "configure": f"there are no sessions: delete the call; {RANKS}",
        "devices": _EXTENDED.format("worker_devices"),
        "distribute_dataset": _INPUT,
        "merge_call": _IN_REPLICA.format("merge_call(merge_fn, args=args)"),
        "parameter_devices": _EXTENDED.format("parameter_devices"),
        "rank": "write `strategy.replica_id`",
        "read_var": _EXTENDED.format("read_var(variable)"),
        "reduce_to": _EXTENDED.format("reduce_to(reduce_op, value, destinations)"),
        "replica_id_in_sync_group": "write `strategy.replica_id`",
        "size": "write `strategy.num_replicas_in_sync`",
        "update": _EXTENDED.format("update(variable, fn, args=args)"),
        "update_config_proto": (
            "there are no sessions: delete the call, and write `mpidist.MPIStrategy()`"
        ),
        "value_container": _EXTENDED.format("value_container(value)"),
        "variable_created_in_scope": _EXTENDED.format(
            "variable_created_in_scope(variable)"
        ),
        "variable_creator_scope": (
            "write `with mpidist.variable_creator_scope(creator):`"
        ),
        "worker_devices": _EXTENDED.format("worker_devices"),
        "world_size": "write `strategy.num_replicas_in_sync`",
    },
    "StrategyExtended": {
        "_container_strategy": "write `mpidist.get_strategy()`",
        "_in_multi_worker_mode": "write `strategy.num_replicas_in_sync > 1`",
        "_replica_ctx_all_reduce": _IN_REPLICA.format("all_reduce(reduce_op, value)"),
        "_replica_ctx_update": _IN_REPLICA.format("merge_call(merge_fn, args=args)"),
        "_use_merge_call": "write `mpidist.get_replica_context().merge_call(fn, args)`",
        "configure": (
            "there are no sessions: delete the call, and write `mpidist.MPIStrategy()`"
        ),
        "gather_to": "write `strategy.gather(value, axis)`",
        "num_replicas_in_sync": "write `strategy.num_replicas_in_sync`",
        "reduce": "write `strategy.reduce(reduce_op, value, axis=None)`",
        "run": "write `strategy.run(fn, args=args)`",
        "scope": "write `strategy.scope()`",
    },
    "ReplicaContext": {
        "_update": (
            "write `variable.assign(value)` for a variable with an aggregation, or "
            "`strategy.extended.update` in a merge_call"
        ),
        "allgather": "write `context.all_gather(value, axis=0)`",
        "allreduce": 'write `context.all_reduce("SUM", value)`',
        "barrier": _BARRIER,
        "batch_reduce": 'write `context.all_reduce("SUM", [x, y])`, of any nest',
        "bcast": _BROADCAST,
        "broadcast": _BROADCAST,
        "extended": "write `context.strategy.extended`",
        "gather": "write `context.all_gather(value, axis=0)`",
        "num_replicas": "write `context.num_replicas_in_sync`",
        "rank": "write `context.replica_id_in_sync_group`",
        "reduce": 'write `context.all_reduce("SUM", value)`',
        "replica_id": "write `context.replica_id_in_sync_group`",
        "size": "write `context.num_replicas_in_sync`",
    },
    "PerReplica": {
        **dict.fromkeys(
            (
                *("T", "all", "any", "astype", "copy", "dtype", "flatten", "get"),
                *("item", "max", "mean", "min", "ndim", "numpy", "ravel", "reshape"),
                *("round", "shape", "size", "std", "sum", "tolist", "value", "var"),
            ),
            _COMPONENT,
        ),
        "_values": "write `value.values`",
    },
    "Variable": {
        "constraint": "apply it after the step, in `variable.assign(f(variable))`",
        "eval": "write `variable.numpy()`",
        "get_shape": "write `variable.shape`",
        "gather_nd": "write `variable[indices]`",
        "handle": "there is no graph: write `variable.value()`",
        "initial_value": "write `variable.numpy()` before the first step",
        "initialized_value": "write `variable.read_value()`",
        "initializer": "a variable is initialized when it is created: delete the call "
        "of `initializer`",
        "load": "write `variable.assign(value)`",
        "op": "there is no graph: write `variable.name`",
        "ref": "write `variable` itself, which is a key of dicts and sets",
        "set_shape": "its shape is fixed: write `mpidist.Variable(value, shape=shape)`",
        "sparse_read": "write `variable[indices]`",
        **dict.fromkeys(
            ("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update"),
            "write `variable.scatter_add(mpidist.IndexedSlices(values, indices))`, or "
            "`scatter_sub`, `scatter_update`",
        ),
    },
    "Optimizer": {
        "add_slot": "write `optimizer.build(variables)`, which makes all slots",
        "add_variable": "write `optimizer.build(variables)`, which makes all slots",
        "apply": _STEP,
        "compute_gradients": _STEP,
        "from_config": "write the class, as in `mpidist.optimizers.Adam(...)`",
        "get_config": "write `repr(optimizer)` for its settings",
        "get_slot": "write `optimizer.variables`, whose names have that of the slot",
        "get_weights": _STATE,
        "load_own_variables": _STATE,
        "lr": "write `optimizer.learning_rate`",
        "minimize": _STEP,
        "set_weights": _STATE,
        "state_dict": _STATE,
        "load_state_dict": _STATE,
        "step": _STEP,
        "update_step": _STEP,
        "weights": "write `optimizer.variables`",
        "zero_grad": "gradients are arguments: delete the call, and write "
        "`optimizer.apply_gradients(zip(gradients, variables))`",
    },
    "Checkpoint": {
        "read": _RESTORE,
        "save_counter": (
            "write `mpidist.CheckpointManager(checkpoint, directory)`, which numbers "
            "the checkpoints"
        ),
        "sync": "calls are synchronous: write `checkpoint.save(path)`",
        "write": _SAVE,
    },
    "CheckpointManager": {
        "checkpoint_interval": "write `if step % interval == 0: manager.save()`",
        "restore": "write `manager.restore_or_initialize()`",
        "sync": "calls are synchronous: write `manager.save()`",
    },
    "RestoreStatus": dict.fromkeys(
        ("initialize_or_restore", "run_restore_ops"),
        "calls are synchronous: write `checkpoint.restore(path)`",
    ),
    "CheckpointReader": {
        "get_tensor": "write `reader[name]`",
        "get_variable_to_dtype_map": (
            "write `{name: x.dtype for name, x in reader.items()}`"
        ),
        "get_variable_to_shape_map": (
            "write `{name: x.shape for name, x in reader.items()}`"
        ),
        "has_tensor": "write `name in reader`",
    },
    "PreemptionCheckpointHandler": {
        "watch_preemption_scope": (
            "write `handler.save_checkpoint_if_preempted()` in the loop"
        ),
    },
}
"""What to do, by the public name of the module or class, and by the missing name."""
