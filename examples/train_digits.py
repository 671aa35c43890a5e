"""Train a classifier of handwritten digits, data-parallel on all ranks.

Needs the extra `examples`:

    mpirun -n 4 python examples/train_digits.py

Each rank has a copy of a small neural network, and computes loss and gradients on its
share of each batch. The sum of the gradients over the ranks is the gradient of the
whole batch, so the loss is the same on any number of ranks. The array code runs on
NumPy and, where there is a GPU, on CuPy.

`--checkpoint DIR` saves the state after each epoch; with `--resume` the program
continues from there, and ends with the weights of an uninterrupted run.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import mpidist

HIDDEN_UNITS = 128
LEARNING_RATE = 0.2  # at the first step; it falls to zero
MOMENTUM = 0.9


def load_data(xp):
    """Return images and labels to train with, and 20 % held out to test with."""
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [len(order) // 5])
    return [
        (xp.asarray(images[rows]), xp.asarray(labels[rows])) for rows in (train, test)
    ]


def make_variables(rng):
    """Return the weights and biases of two layers, the same on all ranks.

    They are float64, so that loss curves can be compared to many digits.
    """
    shapes = {
        "weights_1": (64, HIDDEN_UNITS),
        "bias_1": (HIDDEN_UNITS,),
        "weights_2": (HIDDEN_UNITS, 10),
        "bias_2": (10,),
    }
    variables = []
    for name, shape in shapes.items():
        scale = np.sqrt(2 / shape[0]) if len(shape) == 2 else 0
        variables.append(mpidist.Variable(scale * rng.normal(size=shape), name=name))
    return variables


def forward(variables, images):
    """Return the output of the hidden layer, and a score for each digit."""
    weights_1, bias_1, weights_2, bias_2 = (v.value() for v in variables)
    hidden = (images @ weights_1 + bias_1).clip(0)
    return hidden, hidden @ weights_2 + bias_2


def loss_and_gradients(xp, variables, images, labels):
    """Return the cross-entropy and its gradients, summed over the images.

    There may be no images: then they are zero.
    """
    hidden, scores = forward(variables, images)
    targets = xp.eye(10)[labels]
    scores = scores - scores.max(axis=1, keepdims=True)
    log_probabilities = scores - xp.log(xp.exp(scores).sum(axis=1, keepdims=True))
    loss = -(targets * log_probabilities).sum()

    d_scores = xp.exp(log_probabilities) - targets
    d_hidden = (d_scores @ variables[2].T) * (hidden > 0)
    gradients = [
        images.T @ d_hidden,
        d_hidden.sum(axis=0),
        hidden.T @ d_scores,
        d_scores.sum(axis=0),
    ]
    return loss, gradients


def momentum_step(variable, velocity, gradient, learning_rate):
    """Change this replica's copies of a variable and its velocity."""
    velocity.assign(MOMENTUM * velocity - learning_rate * gradient)
    variable.assign_add(velocity)


def my_share(x):
    """Return what this replica takes of an array: every n-th row."""
    context = mpidist.get_replica_context()
    return x[context.replica_id_in_sync_group :: context.num_replicas_in_sync]


class Progress:
    """How training went so far. A checkpoint holds it by its two methods."""

    def __init__(self):
        self.losses = []  # at each step
        self.accuracies = []  # on the test images, after each epoch
        self.epochs_before = 0  # in the run that this one goes on from

    def state(self):
        return {"losses": self.losses, "accuracies": self.accuracies}

    def restore(self, state):
        self.losses, self.accuracies = state["losses"], state["accuracies"]
        self.epochs_before = len(self.accuracies)


def train(
    strategy,
    data,
    *,
    epochs,
    batch_size,
    seed,
    show_progress=False,
    bar=False,
    progress=None,
    directory=None,
    resume=False,
):
    """Train a network, on all ranks together.

    Saves a checkpoint after each epoch if `directory` is given; first goes back to the
    newest one that is there if `resume` is set.

    Returns its variables, the loss at each step, and the accuracy on the test images
    after each epoch.
    """
    xp = strategy.array_module
    (images, labels), (test_images, test_labels) = data
    # Seeded alike on all ranks, so that all shuffle alike.
    weights_rng, shuffle_rng = np.random.default_rng(seed).spawn(2)
    with strategy.scope():
        variables = make_variables(weights_rng)
        velocities = [mpidist.Variable(np.zeros(v.shape)) for v in variables]
    progress = Progress() if progress is None else progress

    manager = None
    if directory is not None:
        everything = mpidist.Checkpoint(
            variables={v.name: v for v in variables},
            velocities=velocities,
            shuffle_rng=shuffle_rng,
            progress=progress,
        )
        manager = mpidist.CheckpointManager(everything, directory, max_to_keep=3)
        if resume:
            manager.restore_or_initialize()
    losses, accuracies = progress.losses, progress.accuracies

    def train_step(batch):
        rows = xp.asarray(my_share(batch))
        return loss_and_gradients(xp, variables, images[rows], labels[rows])

    def count_correct():
        _, scores = forward(variables, my_share(test_images))
        return (scores.argmax(axis=1) == my_share(test_labels)).sum()

    cuts = range(batch_size, len(labels), batch_size)
    num_steps = epochs * (len(cuts) + 1)
    epochs_to_go = tqdm(
        range(len(accuracies), epochs),
        "training",
        initial=len(accuracies),
        total=epochs,
        unit=" epochs",
        disable=not (show_progress and bar),
    )
    for _ in epochs_to_go:
        for batch in np.split(shuffle_rng.permutation(len(labels)), cuts):
            sums = strategy.run(train_step, args=(batch,))
            loss, gradients = strategy.reduce("SUM", sums, axis=None)
            learning_rate = LEARNING_RATE * (1 - len(losses) / num_steps)
            for variable, velocity, gradient in zip(
                variables, velocities, gradients, strict=True
            ):
                arguments = (velocity, gradient / len(batch), learning_rate)
                strategy.extended.update(variable, momentum_step, args=arguments)
            losses.append(float(loss) / len(batch))
        correct = strategy.reduce("SUM", strategy.run(count_correct), axis=None)
        accuracies.append(int(correct) / len(test_labels))
        found = f"test accuracy {accuracies[-1]:.1%}"
        epochs_to_go.set_postfix_str(found, refresh=False)
        if show_progress and not bar:
            print(f"epoch {len(accuracies)} of {epochs}: {found}", file=sys.stderr)
        if manager is not None:
            manager.save(len(accuracies))
    return variables, losses, accuracies


def save_picture(path, losses, accuracies):
    """Draw the loss and the accuracy against the epoch."""
    from matplotlib.figure import Figure

    epochs = np.arange(1, len(accuracies) + 1)
    by_epoch = np.reshape(losses, (len(epochs), -1))
    steps = (np.arange(len(losses)) + 1) / by_epoch.shape[1]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(steps, losses, color="tab:blue", alpha=0.3, lw=0.8, label="each step")
    left.semilogy(epochs - 0.5, by_epoch.mean(1), "o-", ms=4, label="epoch mean")
    left.set(title="Loss on the training images", xlabel="epoch")
    left.legend()
    right.plot(epochs, 100 * np.array(accuracies), "o-", color="tab:green", ms=4)
    right.set(title="Accuracy on the test images (%)", xlabel="epoch")
    for axes in (left, right):
        axes.set_xlim(0, 1.02 * len(epochs))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments():
    def positive(text):
        if int(text) < 1:
            raise ValueError(text)
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--epochs", type=positive, default=20)
    add("--batch-size", type=positive, default=100, help="of all ranks together")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto, cpu, gpu or gpu:K")
    add("--output", type=Path, default=Path("train_digits.png"), help="the picture")
    add("--losses", type=Path, help="write the loss at each step there, as JSON")
    add("--checkpoint", type=Path, metavar="DIR", help="save there after each epoch")
    add(
        "--progress",
        action="store_true",
        help="a bar, not lines, though stderr is no terminal (mpirun makes it a pipe)",
    )
    add("--resume", action="store_true", help="go on from the newest one there")
    options = parser.parse_args()
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR")
    return options


def main():
    options = parse_arguments()
    strategy = mpidist.MPIStrategy(device=options.device)
    data = load_data(strategy.array_module)

    before = strategy.communication_statistics().seconds
    start = time.perf_counter()
    progress = Progress()
    _, losses, accuracies = train(
        strategy,
        data,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
        show_progress=strategy.replica_id == 0,
        bar=options.progress or sys.stderr.isatty(),
        progress=progress,
        directory=options.checkpoint,
        resume=options.resume,
    )
    seconds = time.perf_counter() - start
    mine = (strategy.communication_statistics().seconds - before) / seconds
    share = strategy.reduce("MEAN", strategy.run(lambda: mine), axis=None)
    if strategy.replica_id != 0:
        return

    n = strategy.num_replicas_in_sync
    rate = (len(accuracies) - progress.epochs_before) * len(data[0][1]) / seconds
    print(f"replicas            {n}, with {strategy.array_module.__name__} arrays")
    print(f"test accuracy       {accuracies[-1]:.1%}")
    print(f"samples per second  {rate:,.0f}")
    print(f"communicating       {share:.0%} of the time")
    save_picture(options.output, losses, accuracies)
    print(f"picture             {options.output.resolve()}")
    if options.losses:
        options.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
