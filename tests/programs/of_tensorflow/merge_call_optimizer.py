"""An optimizer of a library, with slots, merge_call, update and update_non_slot."""

import numpy as np
import tensorflow as tf


class MomentumOptimizer:
    def __init__(self, learning_rate, momentum, clip=None):
        self._lr, self._momentum, self._clip = learning_rate, momentum, clip
        self._slots = {}
        self._steps = None

    def create_slots(self, var_list):
        strategy = tf.distribute.get_strategy()
        for var in var_list:
            with strategy.extended.colocate_vars_with(var):
                self._slots[var.ref()] = tf.Variable(
                    tf.zeros_like(var), trainable=False
                )
        self._steps = tf.Variable(0, trainable=False)

    def apply_gradients(self, grads_and_vars, name=None):
        grads_and_vars = tuple((g, v) for g, v in grads_and_vars if g is not None)
        context = tf.distribute.get_replica_context()
        if context is None:
            return tf.__internal__.distribute.interim.maybe_merge_call(
                self._distributed_apply, tf.distribute.get_strategy(), grads_and_vars
            )
        return context.merge_call(
            self._distributed_apply, args=(grads_and_vars,), kwargs={"name": name}
        )

    def _distributed_apply(self, distribution, grads_and_vars, name):
        reduced_grads = distribution.extended.batch_reduce_to(
            tf.distribute.ReduceOp.SUM, grads_and_vars
        )
        var_list = [v for _, v in grads_and_vars]

        def apply_grad_to_update_var(var, slot, grad, lr, momentum):
            slot.assign(momentum * slot + grad)
            with tf.control_dependencies([grad]):
                return var.assign_sub(lr * slot)

        update_ops = []
        with tf.name_scope(name or "momentum"):
            for grad, var in zip(reduced_grads, var_list):
                slot = self._slots[var.ref()]
                update_ops.append(
                    distribution.extended.update(
                        var,
                        apply_grad_to_update_var,
                        args=(slot, grad, self._lr, self._momentum),
                        group=False,
                    )
                )
        distribution.extended.update(self._steps, lambda v: v.assign_add(1))
        return tf.group(*update_ops)


strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
with strategy.scope():
    a = tf.Variable([1.0, 2.0], name="a")
    b = tf.Variable(3.0, name="b")
    optimizer = MomentumOptimizer(0.1, 0.9)
    optimizer.create_slots([a, b])


@tf.function(jit_compile=True)
def replica_fn():
    i = tf.distribute.get_replica_context().replica_id_in_sync_group
    gradients = [tf.ones([2]) * (i + 1.0), None]
    if i >= 0:
        gradients[1] = tf.constant(2.0)
    optimizer.apply_gradients(zip(gradients, [a, b]))


for _ in range(2):
    strategy.run(replica_fn)
g = n * (n + 1) / 2
assert np.allclose(a.numpy(), np.array([1.0, 2.0]) - 0.1 * (g + 1.9 * g))
assert np.allclose(b.numpy(), 3.0 - 0.1 * (2 * n + 1.9 * 2 * n))
assert int(optimizer._steps.numpy()) == 2
