"""Train a torch module on handwritten digits, data-parallel on all ranks.

Needs the extras `examples` and `torch`:

    mpirun -n 4 python examples/train_torch.py
    mpirun -n 4 python examples/train_torch.py --checkpoint run --resume

Each rank takes its share of each batch, and the optimizer that mpidist wraps averages
the gradients over the ranks before each step. So the losses are the same on any number
of ranks that divides the batch.

The second command saves the model, the optimizer, the scheduler and the order of the
data after each epoch. Started again, on any number of ranks, it continues from there.
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


class History:
    """The losses and accuracies so far: plain numbers, as an object with a state."""

    def __init__(self):
        self.losses, self.accuracies = [], []

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def train(strategy, objects, data, *, epochs, batch_size, directory, resume):
    """Train for the epochs that are left; return the history of all."""
    (images, labels), (test_images, test_labels) = data
    model, optimizer, scheduler, generator, history = objects.values()
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    if directory:
        checkpoint = mpidist.Checkpoint(**objects)
        manager = mpidist.CheckpointManager(checkpoint, directory, max_to_keep=2)
        if resume:
            manager.restore_or_initialize()
    done = len(history.accuracies)
    hide = True if rank else None  # None: unless stderr is a terminal
    for _ in tqdm(range(done, epochs), "training", unit=" epochs", disable=hide):
        losses = []
        order = torch.randperm(len(labels), generator=generator)
        for batch in order.split(batch_size)[: len(order) // batch_size]:
            mine = batch[rank::size]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        scheduler.step()
        with torch.no_grad():
            right = model(test_images).argmax(1) == test_labels
        # The ranks' losses are means over their shares: one reduction for all steps.
        per_replica = strategy.run(lambda: torch.stack(losses))  # noqa: B023
        history.losses += strategy.reduce("MEAN", per_replica, axis=None).tolist()
        history.accuracies.append(float(right.double().mean()))
        if directory:
            manager.save(len(history.accuracies))
    return history


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=96, help="of all ranks together")
    add("--output", type=Path, default=Path("train_torch.png"), help="the picture")
    add("--losses", type=Path, help="write the loss at each step there, as JSON")
    add("--checkpoint", type=Path, metavar="DIR", help="save there after each epoch")
    add("--resume", action="store_true", help="continue from the newest checkpoint")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the ranks use the cores
    strategy = mpidist.MPIStrategy()
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR")
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
        inner = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        objects = {
            "model": model,
            "optimizer": mpidist.torch.DistributedOptimizer(inner, max_norm=5.0),
            "scheduler": torch.optim.lr_scheduler.StepLR(inner, 10, gamma=0.5),
            "order": torch.Generator().manual_seed(1),  # the same on all ranks
            "history": History(),
        }
        history = train(
            strategy,
            objects,
            load_data(),
            epochs=options.epochs,
            batch_size=options.batch_size,
            directory=options.checkpoint,
            resume=options.resume,
        )
        mpidist.torch.check_in_sync(model)
    if strategy.replica_id != 0:
        return
    print(f"replicas       {strategy.num_replicas_in_sync}, with torch tensors")
    print(f"test accuracy  {history.accuracies[-1]:.1%}")
    save_picture(options.output, history.losses, history.accuracies)
    print(f"picture        {options.output.resolve()}")
    if options.losses:
        options.losses.write_text(json.dumps(history.losses))


if __name__ == "__main__":
    main()
