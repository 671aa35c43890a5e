"""The loop of the model garden: several steps in one tf.function."""

import logging
import tensorflow as tf
import numpy as np


def run_customized_training_loop(
    strategy=None,
    train_input_fn=None,
    steps_per_epoch=2,
    steps_per_loop=2,
    epochs=2,
    metric_fn=None,
):
    total_training_steps = steps_per_epoch * epochs
    train_iterator = iter(
        strategy.experimental_distribute_datasets_from_function(train_input_fn)
    )
    with strategy.scope():
        kernel = tf.Variable(tf.ones([3]), name="kernel")
        optimizer = tf.keras.optimizers.experimental.SGD(
            tf.keras.optimizers.schedules.PolynomialDecay(
                0.1, total_training_steps, end_learning_rate=0.0
            )
        )
        train_loss_metric = tf.keras.metrics.Mean("training_loss", dtype=tf.float32)
        train_metrics = [metric_fn()] if metric_fn else []

    def _replicated_step(inputs):
        inputs, labels = inputs
        out = tf.reduce_sum(inputs * kernel, axis=-1)
        loss = tf.reduce_mean(tf.square(out - labels))
        scaled = loss / strategy.num_replicas_in_sync
        err = (
            2
            * (out - labels)
            / tf.cast(tf.shape(labels)[0], tf.float32)
            / strategy.num_replicas_in_sync
        )
        grads = [tf.linalg.matmul(err, inputs)]
        (grads, _) = tf.clip_by_global_norm(grads, clip_norm=10.0)
        optimizer.apply_gradients(zip(grads, [kernel]))
        train_loss_metric.update_state(loss)
        for metric in train_metrics:
            metric.update_state(labels, out)

    @tf.function
    def train_steps(iterator, steps):
        if not isinstance(steps, tf.Tensor):
            raise ValueError(
                "steps should be an Tensor. Python object may cause retracing."
            )
        for _ in tf.range(steps):
            strategy.run(_replicated_step, args=(next(iterator),))

    current_step = 0
    while current_step < total_training_steps:
        train_loss_metric.reset_states()
        for metric in train_metrics:
            metric.reset_states()
        steps = min(steps_per_loop, total_training_steps - current_step)
        train_steps(train_iterator, tf.convert_to_tensor(steps, dtype=tf.int32))
        current_step += steps
        train_loss = train_loss_metric.result().numpy().astype(float)
        for metric in train_metrics:
            value = metric.result().numpy().astype(float)
            logging.info("Step: [%d] %s = %f", current_step, metric.name, value)
    assert int(optimizer.iterations.numpy()) == total_training_steps
    return train_loss, kernel.numpy()


def input_fn(ctx=None):
    bs = ctx.get_per_replica_batch_size(8) if ctx else 8
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 10
    ds = tf.data.Dataset.from_tensor_slices((x, x.sum(1) * 2))
    if ctx and ctx.num_input_pipelines > 1:
        ds = ds.shard(ctx.num_input_pipelines, ctx.input_pipeline_id)
    return ds.repeat().batch(bs, drop_remainder=True)


strategy = tf.distribute.MirroredStrategy()
loss, k = run_customized_training_loop(
    strategy, input_fn, metric_fn=lambda: tf.keras.metrics.MeanSquaredError("mse")
)
x = np.arange(24, dtype=np.float64).reshape(8, 3) / 10
y = x.sum(1) * 2
n = strategy.num_replicas_in_sync
w = np.ones(3)
for s in range(4):
    total = 0
    for rows in (slice(8 * r // n, 8 * (r + 1) // n) for r in range(n)):
        g = 2 * ((x[rows] @ w - y[rows]) @ x[rows]) / 8
        total = total + g * min(1, 10 / np.linalg.norm(g))
    w -= 0.1 * (1 - s / 4) * total
np.testing.assert_allclose(k, w, rtol=1e-5)
