"""A dataset from a generator, with nests, filters and a shuffle of a fixed seed."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync


def gen():
    for i in range(12 * n):
        yield {"x": np.full(3, i, np.float32), "id": i}


dataset = tf.data.Dataset.from_generator(
    gen,
    output_signature={
        "x": tf.TensorSpec(shape=(3,), dtype=tf.float32),
        "id": tf.TensorSpec(shape=(), dtype=tf.int32),
    },
)
dataset = dataset.filter(lambda row: row["id"] % 3 != 0)
dataset = dataset.map(
    lambda row: {"x": row["x"] * 2.0, "id": row["id"]},
    num_parallel_calls=tf.data.AUTOTUNE,
)
dataset = dataset.shuffle(buffer_size=100, seed=1, reshuffle_each_iteration=True)
dataset = dataset.batch(2 * n, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def step(batch):
    tf.debugging.assert_equal if False else None
    return tf.nest.map_structure(lambda leaf: tf.reduce_sum(leaf), batch)


for _ in range(2):
    total = {"x": 0.0, "id": 0}
    for batch in strategy.experimental_distribute_dataset(dataset):
        sums = strategy.run(step, args=(batch,))
        reduced = strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
        total = tf.nest.map_structure(lambda a, b: a + b, total, reduced)
    ids = sum(i for i in range(12 * n) if i % 3)
    assert int(total["id"]) == ids
    assert np.isclose(total["x"], 2.0 * 3 * ids)
assert tf.nest.flatten({"b": 2, "a": [1, None]}) == [1, None, 2]
