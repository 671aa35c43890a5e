"""Distributed evaluation with many metrics in a dict, and a metric of one's own."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()


class BinaryTruePositives(tf.keras.metrics.Metric):
    def __init__(self, name="binary_true_positives", **kwargs):
        super(BinaryTruePositives, self).__init__(name=name, **kwargs)
        self.true_positives = self.add_weight(name="tp", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = tf.cast(y_true, tf.bool)
        y_pred = tf.cast(y_pred > 0.5, tf.bool)
        values = tf.logical_and(tf.equal(y_true, True), tf.equal(y_pred, True))
        values = tf.cast(values, tf.float32)
        if sample_weight is not None:
            values = tf.multiply(values, sample_weight)
        self.true_positives.assign_add(tf.reduce_sum(values))

    def result(self):
        return self.true_positives

    def reset_state(self):
        self.true_positives.assign(0)


rng = np.random.RandomState(3)
labels = rng.randint(0, 2, size=(50,)).astype(np.float32)
scores = np.clip(0.3 * labels + 0.7 * rng.rand(50), 0, 1).astype(np.float32)
weights = rng.rand(50).astype(np.float32)
ds = tf.data.Dataset.from_tensor_slices({"y": labels, "p": scores, "w": weights}).batch(
    16
)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
)
ds = ds.with_options(options)
dist_ds = strategy.experimental_distribute_dataset(ds)

with strategy.scope():
    metrics = {
        "loss": tf.keras.metrics.BinaryCrossentropy(name="loss"),
        "accuracy": tf.keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.5),
        "precision": tf.keras.metrics.Precision(name="precision"),
        "recall": tf.keras.metrics.Recall(name="recall"),
        "auc": tf.keras.metrics.AUC(name="auc"),
        "tp": BinaryTruePositives(),
        "examples": tf.keras.metrics.Sum(name="examples", dtype=tf.int64),
    }
    weighted = tf.keras.metrics.Precision()


@tf.function
def eval_step(batch):
    for name, metric in metrics.items():
        if name == "examples":
            metric.update_state(tf.ones_like(batch["y"]))
        else:
            metric.update_state(batch["y"], batch["p"])
    weighted.update_state(batch["y"], batch["p"], sample_weight=batch["w"])


for batch in dist_ds:
    strategy.run(eval_step, args=(batch,))
results = {name: float(metric.result().numpy()) for name, metric in metrics.items()}
print(", ".join("{}: {:.4f}".format(k, v) for k, v in results.items()))

positive = scores > 0.5
p = np.clip(scores.astype(np.float64), 1e-7, 1 - 1e-7)
expected = {
    "loss": -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p)),
    "accuracy": np.mean(positive == labels),
    "precision": labels[positive].mean(),
    "recall": positive[labels == 1].mean(),
    "tp": (positive * labels).sum(),
    "examples": 50,
}
for name, value in expected.items():
    assert np.isclose(results[name], value, rtol=1e-5), (name, results[name], value)
pairs = scores[labels == 1][:, None] > scores[labels == 0][None]
assert abs(results["auc"] - pairs.mean()) < 0.02
share = (weights * labels)[positive].sum() / weights[positive].sum()
assert np.isclose(weighted.result(), share)
for metric in metrics.values():
    metric.reset_state()
assert metrics["tp"].result() == 0 and metrics["auc"].result() == 0
