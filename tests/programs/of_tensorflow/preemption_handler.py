"""The tutorial "Fault tolerance" with a handler of preemptions."""

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
    opt = tf.keras.optimizers.SGD(0.1)
    checkpoint = tf.train.Checkpoint(optimizer=opt, w=w)


def fn():
    opt.apply_gradients([(tf.constant(1.0), w)])


@tf.function
def step():
    strategy.run(fn)


preemption_handler = tf.distribute.experimental.PreemptionCheckpointHandler(
    strategy.cluster_resolver,
    checkpoint,
    FOLDER,
    tf.distribute.experimental.TerminationConfig(grace_period=1),
)
for epoch in range(preemption_handler.total_run_calls // 3, 2):
    for _ in range(3):
        preemption_handler.run(step)
assert abs(w.numpy() + 0.1 * 6 * strategy.num_replicas_in_sync) < 1e-6
