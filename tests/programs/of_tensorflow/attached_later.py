"""Parts that are made, or attached, after the restore."""

import os
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()


class Layer(tf.Module):
    def __init__(self, units):
        super().__init__()
        self.units = units

    def __call__(self, x):
        if not hasattr(self, "kernel"):
            self.kernel = tf.Variable(tf.zeros([3, self.units]))
        return tf.matmul(x, self.kernel)


def make():
    net = tf.Module()
    net.parts = [Layer(2), Layer(3)]
    return net


x = tf.ones([4, 3])
with strategy.scope():
    net = make()
    expected = []
    for layer in net.parts:
        layer(x)
        layer.kernel.assign_add(tf.ones([3, layer.units]))
        expected.append(layer(x))
    bias = tf.Variable(tf.ones([5]))
    path = tf.train.Checkpoint(net=net, bias=bias).write(os.path.join(FOLDER, "c"))

    net = make()
    root = tf.train.Checkpoint(net=net)
    status = root.restore(path)
    status.assert_existing_objects_matched()
    first = net.parts[0](x)


def replica_fn():
    return net.parts[1](x)


second = strategy.run(replica_fn)
for found, want in zip((first, second), expected):
    found = strategy.experimental_local_results(found)[0]
    assert abs(found - want).max() == 0.0
try:
    status.assert_consumed()
except AssertionError:
    pass
else:
    raise RuntimeError("the bias was not restored")
with strategy.scope():
    late = tf.Variable(tf.zeros([5]))
assert late.numpy()[0] == 0.0
root.bias = late
assert late.numpy()[0] == 1.0
status.assert_consumed()
