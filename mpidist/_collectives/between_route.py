"""The route of host arrays between nodes of few ranks, and of small ones.

A nest that has room behind the header takes one collective of MPI. A larger one takes
two, of which the core starts the second when the headers agree, without Python in
between (``_native/py_between.c``); or with the header, if the ranks expect the call
(``_native/guess.h``).
"""

from __future__ import annotations

import itertools
from typing import Final

from mpidist import _native
from mpidist._agreement.channel import between_of
from mpidist._base.memory import lay_out
from mpidist._collectives.core_routes import CoreReduce
from mpidist._collectives.plan import Signature
from mpidist._collectives.resources import Resources
from mpidist._mpi.allreduce_algorithm import Algorithm
from mpidist._mpi.communicator import Communicator
from mpidist._mpi.library import mpi_module
from mpidist._mpi.ops import host_op

# Of nests that are copied into one buffer, or gathered.
_MOST_COPIED_BYTES: Final = 2**20
# Of one array: MPI's collectives of larger ones are cut, each with a deadline.
_MOST_BYTES: Final = 64 * 2**20
_MOST_RUNS: Final = 8


def between(resources: Resources, signature: Signature) -> CoreReduce | None:
    """Return the plan of a nest, if ranks exchange headers by MPI, in the core."""
    comm, guard = resources.comm, resources.guard
    channel = between_of(guard.channel)
    if channel is None or not guard.enabled or not isinstance(comm, Communicator):
        return None
    if not (channel.room and comm.buffers.same_bits and signature.nest.has_kernels):
        return None
    if signature.on_device or signature.root is not None or signature.compress:
        return None
    unit = _native.core.PAYLOAD_ALIGNMENT
    _, nbytes = lay_out(signature.nest.sizes, unit)
    if not nbytes:
        return None
    algorithm = None
    if nbytes > channel.room:
        algorithm = comm.buffers.algorithm
        if nbytes > _most_bytes(resources, signature, algorithm):
            return None
    core = _new_core(resources, signature, algorithm)
    return CoreReduce(resources, signature, "between", core)


def _most_bytes(
    resources: Resources, signature: Signature, algorithm: Algorithm
) -> int:
    """Return up to which size this is the route of nests without room in the header."""
    kinds = [(x.reduction.compute, x.reduction.combining) for x in signature.leaves]
    if sum(1 for _ in itertools.groupby(kinds)) > _MOST_RUNS:  # a collective each
        return 0
    copied = algorithm.gathers or len(signature.leaves) > 1
    most = _MOST_COPIED_BYTES if copied else _MOST_BYTES
    if resources.nodes is not None:
        most = min(most, resources.nodes.least_bytes - 1)
    return min(most, algorithm.exchanged_bytes - 1)


def _new_core(
    resources: Resources, signature: Signature, algorithm: Algorithm | None
) -> _native.Reduce:
    """Return the nest in the core."""
    guard, leaves = resources.guard, signature.nest.core_leaves
    nbytes = sum(x.size * x.reduction.dtype.itemsize for x in signature.leaves)
    number = signature.call.fingerprint
    arguments = guard.channel, leaves, 0, number, guard.timeout_ms, True
    if algorithm is None:
        return _native.core.Reduce(*arguments, nbytes=nbytes)
    handle = mpi_module()._handleof
    handles = [tuple(map(handle, host_op(x.dtype, x.operation))) for x in leaves]
    return _native.core.Reduce(*arguments, algorithm[:3], handles, nbytes)
