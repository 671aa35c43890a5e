"""The tutorial "Custom training": a classifier of two layers, by hand, with losses of Keras."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))

BUFFER_SIZE = 96
BATCH_SIZE_PER_REPLICA = 8
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 12

rng = np.random.RandomState(0)
x = rng.randn(96, 4).astype(np.float32)
y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0).astype(np.int64)
x_test, y_test = x[:31], y[:31]

train_dataset = (
    tf.data.Dataset.from_tensor_slices((x, y))
    .shuffle(BUFFER_SIZE)
    .batch(GLOBAL_BATCH_SIZE)
)
test_dataset = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(
    GLOBAL_BATCH_SIZE
)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )

    def compute_loss(labels, predictions):
        per_example_loss = loss_object(labels, predictions)
        return tf.nn.compute_average_loss(
            per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE
        )

    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    w1 = tf.Variable(tf.constant(0.5 * rng.randn(4, 16), dtype=tf.float32), name="w1")
    b1 = tf.Variable(tf.zeros([16], tf.float32), name="b1")
    w2 = tf.Variable(tf.constant(0.5 * rng.randn(16, 3), dtype=tf.float32), name="w2")
    b2 = tf.Variable(tf.zeros([3], tf.float32), name="b2")
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.05)


def model(images):
    hidden = tf.nn.relu(tf.matmul(images, w1) + b1)
    return hidden, tf.matmul(hidden, w2) + b2


def train_step(inputs):
    images, labels = inputs
    hidden, predictions = model(images)
    loss = compute_loss(labels, predictions)
    d_logits = loss_object.gradient(labels, predictions) / GLOBAL_BATCH_SIZE
    d_hidden = tf.matmul(d_logits, w2, transpose_b=True) * tf.cast(
        hidden > 0, tf.float32
    )
    gradients = [
        tf.matmul(images, d_hidden, transpose_a=True),
        tf.reduce_sum(d_hidden, axis=0),
        tf.matmul(hidden, d_logits, transpose_a=True),
        tf.reduce_sum(d_logits, axis=0),
    ]
    optimizer.apply_gradients(zip(gradients, [w1, b1, w2, b2]))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    _, predictions = model(images)
    t_loss = loss_object(labels, predictions)
    test_loss.update_state(t_loss)
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


for epoch in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    for batch in train_dist_dataset:
        total_loss += distributed_train_step(batch)
        num_batches += 1
    train_loss = total_loss / num_batches
    for batch in test_dist_dataset:
        distributed_test_step(batch)
    template = "Epoch {}, Loss: {}, Accuracy: {}, Test Loss: {}, Test Accuracy: {}"
    print(
        template.format(
            epoch + 1,
            train_loss,
            train_accuracy.result() * 100,
            test_loss.result(),
            test_accuracy.result() * 100,
        )
    )
    last = float(test_loss.result()), float(test_accuracy.result())
    test_loss.reset_states()
    train_accuracy.reset_states()
    test_accuracy.reset_states()

_, logits = model(x_test)
expected = np.mean(np.argmax(logits, axis=1) == y_test)
shifted = logits - logits.max(axis=1, keepdims=True)
log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
assert np.isclose(last[1], expected), (last, expected)
assert np.isclose(last[0], -log_p[np.arange(31), y_test].mean(), rtol=1e-5)
assert last[1] > 0.6, last
