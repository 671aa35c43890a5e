"""A training of three replicas that ends, or that one of them leaves, in some way.

usage: ending_training.py HOW [FOLDER]. In "left" replica 2 raises in `train`. In all
others replica 1 dies, and then

- "interrupt": a KeyboardInterrupt comes to replica 2 when it learns of it;
- "later": it comes while replica 2 closes the strategy, and that process stays until
  the other has left, too;
- "saving": replica 1 dies only while replica 0 writes the last checkpoint;
- "again": `train` raises as if a replica had died again;
- "exit": `train` ends, and then the program calls `sys.exit(3)`.

Each rank that is left prints what `elastic.run` has raised, but in "again".
"""

import os
import signal
import sys
import threading
import time

import pytest

import mpidist
from mpidist._checkpoints import storage


def train(strategy, state):
    rank, is_first = strategy.replica_id, strategy.num_replicas_in_sync == 3
    for step in range(state.step, 6):
        if is_first and step == 3 and how == "left" and rank == 2:
            raise KeyError("of replica 2 alone")
        if is_first and step == 3 and how not in ("left", "saving") and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:  # the others learn of it here
            strategy.reduce("SUM", strategy.run(int), axis=None)
        except mpidist.ReplicaLostError:
            if rank == 2 and how == "interrupt":
                raise KeyboardInterrupt from None
            if rank == 2 and how == "later":
                mpidist.MPIStrategy.close = interrupted
            raise
        if how == "again" and not is_first:
            raise mpidist.ReplicaLostError("as a call of another strategy would")
        state.step += 1
        state.commit()
    if how == "saving" and is_first and rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    used.append(strategy)
    return strategy.num_replicas_in_sync


def interrupted(strategy):
    raise KeyboardInterrupt


def write_slowly(*arguments):
    time.sleep(1.5)
    write_checkpoint(*arguments)


how, *folder = sys.argv[1:]
used = []
write_checkpoint = storage.write_checkpoint
storage.write_checkpoint = write_slowly
directory = folder[0] if how == "saving" else None
try:
    size = mpidist.elastic.run(
        train, mpidist.elastic.State(step=0, directory=directory)
    )
except (Exception, KeyboardInterrupt) as error:
    if how == "again":
        raise
    text = str(error).strip().replace("\n", " ")
    print(f"{type(error).__name__}: {text}\n", end="", flush=True)
    if how == "later" and isinstance(error, KeyboardInterrupt):
        while not os.listdir(folder[0]):
            time.sleep(0.02)
    elif how == "later":
        open(os.path.join(folder[0], "left"), "w").close()
else:
    assert size == 2, size
    with pytest.raises(RuntimeError, match="make its calls in `train`"):
        used[-1].run(int)
    if how == "exit":
        sys.exit(3)
