"""tf.Module, as in the guide "Introduction to modules"."""

import tensorflow as tf


class Dense(tf.Module):
    def __init__(self, in_features, out_features, name=None):
        super().__init__(name=name)
        self.w = tf.Variable(tf.ones([in_features, out_features]), name="w")
        self.b = tf.Variable(tf.zeros([out_features]), name="b")

    def __call__(self, x):
        return tf.matmul(x, self.w) + self.b


class Seq(tf.Module):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.dense_1 = Dense(3, 3)
        self.dense_2 = Dense(in_features=3, out_features=2)

    @tf.function
    def __call__(self, x):
        return self.dense_2(self.dense_1(x))


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = Seq(name="m")
    opt = tf.keras.optimizers.Adam()
    ckpt = tf.train.Checkpoint(model=model, optimizer=opt)


def step():
    y = model(tf.ones([1, 3]))
    grads = [tf.ones_like(v) for v in model.trainable_variables]
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return tf.reduce_sum(y)


strategy.run(step)
ckpt.save(FOLDER + "/m")
assert len(model.variables) == 4
saved = [v.numpy() for v in model.variables]
strategy.run(step)
ckpt.restore(FOLDER + "/m")
assert all((a == b.numpy()).all() for a, b in zip(saved, model.variables))
