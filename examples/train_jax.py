"""Train a network of JAX on handwritten digits, data-parallel on all ranks.

Needs the extras `examples` and `jax`:

    mpirun -n 4 python examples/train_jax.py

Each rank takes its share of each batch, and one all-reduce averages loss and gradients
over the ranks. So losses are the same on any number of ranks that divides the batch.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm
from train_digits import load_data, save_picture

import mpidist
import mpidist.jax

MOMENTUM = 0.9


def make_parameters(key):
    """Return the weights and biases of two layers."""
    one, two = jax.random.split(key)
    return {
        "hidden": {
            "weights": jax.random.normal(one, (64, 128)) * (2 / 64) ** 0.5,
            "bias": jnp.zeros(128),
        },
        "output": {
            "weights": jax.random.normal(two, (128, 10)) * (2 / 128) ** 0.5,
            "bias": jnp.zeros(10),
        },
    }


def scores_of(parameters, images):
    """Return a score for each digit."""
    hidden, output = parameters["hidden"], parameters["output"]
    active = jax.nn.relu(images @ hidden["weights"] + hidden["bias"])
    return active @ output["weights"] + output["bias"]


def loss_of(parameters, images, labels):
    """Return the mean cross-entropy."""
    log_probabilities = jax.nn.log_softmax(scores_of(parameters, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], 1).mean()


@jax.jit
def update(parameters, velocities, gradients, learning_rate):
    """Take a step of gradient descent with momentum."""
    velocities = jax.tree.map(
        lambda v, g: MOMENTUM * v - learning_rate * g, velocities, gradients
    )
    return jax.tree.map(jnp.add, parameters, velocities), velocities


@jax.jit
def accuracy_of(parameters, images, labels):
    return (scores_of(parameters, images).argmax(1) == labels).mean()


def train(strategy, data, *, epochs, batch_size):
    """Return the loss at each step, and the accuracy after each epoch."""
    (images, labels), test = data
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    parameters = make_parameters(jax.random.key(rank))
    parameters = mpidist.jax.broadcast(parameters, strategy=strategy)  # rank 0's
    velocities = jax.tree.map(jnp.zeros_like, parameters)
    gradient_of = mpidist.jax.value_and_grad(loss_of, strategy=strategy)
    shuffle = np.random.default_rng(1)  # the same order on all ranks
    losses, accuracies = [], []
    hide = True if rank else None  # None: unless stderr is a terminal
    for _ in tqdm(range(epochs), "training", unit=" epochs", disable=hide):
        order = shuffle.permutation(len(labels))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            mine = order[start : start + batch_size][rank::size]
            loss, gradients = gradient_of(parameters, images[mine], labels[mine])
            parameters, velocities = update(parameters, velocities, gradients, 0.1)
            losses.append(float(loss))
        accuracies.append(float(accuracy_of(parameters, *test)))
    return losses, accuracies


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=96, help="of all ranks together")
    add("--output", type=Path, default=Path("train_jax.png"), help="the picture")
    add("--losses", type=Path, help="write the loss at each step there, as JSON")
    options = parser.parse_args()

    jax.config.update("jax_enable_x64", True)  # to compare losses to many digits
    strategy = mpidist.MPIStrategy()
    if options.batch_size % strategy.num_replicas_in_sync:
        parser.error("--batch-size has to be a multiple of the number of ranks")
    losses, accuracies = train(
        strategy, load_data(jnp), epochs=options.epochs, batch_size=options.batch_size
    )
    if strategy.replica_id != 0:
        return
    print(f"replicas       {strategy.num_replicas_in_sync}, with JAX arrays")
    print(f"test accuracy  {accuracies[-1]:.1%}")
    save_picture(options.output, losses, accuracies)
    print(f"picture        {options.output.resolve()}")
    if options.losses:
        options.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
