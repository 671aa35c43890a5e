"""CheckpointManager: which checkpoints it keeps, finds, skips and deletes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from checkpoint_objects import (
    Iterator,
    checkpoint_of,
    expected_warnings,
    flip_in_array,
    per_rank,
    variable,
)
from replicas import (
    core_by_mpi,
    core_on_ranks,
    on_ranks,
    raises_everywhere,
)

import mpidist
from mpidist._checkpoints import directory, replace
from mpidist._checkpoints.storage import CheckpointReader


@core_on_ranks
def test_the_manager_keeps_the_newest(strategy, folder, rank):
    step = variable(strategy, 0)
    checkpoint = mpidist.Checkpoint(step=step)
    manager = mpidist.CheckpointManager(checkpoint, folder / "run", max_to_keep=2)
    assert manager.latest_checkpoint is None
    assert manager.checkpoints == []
    assert manager.restore_or_initialize() is None
    for number in (1, 2):
        step.assign_add(1)
        assert manager.save() == f"{manager.directory}/ckpt-{number}"
    step.assign_add(8)
    manager.save(step)  # a variable: the step
    assert manager.save(4) == f"{manager.directory}/ckpt-4"  # a lower number
    assert [Path(p).name for p in manager.checkpoints] == ["ckpt-10", "ckpt-4"]
    assert manager.checkpoint is checkpoint
    if rank == 0:
        assert sorted(os.listdir(folder / "run")) == ["ckpt-10", "ckpt-4"]

    again = mpidist.CheckpointManager(checkpoint, folder / "run", max_to_keep=None)
    assert again.checkpoints == manager.checkpoints
    assert again.save() == f"{manager.directory}/ckpt-11"
    assert again.save(11) == again.latest_checkpoint  # once more, in its place
    assert [Path(p).name for p in again.checkpoints] == ["ckpt-10", "ckpt-4", "ckpt-11"]
    # The first one goes on after the numbers of the other.
    assert manager.save(wait=False) == f"{manager.directory}/ckpt-12"
    assert again.save() == f"{manager.directory}/ckpt-13"
    step.assign(0)
    assert again.restore_or_initialize() == again.latest_checkpoint
    assert step.numpy() == 10
    everybody = per_rank(strategy, again.checkpoints)
    assert everybody.count(everybody[0]) == len(everybody)


@core_by_mpi
def test_the_manager_finds_the_newest_whole_one(strategy, folder, rank):
    step = variable(strategy, 0)
    checkpoint = mpidist.Checkpoint(step=step)
    manager = mpidist.CheckpointManager(checkpoint, folder)
    for _ in range(5):
        step.assign_add(1)
        manager.save()
    if rank == 0:
        flip_in_array(folder / "ckpt-5", "step")
        (folder / "ckpt-4" / "manifest.json").unlink()
        (folder / "ckpt-3" / "arrays-1.npz").unlink()
        (folder / ".ckpt-6.tmp-0a1b2c3d").mkdir()  # of a killed job
        (folder / "ckpt-notes").mkdir()
    with expected_warnings(rank, ["ckpt-3", "ckpt-4", "ckpt-5.*array 'step'"]):
        manager = mpidist.CheckpointManager(checkpoint, folder)
    assert manager.latest_checkpoint == f"{manager.directory}/ckpt-2"
    assert manager.restore_or_initialize() == f"{manager.directory}/ckpt-2"
    assert step.numpy() == 2
    if rank == 0:
        flip_in_array(folder / "ckpt-2", "step")
    with expected_warnings(rank, ["ckpt-2.*array 'step'"]):
        assert manager.restore_or_initialize() == f"{manager.directory}/ckpt-1"
    assert step.numpy() == 1
    assert manager.save() == f"{manager.directory}/ckpt-6"
    if rank == 0:
        assert not list(folder.glob(".*"))
    manager.save(4)  # where a half one was
    other = mpidist.Checkpoint(step=variable(strategy, 0.5))
    with expected_warnings(rank, ["ckpt-2", "ckpt-3", "ckpt-5"], every=False):
        manager = mpidist.CheckpointManager(other, folder)
    with pytest.raises(mpidist.CheckpointError, match="expected float64"):
        manager.restore_or_initialize()  # the program's fault, and not skipped


@pytest.mark.mpi
@pytest.mark.one_size
def test_an_init_fn_that_raises(strategy, folder, rank):
    step = variable(strategy, 0)

    def begin():
        step.assign(3)
        if rank == 1:
            raise FileNotFoundError("no weights")

    manager = mpidist.CheckpointManager(
        mpidist.Checkpoint(step=step), folder, init_fn=begin
    )
    error = FileNotFoundError if rank == 1 else mpidist.ReplicaError
    with pytest.raises(error, match="no weights"):
        manager.restore_or_initialize()
    assert step.assign_add(1).numpy() == 4


@pytest.mark.mpi
@pytest.mark.one_size
def test_training_does_not_begin_anew_if_all_are_damaged(strategy, folder, rank):
    checkpoint, begun = mpidist.Checkpoint(step=variable(strategy, 0)), []

    def manager():
        return mpidist.CheckpointManager(
            checkpoint, folder, init_fn=lambda: begun.append(1)
        )

    one, other = manager(), manager()
    one.save(checkpoint_number=0)
    assert other.restore_or_initialize() is None  # of what was there before
    if rank == 0:
        flip_in_array(folder / "ckpt-0", "step")
    for make in (lambda: one, manager):
        with expected_warnings(rank, ["ckpt-0.*array 'step'"]):
            made = make()
            for _ in range(2):
                raises_everywhere(
                    mpidist.CheckpointError, made.restore_or_initialize, "remove them"
                )
    assert begun == [1]


@pytest.mark.mpi
def test_what_killed_jobs_have_left_is_deleted_before_a_save(
    strategy, folder, rank, monkeypatch
):
    """Their disk may be full of it, so that no save completes before."""
    checkpoint = mpidist.Checkpoint(step=variable(strategy, 0))
    saved = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=None)
    for _ in range(4):
        saved.save()
    if rank == 0:
        for number in range(3):
            (folder / f".ckpt-5.tmp-{number:08x}").mkdir()
        (folder / ".ckpt-best-1.tmp-00000000").mkdir()  # somebody else's
    manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)
    found = []

    def full(fd):
        if not found:
            found.append(sorted(os.listdir(folder)))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            manager.save()
    if rank == 0:
        (new,) = [name for name in found[0] if name.startswith(".ckpt-5.tmp-")]
        others = ".ckpt-best-1.tmp-00000000"
        assert found == [[new, others, "ckpt-3", "ckpt-4"]]
        assert sorted(os.listdir(folder)) == [others, "ckpt-3", "ckpt-4"]
    assert [Path(p).name for p in manager.checkpoints] == ["ckpt-3", "ckpt-4"]
    manager.save()
    assert [Path(p).name for p in manager.checkpoints] == ["ckpt-4", "ckpt-5"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_told(tmp_path, monkeypatch):
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable(1.0))
    manager = mpidist.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    manager.save()

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(replace, "remove", refuse)
    text = r"CheckpointManager\.save: the old .*ckpt-1' cannot be deleted: .*Permission"
    with pytest.warns(RuntimeWarning, match=text):
        path = manager.save()
    assert manager.checkpoints == [path]


@on_ranks
def test_new_checkpoints_are_waited_for_together(strategy, folder, rank, monkeypatch):
    monkeypatch.setattr(directory, "_POLL_SECONDS", 0.01)
    checkpoint = mpidist.Checkpoint(step=variable(strategy, 0))
    own = folder if rank == 0 else "nowhere"
    answers = [False, True]
    verified, verify = [], CheckpointReader.verify
    monkeypatch.setattr(
        CheckpointReader, "verify", lambda x: (verified.append(x.path), verify(x))
    )
    with strategy.scope():
        timeout_fn = (lambda: answers.pop(0)) if rank == 0 else None
        paths = mpidist.checkpoints_iterator(own, timeout=0.05, timeout_fn=timeout_fn)
        assert list(paths) == []
        assert answers == ([] if rank == 0 else [False, True])
        checkpoint.save(folder / "first")
        found = []
        for path in mpidist.checkpoints_iterator(own, timeout=0.05):
            found.append(Path(path).name)
            if len(found) < 3:
                checkpoint.save(folder / f"next-{len(found)}")
        assert found == ["first", "next-1", "next-2"]
        assert len(set(verified)) == len(verified)  # each once


@on_ranks
def test_errors_of_waiting_for_checkpoints(strategy, folder, rank):
    def wait(*args, **kwargs):
        with strategy.scope():
            next(mpidist.checkpoints_iterator(*args, **kwargs))

    raises_everywhere(TypeError, lambda: wait(folder, timeout="x" if rank == 0 else 0))
    raises_everywhere(KeyError, lambda: wait(folder, timeout=0, timeout_fn={}.popitem))


@on_ranks
def test_checkpoints_without_arrays(strategy, folder):
    """A reader of one is false, as an empty dict: managers never found them."""
    progress = Iterator()
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(progress=progress)
        for number in range(3):
            manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)
            newest = manager.restore_or_initialize()
            assert (newest is None) == (number == 0)
            assert newest == manager.latest_checkpoint
            manager.save()
    assert len(manager.checkpoints) == 2


def test_latest_checkpoint_finds_those_of_all_names(tmp_path):
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable(1.0))
    assert mpidist.latest_checkpoint(tmp_path) is None
    checkpoint.save(tmp_path / "ckpt")  # a notebook of TensorFlow's
    assert mpidist.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt")
    manager = mpidist.CheckpointManager(checkpoint, tmp_path, checkpoint_name="model")
    path = manager.save()
    (tmp_path / "other").mkdir()
    (tmp_path / "notes").write_text("x")
    assert mpidist.latest_checkpoint(tmp_path) == path
    assert mpidist.latest_checkpoint(path) == path  # after `if isdir(path)`
    assert mpidist.latest_checkpoint(os.path.relpath(path)) == path  # an absolute one
    assert mpidist.load_checkpoint(tmp_path).path == path  # as in TensorFlow's guide
    with pytest.raises(TypeError, match=r"expected a path.* got None .*; where"):
        mpidist.load_checkpoint(mpidist.latest_checkpoint(tmp_path / "none"))
    assert mpidist.latest_checkpoint(tmp_path, "model") == path
    assert mpidist.latest_checkpoint(tmp_path, "best") is None
    hidden = mpidist.Checkpoint(v=mpidist.Variable(1)).save(tmp_path / "b" / ".best")
    assert mpidist.latest_checkpoint(tmp_path / "b") == hidden
    flip_in_array(tmp_path / "model-1", "v")
    with pytest.warns(RuntimeWarning, match=r"model-1.* is skipped"):
        assert mpidist.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt")


def test_arguments_of_the_manager(tmp_path):
    checkpoint = mpidist.Checkpoint(step=mpidist.Variable(0))
    counter = r"write `step_counter=optimizer\.iter"
    for arguments, error, message in (
        ({"max_to_keep": 0}, ValueError, "1 or more"),
        ({"checkpoint_name": "a/b"}, ValueError, "without a slash"),
        ({"format": "hdf5"}, ValueError, '"npz" or "safetensors"'),
        ({"checkpoint_interval": 0}, ValueError, "1 or more, got 0"),
        ({"checkpoint_interval": 3}, TypeError, counter),
        ({"checkpoint_interval": 3, "step_counter": 7}, TypeError, counter),
    ):
        with pytest.raises(error, match=message):
            mpidist.CheckpointManager(checkpoint, tmp_path, **arguments)
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/below"):
        with pytest.raises(NotADirectoryError, match=r"expected a directory, .*/file'"):
            mpidist.CheckpointManager(checkpoint, tmp_path / place)
    with pytest.raises(TypeError, match=r"CheckpointManager\(mpidist.Checkpoint"):
        mpidist.CheckpointManager(tmp_path, checkpoint)
    manager = mpidist.CheckpointManager(checkpoint, tmp_path)
    with pytest.raises(TypeError, match=r"an int, or a variable of .* got 1\.5"):
        manager.save(1.5)
    with pytest.raises(ValueError, match="0 or more"):
        manager.save(-1)


@pytest.mark.mpi
@pytest.mark.replicas(2)
@pytest.mark.one_size
def test_an_interval_of_a_counter_leaves_saves_out(strategy, folder):
    step = variable(strategy, 0)
    checkpoint = mpidist.Checkpoint(step=step)
    begun = []
    settings = {"step_counter": step, "checkpoint_interval": 3}
    manager = mpidist.CheckpointManager(
        checkpoint, folder / "run", init_fn=lambda: begun.append(1), **settings
    )
    assert manager.checkpoint_interval == 3
    assert manager.restore_or_initialize() is None
    assert begun == [1]
    saved = []
    for _ in range(7):
        step.assign_add(1)
        if manager.save(step) is not None:
            saved.append(int(step))
    assert saved == [1, 4, 7]
    step.assign_add(1)
    assert manager.save(step, check_interval=False) == manager.latest_checkpoint
    assert manager.save(step, check_interval=False) is None  # there is one

    again = mpidist.CheckpointManager(checkpoint, folder / "run", **settings)
    assert again.restore_or_initialize() == manager.latest_checkpoint
    step.assign_add(2)
    assert again.save() is None  # 2 steps since the restored one
    step.assign_add(1)
    assert again.save() is not None


@pytest.mark.mpi
@pytest.mark.replicas(2)
@pytest.mark.one_size
def test_counters_that_differ_between_ranks(strategy, folder, rank):
    own = mpidist.Variable(3 * rank)  # outside of the scope
    manager = mpidist.CheckpointManager(
        checkpoint_of(strategy, step=0), folder, step_counter=own, checkpoint_interval=2
    )
    texts = raises_everywhere(mpidist.CollectiveMismatchError, manager.save)
    assert "rank 1: CheckpointManager.save with a step_counter of 3, None" in texts[0]
    own.assign(4)
    assert manager.save() == manager.latest_checkpoint
