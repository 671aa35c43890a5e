"""All-reduce of CuPy arrays against what a program does by hand.

Run it with mpirun on ranks that have a GPU, which they may share; `launch/gpu-check`
does. The ways alternate; times are medians, in microseconds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy
import cupyx
import numpy as np
from mpi4py import MPI

import mpidist

WORLD = MPI.COMM_WORLD
# The arrays of a ResNet-34.
SIZES = [64 * 3 * 49, 2048 * 1000, *[512] * 50]
for width, count in ((64, 6), (128, 8), (256, 12), (512, 5)):
    SIZES += [width * width * 9] * count


def measure(call: Callable[[], object], times: int) -> float:
    """Return the median time of a call, with its work on the GPU. Collective."""
    found = []
    for _ in range(times):
        WORLD.Barrier()
        start = time.perf_counter()
        call()
        cupy.cuda.get_current_stream().synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found) * 1e6


def by_mpidist(strategy: mpidist.Strategy, arrays: list[Any], times: int) -> float:
    def step() -> float:
        context = mpidist.get_replica_context()
        return measure(lambda: context.all_reduce("SUM", arrays), times)

    return float(strategy.experimental_local_results(strategy.run(step))[0])


def by_hand(arrays: list[Any], times: int, page_locked: bool) -> float:
    new = cupyx.empty_pinned if page_locked else np.empty
    hosts = [new(x.shape, x.dtype) for x in arrays]

    def call() -> None:
        for x, host in zip(arrays, hosts, strict=True):
            x.get(out=host, blocking=not page_locked)
        cupy.cuda.get_current_stream().synchronize()
        for host in hosts:
            WORLD.Allreduce(MPI.IN_PLACE, host)
        for x, host in zip(arrays, hosts, strict=True):
            cupy.empty_like(x).set(host)

    return measure(call, times)


def by_mpi(arrays: list[Any], times: int) -> float:
    def call() -> None:
        for x in arrays:
            WORLD.Allreduce(x, cupy.empty_like(x))

    return measure(call, times)


def make(implementation: str) -> mpidist.MPIStrategy:
    options = mpidist.experimental.CommunicationOptions(implementation=implementation)
    return mpidist.MPIStrategy(device="gpu", communication_options=options)


def main() -> None:
    ways: dict[str, Callable[[list[Any], int], float]] = {}
    for name in ("staged", "direct", "nccl"):
        if name == "direct" and not os.environ.get("MPIDIST_TEST_DIRECT"):
            continue
        try:
            strategy = make(name.upper())
        except ValueError:  # no NCCL: on all ranks
            continue
        ways[name] = lambda x, n, strategy=strategy: by_mpidist(strategy, x, n)
    ways["by hand"] = lambda x, n: by_hand(x, n, False)
    ways["page-locked"] = lambda x, n: by_hand(x, n, True)
    if "direct" in ways:
        ways["MPI on GPU"] = by_mpi
    square = cupy.ones((4096, 4096), cupy.float32)
    for _ in range(300):  # a GPU that was idle is slow at first
        square @ square
    if WORLD.rank == 0:
        print(f"{'us':12}", *(f"{name:>12}" for name in ways))
    cases = [[4], [1024], [2**16], [2**20], [2**24], [2**26], [4 * n for n in SIZES]]
    for case in cases:
        arrays = [cupy.ones(nbytes // 4, cupy.float32) for nbytes in case]
        times = 50 if sum(case) < 2**22 else 8
        rows = [[way(arrays, times) for way in ways.values()] for _ in range(3)]
        if WORLD.rank == 0:
            name = f"{case[0]} B" if len(case) == 1 else f"{len(case)} arrays"
            medians = np.median(rows, axis=0)
            print(f"{name:12}", *(f"{x:12.0f}" for x in medians), flush=True)


if __name__ == "__main__":
    main()
