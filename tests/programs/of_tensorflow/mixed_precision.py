"""float16 with a scaled loss, written out as in the guide "Mixed precision"."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
with strategy.scope():
    w = tf.Variable(tf.zeros([4], tf.float32), name="w")
    loss_scale = tf.Variable(2.0**15, trainable=False, dtype=tf.float32)
    good_steps = tf.Variable(0, trainable=False)
    optimizer = tf.keras.optimizers.SGD(0.5)


def train_step(x, y, breaks):
    half = tf.cast(w, tf.float16)
    error = tf.reduce_sum(x * half, axis=1) - y
    gradient = tf.transpose(x) * error * tf.cast(1.0 / (4 * n), tf.float16)
    scaled = tf.cast(tf.reduce_sum(gradient, axis=1), tf.float32) * loss_scale
    if breaks and tf.distribute.get_replica_context().replica_id_in_sync_group == 0:
        scaled = scaled * np.inf
    total = tf.distribute.get_replica_context().all_reduce("SUM", scaled)
    finite = bool(tf.reduce_all(tf.math.is_finite(total)))
    if finite:
        optimizer.apply_gradients(
            [(total / loss_scale, w)], skip_gradients_aggregation=True
        )
    return tf.cast(finite, tf.float32)


rng = np.random.default_rng(1)
rows = rng.normal(size=(4 * n, 4)).astype(np.float16)
targets = rows @ np.float16([1, 2, 3, 4])
dataset = tf.data.Dataset.from_tensors((rows, targets)).unbatch().batch(4 * n)
for step in range(200):
    for x, y in strategy.experimental_distribute_dataset(dataset):
        finite = strategy.reduce(
            "MIN" if False else tf.distribute.ReduceOp.MEAN,
            strategy.run(train_step, args=(x, y, step == 3)),
            axis=None,
        )
    if finite == 1.0:
        good_steps.assign_add(1)
    else:
        loss_scale.assign(loss_scale / 2.0)
assert int(good_steps.numpy()) == 199
assert float(loss_scale.numpy()) == 2.0**14
assert np.allclose(w.numpy(), [1, 2, 3, 4], atol=0.1)
