"""What the ranks of a strategy share: the memory of one node, or of each of several."""

from __future__ import annotations

import dataclasses
from typing import Final

from mpidist._base import threads
from mpidist._engine.node import Node, open_node
from mpidist._engine.nodes import Nodes, open_nodes
from mpidist._mpi.communicator import Communicator
from mpidist._mpi.library import is_crowded


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """The memory that ranks share, if any; the same on all ranks.

    Attributes:
        node: of one node.
        nodes: of each of several nodes.
        problem: why there is none; "" if there is, or with one rank.
        in_process: whether replicas are threads, which need none.
    """

    node: Node | None = None
    nodes: Nodes | None = None
    problem: str = ""
    in_process: bool = False


NO_MEMORY: Final = SharedMemory()


def open_shared_memory(comm: Communicator, *, wanted: bool) -> SharedMemory:
    """Make shared memory, if all ranks want it and can. Collective.

    Args:
        comm: all ranks.
        wanted: whether this rank wants it.
    """
    if threads.current() is not None:
        return SharedMemory(problem="replicas are threads", in_process=True)
    crowded = is_crowded(comm.machine_size)
    # It decides how the ranks meet, so all must have the same answer.
    crowded = not comm.all_min(int(not crowded))
    if comm.num_nodes > 1:
        nodes, problem = open_nodes(comm, wanted=wanted, crowded=crowded)
        return SharedMemory(None, nodes, problem)
    opened = open_node(comm, wanted=wanted, crowded=crowded)
    node = opened.node
    if node is None:
        return SharedMemory(problem=opened.problem)
    comm.traffic.core = node.channel
    return SharedMemory(node)
