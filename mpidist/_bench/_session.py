"""What all benchmarks of one run share: ranks, strategies, options, notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np

import mpidist
from mpidist._bench._contest import Body, Contestant, Effort, measure
from mpidist._bench._job import Job, UsageError
from mpidist._bench._results import COPY, Result
from mpidist._bench._torch import Gloo

OURS: Final = "mpidist"
NO_GUARD: Final = "mpidist, no guard"
RESIDENT: Final = "mpidist, resident"
_SPARE: Final = 0.8  # of the memory that is free, this much may be used
_TILE: Final = 10_000  # of cycles are made at once
_MODULUS: Final = 13  # of the values: small integers, whose sums are exact


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        sizes: bytes, for all_reduce and gather; None: their own.
        packs: values of ``bytes_per_pack`` for nest.
        models: which shapes nest reduces: resnet50, bert, mlp.
        batch: rows on each rank in a step of train.
        effort: how long to measure.
        torch: whether PyTorch's gloo takes part.
    """

    sizes: tuple[int, ...] | None = None
    packs: tuple[int, ...] = ()
    models: tuple[str, ...] = ("resnet50", "bert")
    batch: int = 128
    effort: Effort = dataclasses.field(default_factory=Effort)
    torch: bool = False


class Replicas:
    """A strategy, and the way into its replica context."""

    def __init__(self, strategy: mpidist.MPIStrategy) -> None:
        """Take a strategy of all ranks."""
        self.strategy = strategy
        self.context: mpidist.ReplicaContext | None = None

    def within(self, body: Body) -> None:
        """Call ``body`` in a replica function, with `context` set. Collective."""

        def replica() -> None:
            self.context = mpidist.get_replica_context()
            body()

        self.strategy.run(replica)

    def all_reduce(self, value: Any, options: Any = None) -> Any:
        """Sum over the replicas, inside `within`. Collective."""
        return self._inside().all_reduce(mpidist.ReduceOp.SUM, value, options)

    def all_gather(self, value: Any) -> Any:
        """Concatenate over the replicas, inside `within`. Collective."""
        return self._inside().all_gather(value, 0)

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Have rank 0 run ``fn``, inside `within`. Collective."""
        return self._inside().merge_call(fn, args)

    def _inside(self) -> mpidist.ReplicaContext:
        if self.context is None:
            raise RuntimeError("Replicas: only inside `within`")
        return self.context


class Session:
    """One run of benchmarks."""

    def __init__(self, job: Job, options: Options) -> None:
        """Make the strategies. Collective."""
        self.job = job
        self.options = options
        self.notes: list[str] = []
        self.results: list[Result] = []
        self.replicas = Replicas(mpidist.MPIStrategy(device="cpu"))
        self.unguarded = Replicas(
            mpidist.MPIStrategy(
                device="cpu",
                communication_options=mpidist.experimental.CommunicationOptions(
                    guard=False
                ),
            )
        )
        self.gloo = Gloo(job) if options.torch else None

    @property
    def strategy(self) -> mpidist.MPIStrategy:
        """The strategy with all defaults."""
        return self.replicas.strategy

    def close(self) -> None:
        """Give everything back. Collective."""
        if self.gloo is not None:
            self.gloo.close()
        self.unguarded.strategy.close()
        self.strategy.close()

    def contest(
        self,
        bench: str,
        case: str,
        contestants: list[Contestant],
        *,
        baseline: str,
        nbytes: int | None = None,
        seconds: float = 1.0,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Measure, and keep the result. Collective.

        Args:
            bench: which benchmark this is of.
            case: what the contestants do.
            contestants: all ways to do it.
            baseline: the name of the one that ratios are to.
            nbytes: how much is moved.
            seconds: how long, in units of ``options.effort.seconds``.
            facts: more to know about it.
        """
        given = self.options.effort
        effort = dataclasses.replace(given, seconds=seconds * given.seconds)
        timings = measure(self.job, f"{bench} of {case}", contestants, effort)
        ours = tuple(name for name in timings if name.startswith(OURS))
        self.results.append(
            Result(bench, case, nbytes, baseline, ours, timings, facts or {})
        )

    def note(self, text: str) -> None:
        """Keep a sentence that the reader of the tables has to know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def has_room(self, nbytes: int) -> bool:
        """Return whether every rank can have so many bytes more. Collective."""
        free = free_memory()
        fits = free is None or nbytes * self.job.local_size <= _SPARE * free
        return self.job.everywhere(fits)

    def resident(self, like: Any) -> Any:
        """Return arrays in the memory that the ranks share, or None.

        Collective. None where this version of mpidist has no resident buffers, or
        these ranks have no memory for them.

        Args:
            like: a nest of arrays, whose values the result has too.
        """
        make = getattr(self.strategy, "buffers_like", None)
        transports = self.strategy._collectives.transports
        if make is None or transports.host.name != "shared":
            return None
        buffers = make(like)
        for target, values in zip(_leaves(buffers), _leaves(like), strict=True):
            target[...] = values
        return buffers

    def pattern(self, count: int, dtype: Any = np.float32) -> Any:
        """Return numbers that are other on each rank, and whose sums are exact."""
        return _cycle(count, dtype(self.job.rank + 1))

    def pattern_sum(self, count: int, dtype: Any = np.float32) -> Any:
        """Return the sum of `pattern` over all ranks."""
        factor = self.job.size * (self.job.size + 1) // 2
        return _cycle(count, dtype(factor))

    def copy(self, source: Any, target: Any) -> Contestant:
        """Return the contestant that copies an array in memory, on all ranks at once.

        What it does bounds what a reduction can do that reads and writes its array.
        """

        def call() -> Any:
            np.copyto(target, source)
            return target

        return Contestant(COPY, call, lambda result: np.array_equal(result, source))


def free_memory() -> int | None:
    """Return the bytes of memory that programs can still have; None if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def check_torch(job: Job) -> None:
    """Raise on all ranks if PyTorch is missing on one. Collective.

    Raises:
        UsageError: saying what to install.
    """
    job.require(Gloo.missing())


def _cycle(count: int, factor: Any) -> Any:
    """Return 0, 1, ... 12, 0, 1, ... times a factor, in the factor's dtype."""
    once = np.arange(_MODULUS, dtype=factor.dtype) * factor
    return np.resize(np.tile(once, min(_TILE, -(-count // _MODULUS))), count)


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        return [leaf for key in sorted(nest) for leaf in _leaves(nest[key])]
    if isinstance(nest, (list, tuple)):
        return [leaf for item in nest for leaf in _leaves(item)]
    return [nest]


__all__ = [
    "NO_GUARD",
    "OURS",
    "RESIDENT",
    "Options",
    "Replicas",
    "Session",
    "UsageError",
    "check_torch",
    "free_memory",
]
