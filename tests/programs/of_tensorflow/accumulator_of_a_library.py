"""The accumulator of gradients of a library: ON_READ variables, made on first use."""

import tensorflow as tf


class Accum(object):
    def __init__(self, opt, every):
        self.opt, self.every = opt, every
        self._grads = None
        self._step = None

    @property
    def step(self):
        if self._step is None:
            self._step = tf.Variable(
                tf.constant(0, dtype=tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        return self._step

    @property
    def gradients(self):
        return list(g.value() if g is not None else g for g in self._grads)

    def __call__(self, grads, vs):
        if not self._grads:
            _ = self.step
            self._grads = [
                tf.Variable(
                    tf.zeros_like(g),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.NONE,
                )
                if g is not None
                else g
                for g in grads
            ]
        if len(grads) != len(self._grads):
            raise ValueError(
                "Expected %s gradients, but got %d" % (len(self._grads), len(grads))
            )
        for accum, g in zip(self._grads, grads):
            if accum is not None and g is not None:
                accum.assign_add(g)
        self._step.assign_add(1)

    def reset(self):
        if not self._grads:
            return
        self._step.assign(0)
        for g in self._grads:
            if g is not None:
                g.assign(tf.zeros_like(g))


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    v = tf.Variable([4.0, 3.0])
    opt = tf.keras.optimizers.SGD(1.0)
    acc = Accum(opt, 2)


def f(a, b):
    acc([tf.constant([a, b])], [v])


def apply():
    opt.apply_gradients(list(zip(acc.gradients, [v])))


strategy.run(f, args=(1.0, 2.0))
strategy.run(f, args=(-1.0, 1.0))
strategy.run(apply)
n = strategy.num_replicas_in_sync
assert v.numpy().tolist() == [4.0, 3.0 - 3.0 * n], v.numpy()
strategy.run(acc.reset)
assert int(acc.step.numpy()) == 0
