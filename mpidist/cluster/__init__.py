"""Where processes are: what the launcher says, and tf.distribute's cluster resolvers.

Nothing here starts MPI, and no call communicates. What MPI knows of the ranks of a
strategy is in its `cluster_resolver`, an `MPIClusterResolver`.
"""

from mpidist.cluster._hostlist import (
    expand_hostlist as expand_hostlist,
    expand_tasks_per_node as expand_tasks_per_node,
)
from mpidist.cluster._mpi_resolver import MPIClusterResolver as MPIClusterResolver
from mpidist.cluster._process import (
    Process as Process,
    ReplicaDevice as ReplicaDevice,
    replica_devices as replica_devices,
    this_process as this_process,
)
from mpidist.cluster._resolvers import (
    ClusterResolver as ClusterResolver,
    SimpleClusterResolver as SimpleClusterResolver,
    TFConfigClusterResolver as TFConfigClusterResolver,
    TPUClusterResolver as TPUClusterResolver,
    UnionResolver as UnionResolver,
)
from mpidist.cluster._slurm import SlurmClusterResolver as SlurmClusterResolver
from mpidist.cluster._spec import ClusterSpec as ClusterSpec
