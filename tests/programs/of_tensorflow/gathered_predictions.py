"""Predictions of all replicas, gathered and put in order."""

import tensorflow as tf
import numpy as np

strategy = tf.distribute.MirroredStrategy()
data = np.arange(11, dtype=np.float32)
ds = tf.data.Dataset.from_tensor_slices({"x": data, "id": tf.range(11)}).batch(
    4, drop_remainder=False
)
preds, ids = [], []


@tf.function
def predict(batch):
    return tf.math.tanh(batch["x"]), batch["id"]


for batch in strategy.experimental_distribute_dataset(ds):
    p, i = strategy.run(predict, args=(batch,))
    preds.append(tf.concat(p.values, axis=0).numpy())
    rows = strategy.experimental_local_results(batch["x"])
    assert sum(len(x) for x in rows) == sum(x.shape[0] for x in p.values)
    ids.append(strategy.gather(i, axis=0).numpy())
preds = tf.concat(preds, axis=0).numpy()
order = tf.argsort(tf.concat(ids, axis=0)).numpy()
np.testing.assert_allclose(preds[order], np.tanh(data), rtol=1e-6)
total = strategy.reduce(
    tf.distribute.ReduceOp.MEAN, strategy.run(lambda: tf.constant(2.0)), axis=None
)
assert total == 2.0
