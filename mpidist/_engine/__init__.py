"""From a call to memory: plans that move arrays, made once for each signature.

- ``node``: the memory that the ranks of a node share, and how they come to share it;
- ``memory``: that of one node, or of each of several, as a strategy has it;
- ``plans``: looks a call's plan up by its signature, or has a route make one;
- ``core_routes``: *eager* and *shared*, through that memory;
- ``nodes``: how the nodes of several exchange their sums;
- ``hierarchical_route``: *hierarchical*, through the memory of each of several nodes;
- ``staging``: copies between a GPU and that memory;
- ``device_routes``: *nccl*, *direct* and *staged*, of arrays on GPUs;
- ``mpi_route``: *mpi*, which takes everything, also between nodes;
- ``header_route``: *header*, small nests behind headers that go by messages;
- ``gather``: the plans of all-gathers.
"""

from typing import Final

from mpidist._engine.buckets import FlatBuffers
from mpidist._engine.core_routes import eager, shared
from mpidist._engine.device_routes import direct, nccl, staged
from mpidist._engine.gather import CoreGather, GatherLeaf, MpiGather
from mpidist._engine.gather import make as make_gather
from mpidist._engine.header_route import header
from mpidist._engine.hierarchical_route import hierarchical
from mpidist._engine.memory import NO_MEMORY, SharedMemory, open_shared_memory
from mpidist._engine.mpi_route import mpi
from mpidist._engine.node import Node
from mpidist._engine.nodes import Nodes
from mpidist._engine.plans import Means, Plan, Plans, Signature, leaves_of
from mpidist._engine.staging import Staging

ROUTES: Final = (eager, shared, hierarchical, nccl, direct, staged, header, mpi)
"""In this order; the last takes everything."""

__all__ = [
    "CoreGather",
    "FlatBuffers",
    "GatherLeaf",
    "Means",
    "MpiGather",
    "NO_MEMORY",
    "Node",
    "Nodes",
    "Plan",
    "Plans",
    "ROUTES",
    "SharedMemory",
    "Signature",
    "Staging",
    "leaves_of",
    "make_gather",
    "open_shared_memory",
]
