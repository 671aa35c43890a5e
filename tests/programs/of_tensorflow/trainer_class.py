"""A class with strategy, optimizer, metrics and a manager, resumed by another one."""

import os
import time
import tensorflow as tf
import numpy as np


class Trainer(object):
    def __init__(self, strategy, global_batch, ckpt_dir):
        self.strategy = strategy
        self.global_batch = global_batch
        with self.strategy.scope():
            self.w = tf.Variable(tf.constant([[0.5], [-0.5]]), name="w", trainable=True)
            self.b = tf.Variable(tf.zeros((1,)), name="b")
            self.optimizer = tf.keras.optimizers.Adam(learning_rate=5e-2, clipnorm=1.0)
            self.train_loss = tf.keras.metrics.Mean("train_loss", dtype=tf.float32)
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.ckpt = tf.train.Checkpoint(
                step=self.step, optimizer=self.optimizer, w=self.w, b=self.b
            )
        self.manager = tf.train.CheckpointManager(self.ckpt, ckpt_dir, max_to_keep=5)
        if self.manager.latest_checkpoint:
            self.ckpt.restore(self.manager.latest_checkpoint)
            print("Restored from {}".format(self.manager.latest_checkpoint))
        else:
            print("Initializing from scratch.")

    def compute_loss(self, x, y):
        pred = tf.matmul(x, self.w) + self.b
        err = tf.squeeze(pred - y, axis=1)
        return tf.nn.compute_average_loss(
            tf.math.square(err), global_batch_size=self.global_batch
        ), err

    @tf.function
    def train_step(self, batch):
        x, y = batch
        loss, err = self.compute_loss(x, y)
        gw = (
            2.0
            * tf.matmul(tf.transpose(x), tf.expand_dims(err, -1))
            / self.global_batch
        )
        gb = 2.0 * tf.reshape(tf.reduce_sum(err), [1]) / self.global_batch
        self.optimizer.apply_gradients(zip([gw, gb], [self.w, self.b]))
        self.train_loss.update_state(loss * self.strategy.num_replicas_in_sync)
        return loss

    @tf.function
    def distributed_train(self, batch):
        losses = self.strategy.run(self.train_step, args=(batch,))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def fit(self, ds, epochs):
        for epoch in range(epochs):
            start = time.time()
            self.train_loss.reset_states()
            for step, batch in enumerate(ds):
                l = self.distributed_train(batch)
                self.step.assign_add(1)
                if step % 2 == 0:
                    tf.print("step", int(self.step), "loss", l)
            self.manager.save(checkpoint_number=self.step)
            print(
                "Epoch {} loss {:.5f} time {:.2f}".format(
                    epoch + 1, self.train_loss.result().numpy(), time.time() - start
                )
            )
        return self.train_loss.result()


strategy = tf.distribute.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))
BATCH = 8 * strategy.num_replicas_in_sync
rng = np.random.RandomState(0)
X = rng.randn(64, 2).astype("float32")
Y = (X @ np.array([[1.0], [2.0]], "float32") + 3).astype("float32")
ds = (
    tf.data.Dataset.from_tensor_slices((X, Y))
    .cache()
    .shuffle(64, seed=3)
    .batch(BATCH)
    .prefetch(tf.data.experimental.AUTOTUNE)
)
ds = strategy.experimental_distribute_dataset(ds)
t = Trainer(strategy, BATCH, os.path.join(FOLDER, "a"))
a = t.fit(ds, 20)
t2 = Trainer(strategy, BATCH, os.path.join(FOLDER, "a"))
assert int(t2.step) == int(t.step) > 0
b = t2.fit(ds, 20)
assert b < a, (a, b)
