"""Evaluation with metrics of Keras, of batches that do not divide evenly."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

strategy = tf.distribute.MirroredStrategy()
rng = np.random.default_rng(2)
truth = rng.integers(0, 2, size=13)
score = rng.uniform(size=(13, 1))
dataset = tf.data.Dataset.from_tensor_slices((truth, score)).batch(5)
dist_dataset = strategy.experimental_distribute_dataset(dataset)
with strategy.scope():
    metrics = [
        keras.metrics.BinaryAccuracy(name="accuracy"),
        keras.metrics.MeanSquaredError(name="mse"),
        keras.metrics.MeanAbsoluteError(name="mae"),
    ]
    eval_loss = keras.metrics.Mean("eval_loss", dtype=tf.float32)


@tf.function
def eval_step(iterator):
    def step_fn(inputs):
        labels, predictions = inputs
        for metric in metrics:
            metric.update_state(labels, predictions)
        eval_loss.update_state(tf.square(tf.squeeze(predictions, 1) - labels))

    strategy.run(step_fn, args=(next(iterator),))


iterator = iter(dist_dataset)
for _ in range(3):
    eval_step(iterator)
results = {metric.name: float(metric.result()) for metric in metrics}
expected = {
    "accuracy": np.mean((score[:, 0] > 0.5) == truth),
    "mse": np.mean((score[:, 0] - truth) ** 2),
    "mae": np.mean(np.abs(score[:, 0] - truth)),
}
assert all(np.isclose(results[k], expected[k]) for k in expected), (results, expected)
assert np.isclose(eval_loss.result().numpy(), expected["mse"])
