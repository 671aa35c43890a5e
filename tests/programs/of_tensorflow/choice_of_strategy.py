"""Strategies chosen by their names, as in the model garden, and by the number of GPUs."""

import tensorflow as tf


def get_distribution_strategy(distribution_strategy="mirrored", tpu_address=None):
    if distribution_strategy == "tpu":
        return tf.distribute.TPUStrategy(tpu_address)
    if distribution_strategy == "multi_worker_mirrored":
        return tf.distribute.experimental.MultiWorkerMirroredStrategy(
            communication=tf.distribute.experimental.CollectiveCommunication.RING
        )
    if distribution_strategy == "mirrored":
        return tf.distribute.MirroredStrategy(
            cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    if distribution_strategy == "parameter_server":
        cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        return tf.distribute.experimental.ParameterServerStrategy(cluster_resolver)
    raise ValueError("Unrecognized Distribution Strategy: %r" % distribution_strategy)


def get_strategy_scope(strategy):
    return strategy.scope()


for name in ("mirrored", "multi_worker_mirrored"):
    strategy = get_distribution_strategy(name)
    assert not isinstance(strategy, tf.distribute.experimental.TPUStrategy)
    assert not isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    assert isinstance(strategy, tf.distribute.Strategy)
    with get_strategy_scope(strategy):
        assert tf.distribute.has_strategy()
        assert tf.distribute.in_cross_replica_context()
        v = tf.Variable(1.0)
        assert strategy.extended.variable_created_in_scope(v)
    ones = strategy.run(lambda: tf.constant(1.0))
    n = strategy.num_replicas_in_sync
    assert strategy.reduce(tf.distribute.ReduceOp.SUM, ones, axis=None) == n
try:
    get_distribution_strategy("parameter_server")
except NotImplementedError as error:
    print(error)

mirrored_strategy = tf.distribute.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])
communication_options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=communication_options
)
central_storage_strategy = tf.distribute.experimental.CentralStorageStrategy()
for strategy in (mirrored_strategy, strategy, central_storage_strategy):
    assert strategy.num_replicas_in_sync == n
one_device = tf.distribute.OneDeviceStrategy("/cpu:0")
assert one_device.num_replicas_in_sync == 1


def choose_by_devices():
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        try:
            for gpu in gpus:
                tf.config.experimental.set_memory_growth(gpu, True)
            logical_gpus = tf.config.experimental.list_logical_devices("GPU")
            print(len(gpus), "Physical GPUs,", len(logical_gpus), "Logical GPUs")
        except RuntimeError as e:
            print(e)
    try:
        tpu = tf.distribute.cluster_resolver.TPUClusterResolver()
        return tf.distribute.TPUStrategy(tpu)
    except ValueError:
        pass
    if len(gpus) > 1:
        return tf.distribute.MirroredStrategy([gpu.name for gpu in gpus])
    elif len(gpus) == 1:
        return tf.distribute.OneDeviceStrategy(device="/gpu:0")
    return tf.distribute.get_strategy()


visible = tf.config.get_visible_devices(device_type="GPU")
available = tf.test.is_gpu_available(
    cuda_only=False, min_cuda_compute_capability=(3, 0)
)
assert available and tf.test.is_built_with_cuda()
assert not tf.config.list_logical_devices("TPU")
strategy = choose_by_devices()
assert len(visible) == len(tf.config.list_physical_devices()) == n
assert strategy.num_replicas_in_sync == n
