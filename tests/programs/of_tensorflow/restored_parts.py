"""Parts of a checkpoint, and what is in it."""

import os
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.Module()
    model.w = tf.Variable(tf.ones([2]))
    opt = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    root = tf.train.Checkpoint(model=model, opt=opt, best=tf.Variable(0.0))
path = tf.train.CheckpointManager(
    root,
    os.path.join(FOLDER, "k"),
    max_to_keep=2,
    checkpoint_name="model",
    keep_checkpoint_every_n_hours=None,
)
status = root.restore(path.latest_checkpoint)


def step():
    opt.apply_gradients([(tf.ones([2]), model.w)])


strategy.run(step)
root.best.assign(3.0)
saved = path.save(checkpoint_number=7)
assert saved.endswith("model-7"), saved
with strategy.scope():
    m2 = tf.Module()
    m2.w = tf.Variable(tf.zeros([2]))
only = tf.train.Checkpoint(model=m2)
only.restore(saved).expect_partial()
only.restore(saved).assert_existing_objects_matched()
assert abs(m2.w.numpy()[0] - (1 - 0.1 * strategy.num_replicas_in_sync)) < 1e-6
for name, shape in tf.train.list_variables(saved):
    print(name, shape)
