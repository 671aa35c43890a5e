"""Train a torch module that continues when a rank is killed.

Needs the extras `examples` and `torch`:

    mpidist run --elastic -n 3 examples/train_torch_elastic.py
    mpidist run --elastic -n 3 examples/train_torch_elastic.py --kill 1 --at-step 40

The second command kills rank 1 after 40 steps. The others continue from the last
commit, with the same global batches, so the result is that of the first command.
`--directory DIR` also writes checkpoints, from which a restarted job continues. Needs
Open MPI 5; with another MPI, or without `--elastic`, the job ends when one is killed.
"""

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits

import mpidist
import mpidist.torch

BATCH = 60


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--kill", type=int, metavar="RANK", help="kill this rank")
    parser.add_argument("--at-step", type=int, default=40, help="after so many steps")
    parser.add_argument("--directory", help="write checkpoints there")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the ranks use the cores
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data) / 16, torch.from_numpy(digits.target)
    torch.manual_seed(0)  # the same weights on all ranks, spares and those that joined
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    def build(strategy):
        """Make what belongs to a strategy; after a loss there is a new one."""
        rows = mpidist.data.Dataset.from_tensor_slices((images.numpy(), labels.numpy()))
        batches = rows.shuffle(len(labels), seed=2).batch(BATCH, drop_remainder=True)
        return {"batches": strategy.experimental_distribute_dataset(batches)}

    def train(strategy, state):
        """Train from where the state is: this is called again after a loss."""
        # An optimizer of this strategy, around the one that is kept.
        optimizer = mpidist.torch.DistributedOptimizer(
            state.optimizer, op="SUM", strategy=strategy
        )

        def step(x, y):
            optimizer.zero_grad()
            scores = state.model(torch.from_numpy(x))
            losses = torch.nn.functional.cross_entropy(
                scores, torch.from_numpy(y), reduction="sum"
            )
            (losses / BATCH).backward()  # the share of these rows, maybe none
            optimizer.step()

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

    state = mpidist.elastic.State(
        build,
        model=model,
        optimizer=optimizer,
        epoch=0,
        step=0,
        directory=options.directory,
    )
    replica_id, replicas = mpidist.elastic.run(train, state)
    if replica_id != 0:
        return
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).double().mean())
        total = sum(float(p.abs().sum()) for p in model.parameters())
    print(
        f"{state.step} steps, {replicas} replicas at the end: accuracy {accuracy:.1%}, "
        f"sum of weights {total:.6f}"
    )


if __name__ == "__main__":
    main()
