"""Replicas as threads of one process, for tests and notebooks: no mpirun, no MPI.

`run` runs a program on some replicas. For pytest there are the fixture ``replicas``,
which is `run`, and the mark ``replicas``, which runs a test with several numbers of
replicas (see the guide, "Testing").
"""

from mpidist._base.remedies import publish as _publish
from mpidist.testing._fixtures import each_replica as each_replica
from mpidist.testing._group import ThreadGroup as ThreadGroup
from mpidist.testing._run import (
    ReplicaStopped as ReplicaStopped,
    current_group as current_group,
    run as run,
)

_publish(__name__)
