"""The guide "Distributed Input"."""

import numpy as np
import tensorflow as tf

tf.get_logger().setLevel("ERROR")

mirrored_strategy = tf.distribute.MirroredStrategy()
n = mirrored_strategy.num_replicas_in_sync
global_batch_size = 2 * n

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(10 * n)
dataset = dataset.batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


@tf.function
def train_step(inputs):
    features, labels = inputs
    return tf.reduce_sum(labels - 0.3 * features)


@tf.function
def distributed_train_step(iterator):
    return mirrored_strategy.run(train_step, args=(next(iterator),))


total = 0.0
steps = 0
dist_iterator = iter(dist_dataset)
try:
    while True:
        loss = distributed_train_step(dist_iterator)
        total += mirrored_strategy.reduce("SUM", loss, axis=None)
        steps += 1
except tf.errors.OutOfRangeError:
    print("end of the dataset")
assert steps == 5
assert np.isclose(total, 0.7 * 10 * n)

# A known number of steps, then as optional.
steps_per_epoch = 4
for step, x in enumerate(dist_dataset):
    if step >= steps_per_epoch:
        break
    mirrored_strategy.run(train_step, args=(x,))
dist_iterator = iter(dist_dataset)
has_data = True
count = 0
while has_data:
    optional = dist_iterator.get_next_as_optional()
    has_data = optional.has_value()
    if has_data:
        mirrored_strategy.run(train_step, args=(optional.get_value(),))
        count += 1
assert count == 5


def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = tf.data.Dataset.range(8 * n)
    dataset = dataset.shard(
        input_context.num_input_pipelines, input_context.input_pipeline_id
    )
    dataset = dataset.batch(batch_size)
    return dataset.prefetch(tf.data.experimental.AUTOTUNE)


dist_dataset = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
print(dist_dataset.element_spec)
seen = sum(
    mirrored_strategy.reduce("SUM", mirrored_strategy.run(tf.reduce_sum, (x,)), None)
    for x in dist_dataset
)
assert seen == sum(range(8 * n))


# Values from a function, and options.
def value_fn(ctx):
    return tf.constant(float(ctx.replica_id_in_sync_group))


distributed_values = mirrored_strategy.experimental_distribute_values_from_function(
    value_fn
)
total = mirrored_strategy.reduce("SUM", distributed_values, axis=None)
assert total == n * (n - 1) / 2
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
)
options = tf.distribute.InputOptions(
    experimental_fetch_to_device=True,
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_WORKER,
)
