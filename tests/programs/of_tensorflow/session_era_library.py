"""Library code of the years of tf.contrib.distribute, as far as it needs no session."""

import numpy as np
import tensorflow as tf

distribution = tf.contrib.distribute.MirroredStrategy()


def fn(x):
    context = tf.contrib.distribute.get_replica_context()
    loss = tf.reduce_mean(tf.square(x)) / context.num_replicas_in_sync

    def merge(strategy, value):
        total = strategy.extended.reduce_to(
            tf.distribute.ReduceOp.SUM, value, destinations=ema
        )
        with tf.control_dependencies(None):
            strategy.extended.update(
                ema, lambda v, t: v.assign(0.5 * v + 0.5 * t), args=(total,)
            )
        return strategy.extended.read_var(ema)

    return loss, context.merge_call(merge, args=(loss,))


with distribution.scope():
    ema = tf.compat.v1.Variable(0.0, use_resource=True, dtype=tf.float64, name="ema")
    assert distribution.extended.worker_devices
    results = distribution.extended.call_for_each_replica(
        fn, args=(tf.ones([4]) * 2.0,)
    )
    losses, averages = results
    local = distribution.unwrap(averages)[0]
    distribution.group(losses)
assert np.isclose(local, 2.0)
assert np.isclose(ema.numpy(), 2.0)
total = distribution.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
assert np.isclose(total, 4.0)
assert distribution.experimental_run_v2(lambda: 1.0) is not None
