"""The tutorial "Save and load": saved under a strategy, restored without one."""

import os

import numpy as np
import tensorflow as tf

path = os.path.join(FOLDER, "tf_ckpts")  # noqa: F821
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    kernel = tf.Variable(tf.ones([2, 3]), name="kernel")
    counter = tf.Variable(
        0.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
    opt = tf.keras.optimizers.Adam(0.1)
    step = tf.Variable(1)
    ckpt = tf.train.Checkpoint(step=step, optimizer=opt, net=[kernel], counter=counter)
    manager = tf.train.CheckpointManager(ckpt, path, max_to_keep=3)


def train_step():
    opt.apply_gradients([(tf.ones_like(kernel), kernel)])
    counter.assign_add(1.0)


def train_and_checkpoint(steps):
    ckpt.restore(manager.latest_checkpoint)
    if manager.latest_checkpoint:
        print("Restored from {}".format(manager.latest_checkpoint))
    else:
        print("Initializing from scratch.")
    for _ in range(steps):
        strategy.run(train_step)
        ckpt.step.assign_add(1)
        if int(ckpt.step) % 2 == 0:
            save_path = manager.save()
            print("Saved checkpoint for step {}: {}".format(int(ckpt.step), save_path))


train_and_checkpoint(4)
assert len(manager.checkpoints) == 2
assert int(ckpt.step) == 5
saved_at_4 = float(counter.numpy())
train_and_checkpoint(0)
assert int(ckpt.step) == 4
assert float(counter.numpy()) == 3.0 * strategy.num_replicas_in_sync < saved_at_4

reader = tf.train.load_checkpoint(manager.latest_checkpoint)
assert any("kernel" in name or "net" in name for name in reader)
to_restore = tf.Variable(tf.zeros([2, 3]))
fake = tf.train.Checkpoint(net=[to_restore])
fake.restore(tf.train.latest_checkpoint(path)).expect_partial()
assert np.array_equal(to_restore.numpy(), kernel.numpy())
