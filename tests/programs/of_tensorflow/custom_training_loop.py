"""A custom training loop as in the guides, with names of several versions."""

import os
import tempfile
import tensorflow.compat.v2 as tf  # of 2.x
from tensorflow import keras

GLOBAL_BATCH_SIZE = 4
strategy = tf.distribute.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))
tpus = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)
if isinstance(strategy, tpus):
    raise SystemExit("not here")
x = tf.constant(np.linspace(-1.0, 1.0, 16), dtype=tf.dtypes.float64)
dataset = tf.data.Dataset.from_tensor_slices((x, 3.0 * x)).batch(GLOBAL_BATCH_SIZE)
dataset = dataset.prefetch(tf.data.experimental.AUTOTUNE)
train_dist_dataset = strategy.experimental_distribute_dataset(dataset)
with strategy.scope():
    w = tf.Variable(0.0, name="w", dtype=tf.float64)
    seen = tf.Variable(
        0,
        dtype=tf.int64,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
    optimizer = keras.optimizers.legacy.SGD(tf.cast(1, tf.float64))
    schedule = tf.keras.optimizers.schedules.PolynomialDecay(0.5, 9, 0.5)
    optimizer.learning_rate = schedule
    checkpoint = tf.compat.v2.train.Checkpoint(w=w, optimizer=optimizer)


def train_step(inputs):
    x, y = inputs
    error = w * x - y
    loss = tf.nn.compute_average_loss(
        error * error, global_batch_size=GLOBAL_BATCH_SIZE
    )
    gradient = tf.reduce_sum(2.0 * error * x) / GLOBAL_BATCH_SIZE
    optimizer.apply_gradients(zip([gradient], [w]))
    seen.assign_add(len(x))
    return loss


@tf.function(input_signature=[tf.TensorSpec(shape=[None], dtype=tf.float32)])
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


manager = tf.train.CheckpointManager(
    checkpoint, os.path.join(FOLDER, "checkpoints"), max_to_keep=2
)
printed = []
for epoch in tf.range(3):
    total_loss, num_batches = 0.0, 0
    for inputs in train_dist_dataset:
        total_loss += distributed_train_step(inputs).numpy()
        num_batches += 1
    manager.save()
    template = "Epoch {}, loss {:.6f}, w {:.6f}, seen {}"
    printed.append(
        template.format(epoch, total_loss / num_batches, w.numpy(), int(seen.numpy()))
    )
iterator = iter(train_dist_dataset)
try:
    while True:
        iterator.get_next()
except tf.errors.OutOfRangeError:
    printed.append("end of the data")
best = tf.train.Checkpoint(w=w).write(manager.latest_checkpoint + "-w")
tf.train.Checkpoint(w=w).read(best).assert_consumed()
status = checkpoint.read(checkpoint.write(manager.latest_checkpoint + "-best"))
status = checkpoint.restore(manager.latest_checkpoint)
status.assert_consumed()
optimizer.lr.assign(0.25)
kept = {"w": [w]}
history = [w.numpy(), w.value(), tf.identity(w), kept["w"][0].numpy()]
history += [max([w, w]).numpy()]
trained = float(history[0])
w.assign_add(100.0)
assert max(history) < 50.0  # copies, as in TensorFlow

w, lines = 0.0, []
x = [-1.0 + 2.0 * k / 15 for k in range(16)]
for epoch in range(3):
    losses = 0.0
    for start in range(0, 16, 4):
        rows = x[start : start + 4]
        losses += sum((w * r - 3 * r) ** 2 for r in rows) / 4
        w -= 0.5 * sum(2 * (w * r - 3 * r) * r for r in rows) / 4
    number = 16 * (epoch + 1)
    lines.append(f"Epoch {epoch}, loss {losses / 4:.6f}, w {w:.6f}, seen {number}")
assert printed == lines + ["end of the data"], printed
assert abs(trained - w) < 1e-9, trained
