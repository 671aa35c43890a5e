"""Local SGD: each worker trains its own copy, and parameters are averaged every few steps."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
SYNC_EVERY = 4
rng = np.random.RandomState(1)
features = rng.randn(128, 3).astype("float32")
targets = tf.linalg.matmul(
    features, tf.constant([[1.0], [-2.0], [0.5]], dtype=tf.float32)
)
targets = tf.squeeze(targets, axis=-1)

with strategy.scope():
    local = tf.Variable(
        tf.zeros([3]),
        trainable=True,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
        name="local_weights",
    )
    averaged = tf.Variable(
        tf.zeros([3]), name="averaged", aggregation=tf.VariableAggregation.MEAN
    )

dataset = (
    tf.data.Dataset.from_tensor_slices((features, targets))
    .repeat(10)
    .batch(8 * strategy.num_replicas_in_sync, drop_remainder=True)
)
dist_dataset = strategy.experimental_distribute_dataset(dataset)


@tf.function
def local_step(inputs):
    x, y = inputs
    prediction = tf.reduce_sum(x * local, axis=1)
    gradient = tf.reduce_mean(2.0 * (prediction - y)[:, tf.newaxis] * x, axis=0)
    local.assign_sub(0.05 * gradient)
    return tf.reduce_mean(tf.square(prediction - y))


@tf.function
def average():
    replica_context = tf.distribute.get_replica_context()
    mean = replica_context.all_reduce(tf.distribute.ReduceOp.MEAN, local)
    local.assign(mean)
    averaged.assign(mean)


for step, inputs in enumerate(dist_dataset):
    loss = strategy.reduce(
        tf.distribute.ReduceOp.MEAN, strategy.run(local_step, args=(inputs,)), axis=None
    )
    if (step + 1) % SYNC_EVERY == 0:
        strategy.run(average)
        copies = strategy.experimental_local_results(
            strategy.run(lambda: tf.identity(local))
        )
        assert all(np.allclose(c, averaged) for c in copies)
    if step % 10 == 0:
        tf.print("step", step, "loss", loss)
strategy.run(average)
np.testing.assert_allclose(averaged.numpy(), [1.0, -2.0, 0.5], atol=0.05)
