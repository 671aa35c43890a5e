"""A learner and a loop as those of agents and model libraries, with their helpers."""

import os
from typing import Optional
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values as ds_values
from tensorflow.python.distribute.values import DistributedVariable, PerReplica

tf.config.set_soft_device_placement(True)
tf.config.experimental.enable_tensor_float_32_execution(False)


class Agent(tf.Module):
    def __init__(self):
        super().__init__(name="agent")
        self.w = tf.Variable(0.0, dtype=tf.float64)
        self.optimizer = tf.keras.optimizers.SGD(0.5)

    def train(self, experience):
        error = self.w - experience
        self.optimizer.apply_gradients([(tf.reduce_sum(error) / 4, self.w)])
        return {"losses": error * error, "loss": tf.reduce_sum(error * error)}


class Checkpointer:
    def __init__(self, ckpt_dir, **kwargs):
        self._checkpoint = tf.train.Checkpoint(**kwargs)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint,
            ckpt_dir,
            step_counter=kwargs["step"],
            checkpoint_interval=2,
        )
        self._load_status = self._checkpoint.restore(self._manager.latest_checkpoint)

    def initialize_or_restore(self, session=None):
        self._load_status.initialize_or_restore(session)
        return self._load_status

    def save(self, step, options: Optional[tf.train.CheckpointOptions] = None):
        return self._manager.save(checkpoint_number=step, options=options)


class Learner(tf.Module):
    def __init__(self, strategy, agent, dataset_fn, root):
        assert tf.executing_eagerly()
        self.strategy = strategy
        self._agent = agent
        self._agent.train = tf.autograph.experimental.do_not_convert(agent.train)
        self.writer = tf.summary.create_file_writer(root, flush_millis=10000)
        dataset = strategy.distribute_datasets_from_function(lambda _: dataset_fn())
        self._iterator = iter(dataset)
        with strategy.scope():

            @tf.function
            def _create_variables(spec):
                return strategy.run(agent.train, args=(spec,))

            _create_variables.get_concrete_function(dataset.element_spec)
            self._checkpointer = Checkpointer(
                os.path.join(root, "checkpoints"),
                agent=agent,
                step=agent.optimizer.iterations,
            )
            self._checkpointer.initialize_or_restore()

    def run(self, iterations):
        step = self._agent.optimizer.iterations
        with (
            self.writer.as_default(),
            tf.summary.record_if(lambda: tf.equal(step % 2, 0)),
        ):
            with tf.experimental.async_scope():
                for _ in tf.range(iterations):
                    tf.autograph.experimental.set_loop_options(parallel_iterations=10)
                    result = strategy.run(self._agent.train, (next(self._iterator),))
            tf.experimental.async_clear_error()
            totals = tf.nest.map_structure(self._reduce, result)
            tf.summary.experimental.set_step(step)
            tf.summary.scalar("loss", totals["loss"])
        return totals, self._checkpointer.save(step)

    def _reduce(self, value):
        rank = 0
        if isinstance(value, ds_values.PerReplica):
            assert isinstance(value, PerReplica)
            rank = value.values[0].shape.rank
        elif tf.is_tensor(value):
            rank = value.shape.rank
        axis = tuple(range(0, rank)) or None
        return strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=axis)


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    agent = Agent()
assert not isinstance(
    agent.optimizer, tf.keras.mixed_precision.experimental.LossScaleOptimizer
)
n = strategy.num_replicas_in_sync
rows = np.arange(4.0 * n).reshape(n, 4)


def dataset_fn():
    """One input of all replicas, which take turns."""
    return tf.data.Dataset.from_tensor_slices(rows.reshape(-1)).repeat().batch(4)


learner = Learner(strategy, agent, dataset_fn, FOLDER)
w, saved = 0.0, []
for call in range(4):
    totals, path = learner.run(iterations=1)
    expected = np.sum((w - rows) ** 2)
    assert np.isclose(totals["loss"], expected)
    assert np.isclose(totals["losses"], expected)
    w -= 0.5 * np.sum(w - rows) / 4
    assert np.isclose(agent.w.numpy(), w)
    saved.append(path is not None)
assert saved == [True, False, True, False]
with strategy.scope():
    counter = tf.Variable(0.0)
assert isinstance(counter, DistributedVariable)
assert isinstance(counter, ds_values.DistributedVariable)
assert not isinstance(strategy.run(lambda: 1.0), DistributedVariable)
