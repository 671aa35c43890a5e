"""Where processes are: what the launcher says, and tf.distribute's cluster resolvers.

Nothing here starts MPI, and no call communicates. What MPI knows of the ranks of a
strategy is in its `cluster_resolver`, an `MPIClusterResolver`.
"""

from __future__ import annotations

from mpidist.cluster._hostlist import expand_hostlist, expand_tasks_per_node
from mpidist.cluster._mpi_resolver import MPIClusterResolver
from mpidist.cluster._process import Process, this_process
from mpidist.cluster._resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from mpidist.cluster._slurm import SlurmClusterResolver
from mpidist.cluster._spec import ClusterSpec

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "MPIClusterResolver",
    "Process",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
    "expand_hostlist",
    "expand_tasks_per_node",
    "this_process",
]
