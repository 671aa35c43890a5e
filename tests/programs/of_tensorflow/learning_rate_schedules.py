"""The schedule of the tutorial "Transformer", and those of Keras."""

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync


class CustomSchedule(tf.keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, d_model, warmup_steps=4000):
        super().__init__()
        self.d_model = tf.cast(d_model, tf.float32)
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = tf.cast(step, dtype=tf.float32) + 1.0
        arg1 = 1.0 / tf.math.sqrt(step)
        arg2 = step * (self.warmup_steps**-1.5)
        return 1.0 / tf.math.sqrt(self.d_model) * tf.math.minimum(arg1, arg2)


schedules = [
    CustomSchedule(128, 4),
    tf.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True),
    tf.keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [1.0, 0.5, 0.25]),
    tf.keras.optimizers.schedules.CosineDecay(0.1, 10),
    tf.keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 0.5),
]
rates = [
    [128**-0.5 * min((k + 1) ** -0.5, (k + 1) * 4**-1.5) for k in range(6)],
    [0.1, 0.1, 0.05, 0.05, 0.025, 0.025],
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25],
    [0.05 * (1 + np.cos(np.pi * k / 10)) for k in range(6)],
    [0.1 / (1 + 0.5 * k) for k in range(6)],
]
for schedule, expected in zip(schedules, rates):
    with strategy.scope():
        w = tf.Variable(0.0, dtype=tf.float64)
        optimizer = tf.keras.optimizers.SGD(learning_rate=schedule)

    def step():
        optimizer.apply_gradients([(tf.cast(1.0 / n, tf.float64), w)])  # noqa: B023

    for k in range(6):
        strategy.run(step)
    assert np.isclose(w.numpy(), -sum(expected)), (schedule, w.numpy())
with strategy.scope():
    optimizer = tf.keras.optimizers.SGD(0.1)
optimizer.lr.assign(0.01)
optimizer.lr = optimizer.lr * 1.0
optimizer.learning_rate = optimizer.learning_rate * 0.5
assert np.isclose(float(optimizer.learning_rate.numpy()), 0.005)
