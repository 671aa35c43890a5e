"""all_reduce, all_gather and gather, as in the guide of ReplicaContext."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync


@tf.function
def gather_all():
    ctx = tf.distribute.get_replica_context()
    i = ctx.replica_id_in_sync_group
    uneven = tf.ones([i + 1, 2]) * tf.cast(i, tf.float64)
    gathered = ctx.all_gather(uneven, axis=0)
    mean = ctx.all_reduce(tf.distribute.ReduceOp.MEAN, tf.constant([1.0, 2.0]) * i)
    nest = ctx.all_reduce(
        tf.distribute.ReduceOp.SUM,
        {"a": tf.constant(1.0), "b": [tf.ones([2]), tf.ones([3])]},
        options=tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=1024 * 1024
        ),
    )
    return gathered, mean, tf.nest.map_structure(tf.identity, nest)


gathered, mean, nest = strategy.run(gather_all)
rows = n * (n + 1) // 2
first = strategy.experimental_local_results(gathered)[0]
assert first.shape == (rows, 2)
assert tf.reduce_sum(first).numpy() == sum(2 * i * (i + 1) for i in range(n))
local = strategy.experimental_local_results(mean)[0]
assert np.allclose(local.numpy(), np.array([1.0, 2.0]) * (n - 1) / 2)
assert strategy.experimental_local_results(nest)[0]["b"][1].numpy().tolist() == [n] * 3


def value():
    i = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.fill([2, 1], float(i))


whole = strategy.gather(strategy.run(value), axis=1)
assert whole.numpy().tolist() == [[float(i) for i in range(n)]] * 2


def sum_of_ids():
    i = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.distribute.get_strategy().extended._replica_ctx_all_reduce(
        tf.distribute.ReduceOp.SUM, tf.cast(i, tf.float32)
    )


assert strategy.run(sum_of_ids).values[0] == n * (n - 1) / 2
assert strategy.extended._in_multi_worker_mode() == (n > 1)
