"""Train a torch module on handwritten digits, data-parallel on all ranks.

    mpirun -n 4 python examples/train_torch.py

It is an ordinary training loop of torch. Of each batch a rank takes its share; the
optimizer that mpidist wraps averages the gradients over the ranks before each step. So
the losses are the same on any number of ranks that divides the batch.
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from tqdm import tqdm
from train_digits import save_picture

import mpidist
import mpidist.torch


def load_data():
    """Return images and labels to train with, and 20 % held out to test with."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data) / 16, torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    count = len(order) // 5
    return [(images[rows], labels[rows]) for rows in (order[count:], order[:count])]


def train(strategy, model, optimizer, data, *, epochs, batch_size):
    """Return the loss at each step, and the accuracy after each epoch."""
    (images, labels), (test_images, test_labels) = data
    generator = torch.Generator().manual_seed(1)  # the same order on all ranks
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    losses, accuracies = [], []
    hide = True if rank else None  # None: unless stderr is a terminal
    for _ in tqdm(range(epochs), "training", unit=" epochs", disable=hide):
        order = torch.randperm(len(labels), generator=generator)
        for batch in order.split(batch_size)[: len(order) // batch_size]:
            mine = batch[rank::size]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():
            right = model(test_images).argmax(1) == test_labels
        accuracies.append(float(right.double().mean()))
    # The ranks' losses are means over their shares: one reduction for all steps.
    per_replica = strategy.run(lambda: torch.stack(losses))
    return strategy.reduce("MEAN", per_replica, axis=None).tolist(), accuracies


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=96, help="of all ranks together")
    add("--output", type=Path, default=Path("train_torch.png"), help="the picture")
    add("--losses", type=Path, help="write the loss at each step there, as JSON")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the ranks use the cores
    strategy = mpidist.MPIStrategy()
    if options.batch_size % strategy.num_replicas_in_sync:
        parser.error("--batch-size has to be a multiple of the number of ranks")
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    ).double()
    if strategy.replica_id == 0:  # the others get these weights
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
    with strategy.scope():
        mpidist.torch.broadcast_parameters(model)
        optimizer = mpidist.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), max_norm=5.0
        )
        losses, accuracies = train(
            strategy,
            model,
            optimizer,
            load_data(),
            epochs=options.epochs,
            batch_size=options.batch_size,
        )
        mpidist.torch.check_in_sync(model)
    if strategy.replica_id != 0:
        return
    print(f"replicas       {strategy.num_replicas_in_sync}, with torch tensors")
    print(f"test accuracy  {accuracies[-1]:.1%}")
    save_picture(options.output, losses, accuracies)
    print(f"picture        {options.output.resolve()}")
    if options.losses:
        options.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
