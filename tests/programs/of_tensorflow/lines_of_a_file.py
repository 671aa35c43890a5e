"""A generator that reads a file, with the types and shapes of TensorFlow 2.0."""

import csv
import os

import numpy as np
import tensorflow as tf

path = os.path.join(FOLDER, "lines%d.txt" % os.getpid())
with tf.io.gfile.GFile(path, "w") as f:
    for i in range(12):
        f.write("%d,%d\n" % (i, i * i))


def gen():
    with open(path) as f:
        for row in csv.reader(f):
            yield np.float32(row[0]), np.float32(row[1])


strategy = tf.distribute.MirroredStrategy()
ds = tf.data.Dataset.from_generator(
    gen, (tf.float32, tf.float32), (tf.TensorShape([]), tf.TensorShape([]))
)
ds = ds.batch(4).repeat(2)
total = tf.constant(0.0)
for x, y in strategy.experimental_distribute_dataset(ds):
    part = strategy.run(lambda a, b: tf.reduce_sum(b - a), args=(x, y))
    total += strategy.reduce(tf.distribute.ReduceOp.SUM, part, axis=None)
assert abs(float(total) - 2 * sum(i * i - i for i in range(12))) < 1e-3
