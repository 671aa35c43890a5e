"""Train a classifier of handwritten digits that continues when a rank is killed.

Needs the extra `examples`:

    mpidist run --elastic -n 3 examples/train_elastic.py
    mpidist run --elastic -n 3 examples/train_elastic.py --kill 1 --at-step 100

The second command kills rank 1 after 100 steps. The others continue from the last
commit, with all images and the same global batches, so the result is that of the first
command. `--directory DIR` also writes checkpoints, from which a restarted job
continues. Needs Open MPI 5; with another MPI, or without `--elastic`, the job ends when
a rank is killed.
"""

import argparse
import os
import signal

import numpy as np
from sklearn.datasets import load_digits

import mpidist

HIDDEN_UNITS = 64
BATCH = 60
LEARNING_RATE = 0.2
MOMENTUM = 0.9


def load_data():
    """Return images and labels to train with, and 20 % held out to test with."""
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [len(order) // 5])
    return [(images[rows], labels[rows]) for rows in (train, test)]


def forward(variables, images):
    """Return the output of the hidden layer, and a score for each digit."""
    weights_1, bias_1, weights_2, bias_2 = (v.value() for v in variables)
    hidden = (images @ weights_1 + bias_1).clip(0)
    return hidden, hidden @ weights_2 + bias_2


def gradients_of(variables, images, labels):
    """Return the gradients of the cross-entropy, summed over the images, maybe none."""
    hidden, scores = forward(variables, images)
    scores = scores - scores.max(axis=1, keepdims=True)
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    d_scores = (chances - np.eye(10)[labels]) / BATCH
    d_hidden = (d_scores @ variables[2].T) * (hidden > 0)
    return [
        images.T @ d_hidden,
        d_hidden.sum(axis=0),
        hidden.T @ d_scores,
        d_scores.sum(axis=0),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--kill", type=int, metavar="RANK", help="kill this rank")
    parser.add_argument("--at-step", type=int, default=100, help="after so many steps")
    parser.add_argument("--spares", type=int, default=0, help="ranks that wait")
    parser.add_argument("--directory", help="write checkpoints there")
    options = parser.parse_args()
    (images, labels), (test_images, test_labels) = load_data()

    def build(strategy):
        """Make what belongs to a strategy; after a loss there is a new one."""
        rng = np.random.default_rng(1)
        shapes = [(64, HIDDEN_UNITS), (HIDDEN_UNITS,), (HIDDEN_UNITS, 10), (10,)]
        variables = [
            mpidist.Variable(rng.normal(size=s) * np.sqrt(2 / s[0]) * (len(s) > 1))
            for s in shapes
        ]
        optimizer = mpidist.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        optimizer.build(variables)
        rows = mpidist.data.Dataset.from_tensor_slices((images, labels))
        batches = rows.shuffle(len(labels), seed=2).batch(BATCH, drop_remainder=True)
        return {
            "variables": variables,
            "optimizer": optimizer,
            "batches": strategy.experimental_distribute_dataset(batches),
        }

    def train(strategy, state):
        """Train from where the state is: this is called again after a loss."""

        def step(images, labels):
            gradients = gradients_of(state.variables, images, labels)
            pairs = zip(gradients, state.variables, strict=True)
            state.optimizer.apply_gradients(pairs)

        for epoch in range(state.epoch, options.epochs):
            for batch in state.batches:
                strategy.run(step, args=batch)
                state.step += 1
                state.commit()
                now = state.step == options.at_step
                if now and strategy.replica_id == options.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
            state.epoch = epoch + 1
        return strategy.replica_id, strategy.num_replicas_in_sync

    state = mpidist.elastic.State(build, epoch=0, step=0, directory=options.directory)
    result = mpidist.elastic.run(train, state, spares=options.spares)
    if result is None:
        return  # a spare that was not needed
    replica_id, replicas = result
    if replica_id != 0:
        return
    _, scores = forward(state.variables, test_images)
    accuracy = (scores.argmax(axis=1) == test_labels).mean()
    total = float(sum(np.abs(v.numpy()).sum() for v in state.variables))
    print(
        f"{state.step} steps, {replicas} replicas at the end: test accuracy "
        f"{accuracy:.1%}, sum of weights {total:.6f}"
    )


if __name__ == "__main__":
    main()
