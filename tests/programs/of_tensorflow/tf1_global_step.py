"""A loop of TensorFlow 1: towers, a global step, logging, name scopes."""

import numpy as np
import tensorflow.compat.v1 as tf

tf.logging.set_verbosity(tf.logging.INFO)
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    with tf.name_scope("model"):
        w = tf.Variable([1.0, 2.0], dtype=tf.float64, name="w")
    global_step = tf.Variable(
        0,
        trainable=False,
        name="global_step",
        dtype=tf.int64,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
    optimizer = tf.train.MomentumOptimizer(0.25, 0.5)


def model_fn(batch):
    with tf.name_scope("tower"), tf.device("/cpu:0"):
        gradients = [tf.reduce_mean(batch) * tf.ones_like(w)]
    norm = tf.linalg.norm(gradients[0])
    with tf.control_dependencies([norm]):
        clipped, _ = tf.clip_by_global_norm(gradients, 100.0, norm)
    grads_and_vars = zip(clipped, [w])
    return optimizer.apply_gradients(grads_and_vars, global_step=global_step)


n = strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensors(np.ones(2 * n)).repeat(3)
dataset = dataset.unbatch().batch(2 * n, drop_remainder=True)
iterator = strategy.make_dataset_iterator(dataset)
iterator.initialize()
expected, velocity = np.array([1.0, 2.0]), 0.0
while True:
    try:
        strategy.experimental_run(model_fn, iterator)
    except tf.errors.OutOfRangeError:
        tf.logging.info("done after %d steps", int(global_step.numpy()))
        break
    velocity = 0.5 * velocity + n
    expected = expected - 0.25 * velocity
assert int(global_step.numpy()) == 3
assert np.allclose(w.numpy(), expected)
