"""Prints, for each public call, the functions of MPI that rank 0 has called in it.

The library of ``profile.c`` is preloaded. Each line is a JSON object: the call, what
the library has counted, and what mpidist says.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mpidist

library = ctypes.CDLL(os.environ["LD_PRELOAD"])
library.profile_row.restype = ctypes.c_char_p


def rows() -> Iterator[tuple[str, int]]:
    count, k = ctypes.c_long(), 0
    while (name := library.profile_row(k, ctypes.byref(count))) is not None:
        yield name.decode(), count.value
        k += 1


mpidist.MPIStrategy().close()  # connects the ranks
before = Counter(dict(rows()))
strategy = mpidist.MPIStrategy()
making = Counter(dict(rows())) - before
if strategy.replica_id == 0:
    print(
        json.dumps({"call": "making an `MPIStrategy`", "counted": making}), flush=True
    )
mib = 2**18  # float32


def said() -> Counter[str]:
    return Counter(strategy.communication_statistics().mpi_calls)


def zeros(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(count, np.float32)


with strategy.scope():
    variable = mpidist.Variable(zeros(mib))
checkpoint = mpidist.Checkpoint(variable=variable)
saved = checkpoint.save(sys.argv[1])


def all_reduce(count: int) -> Callable[[], Any]:
    return lambda: mpidist.get_replica_context().all_reduce("SUM", zeros(count))


def all_gather(count: int) -> Callable[[], Any]:
    return lambda: mpidist.get_replica_context().all_gather(zeros(count), 0)


def merge_call(merge_fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: mpidist.get_replica_context().merge_call(merge_fn, args=args)


def nothing() -> None: ...


number = strategy.run(lambda: 1.0)
row = strategy.run(lambda: zeros(1))

# In a replica function.
CALLS: dict[str, Callable[[], Any]] = {
    "`all_reduce` of 4 B": all_reduce(1),
    "`all_reduce` of 64 KiB": all_reduce(mib // 16),
    "`all_reduce` of 1 MiB": all_reduce(mib),
    "`all_reduce` of 16 MiB": all_reduce(16 * mib),
    "`all_gather` of 4 B": all_gather(1),
    "`all_gather` of 1 MiB": all_gather(mib),
    "`merge_call` that does nothing": merge_call(lambda strategy: None),
    "`merge_call` with `reduce_to` of 1 MiB": merge_call(
        lambda strategy, x: strategy.extended.reduce_to("SUM", x, "/gpu:0"), zeros(mib)
    ),
    "`merge_call` with `reduce` and `assign` of 1 MiB": merge_call(
        lambda strategy, x: variable.assign(strategy.reduce("SUM", x, axis=None)),
        zeros(mib),
    ),
    "`merge_call` that looks at 1 MiB of each rank": merge_call(
        lambda strategy, x: len(strategy.experimental_local_results(x)), zeros(mib)
    ),
}
# Outside of it.
OTHERS: dict[str, Callable[[], Any]] = {
    "`run` of a function that does nothing": lambda: strategy.run(nothing),
    "`Strategy.reduce` of a number": lambda: strategy.reduce("SUM", number, axis=None),
    "`Strategy.gather` of 4 B": lambda: strategy.gather(row, axis=0),
    "`Variable.assign` of 1 MiB": lambda: variable.assign(zeros(mib)),
    "`broadcast_to` of 1 MiB": lambda: strategy.extended.broadcast_to(
        zeros(mib), variable
    ),
    "`Checkpoint.restore` of 1 MiB": lambda: checkpoint.restore(saved),
}


def count(name: str, call: Callable[[], Any]) -> None:
    """Print what a call has called, the second time: plans are made, and buffers."""
    call()
    before, said_before = Counter(dict(rows())), said()
    call()
    counted = Counter(dict(rows())) - before
    told = said() - said_before
    if strategy.replica_id == 0:
        print(json.dumps({"call": name, "counted": counted, "said": told}), flush=True)


for name, call in OTHERS.items():
    count(name, call)
for name, call in CALLS.items():
    strategy.run(count, args=(name, call))
