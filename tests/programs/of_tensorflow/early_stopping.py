"""Early stopping: the best weights come back when the validation loss grows."""

import os

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
with strategy.scope():
    w = tf.Variable(10.0, dtype=tf.float64)
    best_loss = tf.Variable(np.inf, dtype=tf.float64, trainable=False)
    optimizer = tf.keras.optimizers.SGD(lambda: 0.2)
    checkpoint = tf.train.Checkpoint(w=w, optimizer=optimizer)
manager = tf.train.CheckpointManager(
    checkpoint,
    os.path.join(FOLDER, "best"),
    max_to_keep=1,  # noqa: F821
)


def step():
    optimizer.apply_gradients([(tf.ones_like(w) * 8.0 / n, w)])


def validation_loss():
    return tf.square(w - 3.0)


patience, wait, history = 2, 0, []
for epoch in range(100):
    strategy.run(step)
    per_replica = strategy.run(validation_loss)
    loss = strategy.reduce(tf.distribute.ReduceOp.MEAN, per_replica, axis=None)
    history.append(float(loss))
    if loss < best_loss.numpy():
        best_loss.assign(loss)
        manager.save()
        wait = 0
    else:
        wait += 1
        if wait >= patience:
            print("Early stopping at epoch", epoch)
            break
checkpoint.restore(manager.latest_checkpoint).assert_consumed()
assert epoch == 5
assert np.isclose(w.numpy(), 10.0 - 1.6 * 4)
assert int(optimizer.iterations.numpy()) == 4
