"""The module of the model garden that makes a strategy by its name."""

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
