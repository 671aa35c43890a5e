"""Optimizers, losses and checkpoints (b.10)."""

from __future__ import annotations

from conformance.registry import Section
from conformance.results import Raised

optimizing = Section("Optimizers and losses")

# Powers of two: TensorFlow keeps them as float32.
RATE, HALF = 0.125, 0.5


def steps(d, optimizer, variables, gradients, number=3):
    """Apply gradients of the replicas' own a number of times; return the copies."""
    for step in range(number):

        def fn(step=step):
            grads = gradients(d.replica_id(), step)
            optimizer.apply_gradients(
                zip([d.array(g) for g in grads], variables, strict=True)
            )

        d.each(fn)
    return [d.copies(v) for v in variables]


def _optimizer(name, what, kind, gradients=None, **settings):
    def gradients_of(i, step):
        return [[i + 1.0, -2.0], [[0.5 * i + step]]]

    def function(d):
        variables = [d.in_scope([1.0, 2.0]), d.in_scope([[3.0]])]
        with d.strategy.scope():
            optimizer = d.optimizer(kind, **settings)
        return steps(d, optimizer, variables, gradients or gradients_of)

    optimizing.add(f"optimizer_{name}", what, function)


_optimizer("sgd", "SGD sums the gradients of the replicas.", "SGD", learning_rate=RATE)
_optimizer(
    "sgd_momentum",
    "SGD with momentum.",
    "SGD",
    learning_rate=RATE,
    momentum=HALF,
)
_optimizer(
    "sgd_nesterov",
    "SGD with Nesterov's momentum.",
    "SGD",
    learning_rate=RATE,
    momentum=HALF,
    nesterov=True,
)
_optimizer(
    "adam",
    "Adam, with an epsilon too small to matter.",
    "Adam",
    learning_rate=RATE,
    beta_1=HALF,
    beta_2=0.75,
    epsilon=1e-12,
)
_optimizer(
    "adamw",
    "AdamW: the decay of the weights apart from the gradient.",
    "AdamW",
    learning_rate=RATE,
    weight_decay=0.0625,
    beta_1=HALF,
    beta_2=0.75,
    epsilon=1e-12,
)


@optimizing.program
def optimizer_iterations(d):
    """`iterations` counts the steps."""
    v = d.in_scope([1.0, 2.0])
    with d.strategy.scope():
        optimizer = d.optimizer("SGD", learning_rate=RATE)
    steps(d, optimizer, [v], lambda i, step: [[1.0, 1.0]])
    return int(d.numbers(optimizer.iterations))


@optimizing.program
def optimizer_after_all_reduce(d):
    """Gradients that are averaged first, and divided by the number of replicas."""
    v = d.in_scope([1.0, 2.0])
    with d.strategy.scope():
        optimizer = d.optimizer("SGD", learning_rate=RATE)

    def fn():
        context = d.dist.get_replica_context()
        mean = context.all_reduce("MEAN", d.own(lambda i: [i, 1.0]))
        optimizer.apply_gradients([(mean / d.n, v)])

    d.each(fn)
    return d.copies(v)


@optimizing.program
def optimizer_training_loop(d):
    """A linear fit on even global batches, with compute_average_loss."""
    v = d.in_scope([0.0, 0.0])
    with d.strategy.scope():
        optimizer = d.optimizer("SGD", learning_rate=RATE)
    rows = [[float(k % 3), float(k % 4)] for k in range(24)]
    x = d.numbers(d.array(rows))
    data = {"x": x, "y": d.numbers(d.array([a - 2.0 * b for a, b in rows]))}
    dataset = d.Dataset.from_tensor_slices(data).batch(12)
    losses = []
    for element in d.distribute(dataset):

        def fn(part):
            error = (part["x"] * v.read_value()) @ d.array([[1.0], [1.0]])
            error = error[:, 0] - part["y"]
            loss = d.average_loss(error * error, global_batch_size=12)
            gradient = [d.sum(part["x"][:, k] * error) / 8.0 for k in (0, 1)]
            optimizer.apply_gradients([(d.stack(gradient), v)])
            return loss

        loss = d.strategy.run(fn, args=(element,))
        losses.append(d.strategy.reduce("SUM", loss, axis=None))
    return losses, d.copies(v)


@optimizing.program
def average_loss(d):
    """compute_average_loss with a global batch size: the shares add up."""
    loss = d.strategy.run(
        lambda: d.average_loss(d.own(lambda i: [i, 1.0, 2.0]), global_batch_size=12)
    )
    return d.replicas(loss), d.strategy.reduce("SUM", loss, axis=None)


@optimizing.program
def average_loss_weighted(d):
    """compute_average_loss with sample weights; and without a size, on even batches."""

    def share(**options):
        return d.run(lambda: d.average_loss(d.own(lambda i: [i, 1.0]), **options))

    weights = d.array([0.5, 2.0])
    return [share(sample_weight=weights, global_batch_size=4), share()]


@optimizing.differs(
    "TensorFlow takes the rows of this replica times the number of replicas, so that "
    "the shares of an uneven batch do not add up to its mean.",
    tensorflow=lambda n: [float(i) / n for i in range(n)],
    mpidist=lambda n: [i * (i + 1) * 2 / (n * (n + 1)) for i in range(n)],
)
def average_loss_uneven(d):
    """compute_average_loss without a size, where replicas have other rows."""
    return d.run(lambda: d.average_loss(d.own(lambda i: [float(i)] * (i + 1))))


@optimizing.program
def clip_by_global_norm(d):
    """clip_by_global_norm: what is clipped, and the norm."""
    grads = [d.array([3.0, 0.0]), d.array([[4.0]])]
    clipped, norm = d.clip_by_global_norm(grads, 2.5)
    same, _ = d.clip_by_global_norm(grads, 10.0)
    return list(clipped), list(same), float(norm)


# --- checkpoints ----------------------------------------------------------------------

saving = Section("Checkpoints")


def save_and_restore(d, variable, change):
    """Save a variable, change it, restore it; return its copies and what is read."""
    with d.folder() as folder:
        path = d.save(folder, v=variable)
        change()
        changed = d.copies(variable)
        d.restore(path, v=variable)
    with d.strategy.scope():
        return changed, d.copies(variable), d.numbers(variable.read_value())


@saving.program
def checkpoint_mirrored(d):
    """A mirrored variable: one value is saved, and restored into every copy."""
    v = d.in_scope([1.0, 2.0])
    return save_and_restore(d, v, lambda: v.assign([7.0, 8.0]))


def _checkpoint_on_read(aggregation, dtype):
    def function(d):
        v = d.on_read([0, 0], aggregation, dtype)
        d.each(lambda: v.assign(d.own(lambda i: [4 * i, 12], dtype)))
        return save_and_restore(
            d, v, lambda: d.each(lambda: v.assign(d.array([1, 1], dtype)))
        )

    saving.add(
        f"checkpoint_on_read_{aggregation.lower()}_{dtype}",
        f"A sync-on-read variable of {dtype} ({aggregation}).",
        function,
    )


_checkpoint_on_read("SUM", "float32")
_checkpoint_on_read("MEAN", "float32")
_checkpoint_on_read("ONLY_FIRST_REPLICA", "float32")
_checkpoint_on_read("SUM", "int32")


@saving.program
def checkpoint_on_read_none(d):
    """A sync-on-read variable without an aggregation cannot be saved: ValueError."""
    v = d.on_read(0.0, "NONE")
    with d.folder() as folder:
        return d.attempt(lambda: bool(d.save(folder, v=v)))


@saving.program
def checkpoint_of_plain_into_on_read(d):
    """What a plain variable saved, a sync-on-read one (SUM) restores, in parts."""
    plain, v = d.variable([12.0, 24.0]), d.on_read([0.0, 0.0], "SUM")
    with d.folder() as folder, d.strategy.scope():
        d.restore(d.save(folder, v=plain), v=v)
    return d.copies(v)


@saving.program
def checkpoint_of_on_read_into_mirrored(d):
    """What a sync-on-read variable (MEAN) saved, a mirrored one restores."""
    v, w = d.on_read([0.0, 0.0], "MEAN"), d.in_scope([0.0, 0.0])
    d.each(lambda: v.assign(d.own(lambda i: [i, 2.0])))
    with d.folder() as folder:
        d.restore(d.save(folder, v=v), v=w)
    return d.copies(w)


@saving.program
def checkpoint_optimizer(d):
    """An optimizer with momentum goes on as if nothing had happened."""

    def gradients(i, step):
        return [[i + 1.0, -2.0]]

    v = d.in_scope([1.0, 2.0])
    with d.strategy.scope():
        optimizer = d.optimizer("SGD", learning_rate=RATE, momentum=HALF)
    steps(d, optimizer, [v], gradients, number=2)
    with d.folder() as folder:
        path = d.save(folder, v=v, optimizer=optimizer)
        first = steps(d, optimizer, [v], gradients, number=1)
        d.restore(path, v=v, optimizer=optimizer)
    return first, steps(d, optimizer, [v], gradients, number=1)


@saving.program
def checkpoint_attached_later(d):
    """Variables get their values when they are attached, in a list too."""
    saved, net = d.module(), d.module()
    saved.v, saved.l = d.in_scope([1.0, 2.0]), [d.in_scope(3.0)]
    saved.inner = d.module()
    saved.inner.v = d.on_read(4.0, "MEAN")
    v, w, m = d.in_scope([0.0, 0.0]), d.in_scope(0.0), d.on_read(0.0, "MEAN")
    net.inner = d.module()
    with d.folder() as folder, d.strategy.scope():
        d.restore(d.save(folder, net=saved), net=net)
        before = d.copies(v)
        net.v, net.l, net.inner.v = v, [w], m
    return before, d.copies(v), d.copies(w), d.copies(m)


@saving.program
def checkpoint_of_another_shape(d):
    """A value of another shape cannot be restored."""
    v, w = d.in_scope([1.0, 2.0]), d.in_scope([1.0, 2.0, 3.0])
    with d.folder() as folder:
        path = d.save(folder, v=v)
        result = d.attempt(lambda: d.restore(path, v=w))
    return isinstance(result, Raised), d.copies(w)
