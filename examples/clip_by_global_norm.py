"""Clip gradients by their global norm: a merge_call.

    mpirun -n 2 python examples/clip_by_global_norm.py

Fits a line to points with wild outliers; each replica draws points of its own. What is
done once for all replicas is in `_apply`, which runs on rank 0 alone: it measures the
norm of the summed gradients, keeps a record, and has every replica change its copies of
the variables. The gradients do not pass through rank 0: `batch_reduce_to` is one
Allreduce, and the function that `update` is given runs on every rank.
"""

import numpy as np

import mpidist

SLOPE, OFFSET = 3.0, -1.0
STEPS = 300
POINTS = 64  # at each step, on all replicas together


class ClippedDescent:
    """Gradient descent, whose steps are shortened where the gradient is too large."""

    def __init__(self, learning_rate, max_norm):
        self.learning_rate = learning_rate
        self.max_norm = max_norm
        self.norms = []  # on rank 0; elsewhere it stays empty

    def apply_gradients(self, gradients_and_variables):
        context = mpidist.get_replica_context()
        context.merge_call(self._apply, args=(gradients_and_variables,))

    def _apply(self, strategy, gradients_and_variables):
        sums = strategy.extended.batch_reduce_to("SUM", gradients_and_variables)
        norm = sum(float((g * g).sum()) for g in sums) ** 0.5
        scale = self.learning_rate * min(1, self.max_norm / norm)
        for gradient, (_, variable) in zip(sums, gradients_and_variables, strict=True):
            strategy.extended.update(
                variable, lambda v, g: v.assign_sub(scale * g), args=(gradient,)
            )
        self.learning_rate *= 0.99
        self.norms.append(norm)


def fit(xp, slope, offset):
    """Fit both variables on this replica's points, and those of the others."""
    context = mpidist.get_replica_context()
    replica_id, n = context.replica_id_in_sync_group, context.num_replicas_in_sync
    rng = np.random.default_rng([0, replica_id])
    optimizer = ClippedDescent(learning_rate=0.5, max_norm=1)
    for _ in range(STEPS):
        size = len(range(replica_id, POINTS, n))
        x = xp.asarray(rng.uniform(-1, 1, size))
        noise = xp.asarray(0.1 * rng.standard_cauchy(size))  # of infinite variance
        error = slope * x + offset - (SLOPE * x + OFFSET + noise)
        gradients = [(error * x).sum() / POINTS, error.sum() / POINTS]
        optimizer.apply_gradients(list(zip(gradients, [slope, offset], strict=True)))
    if replica_id == 0:
        clipped = sum(norm > optimizer.max_norm for norm in optimizer.norms)
        print(
            f"slope {float(slope):.2f} (true: {SLOPE}), offset {float(offset):.2f} "
            f"(true: {OFFSET}); clipped {clipped} of {STEPS} gradients, "
            f"the largest of norm {max(optimizer.norms):.0f}"
        )


def main():
    strategy = mpidist.MPIStrategy()
    with strategy.scope():
        slope = mpidist.Variable(0.0, name="slope")
        offset = mpidist.Variable(0.0, name="offset")
    strategy.run(fit, args=(strategy.array_module, slope, offset))


if __name__ == "__main__":
    main()
