"""Jobs that are told to end save at one step on all ranks, and leave."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from checkpoint_objects import variable
from launching import run_ranks

import mpidist
from mpidist._strategy.strategy import group_of


@pytest.mark.mpi
@pytest.mark.core
@pytest.mark.parametrize("how", ["signal", "watcher"])
def test_all_ranks_save_at_the_same_step(strategy, folder, rank, size, how):
    step = variable(strategy, 0)
    manager = mpidist.CheckpointManager(
        mpidist.Checkpoint(step=step), folder, step_counter=step, checkpoint_interval=99
    )

    def leave():
        raise InterruptedError("leaving")

    def config(**kwargs):
        return mpidist.experimental.TerminationConfig(exit_fn=leave, **kwargs)

    def train(number):
        if how == "signal" and rank == size - 1 and number == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        step.assign_add(1)

    before = signal.getsignal(signal.SIGUSR1)
    asked = iter([False] * 4 + [True] * 9)
    watcher = (lambda: rank == 0 and next(asked)) if how == "watcher" else None
    handler = mpidist.experimental.PreemptionCheckpointHandler(
        None, manager, termination_config=config(termination_watcher_fn=watcher)
    )
    calls = []

    def go_on():
        for number in range(10):
            handler.run(train, number)
            calls.append(number)

    with pytest.raises(InterruptedError, match="leaving"):
        go_on()
    assert calls == [0, 1, 2, 3]
    assert signal.getsignal(signal.SIGUSR1) == before
    assert manager.latest_checkpoint == f"{manager.directory}/ckpt-1"

    step.assign(0)
    again = mpidist.experimental.PreemptionCheckpointHandler(
        None,
        manager,
        manager.directory,  # ignored, as in TensorFlow
        termination_config=config(
            grace_period=1.0, save_fn=lambda: manager.save(wait=False)
        ),
    )
    assert again.total_run_calls == 4
    assert step.numpy() == 4
    start = time.monotonic()  # before it counts on rank 0
    group_of(strategy).communicator.all_gather_objects(b"")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(InterruptedError):
        list(iter(lambda: again.run(time.sleep, 0.1), "never"))
    assert time.monotonic() - start >= 1
    assert 4 < again.total_run_calls < 20
    assert manager.latest_checkpoint == f"{manager.directory}/ckpt-2"
    with pytest.raises(TypeError, match=r"or a `mpidist\.Checkpoint` and"):
        mpidist.experimental.PreemptionCheckpointHandler(None, manager.checkpoint)
    with pytest.raises(TypeError, match=r"`termination_config` to be a .* got {}"):
        mpidist.experimental.PreemptionCheckpointHandler(
            None, manager, termination_config={}
        )


@pytest.mark.mpi
@pytest.mark.replicas(2, 3)
@pytest.mark.core
def test_a_last_save_that_fails_on_one_rank_is_raised_on_all(
    strategy, folder, rank, size
):
    step = variable(strategy, 0)
    manager = mpidist.CheckpointManager(mpidist.Checkpoint(step=step), folder)

    def save():
        assert not mpidist.has_strategy()  # so it may save what another one has
        if rank == size - 1:
            raise InterruptedError("no disk here")
        manager.save()

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    config = mpidist.experimental.TerminationConfig(
        termination_watcher_fn=lambda: rank == 0, save_fn=save
    )
    handler = mpidist.experimental.PreemptionCheckpointHandler(
        None, manager, termination_config=config
    )
    try:
        with pytest.raises(InterruptedError, match="no disk here"):
            handler.run(step.assign_add, 1)
    finally:
        for number, previous in before.items():
            if signal.getsignal(number) != previous:  # not of threads
                signal.signal(number, previous)
    assert manager.latest_checkpoint is None
    step.assign_add(1)


TOLD = """
import os, signal, sys
import mpidist

strategy = mpidist.MPIStrategy(device="cpu")
with strategy.scope():
    step = mpidist.Variable(0)
handler = mpidist.experimental.PreemptionCheckpointHandler(
    None, mpidist.Checkpoint(step=step), "run"
)
while handler.total_run_calls < 6:
    handler.run(step.assign_add, 1)
    if strategy.replica_id == 1 and handler.total_run_calls == 4 and sys.argv[1] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
if strategy.replica_id == 0:
    print("done", step.numpy())
"""


def test_a_job_that_is_told_to_end_leaves_with_42_and_goes_on(tmp_path):
    for number, code, output in (("1", 42, ""), ("2", 0, "done 6")):
        result = run_ranks(2, ["-c", TOLD, number], timeout=100, cwd=tmp_path)
        assert result.returncode == code, result.stderr
        assert result.stdout.strip() == output
        (name,) = os.listdir(tmp_path / "run")
        assert int(mpidist.load_checkpoint(tmp_path / "run" / name)["step"]) == 4


@pytest.mark.mpi
@pytest.mark.core
def test_rank_0_leaves_in_a_save_and_all_leave(strategy, folder, rank, monkeypatch):
    step = variable(strategy, 1)
    if rank == 0:  # as a handler of a signal would
        monkeypatch.setattr(os, "fsync", lambda fd: sys.exit(7))
    with pytest.raises(SystemExit) as caught:
        mpidist.Checkpoint(step=step).save(folder / "a")
    assert caught.value.code == 7
    if rank == 0:
        assert not list(folder.iterdir())
    step.assign_add(1)


def test_the_name_of_its_counter_is_taken(tmp_path):
    """The variable was replaced, and not saved."""
    checkpoint = mpidist.Checkpoint(total_run_calls=mpidist.Variable(7))
    for _ in range(2):
        with pytest.raises(ValueError, match="the checkpoint has an object 'total_run"):
            mpidist.experimental.PreemptionCheckpointHandler(None, checkpoint, tmp_path)
    assert checkpoint.total_run_calls == 7
