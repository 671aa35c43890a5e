"""A moving average of the weights, and a schedule, as in GANs."""

import tensorflow as tf


class Lr(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, base):
        self.base = base

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        return tf.where(step < 2, self.base, self.base / 2)

    def get_config(self):
        return {"base": self.base}


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    g = [tf.Variable(tf.ones([2, 2]), name="g%d" % i) for i in range(2)]
    g_ema = [tf.Variable(x.numpy(), trainable=False, name=x.name + "_ema") for x in g]
    opt = tf.keras.optimizers.Adam(Lr(0.1), beta_1=0.0, beta_2=0.99, epsilon=1e-8)


def step():
    grads = tf.nest.map_structure(lambda v: tf.ones_like(v), g)
    grads = [tf.clip_by_value(x, -1.0, 1.0) for x in grads]
    opt.apply_gradients(zip(grads, g))
    return tf.add_n([tf.reduce_sum(tf.square(x)) for x in g])


for i in range(4):
    l = strategy.run(step)
    for a, b in zip(g_ema, g):
        a.assign(a * 0.9 + b * (1 - 0.9))
mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, l, axis=None)
print("%.4f" % mean.numpy(), opt.iterations.numpy())
assert abs(g[0].numpy()[0][0] - (1 - 0.1 - 0.1 - 0.05 - 0.05)) < 1e-4
