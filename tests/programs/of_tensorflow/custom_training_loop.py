"""The tutorial "Custom training": metrics, a checkpoint, an optimizer in a scope."""

import os

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
GLOBAL_BATCH_SIZE = 4 * n
EPOCHS = 3

rng = np.random.default_rng(0)
images = rng.normal(size=(8 * n, 3))
labels = np.argmax(images, axis=1)
train_dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(
    GLOBAL_BATCH_SIZE
)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

with strategy.scope():
    weights = tf.Variable(tf.zeros([3, 3], tf.float64), name="weights")
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.5, momentum=0.9)
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_loss = tf.keras.metrics.Mean(name="test_loss")
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, weights=weights)

checkpoint_prefix = os.path.join(FOLDER, "ckpt")  # noqa: F821


def train_step(inputs):
    x, y = inputs
    scores = tf.matmul(x, weights)
    e = tf.exp(scores - tf.reduce_max(scores, axis=1, keepdims=True))
    probabilities = e / tf.reduce_sum(e, axis=1, keepdims=True)
    one_hot = tf.cast(tf.equal(tf.expand_dims(y, 1), tf.range(3)), tf.float64)
    per_example_loss = -tf.reduce_sum(one_hot * tf.math.log(probabilities), axis=1)
    loss = tf.nn.compute_average_loss(
        per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE
    )
    gradient = tf.matmul(tf.transpose(x), probabilities - one_hot) / GLOBAL_BATCH_SIZE
    optimizer.apply_gradients(zip([gradient], [weights]))
    train_accuracy.update_state(y, scores)
    test_loss.update_state(per_example_loss)
    return loss


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


losses = []
for epoch in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    losses.append(total_loss / num_batches)
    if epoch == 1:
        checkpoint.save(checkpoint_prefix)
        saved = weights.numpy()
        expected = None
    template = "Epoch {}, Loss: {}, Accuracy: {}, Test Loss: {}"
    print(
        template.format(
            epoch + 1, losses[-1], train_accuracy.result() * 100, test_loss.result()
        )
    )
    assert abs(float(test_loss.result()) - float(losses[-1])) < 1e-9
    test_loss.reset_states()
    last_accuracy = float(train_accuracy.result())
    train_accuracy.reset_states()
assert losses[0] > losses[1] > losses[2]
assert last_accuracy > 0.7
last = weights.numpy()

# Another optimizer and weights, as in a new process: restored before the first step.
with strategy.scope():
    weights = tf.Variable(tf.zeros([3, 3], tf.float64), name="weights")
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.5, momentum=0.9)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, weights=weights)
checkpoint.restore(tf.train.latest_checkpoint(FOLDER))  # noqa: F821
assert np.array_equal(weights.numpy(), saved)
assert not np.array_equal(saved, last)
for x in train_dist_dataset:
    distributed_train_step(x)
assert np.array_equal(weights.numpy(), last)
