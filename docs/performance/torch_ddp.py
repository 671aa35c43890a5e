"""Time training steps of torch, by mpidist and by DistributedDataParallel with gloo.

    OMP_NUM_THREADS=1 mpirun -n 2 python docs/performance/torch_ddp.py

Both are in the same processes, on the same data, one after the other in each round; the
order changes from round to round. A time is that of the slowest rank. The table has
medians, and ratios of medians and of first deciles: where other programs disturb the
ranks, the deciles are what the steps themselves take. Needs the extra `torch`.
"""

import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch
from mpi4py import MPI
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mpidist
import mpidist.torch

ROUNDS, STEPS = 60, 3
SHAPES = {"64-128-10": (64, 128, 10), "256-512-512-10": (256, 512, 512, 10)}
SHAPES["784-1024-1024-10"] = (784, 1024, 1024, 10)


def make_model(sizes):
    torch.manual_seed(0)
    layers = []
    for n, m in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(n, m), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def make_step(model, optimizer, images, labels):
    def step():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def seconds_of(step, comm):
    """Return the seconds of one step on the slowest rank."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return comm.allreduce(time.perf_counter() - start, MPI.MAX) / STEPS


def measure(strategy, comm, sizes, rows):
    images = torch.randn(rows, sizes[0])
    labels = torch.randint(0, sizes[-1], (rows,))
    ours, theirs, alone = (make_model(sizes) for _ in range(3))
    mpidist.torch.broadcast_parameters(ours, strategy=strategy)

    def sgd(model):
        return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    wrapped = mpidist.torch.DistributedOptimizer(sgd(ours), strategy=strategy)
    ddp = DistributedDataParallel(theirs)
    steps = {
        "mpidist": make_step(ours, wrapped, images, labels),
        "DDP": make_step(ddp, sgd(ddp), images, labels),
        "alone": make_step(alone, sgd(alone), images, labels),
    }
    times = {name: [] for name in steps}
    for step in steps.values():
        seconds_of(step, comm)
    for turn in range(ROUNDS):
        names = list(steps)
        for name in names[turn % 3 :] + names[: turn % 3]:
            times[name].append(seconds_of(steps[name], comm))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    return times


def main():
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    strategy = mpidist.MPIStrategy()
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    store = distributed.FileStore(str(Path(folder) / "store"), comm.size)
    distributed.init_process_group(
        "gloo", store=store, rank=comm.rank, world_size=comm.size
    )
    if comm.rank == 0:
        print(
            "| module | rows | one rank alone | DDP, gloo | mpidist | ratio | deciles |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, sizes in SHAPES.items():
        for rows in (16, 128):
            times = measure(strategy, comm, sizes, rows)
            medians = {k: statistics.median(v) * 1e3 for k, v in times.items()}
            deciles = {k: statistics.quantiles(v, n=10)[0] for k, v in times.items()}
            cells = [f"{medians[k]:.2f} ms" for k in ("alone", "DDP", "mpidist")]
            cells += [f"{x['DDP'] / x['mpidist']:.2f}" for x in (medians, deciles)]
            if comm.rank == 0:
                print(f"| {name} | {rows} | {' | '.join(cells)} |", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
