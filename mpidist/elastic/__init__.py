"""Training that goes on when replicas die.

`run` calls a training with a strategy and a `State`. The training commits the state at
the boundaries of its steps. When processes die, `run` calls it again, on the replicas
that are left, with the state of the last commit. See the guide "Elastic training".
"""

from mpidist._base.remedies import publish as _publish
from mpidist.elastic._run import run as run
from mpidist.elastic._state import State as State

_publish(__name__)
