"""Prints, for each public call, the functions of MPI that rank 0 has called in it.

The argument is the folder with the libraries of ``profile.c``. Each line is a JSON
object: the call, what the library has counted, and what mpidist says.
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

if "LD_PRELOAD" not in os.environ:  # only for ranks: mpirun is not made for it
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    large = hasattr(ctypes.CDLL(MPI.__file__), "PMPI_Iallreduce_c")
    path = os.path.join(sys.argv[1], "large.so" if large else "plain.so")
    os.environ["LD_PRELOAD"] = path
    os.execv(sys.executable, [sys.executable, *sys.argv])

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
    print(json.dumps({"call": "MPIStrategy", "counted": making}), flush=True)
mib = 2**18  # float32


def said() -> Counter[str]:
    return Counter(strategy.communication_statistics().mpi_calls)


def in_replica(call: Callable[[mpidist.ReplicaContext], Any]) -> Callable[[], Any]:
    return lambda: call(mpidist.get_replica_context())


def zeros(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(count, np.float32)


with strategy.scope():
    variable = mpidist.Variable(zeros(mib))

CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce of 4 B": in_replica(lambda ctx: ctx.all_reduce("SUM", zeros(1))),
    "all_reduce of 1 MiB": in_replica(lambda ctx: ctx.all_reduce("SUM", zeros(mib))),
    "all_reduce of 16 MiB": in_replica(
        lambda ctx: ctx.all_reduce("SUM", zeros(16 * mib))
    ),
    "all_gather of 4 B": in_replica(lambda ctx: ctx.all_gather(zeros(1), 0)),
    "all_gather of 1 MiB": in_replica(lambda ctx: ctx.all_gather(zeros(mib), 0)),
    "merge_call that does nothing": in_replica(
        lambda ctx: ctx.merge_call(lambda strategy: None)
    ),
    "merge_call with reduce_to of 1 MiB": in_replica(
        lambda ctx: ctx.merge_call(
            lambda strategy, x: strategy.extended.reduce_to("SUM", x, "/gpu:0"),
            args=(zeros(mib),),
        )
    ),
    "merge_call with assign of 1 MiB": in_replica(
        lambda ctx: ctx.merge_call(
            lambda strategy, x: variable.assign(strategy.reduce("SUM", x, axis=None)),
            args=(zeros(mib),),
        )
    ),
}

for name, call in CALLS.items():
    strategy.run(call)  # plans are made, and buffers
    before, said_before = Counter(dict(rows())), said()
    strategy.run(call)
    counted = Counter(dict(rows())) - before
    told = said() - said_before
    if strategy.replica_id == 0:
        print(json.dumps({"call": name, "counted": counted, "said": told}), flush=True)
