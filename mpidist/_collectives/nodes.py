"""How several nodes reduce together: the memory of each, and MPI between peers.

The ranks of a node share memory (`node`). Ranks with the same number on their nodes are
*peers*: there are as many groups of them as the smallest node has ranks. A piece of a
nest is reduced

1. over each node, in its memory: each rank reduces one slice;
2. over the nodes: each rank with peers all-reduces one slice with them by MPI, in the
   area of the node's sums (`hierarchical_route`).

So all ranks of a node send at the same time, and each byte leaves a node once. On a
node with more ranks than the smallest one the slices of 1 and 2 differ, and its ranks
make a step between them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mpidist._agreement.channel import LEFT, LeftError
from mpidist._agreement.guard import Guard
from mpidist._base import threads
from mpidist._base.memory import LINE
from mpidist._base.types import HostArray, record
from mpidist._collectives.node import Node, open_node
from mpidist._mpi.allreduce_algorithm import NEVER
from mpidist._mpi.buffers import BufferCollectives
from mpidist._mpi.communicator import Communicator

LEAST_BYTES: Final = 64 * 1024 + 1
"""The least bytes of a nest for the memory of the nodes.

The steps of a node cost more than MPI between all ranks takes for a smaller one: on 8
simulated nodes of two ranks 16 KiB took 3.9 times raw MPI's time, and 1.1 without.
"""

LEAST_RANKS: Final = 4
"""The least ranks of the smallest node for its memory, but for compressed sums.

With two on each of 2 and 4 hosts, at 1 Gbit/s or without a limit, one collective of all
ranks was as fast or faster (MPICH: up to 1.9 times); with eight it took 1.5 times as
long.
"""


@record
class Nodes:
    """This rank's node, in a job of several, and its peers on the others.

    Attributes:
        node: the memory of its ranks.
        ranks: of this node, in its order.
        peers: one rank of each node; None on a rank without peers.
        slices: how many slices of a piece are sent between nodes.
        least_bytes: from how many on nests that are not compressed use the memory.
        scratch: memory (uint8) for what MPI sends or receives of a slice.
    """

    node: Node
    ranks: list[int]
    peers: BufferCollectives | None
    slices: int
    least_bytes: int
    scratch: HostArray

    def step(self, guard: Guard) -> None:
        """Wait until all ranks of this node have made this step.

        Raises:
            CollectiveTimeoutError: at the deadline, or if another rank has given up.
            LeftError: if a rank of this node has left.
        """
        channel = self.node.channel
        channel.publish()
        if guard.waits.wait_step(channel.wait, self._missing) == LEFT:
            raise LeftError(self.ranks[channel.who])

    def _missing(self) -> list[int]:
        return [self.ranks[k] for k in self.node.channel.missing()]


@record
class SharedMemory:
    """The shared memory of the ranks of a strategy, if any; the same on all ranks.

    Attributes:
        node: the memory of one node.
        nodes: that of each of several nodes.
        problem: why there is none; "" if there is, or with one rank.
        in_process: whether replicas are threads, which need none.
    """

    node: Node | None = None
    nodes: Nodes | None = None
    problem: str = ""
    in_process: bool = False


NO_MEMORY: Final = SharedMemory()


def open_shared_memory(comm: Communicator) -> SharedMemory:
    """Make shared memory, if all ranks want it and can. Collective.

    Args:
        comm: all ranks, which have told each other what `node.rank_info` returned.
    """
    if threads.current() is not None:
        return SharedMemory(problem="replicas are threads", in_process=True)
    if comm.num_nodes > 1:
        nodes, problem = _open_nodes(comm)
        return SharedMemory(None, nodes, problem)
    node, problem = open_node(comm)
    if node is not None:
        comm.traffic.core = node.channel
    return SharedMemory(node, problem=problem)


def _open_nodes(comm: Communicator) -> tuple[Nodes | None, str]:
    """Make shared memory on each of several nodes, and find peers. Collective.

    Returns:
        None if a node cannot, or if each has one rank and nothing to share; and why.
    """
    if comm.num_nodes == comm.size:
        return None, "each node has one rank"
    node, problem = open_node(comm)
    if node is None:
        return None, problem
    peers, slices = comm.connect_peers(), comm.smallest_node
    copies = comm.num_nodes if peers is not None and peers.algorithm.gathers else 1
    lines = copies * (node.piece_bytes // LINE // slices + 2)
    scratch = comm.together(
        lambda: np.empty(lines * LINE, np.uint8), "MPIStrategy(...)"
    )
    least = LEAST_BYTES if slices >= LEAST_RANKS else NEVER
    return Nodes(node, comm.node_ranks, peers, slices, least, scratch), ""
