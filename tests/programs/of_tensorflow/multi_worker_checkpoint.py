"""The tutorial "Custom training loop with MultiWorkerMirroredStrategy"."""

import os

import numpy as np
import tensorflow as tf

num_epochs = 3
num_steps_per_epoch = 4
checkpoint_dir = os.path.join(FOLDER, "ckpt")  # noqa: F821


def _is_chief(task_type, task_id):
    return task_type is None or task_type == "chief" or task_id == 0


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


def train(last_epoch):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def dataset_fn(input_context):
        batch_size = input_context.get_per_replica_batch_size(
            4 * strategy.num_replicas_in_sync
        )
        dataset = tf.data.Dataset.range(64 * strategy.num_replicas_in_sync)
        dataset = dataset.shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id
        )
        return dataset.repeat().batch(batch_size).prefetch(2)

    with strategy.scope():
        multi_worker_dataset = strategy.distribute_datasets_from_function(dataset_fn)
        w = tf.Variable(tf.zeros([2], tf.float64), name="w")
        optimizer = tf.keras.optimizers.Adam(learning_rate=0.1)
        train_accuracy = tf.keras.metrics.Mean(name="train_accuracy")

    @tf.function
    def train_step(iterator):
        def step_fn(inputs):
            x = tf.cast(inputs, tf.float64) / 100.0
            gradient = tf.stack([tf.reduce_sum(x), tf.reduce_sum(x * x)])
            optimizer.apply_gradients([(gradient, w)])
            train_accuracy.update_state(x)
            return tf.reduce_sum(x)

        per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
        return strategy.reduce(
            tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None
        )

    epoch = tf.Variable(
        initial_value=tf.constant(0, dtype=tf.dtypes.int64), name="epoch"
    )
    step_in_epoch = tf.Variable(
        initial_value=tf.constant(0, dtype=tf.dtypes.int64), name="step_in_epoch"
    )
    task_type, task_id = (
        strategy.cluster_resolver.task_type,
        strategy.cluster_resolver.task_id,
    )
    checkpoint = tf.train.Checkpoint(
        w=w, optimizer=optimizer, epoch=epoch, step_in_epoch=step_in_epoch
    )
    write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id)
    checkpoint_manager = tf.train.CheckpointManager(
        checkpoint, directory=write_checkpoint_dir, max_to_keep=1
    )
    latest_checkpoint = tf.train.latest_checkpoint(checkpoint_dir)
    if latest_checkpoint:
        checkpoint.restore(latest_checkpoint)

    start = epoch.numpy()
    while epoch.numpy() < last_epoch:
        iterator = iter(multi_worker_dataset)
        total_loss = 0.0
        num_batches = 0
        while step_in_epoch.numpy() < num_steps_per_epoch:
            total_loss += train_step(iterator)
            num_batches += 1
            step_in_epoch.assign_add(1)
        print(
            "Epoch: %d, accuracy: %f, train_loss: %f."
            % (epoch.numpy(), train_accuracy.result(), total_loss / num_batches)
        )
        train_accuracy.reset_states()
        epoch.assign_add(1)
        step_in_epoch.assign(0)
        checkpoint_manager.save()
        if not _is_chief(task_type, task_id):
            tf.io.gfile.rmtree(write_checkpoint_dir)
    return int(start), w.numpy()


start, interrupted = train(num_epochs)
assert start == 0
start, resumed = train(num_epochs)
assert start == num_epochs
assert np.array_equal(interrupted, resumed)
start, longer = train(num_epochs + 1)
assert start == num_epochs
assert not np.array_equal(resumed, longer)
