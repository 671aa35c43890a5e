"""A training of which rank 1 dies, and which then ends as its argument says."""

import contextlib
import os
import signal
import sys

import pytest

import mpidist


def train(strategy, state):
    for _ in range(state.step, 6):
        dies = strategy.replica_id == 1 and strategy.num_replicas_in_sync == 3
        if dies and state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.reduce(
            "SUM", strategy.run(int), axis=None
        )  # the others learn of it here
        if how == "again" and strategy.num_replicas_in_sync == 2:
            raise mpidist.ReplicaLostError("as a call of another strategy would")
        state.step += 1
        state.commit()
    used.append(strategy)
    return strategy.num_replicas_in_sync


how, used = sys.argv[1], []
size = mpidist.elastic.run(train, mpidist.elastic.State(step=0))
assert size == 2, size
with pytest.raises(RuntimeError, match="make its calls in `train`"):
    used[-1].run(int)
if how == "exit":
    sys.exit(3)
if how == "raise":
    raise SystemExit(3)
if how == "caught":
    with contextlib.suppress(SystemExit):
        sys.exit(3)
