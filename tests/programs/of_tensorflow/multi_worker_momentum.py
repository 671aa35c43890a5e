"""The tutorial of MultiWorkerMirroredStrategy: TF_CONFIG, functions of a mnist module."""

import json
import os

os.environ.pop("TF_CONFIG", None)

import numpy as np
import tensorflow as tf
from tensorflow import keras

tf_config = {
    "cluster": {"worker": ["localhost:12345", "localhost:23456"]},
    "task": {"type": "worker", "index": 0},
}
os.environ["TF_CONFIG"] = json.dumps(tf_config)
num_workers = len(tf_config["cluster"]["worker"])

communication_options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.AUTO
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=communication_options
)
os.environ.pop("TF_CONFIG", None)
per_worker_batch_size = 8
global_batch_size = per_worker_batch_size * strategy.num_replicas_in_sync


def dataset_fn(global_batch_size, input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, 2.0 * x + 1.0))
    dataset = dataset.shard(
        input_context.num_input_pipelines, input_context.input_pipeline_id
    )
    return dataset.shuffle(64).repeat().batch(batch_size, drop_remainder=True)


with strategy.scope():
    multi_worker_dataset = strategy.distribute_datasets_from_function(
        lambda input_context: dataset_fn(global_batch_size, input_context)
    )
    w = tf.Variable(0.0, dtype=tf.float32, name="kernel")
    b = tf.Variable(0.0, dtype=tf.float32, name="bias")
    optimizer = keras.optimizers.SGD(
        learning_rate=keras.optimizers.schedules.CosineDecay(
            0.0, decay_steps=150, warmup_target=0.1, warmup_steps=10
        ),
        momentum=0.9,
        nesterov=True,
    )
    mse = keras.losses.MeanSquaredError(reduction="none")
    train_mse = keras.metrics.MeanSquaredError(name="train_mse")
    train_rmse = keras.metrics.RootMeanSquaredError()


@tf.function
def train_step(iterator):
    """Training step function."""

    def step_fn(inputs):
        x, y = inputs
        predictions = x * w + b
        per_batch_loss = mse(y[:, None], predictions[:, None])
        loss = tf.nn.compute_average_loss(
            per_batch_loss, global_batch_size=global_batch_size
        )
        error = 2 * (predictions - y) / global_batch_size
        optimizer.apply_gradients(
            [(tf.reduce_sum(error * x), w), (tf.reduce_sum(error), b)]
        )
        train_mse.update_state(y, predictions)
        train_rmse.update_state(y, predictions)
        return loss

    per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


iterator = iter(multi_worker_dataset)
for epoch in range(20):
    train_mse.reset_state()
    train_rmse.reset_state()
    for _ in range(8):
        loss = train_step(iterator)
    print("Epoch: %d, loss %f, mse %f" % (epoch, loss, train_mse.result().numpy()))
    assert np.isclose(train_rmse.result() ** 2, train_mse.result())
assert abs(w.numpy() - 2.0) < 0.05 and abs(b.numpy() - 1.0) < 0.05, (
    w.numpy(),
    b.numpy(),
)
assert int(optimizer.iterations) == 160
