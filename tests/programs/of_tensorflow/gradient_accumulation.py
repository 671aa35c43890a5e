"""Gradients are added up in ON_READ variables, and applied every fourth step."""

import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
ACC = 4
with strategy.scope():
    w = tf.Variable(tf.zeros([2]), name="w")
    accum = [
        tf.Variable(
            tf.zeros_like(w),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    ]
    opt = tf.keras.optimizers.SGD(1.0)


def micro(x):
    g = tf.ones([2]) * x
    accum[0].assign_add(g)


def apply():
    opt.apply_gradients([(accum[0].read_value() / ACC, w)])
    accum[0].assign(tf.zeros_like(accum[0]))


for step in range(8):
    strategy.run(micro, args=(tf.constant(float(step)),))
    if (step + 1) % ACC == 0:
        strategy.run(apply)
n = strategy.num_replicas_in_sync
assert w.numpy().tolist() == [-n * (6 + 22) / 4] * 2, w.numpy()
