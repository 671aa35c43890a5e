"""Training that is interrupted and resumed: momentum and a schedule, latest_checkpoint."""

import functools
import os

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
prefix = os.path.join(FOLDER, "ckpts", "ckpt")


def make():
    with strategy.scope():
        v = tf.Variable([1.0, 2.0, 3.0], name="v")
        opt = tf.keras.optimizers.SGD(
            tf.keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.1, 0.01]),
            momentum=0.9,
        )
        seen = tf.Variable(
            0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.SUM
        )
    return v, opt, seen, tf.train.Checkpoint(v=v, optimizer=opt, seen=seen)


def replica_step(scale, v, opt, seen):
    gradient = scale * 2.0 * v.value() / strategy.num_replicas_in_sync
    opt.apply_gradients([(gradient, v)])
    seen.assign_add(1)


def train(steps, v, opt, seen):
    for _ in range(steps):
        strategy.run(functools.partial(replica_step, 1.0), args=(v, opt, seen))


v, opt, seen, ckpt = make()
train(3, v, opt, seen)
first = ckpt.save(prefix + "-1")
train(3, v, opt, seen)
second = ckpt.save(prefix + "-2")
expected = v.numpy()
assert tf.train.latest_checkpoint(os.path.dirname(prefix)) == second
assert first != second, (first, second)
n = strategy.num_replicas_in_sync
assert int(seen) == 6 * n

v, opt, seen, ckpt = make()
status = ckpt.restore(first)
train(3, v, opt, seen)
status.assert_existing_objects_matched()
np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)
# By hand, as Keras has it.
w, m = np.array([1.0, 2.0, 3.0]), np.zeros(3)
for k in range(6):
    m = 0.9 * m - (0.1 if k <= 3 else 0.01) * 2.0 * w
    w = w + m
np.testing.assert_allclose(v.numpy(), w, rtol=1e-5)
