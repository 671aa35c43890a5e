"""What can be saved, by which name, and with which state."""

from __future__ import annotations

import enum
import random

import numpy as np
import pytest
from checkpoint_objects import Iterator
from replicas import (
    on_ranks,
    raises_everywhere,
)

import mpidist
from mpidist._checkpoints import manifest


@on_ranks
@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox", "SFC64"])
def test_generators_of_all_kinds(strategy, folder, kind):
    rng = np.random.Generator(getattr(np.random, kind)(1))
    rng.integers(10, size=3, dtype=np.uint16)  # half of a word stays in the state
    checkpoint = mpidist.Checkpoint(rng=rng, legacy=np.random.RandomState(2))
    with strategy.scope():
        checkpoint.save(folder / "a")
        expected = rng.normal(size=4), checkpoint.legacy.normal(size=3)
        rng.normal(size=9)
        checkpoint.restore(folder / "a")
    np.testing.assert_array_equal(rng.normal(size=4), expected[0])
    np.testing.assert_array_equal(checkpoint.legacy.normal(size=3), expected[1])


def test_a_position_outside_the_buffer_of_a_random_state(strategy, folder):
    """NumPy would take it, and end the process when it draws."""
    kind, keys, _, *rest = np.random.RandomState(0).get_state()
    legacy, taken = Iterator(), []
    legacy.state = lambda: (kind, keys, 10**9, *rest)
    legacy.restore = taken.append
    checkpoint = mpidist.Checkpoint(legacy=legacy)
    checkpoint.save(folder / "a")
    for message in raises_everywhere(
        mpidist.CheckpointError, lambda: checkpoint.restore(folder / "a")
    ):
        assert "expected a position from 0 to 624, got 1000000000" in message
    assert taken == []


@pytest.mark.parametrize("file_format", ["npz", "safetensors"])
def test_states_come_back_as_they_were(tmp_path, file_format):
    kind = enum.Enum("Kind", {"RED": "red"}, type=str)
    state = {
        "list": [1, 2.5, None, True, "x", -0.0, float("inf")],
        "tuple": (1, (2, [3]), b"\0\xff", bytearray(b"x")),
        "big": 2**200,
        "complex": 1 - 2j,
        3: {"$array": 1, ("a", 1): "b"},
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "scalar": np.float32(0.1),
    }
    it, got = Iterator(), []
    # A member of an enum as its value, and an array of the other byte order.
    it.state = lambda: {**state, "kind": kind.RED, "large": np.arange(5e3, dtype=">f8")}
    it.restore = got.append
    checkpoint = mpidist.Checkpoint(it=it)
    checkpoint.save(tmp_path / "a", format=file_format)
    checkpoint.restore(tmp_path / "a")
    (read,) = mpidist.load_checkpoint(tmp_path / "a").states["it"]
    for found in (got[0], read):
        assert found.pop("kind") == kind.RED
        np.testing.assert_array_equal(found.pop("large"), np.arange(5e3))
        assert repr(found) == repr(state)
        assert np.signbit(found["list"][5])


@on_ranks
def test_an_array_with_the_name_of_that_of_another_rank(strategy, folder, rank, size):
    """Rank 1's "a" replaced it in the file."""
    it, got = Iterator(), []
    it.state = lambda: {"a": own, "a (rank 1)": 10 + own}
    it.restore = got.append
    own = np.full(3000, float(rank))
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(it=it)
        checkpoint.save(folder / "a")
        checkpoint.restore(folder / "a")
    assert [x.tolist() for x in got[0].values()] == [[rank] * 3000, [10 + rank] * 3000]


def test_what_could_not_be_restored_is_not_saved(tmp_path, monkeypatch):
    it = Iterator()
    it.state = lambda: [1] * 1000
    checkpoint = mpidist.Checkpoint(it=it)
    checkpoint.save(tmp_path / "a")
    for state, message in (
        (np.ma.masked_equal([1, 2], 2), "MaskedArray, which cannot be saved"),
        ({"f": len}, r"'it': its state has <built-in .* len>"),
    ):
        it.state = lambda state=state: state
        with pytest.raises(TypeError, match=message):
            checkpoint.save(tmp_path / "a")
    it.state = lambda: [2] * 1000
    monkeypatch.setattr(manifest, "_LARGEST_MANIFEST", 1000)
    with pytest.raises(ValueError, match="keep long lists of numbers"):
        checkpoint.save(tmp_path / "a")
    monkeypatch.undo()
    assert mpidist.load_checkpoint(tmp_path / "a").states["it"] == ([1] * 1000,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"step = mpidist.Variable\(3\)"),
        (2.5, r"step = mpidist.Variable\(2.5\)"),
        (np.zeros(3), r"step = mpidist.Variable\(array\)"),
        ("text", "a small class with these two methods"),
        (len, "cannot be saved; expected a `mpidist.Variable`"),
        ({(1, 2): 3}, r"the keys of 'step' to be str or int, got \(1, 2\)"),
        (type("M", (), {"variables": [3]})(), r"`step.variables` to be a list"),
    ],
)
def test_what_can_not_be_saved_is_refused_at_once(value, message):
    with pytest.raises(TypeError, match=message):
        mpidist.Checkpoint(step=value)


def test_names():
    v = mpidist.Variable(0)
    with pytest.raises(ValueError, match="would both be 'a/b'"):
        mpidist.Checkpoint(a={"b": v}, **{"a/b": v})
    with pytest.raises(ValueError, match="'save' is the name of its method"):
        mpidist.Checkpoint(save=v)
    with pytest.raises(TypeError, match=r"write `mpidist.Checkpoint\(model=model\)`"):
        mpidist.Checkpoint(v)
    with pytest.raises(ValueError, match="a null byte"):
        mpidist.Checkpoint(a={"b\0": v})
    checkpoint = mpidist.Checkpoint(v=v)
    assert checkpoint.v is v
    with pytest.raises(AttributeError, match="no object 'w'; it has v"):
        _ = checkpoint.w
    checkpoint.w = mpidist.Variable(0)
    assert "2 variables" in repr(checkpoint)
    checkpoint.v = v
    with pytest.raises(TypeError, match=r"step = mpidist.Variable\(3\)"):
        checkpoint.step = 3
    assert "2 variables" in repr(checkpoint)
    setattr(checkpoint, "x/y", v)
    with pytest.raises(ValueError, match="would both be"):
        checkpoint.x = {"y": v}
    checkpoint = mpidist.Checkpoint(v=v)
    nested = mpidist.Checkpoint(inner=checkpoint, random=random.Random(3))
    assert "1 variables of 8 bytes, 1 states" in repr(nested)


def test_an_optimizer_may_make_its_variables_later(tmp_path):
    class Late:
        made = None

        @property
        def variables(self):
            if self.made is None:
                raise RuntimeError("write `optimizer.build(variables)`")
            return self.made

    optimizer = Late()
    checkpoint = mpidist.Checkpoint(optimizer=optimizer)
    assert "0 variables" in repr(checkpoint)
    with pytest.raises(RuntimeError, match="build"):
        checkpoint.save(tmp_path / "a")
    optimizer.made = [mpidist.Variable(3.0, name="slot")]
    checkpoint.save(tmp_path / "a")
    assert list(mpidist.load_checkpoint(tmp_path / "a")) == ["optimizer/slot"]


def test_the_state_of_another_object_is_none_of_an_optimizer(tmp_path):
    """It was taken for that of one without variables yet, which got nothing."""
    path = mpidist.Checkpoint(optimizer=Iterator()).save(tmp_path / "a")
    checkpoint = mpidist.Checkpoint(optimizer=mpidist.optimizers.SGD(0.1))
    with pytest.raises(mpidist.CheckpointError, match=r"missing in .*: 'optimizer'"):
        checkpoint.restore(path)
    it = Iterator()
    it.state = lambda: {"position": np.ones(3000)}  # an array, as slots are
    mpidist.Checkpoint(optimizer=it).save(tmp_path / "a")
    with pytest.raises(mpidist.CheckpointError, match=r"'optimizer': .* got a state"):
        checkpoint.restore(path, partial=True)
    objects = {"o": mpidist.optimizers.SGD(0.1), "o/w": mpidist.Variable(1.0)}
    checkpoint = mpidist.Checkpoint(**objects)
    checkpoint.restore(checkpoint.save(tmp_path / "a"))


@on_ranks
def test_states_to_merge_share_no_memory(strategy, alone, same_folder, rank, size):
    """Equal arrays of several ranks are in the file once, and were one array."""

    def merge(states):
        total, *others = states
        for other in others:
            total["a"] *= 10
            total["a"] += other["a"]
        return total

    it, got = Iterator(), []
    it.state = lambda: {"a": np.ones(3000), "rank": rank}
    it.restore = got.append
    it.merge_states = merge
    checkpoint = mpidist.Checkpoint(it=it)
    with strategy.scope():
        checkpoint.save(same_folder / "a")
    with alone.scope():
        checkpoint.restore(same_folder / "a")
    assert set(got[0]["a"]) == {float("1" * size)}


def test_a_state_that_is_an_array(tmp_path):
    """Without it among the objects it was not missed, nor left for one attached."""
    it, v = Iterator(), mpidist.Variable(1)
    it.state = lambda: np.ones(3000)
    path = mpidist.Checkpoint(it=it, v=v).save(tmp_path / "a")
    checkpoint = mpidist.Checkpoint(v=v)
    with pytest.raises(mpidist.CheckpointError, match="only in the checkpoint: 'it'"):
        checkpoint.restore(path)
    status, got = checkpoint.restore(path, partial=True), []
    it.restore = got.append
    checkpoint.it = it
    np.testing.assert_array_equal(got[0], np.ones(3000))
    status.assert_consumed()


@on_ranks
def test_arrays_of_two_states_with_one_name(strategy, folder):
    """Both objects got the array of the second one."""
    first, second = Iterator(), Iterator()
    first.state = lambda: {"b": {"x": np.ones(3000)}}
    second.state = lambda: {"x": np.zeros(3000)}
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(d={"a": first, "a/b": second})
        for message in raises_everywhere(
            ValueError, lambda: checkpoint.save(folder / "a")
        ):
            assert "'d/a' and one in that of 'd/a/b' would both be 'd/a/b/x'" in message


@on_ranks
def test_a_dict_with_another_order_on_one_rank(strategy, folder, rank):
    """Such as one made of a set: its arrays were taken for those of another state."""
    it = Iterator()
    values = {"a": np.zeros(3000), "b": np.ones(3000)}
    it.state = lambda: {
        **{key: values[key] for key in ("ba" if rank else "ab")},
        "numbers": {key: [key] for key in ((2, 1) if rank else (1, 2))},
    }
    with strategy.scope():
        mpidist.Checkpoint(it=it).save(folder / "a")
    if rank == 0:
        assert len(mpidist.load_checkpoint(folder / "a").states["it"]) == 1


@on_ranks
def test_the_same_values_at_other_places(strategy, folder, rank):
    """Their sums are equal, so all ranks got those of rank 0."""
    it, got = Iterator(), []
    own = np.zeros(10000)
    own[2000 + 1000 * rank] = 1
    it.state = lambda: {"own": own}
    it.restore = got.append
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(it=it)
        checkpoint.save(folder / "a")
        checkpoint.restore(folder / "a")
    np.testing.assert_array_equal(got[0]["own"], own)
