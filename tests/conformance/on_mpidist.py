"""The side of mpidist: one rank of an ``mpirun``."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

import mpidist
from conformance.adapter import Adapter
from conformance.registry import Program
from conformance.results import Described, OnRank0, Own, Raised, Result, describe, merge

VERSION = mpidist.__version__
SECONDS = 30  # after which a rank that waits for others gives up


class MPIDist(Adapter):
    """MPIStrategy over all ranks."""

    dist = mpidist
    experimental = mpidist.experimental
    Aggregation = mpidist.VariableAggregation
    Synchronization = mpidist.VariableSynchronization
    AutoShardPolicy = mpidist.data.AutoShardPolicy
    Dataset = mpidist.data.Dataset
    tensorflow = False

    def __init__(self, strategy: Any = None) -> None:
        super().__init__(MPI.COMM_WORLD.size)
        self.made: list[Any] = []
        self.strategy = strategy or make_strategy()
        self.own_replica = MPI.COMM_WORLD.rank

    def __reduce__(self) -> Any:
        # Functions that travel inside merge_fn bring the adapter along; the other
        # ranks have one of their own.
        return (_current, ())

    def new_strategy(self) -> Any:
        self.made.append(make_strategy())
        return self.made[-1]

    def v1_strategy(self) -> Any:
        return self.new_strategy()

    def close(self) -> None:
        for strategy in self.made:
            strategy.close()

    def v1(self, name: str) -> Any:
        return getattr(mpidist, name)

    def array(self, value: Any, dtype: str = "float32") -> Any:
        return np.asarray(value, dtype=dtype)

    def variable(self, value: Any, dtype: str = "float32", **options: Any) -> Any:
        return mpidist.Variable(value, dtype=dtype, **options)

    def slices(self, values: Any, indices: Any) -> Any:
        return mpidist.IndexedSlices(self.array(values), np.asarray(indices))

    def sync_on_read_context(self) -> Any:
        return mpidist.variable_sync_on_read_context()

    def distribute(self, dataset: Any, policy: str = "AUTO", **options: Any) -> Any:
        policies = self.AutoShardPolicy
        return self.strategy.experimental_distribute_dataset(
            dataset,
            mpidist.InputOptions(auto_shard_policy=policies[policy], **options),
        )

    def optimizer(self, kind: str, **settings: Any) -> Any:
        return getattr(mpidist.optimizers, kind)(**settings)

    @contextlib.contextmanager
    def folder(self) -> Iterator[str]:
        comm = MPI.COMM_WORLD
        path = comm.bcast(None if comm.rank else tempfile.mkdtemp())
        try:
            yield path
        finally:
            comm.Barrier()
            if comm.rank == 0:
                shutil.rmtree(path)

    def save(self, folder: str, **objects: Any) -> str:
        path = f"{folder}/checkpoint"
        mpidist.Checkpoint(**objects).save(path)
        return path

    def restore(self, path: str, **objects: Any) -> None:
        mpidist.Checkpoint(**objects).restore(path, partial=True)

    def module(self) -> Any:
        return mpidist.Module()

    def sum(self, x: Any) -> Any:
        return np.sum(x)

    def stack(self, x: list[Any]) -> Any:
        return np.stack(x)

    def average_loss(self, per_example_loss: Any, **options: Any) -> Any:
        return mpidist.compute_average_loss(per_example_loss, **options)

    def clip_by_global_norm(self, grads: list[Any], norm: float) -> Any:
        return mpidist.optimizers.clip_by_global_norm(grads, norm)

    def convert(self, x: Any) -> Any:
        return np.asarray(x)

    def replicas(self, value: Any) -> Any:
        (result,) = self.strategy.experimental_local_results(value)
        return Own(Described(describe(result, _to_array)))

    def parts(self, results: tuple[Any, ...]) -> Any:
        (result,) = results
        return Own(Described(describe(result, _to_array)))

    def coordinator(self, value: Any) -> Any:
        return OnRank0(value)

    def numbers(self, value: Any) -> Any:
        return value.numpy() if hasattr(value, "numpy") else value

    def is_variable(self, value: Any) -> bool:
        return isinstance(value, mpidist.Variable)


def make_strategy() -> Any:
    """Make a strategy that does not wait forever."""
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=SECONDS)
    return mpidist.MPIStrategy(device="cpu", communication_options=options)


_side: MPIDist | None = None


def _current() -> MPIDist | None:
    return _side


def _to_array(x: Any) -> Any:
    return x.numpy() if isinstance(x, (mpidist.Mirrored, mpidist.Variable)) else None


def run(programs: list[Program]) -> Iterator[tuple[str, Result, list[str]]]:
    """Run programs on all ranks; yield their names and results, the same on all."""
    global _side
    comm = MPI.COMM_WORLD
    strategy = None
    for program in programs:
        # One strategy for all: it has to stay usable whatever a program does.
        _side = side = MPIDist(strategy)
        strategy = side.strategy
        try:
            result = describe(program.function(side), _to_array)
        except Exception as error:
            side.failed.append(error)
            result = describe(Raised.of(error, uncaught=True))
        messages = [f"{type(e).__name__}: {e}"[:500] for e in side.failed]
        ranks = comm.allgather((result, messages))
        side.close()
        yield program.name, merge([r for r, _ in ranks]), ranks[0][1]
        # But for one that timed out, which is a failure of that program alone.
        if any("CollectiveTimeoutError" in text for _, m in ranks for text in m):
            strategy = None


def is_first() -> bool:
    """Return whether this is rank 0."""
    return MPI.COMM_WORLD.rank == 0
