"""Checkpoints: all that is saved comes back, or none, and files are always whole."""

from __future__ import annotations

import collections
import errno
import json
import os
import resource
import shutil
import struct
import time
import tracemalloc
import types

import numpy as np
import posing
import pytest
from checkpoint_objects import (
    Iterator,
    assert_same_bits,
    checkpoint_of,
    per_rank,
    values_of,
    variable,
)
from launching import run_python
from replicas import (
    Traffic,
    assert_usable,
    core_by_mpi,
    core_on_ranks,
    everywhere,
    on_ranks,
    set_deadline,
)

import mpidist
from mpidist._base.errors import damaged_checkpoint
from mpidist._checkpoints import storage
from mpidist._strategy.strategy import group_of
from mpidist._values.variable import array_of

DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int64",
    "float16",
    "float32",
    "float64",
    "longdouble",
    "complex64",
    "complex128",
    "bfloat16",
]


SHAPES = [(), (0, 3), (5,), (3, 4)]


# --- there and back -----------------------------------------------------------------


def read_elsewhere(path, format):
    """Return the arrays of a checkpoint, read without mpidist."""
    if format == "npz":
        with np.load(path / "arrays-1.npz", allow_pickle=False) as arrays:
            return dict(arrays)
    raw = (path / "arrays-1.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    dtypes = {"F32": "<f4", "I64": "<i8"}
    found = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if entry["dtype"] in dtypes:
            data = raw[8 + length :][slice(*entry["data_offsets"])]
            x = np.frombuffer(data, dtypes[entry["dtype"]])
            found[name] = x.reshape(entry["shape"])
    return found


@core_on_ranks
@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_arrays_of_all_kinds_come_back_bit_for_bit(strategy, folder, rank, format):
    pytest.importorskip("ml_dtypes")
    values = {
        f"{dtype} {shape} {order}": np.asarray(values_of(dtype, shape), order=order)
        for dtype in DTYPES
        for shape in SHAPES
        for order in "CF"
        if format == "npz" or dtype not in ("longdouble", "complex64", "complex128")
    }
    variables = {name: variable(strategy, x) for name, x in values.items()}
    checkpoint = mpidist.Checkpoint(v=variables)
    path = checkpoint.save(folder / "a", format=format)
    assert path == everywhere(str(folder / "a"))[0]
    for v in variables.values():
        v.assign(np.zeros(v.shape, v.dtype))
    assert len(checkpoint.restore(path)) == len(values)
    for name, x in values.items():
        assert_same_bits(variables[name].numpy(), x)

    if rank == 0:
        reader = mpidist.load_checkpoint(path)
        reader.verify()
        assert sorted(reader) == sorted(f"v/{name}" for name in values)
        elsewhere = read_elsewhere(folder / "a", format)
        for name, x in values.items():
            assert_same_bits(reader[f"v/{name}"], x)
            if x.dtype.name in ("float32", "int64"):
                assert_same_bits(elsewhere[f"v/{name}"], x)


@core_on_ranks
def test_everything_of_a_run_comes_back(strategy, folder):
    weights = variable(strategy, values_of("float64", (3, 2)), name="w")
    bias = variable(strategy, np.zeros(2), name="w")  # names need not be unique
    zeros = np.zeros((3, 2)), np.zeros(2)
    slots = [variable(strategy, x, name="slot") for x in zeros]
    optimizer = types.SimpleNamespace(variables=slots)
    step = variable(strategy, 0)
    rng = np.random.default_rng(3)
    iterator = Iterator()
    checkpoint = mpidist.Checkpoint(
        model=[weights, bias], optimizer=optimizer, step=step, rng=rng, data=iterator
    )
    assert "5 variables" in repr(checkpoint)
    rng.normal(size=5)
    iterator.position = 11
    step.assign_add(4)
    for number, v in enumerate(optimizer.variables):
        v.assign(np.full(v.shape, float(number + 1)))
    checkpoint.save(folder / "a")
    expected = rng.normal(size=5)
    iterator.position = 12
    step.assign_add(1)
    for v in [weights, bias, *optimizer.variables]:
        v.assign_add(np.ones(v.shape))
    names = checkpoint.restore(folder / "a")
    of_objects = ["model/0", "model/1", "optimizer/slot", "optimizer/slot_1"]
    assert names == ["data", *of_objects, "rng", "step"]
    np.testing.assert_array_equal(weights, values_of("float64", (3, 2)))
    np.testing.assert_array_equal(bias, np.zeros(2))
    np.testing.assert_array_equal(optimizer.variables[1], np.full(2, 2.0))
    assert checkpoint.step.numpy() == 4
    assert iterator.position == 11
    np.testing.assert_array_equal(rng.normal(size=5), expected)


@core_on_ranks
def test_a_sync_on_read_variable_is_saved_as_one_value(strategy, folder, rank, size):
    """How it is combined, and restored, is in the programs of tests/conformance."""
    v, none = (
        variable(strategy, np.zeros(3), synchronization="ON_READ", aggregation=kind)
        for kind in ("SUM", "NONE")
    )
    strategy.run(lambda: v.assign_add(np.full(3, 2.0 * rank + 3)))
    checkpoint = mpidist.Checkpoint(v=v)
    checkpoint.save(folder / "a")
    if rank == 0:
        assert "1 variables" in repr(checkpoint)  # which is no collective call
        saved = mpidist.load_checkpoint(folder / "a")["v"]
        np.testing.assert_array_equal(
            saved, [sum(2.0 * r + 3 for r in range(size))] * 3
        )
    with pytest.raises(ValueError, match=r"Could not save 'v'.*aggregation=NONE"):
        mpidist.Checkpoint(v=none).save(folder / "b")
    assert rank != 0 or not (folder / "b").exists()


# --- another number of ranks --------------------------------------------------------


@core_on_ranks
def test_many_ranks_save_and_each_restores_alone(
    strategy, alone, same_folder, rank, size
):
    path = same_folder / "a"
    value, iterator = values_of("float32", (4, 3)), Iterator(10 + rank)
    w = variable(strategy, value)
    rngs = {"shared": np.random.default_rng(5), "own": np.random.default_rng([5, rank])}
    checkpoint = mpidist.Checkpoint(w=w, **rngs, it=iterator)
    checkpoint.save(path)
    iterator.position = 0
    checkpoint.restore(path)
    assert iterator.position == 10 + rank

    mine, it = variable(alone, np.zeros((4, 3), np.float32)), Iterator(3)
    shared, own = np.random.default_rng(8), np.random.default_rng(9)
    fewer = mpidist.Checkpoint(w=mine, shared=shared, own=own, it=it)
    if size > 1:
        text = f"'it' was saved with another state on each of {size} replicas"
        with pytest.raises(mpidist.CheckpointError, match=text):
            fewer.restore(path)
        assert it.position == 3
        assert not mine.numpy().any()
        it.merge_states = lambda states: {
            "position": sum(state["position"] for state in states)
        }
        fewer = mpidist.Checkpoint(w=mine, shared=shared, own=own, it=it)
    fewer.restore(path)
    assert it.position == sum(10 + r for r in range(size))
    assert_same_bits(mine.numpy(), value)
    assert shared.random() == rngs["shared"].random()
    assert own.random() == np.random.default_rng([5, 0]).random()


@core_on_ranks
@pytest.mark.parametrize("own", [False, True])
def test_one_rank_saves_and_many_restore(
    strategy, alone, tmp_path_factory, rank, size, own
):
    path = everywhere(tmp_path_factory.mktemp("c") if rank == 0 else None)[0]
    rng = np.random.default_rng(5)
    w = variable(alone, values_of("float32", (4, 3)))
    if rank == 0:
        mpidist.Checkpoint(w=w, rng=rng).save(path / "a")
    there = variable(strategy, np.zeros((4, 3), np.float32))
    # What the program gives its ranks says whether they are to have the same numbers.
    mine = np.random.default_rng([1, rank] if own else 1)
    checkpoint = mpidist.Checkpoint(w=there, rng=mine)
    checkpoint.restore(path / "a")
    assert_same_bits(there.numpy(), values_of("float32", (4, 3)))
    first = mine.random()
    drawn = per_rank(strategy, first)
    assert drawn[0] == np.random.default_rng(5).random()
    assert len(set(drawn)) == (size if own else 1)
    checkpoint.restore(path / "a")  # the new streams follow from what was saved
    assert mine.random() == first


# --- all or nothing -----------------------------------------------------------------


@core_on_ranks
def test_what_does_not_fit_changes_nothing(strategy, folder, rank):
    w, step = variable(strategy, np.ones((2, 3))), variable(strategy, 1)
    rng = np.random.default_rng(0)
    mpidist.Checkpoint(w=w, old=step, same=step, rng=rng).save(folder / "a")
    other = variable(strategy, np.zeros((3, 2))), variable(strategy, 5.0)
    twister = np.random.Generator(np.random.MT19937(0))
    before = repr(twister.bit_generator.state)
    same = variable(strategy, 9)
    checkpoint = mpidist.Checkpoint(
        w=other[0], old=other[1], new=same, same=same, rng=twister
    )
    with pytest.raises(mpidist.CheckpointError) as caught:
        checkpoint.restore(folder / "a", partial=False)
    text = str(caught.value)
    assert "'w': expected float64 (3, 2), got float64 (2, 3)" in text
    assert "'old': expected float64 (), got int64 ()" in text
    assert "missing in the checkpoint: 'new'" in text
    assert "expected the state of a MT19937, got that of PCG64" in text
    assert "only in the checkpoint" not in text
    assert not caught.value.damaged
    assert same.numpy() == 9
    assert other[0].numpy().sum() == 0
    assert repr(twister.bit_generator.state) == before

    checkpoint = mpidist.Checkpoint(same=same)
    with pytest.raises(
        mpidist.CheckpointError, match=r"only in the .*'old', 'w', 'rng'"
    ):
        checkpoint.restore(folder / "a")
    assert same.numpy() == 9
    assert checkpoint.restore(folder / "a", partial=True) == ["same"]
    assert same.numpy() == 1
    with pytest.raises(mpidist.CheckpointError, match="Nothing of it is among"):
        mpidist.Checkpoint(wieghts=same).restore(folder / "a", partial=True)


@core_on_ranks
@pytest.mark.parametrize(
    "error",
    # The others, taken for a missing or damaged checkpoint, would begin anew.
    [
        ValueError("an error of the user"),
        FileNotFoundError("a file of the user"),
        damaged_checkpoint("a checkpoint of the user"),
    ],
    ids=["refused", "missing", "damaged"],
)
def test_a_state_that_one_rank_refuses_changes_nothing(
    strategy, folder, rank, size, error
):
    w = variable(strategy, 1.0)
    first, second, rng = Iterator(1), Iterator(2), np.random.default_rng(rank)
    checkpoint = mpidist.Checkpoint(w=w, a=first, b=second, aa=rng)
    manager = mpidist.CheckpointManager(checkpoint, folder)
    path = manager.save()
    w.assign(5.0)
    first.position, second.position = 7, 8
    before = rng.bit_generator.state

    def refuse(state):
        if rank == size - 1 and state["position"] == 2:
            raise error
        second.position = state["position"]

    second.restore = refuse
    with pytest.raises(type(error), match="of the user"):
        manager.restore_or_initialize()
    assert (w.numpy(), first.position, second.position) == (5.0, 7, 8)
    assert rng.bit_generator.state == before
    del second.restore
    assert manager.restore_or_initialize() == path
    assert (w.numpy(), first.position, second.position) == (1.0, 1, 2)


class Counts:
    """Gives away its own counter, and fills it again."""

    def __init__(self, **counts):
        self.counts = collections.Counter(counts)

    def state_dict(self):
        return {"counts": self.counts}

    def load_state_dict(self, state):
        self.counts.clear()
        self.counts.update(state["counts"])


def test_a_counter_keeps_its_counts_if_another_object_refuses(tmp_path):
    counts = Counts(a=1)
    checkpoint = mpidist.Checkpoint(a=counts, b=Iterator(-1))
    checkpoint.save(tmp_path / "a")
    counts.counts["a"] = 7
    with pytest.raises(ValueError, match="cannot go back"):
        checkpoint.restore(tmp_path / "a")
    assert counts.counts == {"a": 7}


@core_on_ranks
def test_copies_that_have_drifted_are_found(strategy, folder, rank, size):
    checkpoint = checkpoint_of(strategy, w=np.zeros(1000), step=0)
    checkpoint.save(folder / "a")
    if size == 1:
        return
    odd = size - 1
    if rank == odd:
        array_of(checkpoint.w)[500] = 1e-300
    names = f"rank {odd} has another value than rank"
    with pytest.raises(mpidist.CollectiveMismatchError, match=f"'w'.*{names}"):
        checkpoint.save(folder / "a")
    with pytest.raises(mpidist.CollectiveMismatchError):
        checkpoint.save(folder / "b")
    if rank == 0:
        assert [p.name for p in folder.iterdir()] == ["a"]
    checkpoint.restore(folder / "a")  # which mends them
    checkpoint.save(folder / "b")


@on_ranks
def test_the_padding_of_longdouble_is_no_drift(strategy, folder, rank):
    w = variable(strategy, np.arange(4).astype("longdouble"))
    if w.dtype.itemsize == 16 and np.finfo("longdouble").nmant == 63:
        array_of(w).view(np.uint8)[15::16] = rank + 1
    mpidist.Checkpoint(w=w).save(folder / "a")


# --- failures on rank 0 -------------------------------------------------------------


def test_a_checkpoint_has_the_group_of_its_folder(tmp_path):
    """On clusters the folder of a project gives its group to what is made in it."""
    if os.geteuid():
        pytest.skip("only root may give a folder any group")
    os.chown(tmp_path, -1, 1234)
    tmp_path.chmod(0o2775)
    path = tmp_path / "a"
    mpidist.Checkpoint(v=mpidist.Variable(np.zeros(3))).save(path)
    assert {file.stat().st_gid for file in (path, *path.iterdir())} == {1234}


# What fails, with what, and the call of it at which it does: of a save in which there
# is a checkpoint. A network file system may say that a rename failed that it has done.
REFUSALS = {
    "full": (os, "fsync", errno.ENOSPC, 1),
    "full, without the guard": (os, "fsync", errno.ENOSPC, 1),
    "read-only": (os, "mkdir", errno.EROFS, 1),
    "quota": (os, "fsync", errno.EDQUOT, 2),
    "quota for the manifest": (storage.json, "dumps", errno.EDQUOT, 1),
    "rename of the array file": (os, "rename", errno.EIO, 1),
    "rename of the manifest": (os, "rename", errno.ESTALE, 2),
    "after the array file was renamed": (os, "rename", errno.EIO, -1),
    "after the manifest was renamed": (os, "rename", errno.ENOENT, -2),
}


@core_by_mpi
@pytest.mark.parametrize("how", REFUSALS)
def test_a_file_system_that_refuses_is_told_to_all(
    new_strategy, folder, rank, monkeypatch, how
):
    owner, name, number, at = REFUSALS[how]
    strategy = new_strategy(guard="guard" not in how)
    checkpoint = checkpoint_of(strategy, w=np.arange(5.0), step=1)
    w, step = checkpoint.w, checkpoint.step
    checkpoint.save(folder / "a")
    w.assign(np.full(5, 7.0))
    step.assign(2)
    real, calls = getattr(owner, name), [0]

    def refuse(*args, **kwargs):
        calls[0] += 1
        result = real(*args, **kwargs) if calls[0] != at else None
        if calls[0] == abs(at):
            raise OSError(number, os.strerror(number), "the file")
        return result

    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(owner, name, refuse)
        with pytest.raises(OSError, match="'the file'") as caught:
            checkpoint.save(folder / "a")
        if number == errno.ENOSPC:
            calls[0] = 0
            with pytest.raises(OSError, match="No space left"):
                checkpoint.save(folder / "b")
    assert caught.value.errno == number
    assert bool(calls[0]) == (rank == 0)
    w.assign(np.zeros(5))
    checkpoint.restore(folder / "a")
    done = how == "after the manifest was renamed"
    assert step.numpy() == 1 + done
    np.testing.assert_array_equal(w, np.full(5, 7.0) if done else np.arange(5.0))
    assert_usable(strategy)
    checkpoint.save(folder / "a")
    if rank == 0:
        assert [p.name for p in folder.iterdir()] == ["a"]
        assert len(os.listdir(folder / "a")) == 2


@core_by_mpi
def test_a_folder_that_is_deleted_during_a_save(strategy, folder, rank, monkeypatch):
    checkpoint = checkpoint_of(strategy, w=1.0)
    fsync = os.fsync

    def delete(fd):
        shutil.rmtree(folder / "run", ignore_errors=True)
        fsync(fd)

    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(os, "fsync", delete)
        with pytest.raises(FileNotFoundError, match=r"\.a\.tmp-"):
            checkpoint.save(folder / "run" / "a")
    assert_usable(strategy)
    checkpoint.save(folder / "run" / "a")
    checkpoint.restore(folder / "run" / "a")


@pytest.mark.mpi
def test_a_limit_on_the_file_size_is_met_amid_an_array(strategy, folder, rank):
    checkpoint = checkpoint_of(strategy, a=1, w=np.arange(100_000.0))
    checkpoint.save(folder / "a")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        for format in ("npz", "safetensors"):
            with pytest.raises(OSError, match=r"(?s)File too large.*save to '.*a'"):
                checkpoint.save(folder / "a", format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if rank == 0:
        assert [p.name for p in folder.iterdir()] == ["a"]
    checkpoint.restore(folder / "a")


@pytest.mark.one_size
@pytest.mark.mpi
def test_the_others_wait_for_a_slow_disk(new_strategy, folder, rank, monkeypatch):
    strategy = new_strategy()
    if rank == 0:
        monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(0.9))
    checkpoint = checkpoint_of(strategy, v=1.0)
    start = time.monotonic()  # before rank 0 begins
    set_deadline(strategy, 2.0)
    checkpoint.save(folder / "a")
    assert time.monotonic() - start > 2  # longer than the deadline
    total = strategy.reduce("SUM", strategy.run(lambda: 1), axis=None)
    assert total == strategy.num_replicas_in_sync


@on_ranks
def test_what_a_save_and_a_restore_send(strategy, folder, rank, size):
    if size == 1:
        return
    checkpoint = checkpoint_of(strategy, v=np.zeros(1000), w=np.zeros(1000))

    def sent(call):
        traffic, number = Traffic(strategy), group_of(strategy).guard.sequence
        call()
        headers = group_of(strategy).guard.sequence - number
        return {**traffic.calls, "headers": headers - 1}  # an Ibcast counts as one

    saving = sent(lambda: checkpoint.save(folder / "a"))
    assert saving == {"headers": 3, "Ibcast": 1}
    restoring = sent(lambda: checkpoint.restore(folder / "a"))
    assert restoring == {"headers": 4, "Ibcast": 1, "Bcast": 2}


@on_ranks
def test_paths_that_can_not_be(strategy, folder, rank):
    checkpoint = checkpoint_of(strategy, step=0)
    if rank == 0:
        (folder / "file").write_text("x")
        (folder / "mine").mkdir()
        (folder / "mine" / "thesis.tex").write_text("x")
        (folder / "empty").mkdir()
        (folder / "empty" / ".nfs0000000000000001").touch()  # deleted, but open
    for path in ("missing", "mine"):
        text = f"there is no checkpoint at .*{path}"
        with pytest.raises(FileNotFoundError, match=text):
            checkpoint.restore(folder / path)
    for path, error, text in (
        (folder / "file", FileExistsError, "got a file"),
        (folder / "mine", FileExistsError, "with 'thesis.tex' in it"),
        (folder / "file" / "below", NotADirectoryError, None),
        (3, TypeError, "expected a path"),
    ):
        with pytest.raises(error, match=text):
            checkpoint.save(path)
    with pytest.raises(ValueError, match='"npz" or "safetensors"'):
        checkpoint.save(folder / "a", format="pickle")
    checkpoint.save(folder / "empty")
    checkpoint.save(folder / "new" / "folders" / "a")
    checkpoint.restore(folder / "new" / "folders" / "a")


@core_on_ranks
def test_ranks_that_save_different_things(strategy, folder, rank, size):
    v = variable(strategy, 0.0)
    checkpoint = mpidist.Checkpoint(**{f"v{rank}": v})
    if size > 1:
        with pytest.raises(mpidist.CollectiveMismatchError, match=r"Checkpoint.save"):
            checkpoint.save(folder / "a")
        iterator = Iterator()
        if rank == size - 1:
            iterator.state = lambda: {"f": len}
        with pytest.raises(TypeError, match="'it': its state has"):
            mpidist.Checkpoint(v=v, it=iterator).save(folder / "a")
    mpidist.Checkpoint(v=v).save(folder / "a")


@on_ranks
def test_the_path_of_rank_0_is_used(strategy, folder, rank, size):
    checkpoint = checkpoint_of(strategy, v=1.0)
    mine = folder / ("a" if rank == 0 else f"own-{rank}/a")
    assert checkpoint.save(mine) == str(everywhere(folder / "a")[0])
    checkpoint.v.assign(2.0)
    assert checkpoint.restore(mine) == ["v"]
    assert checkpoint.v == 1.0
    # Of ranks that do not see the folder, `latest_checkpoint` is None.
    assert checkpoint.restore(mine if rank == 0 else None) == ["v"]
    assert checkpoint.restore(None if rank == 0 else mine) == []
    if rank == 0:
        assert os.listdir(folder) == ["a"]
    for other in (3, None) if size > 1 else ():
        with pytest.raises(TypeError, match="expected a path"):
            checkpoint.save(mine if rank == 0 else other)
    parent = folder / ("run" if rank == 0 else f"run-{rank}")
    manager = mpidist.CheckpointManager(checkpoint, parent, max_to_keep=1)
    assert manager.directory == str(parent)
    for _ in range(2):
        manager.save()
        if rank != 0:  # as TensorFlow's tutorial cleans up
            assert os.listdir(parent) == []
            shutil.rmtree(parent)
    assert manager.latest_checkpoint == str(everywhere(folder)[0] / "run" / "ckpt-2")


@on_ranks
def test_no_path_restores_nothing(strategy, folder):
    """As in `checkpoint.restore(manager.latest_checkpoint)` at the first start."""
    checkpoint = checkpoint_of(strategy, v=1.0)
    manager = mpidist.CheckpointManager(checkpoint, folder / "run")
    status = checkpoint.restore(manager.latest_checkpoint)
    assert status == []
    assert status.expect_partial() is status
    for check in (
        status.assert_consumed,
        status.assert_existing_objects_matched,
        status.assert_nontrivial_match,
    ):
        with pytest.raises(AssertionError, match="the path was None"):
            check()
    assert checkpoint.v == 1.0
    manager.save()
    assert checkpoint.restore(manager.latest_checkpoint).assert_consumed() == ["v"]


@on_ranks
def test_only_at_program_level(strategy, folder, rank):
    checkpoint = checkpoint_of(strategy, v=0.0)

    def in_merge():
        context = mpidist.get_replica_context()
        context.merge_call(lambda strategy: checkpoint.save(folder / "a"))

    for function, level in (
        (lambda: checkpoint.save(folder / "a"), "in a replica context"),
        (lambda: checkpoint.restore(folder / "a"), "in a replica context"),
        (in_merge, "inside merge_fn"),
    ):
        with pytest.raises(RuntimeError, match=f"at program level.*{level}"):
            strategy.run(function)
    with strategy.scope():
        checkpoint.save(folder / "a")
        checkpoint.restore(folder / "a")


@on_ranks
def test_which_ranks_save_together(strategy, new_strategy, folder, size):
    rng = np.random.default_rng(0)
    checkpoint = mpidist.Checkpoint(rng=rng)
    if size > 1:
        with pytest.raises(RuntimeError, match=r"write `with strategy.scope\(\):`"):
            checkpoint.save(folder / "a")
    other = new_strategy()
    with pytest.raises(ValueError, match="belong to 2 strategies"):
        mpidist.Checkpoint(a=variable(strategy, 0), b=variable(other, 0))
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(rng=rng)
    checkpoint.save(folder / "a")  # by the strategy in whose scope it was made
    checkpoint = checkpoint_of(strategy, a=0)
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different Strategy"):
        checkpoint.save(folder / "a")


@on_ranks
def test_a_plain_variable_is_saved_where_it_is_the_same(strategy, folder, rank, size):
    plain = mpidist.Variable(float(rank))  # outside every scope: one of each process
    checkpoint = mpidist.Checkpoint(plain=plain, step=variable(strategy, 0))
    if size > 1:
        with pytest.raises(mpidist.CollectiveMismatchError, match="'plain'"):
            checkpoint.save(folder / "a")
    plain.assign(3.0)
    checkpoint.save(folder / "a")
    plain.assign(float(rank))
    checkpoint.restore(folder / "a")
    assert plain.numpy() == 3.0


@pytest.mark.mpi
@pytest.mark.parametrize("wait", [True, False])
def test_variables_on_a_gpu(new_strategy, folder, rank, monkeypatch, wait):
    posing.install(monkeypatch)
    strategy = new_strategy(device="gpu")
    value = values_of("float32", (3, 4))
    checkpoint = checkpoint_of(strategy, w=value, step=3)
    w = checkpoint.w
    assert isinstance(w.values[0], posing.ndarray)
    checkpoint.save(folder / "a", wait=wait)
    w.assign(np.zeros((3, 4), np.float32))
    checkpoint.restore(folder / "a")
    assert isinstance(w.values[0], posing.ndarray)
    assert_same_bits(w.numpy(), value)
    assert checkpoint.step.numpy() == 3


# --- without MPI ---------------------------------------------------------------------


def test_without_mpi(tmp_path):
    """In a process that has made no strategy: as in a notebook."""
    program = """
import sys, random
import numpy as np
import mpidist
from mpidist._base.errors import damaged_checkpoint
from mpidist._checkpoints import storage

v, rng, dice = mpidist.Variable([1.0, 2.0]), np.random.default_rng(0), random.Random(0)
checkpoint = mpidist.Checkpoint(inner=mpidist.Checkpoint(v=v), rng=rng, dice=dice)
checkpoint.save("a")
drawn = rng.random(), dice.random()
v.assign([3.0, 4.0])
assert checkpoint.restore("a") == ["dice", "inner/v", "rng"]
assert v.numpy().tolist() == [1.0, 2.0]
assert drawn == (rng.random(), dice.random())
print(mpidist.load_checkpoint("a"))
assert "mpi4py.MPI" not in sys.modules
"""
    first, *rest = run_python("-c", program, cwd=tmp_path).splitlines()
    assert "1 arrays of 16 bytes, 2 states, saved on 1 replicas at 20" in first
    assert rest == ["  inner/v: float64 (2,)", "  dice: state", "  rng: state"]


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_neither_writing_nor_reading_makes_a_second_copy(tmp_path, format):
    value = np.random.default_rng(0).random(2**23)  # 64 MiB
    v = mpidist.Variable(value)
    checkpoint = mpidist.Checkpoint(v=v)
    checkpoint.save(tmp_path / "a", format=format)  # imports, and makes, what it needs
    tracemalloc.start()
    try:
        checkpoint.save(tmp_path / "a", format=format)
        assert tracemalloc.get_traced_memory()[1] < value.nbytes / 2
        reader = mpidist.load_checkpoint(tmp_path / "a")
        tracemalloc.reset_peak()
        np.testing.assert_array_equal(reader["v"][:9], value[:9])
        assert tracemalloc.get_traced_memory()[1] < value.nbytes * 1.5
        tracemalloc.reset_peak()
        checkpoint.restore(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < value.nbytes * 1.5
    finally:
        tracemalloc.stop()
