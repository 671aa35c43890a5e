"""Collectives: for each call a plan that moves arrays, made once for its signature.

The face, one object for all callers:

- ``collectives``: `Collectives`: the all-reduce, and all classes below together;
- ``resources``: what every collective uses: ranks, guard, options, transports;
- ``all_gather``, ``registered_buffers``, ``share``, ``rows``: one
  job each; ``array_heads``: arrays as messages; ``observed``: what observers are told.

From a call to a plan:

- ``plans``: finds the plan of an all-reduce by its signature, or has a route make one;
- ``core_routes``: *eager* and *shared*, through the memory of one node;
- ``hierarchical_route``: *hierarchical*, through the memory of each of several nodes;
- ``device_routes``: *nccl*, *direct* and *staged*, of arrays on GPUs;
- ``between_route``: *between*, with or behind headers that are collectives of MPI;
- ``mpi_route``: *mpi*, which takes everything, also between nodes;
- ``gather_plans``: the plans of all-gathers.

What they use:

- ``node``: the memory that the ranks of a node share, and how they come to share it;
- ``nodes``: how several nodes exchange their sums;
- ``memory``: a strategy's share of both;
- ``staging``: copies between a GPU and that memory;
- ``dtype_table``, ``buckets``, ``pool``: operations by dtype, flat buffers, memory
  for results.
"""

from typing import Final

from mpidist._engine.between_route import between
from mpidist._engine.core_routes import eager, shared
from mpidist._engine.device_routes import direct, nccl, staged
from mpidist._engine.hierarchical_route import hierarchical
from mpidist._engine.memory import SharedMemory, open_shared_memory
from mpidist._engine.mpi_route import mpi
from mpidist._engine.plans import Plan

ROUTES: Final = (eager, shared, between, hierarchical, nccl, direct, staged, mpi)
"""In this order; the last takes everything."""

__all__ = ["Plan", "ROUTES", "SharedMemory", "open_shared_memory"]
