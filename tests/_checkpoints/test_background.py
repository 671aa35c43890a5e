"""Saves with `wait=False`: what is written, who waits for it, and where errors go."""

from __future__ import annotations

import errno
import os
import threading
import time

import numpy as np
import pytest
from checkpoint_objects import Iterator, checkpoint_of, variable
from launching import run_ranks
from replicas import (
    assert_usable,
    core_on_ranks,
    everywhere,
    on_ranks,
    rarely,
    set_deadline,
)

import mpidist


class Disk:
    """Has `os.fsync` wait, on this rank, until it is let go, and then perhaps fail."""

    def __init__(self, monkeypatch):
        self.event = threading.Event()
        self.error = None
        self._fsync = os.fsync
        if monkeypatch is not None:
            monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd):
        assert self.event.wait(60)
        if self.error is not None:
            raise self.error
        self._fsync(fd)

    def let_go(self, error=None):
        self.error = error
        self.event.set()


@pytest.fixture
def disk(monkeypatch, rank):
    """Return a disk that waits on rank 0."""
    made = Disk(monkeypatch if rank == 0 else None)
    everywhere(None)
    yield made
    made.event.set()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")


@core_on_ranks
def test_what_is_saved_is_the_state_at_the_call(strategy, folder, rank, disk):
    w, step = variable(strategy, np.arange(1000.0)), variable(strategy, 1)
    data = Iterator()
    data.state = lambda: {"position": 3, "rows": rows}
    data.restore = lambda state: np.copyto(rows, state["rows"])
    rows = np.full(5000, 2.5)
    checkpoint = mpidist.Checkpoint(w=w, step=step, data=data)
    path = checkpoint.save(folder / "a", wait=False)
    assert path == everywhere(str(folder / "a"))[0]
    w.assign(np.zeros(1000))
    step.assign(2)
    rows[:] = 7
    assert mpidist.latest_checkpoint(folder) is None
    assert_usable(strategy)
    disk.let_go()
    checkpoint.wait()
    checkpoint.wait()
    if rank == 0:
        assert mpidist.latest_checkpoint(folder) == path
    checkpoint.restore(path)
    np.testing.assert_array_equal(w, np.arange(1000.0))
    assert step.numpy() == 1
    assert (rows == 2.5).all()


def test_a_thread_that_waits_for_another_saves_where_the_call_was(
    new_strategy, tmp_path, rank, disk, monkeypatch
):
    (tmp_path / "other" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("other/run")
    monkeypatch.chdir(tmp_path)
    made = [checkpoint_of(new_strategy(), v=1.0) for _ in range(2)]
    for checkpoint, name in zip(made, ("a", "link/../b"), strict=True):
        checkpoint.save(name, wait=False)
    monkeypatch.chdir("other")
    disk.let_go()
    for checkpoint in made:
        checkpoint.wait()
    if rank == 0:
        assert sorted(os.listdir(tmp_path)) == ["a", "link", "other"]
        assert sorted(os.listdir(tmp_path / "other")) == ["b", "run"]


@on_ranks
@pytest.mark.parametrize("how", ["wait", "save", "restore", "close", "manager"])
def test_who_waits_for_it_and_raises_its_error(new_strategy, folder, rank, disk, how):
    strategy = new_strategy()
    checkpoint = checkpoint_of(strategy, w=1.0)
    other = checkpoint_of(strategy, v=1.0)
    calls = {
        "wait": other.wait,
        "save": lambda: other.save(folder / "b"),
        "restore": lambda: other.restore(folder / "b"),
        "close": strategy.close,
        "manager": lambda: mpidist.CheckpointManager(other, folder),
    }
    checkpoint.save(folder / "a", wait=False)
    set_deadline(strategy, 60.0)
    disk.let_go(FULL)
    with pytest.raises(OSError, match="No space left on device: 'the file'") as caught:
        calls[how]()
    assert caught.value.errno == errno.ENOSPC
    assert any("wait=False" in note for note in caught.value.__notes__)
    disk.error = None
    if rank == 0:
        assert os.listdir(folder) == []
    assert_usable(strategy)
    checkpoint.save(folder / "b", wait=False)
    mpidist.Checkpoint(w=checkpoint.w).restore(folder / "b")
    checkpoint.save(folder / "b", wait=False)
    strategy.close()
    if rank == 0:
        assert os.listdir(folder) == ["b"]


@on_ranks
def test_the_manager_knows_a_checkpoint_when_it_is_complete(
    strategy, folder, rank, disk
):
    checkpoint = checkpoint_of(strategy, step=0)
    manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=1)
    path = manager.save(wait=False)
    assert manager.latest_checkpoint is None
    disk.let_go()
    manager.sync()
    assert manager.checkpoints == [path]
    checkpoint.step.assign(1)
    second = manager.save(wait=False)
    assert manager.latest_checkpoint == path  # which is kept until the next save
    assert manager.restore_or_initialize() == second
    assert manager.checkpoints == [path, second]
    disk.error = FULL
    manager.save(wait=False)
    with pytest.raises(OSError, match="No space left"):
        manager.save()
    assert manager.checkpoints == [second]
    disk.error = None
    if rank == 0:
        assert os.listdir(folder) == ["ckpt-2"]
    assert manager.save(wait=False).endswith("ckpt-3")
    checkpoint.wait()
    assert [os.path.basename(x) for x in manager.checkpoints] == ["ckpt-2", "ckpt-3"]


@on_ranks
def test_a_failed_save_begins_no_interval(strategy, folder, disk):
    checkpoint = checkpoint_of(strategy, step=0)
    manager = mpidist.CheckpointManager(
        checkpoint, folder, step_counter=checkpoint.step, checkpoint_interval=3
    )
    manager.save(wait=False)
    disk.let_go(FULL)
    with pytest.raises(OSError, match="No space left"):
        manager.sync()
    disk.error = None
    assert manager.save() == manager.checkpoints[0]
    assert manager.save() is None


@on_ranks
def test_errors_before_the_write_are_raised_at_once(strategy, folder, rank):
    checkpoint = checkpoint_of(strategy, w=1j)
    with pytest.raises(ValueError, match="safetensors has no dtype complex128"):
        checkpoint.save(folder / "a", format="safetensors", wait=False)
    checkpoint.wait()

    def in_replica():
        with pytest.raises(RuntimeError, match="at program level"):
            checkpoint.wait()

    strategy.run(in_replica)


@pytest.mark.guests
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_tensors_are_copied(tmp_path, monkeypatch, library):
    disk = Disk(monkeypatch)
    if library == "torch":
        torch = pytest.importorskip("torch")
        model = torch.nn.Linear(50, 3)
        before = model.weight.detach().clone()
        checkpoint = mpidist.Checkpoint(model=model)
        checkpoint.save(tmp_path / "a", wait=False)
        with torch.no_grad():
            model.weight.zero_()
        name = "model/weight"
    else:
        jax = pytest.importorskip("jax")
        before = np.arange(100.0, dtype=np.float32)
        x = jax.device_put(before)
        checkpoint = mpidist.Checkpoint(tree={"x": x})
        checkpoint.save(tmp_path / "a", wait=False)
        checkpoint.tree = {"x": jax.jit(lambda x: x + 1, donate_argnums=0)(x)}
        name = "tree/x"
    disk.let_go()
    checkpoint.wait()
    np.testing.assert_array_equal(mpidist.load_checkpoint(tmp_path / "a")[name], before)


AT_THE_END = """
import os, sys, time
import numpy as np
import mpidist

how = sys.argv[1]
if how.startswith("alone"):
    weights = mpidist.Variable(np.arange(1000.0))
else:
    from mpidist._strategy.strategy import group_of
    strategy = mpidist.MPIStrategy(device="cpu")
    with strategy.scope():
        weights = mpidist.Variable(np.arange(1000.0))
    # Not to make it in, which takes long on a busy machine.
    group_of(strategy).guard.timeout_seconds = 2.0
fsync = os.fsync

def slow(fd):
    time.sleep(0.7)
    if how.startswith(("fails", "alone")):
        raise OSError(28, "No space left on device", "the file")
    if how == "killed":
        os.kill(os.getpid(), 9)
    fsync(fd)

os.fsync = slow
checkpoint = mpidist.Checkpoint(weights=weights)
# Who is alone does not know of the other one, and takes another path.
checkpoint.save(f"a{os.getpid()}" if how.startswith("alone") else "a", wait=False)
if how == "forks":
    child = os.fork()
    if child == 0:
        try:
            checkpoint.wait()
        except RuntimeError as error:
            assert "fork" in str(error), error
        sys.exit(5)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 5, code
if how == "alone, then others":
    mpidist.MPIStrategy(device="cpu")
if how == "raises":
    raise ValueError("the end")
if how == "killed":
    checkpoint.wait()
"""


@pytest.mark.parametrize(
    ("how", "ranks", "code", "text"),
    [
        ("forks", 2, 0, ""),
        ("fails", 2, 1, "No space left on device: 'the file'"),
        rarely("alone", 1, 1, "No space left on device: 'the file'"),
        ("alone, then others", 2, 1, "No space left on device: 'the file'"),
        ("raises", 2, 1, "ValueError: the end"),
        rarely("killed", 2, None, ""),
    ],
)
def test_the_end_of_the_program(tmp_path, how, ranks, code, text):
    start = time.monotonic()
    result = run_ranks(ranks, ["-c", AT_THE_END, how], timeout=100, cwd=tmp_path)
    assert time.monotonic() - start < 40
    assert result.returncode == code or (code is None and result.returncode)
    assert text in result.stderr
    if how == "forks":
        assert mpidist.load_checkpoint(tmp_path / "a")["weights"].sum() == 499500
    else:
        assert not list(tmp_path.glob("a*"))
