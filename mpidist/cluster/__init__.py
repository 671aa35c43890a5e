"""Where processes are: what the launcher says, and tf.distribute's cluster resolvers.

Nothing here starts MPI, and no call communicates. What MPI knows of the ranks of a
strategy is in its `cluster_resolver`, an `MPIClusterResolver`.
"""

from mpidist.cluster._hostlist import expand_hostlist as expand_hostlist
from mpidist.cluster._hostlist import expand_tasks_per_node as expand_tasks_per_node
from mpidist.cluster._mpi_resolver import MPIClusterResolver as MPIClusterResolver
from mpidist.cluster._process import Process as Process
from mpidist.cluster._process import this_process as this_process
from mpidist.cluster._resolvers import ClusterResolver as ClusterResolver
from mpidist.cluster._resolvers import SimpleClusterResolver as SimpleClusterResolver
from mpidist.cluster._resolvers import (
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from mpidist.cluster._resolvers import UnionResolver as UnionResolver
from mpidist.cluster._slurm import SlurmClusterResolver as SlurmClusterResolver
from mpidist.cluster._spec import ClusterSpec as ClusterSpec
