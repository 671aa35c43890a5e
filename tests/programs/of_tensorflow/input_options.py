"""tf.data: zip, options, cardinality."""

import tensorflow as tf

tf.get_logger().setLevel("ERROR")
strategy = tf.distribute.MirroredStrategy(devices=None)
ds = tf.data.Dataset.zip((tf.data.Dataset.range(20), tf.data.Dataset.range(20, 40)))
ds = ds.map(
    lambda a, b: (tf.cast(a, tf.float32), tf.cast(b, tf.float32)),
    num_parallel_calls=tf.data.AUTOTUNE,
)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
)
ds = ds.batch(4).with_options(options)
card = tf.data.experimental.cardinality(ds).numpy()
dist = strategy.experimental_distribute_dataset(ds)
acc = []
for a, b in dist:
    s = strategy.run(lambda x, y: tf.reduce_sum(x * y), args=(a, b))
    acc.append(strategy.reduce(tf.distribute.ReduceOp.SUM, s, axis=None).numpy())
assert sum(acc) == sum(i * (i + 20) for i in range(20))
assert card == 5
