"""A training that one replica leaves by an exception that it catches.

usage: leaving_training.py HOW [FOLDER], where HOW is

- "raise": replica 2 raises in `train`;
- "interrupt": replica 1 dies, and a KeyboardInterrupt comes to replica 2 when it learns
  of it;
- "later": the same, but it comes while replica 2 closes the strategy, and that process
  stays until the other has left, too.

Each rank that is left prints what `elastic.run` has raised.
"""

import os
import signal
import sys
import time

import mpidist


def train(strategy, state):
    for step in range(5):
        if step == 3 and how == "raise" and strategy.replica_id == 2:
            raise KeyError("of replica 2 alone")
        if step == 3 and how != "raise" and strategy.replica_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            strategy.reduce("SUM", strategy.run(int), axis=None)
        except mpidist.ReplicaLostError:
            if strategy.replica_id == 2:
                if how == "interrupt":
                    raise KeyboardInterrupt from None
                mpidist.MPIStrategy.close = interrupted
            raise
        state.commit()


def interrupted(strategy):
    raise KeyboardInterrupt


how, *folder = sys.argv[1:]
try:
    mpidist.elastic.run(train, mpidist.elastic.State())
except (Exception, KeyboardInterrupt) as error:
    text = str(error).strip().replace("\n", " ")
    print(f"{type(error).__name__}: {text}\n", end="", flush=True)
    if how == "later" and isinstance(error, KeyboardInterrupt):
        while not os.listdir(folder[0]):
            time.sleep(0.02)
    elif how == "later":
        open(os.path.join(folder[0], "left"), "w").close()
