"""Files and states of datasets that someone has changed: an error, nothing executed."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

import mpidist
from mpidist.data import Dataset

EVENTS = ("open", "pickle.find_class", "os.mkdir")


class Evil:
    """An object whose unpickling makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def watched():
    """Return what is opened and unpickled during the test."""
    heard = []

    def hear(event, args):
        if heard is not None and event in EVENTS:
            heard.append((event, str(args[0])))

    sys.addaudithook(hear)  # for good: it cannot be removed
    yield heard
    heard = None


def test_a_dataset_opens_no_file_and_unpickles_nothing(tmp_path, watched):
    evil = tmp_path / "evil"
    np.save(tmp_path / "rows-0.npy", np.arange(4))
    objects = np.array([Evil(evil)], object)
    np.save(tmp_path / "rows-1.npy", objects, allow_pickle=True)
    os.mkfifo(tmp_path / "rows-2.npy")
    (tmp_path / "rows-3.npy").symlink_to("/nowhere")
    (tmp_path / "rows-4.npy").mkdir()
    watched.clear()
    files = Dataset.list_files(str(tmp_path / "rows-*.npy"), shuffle=False)
    names = [os.path.basename(str(name)) for name in files]
    assert names[:2] == ["rows-0.npy", "rows-1.npy"]
    assert not [at for _, at in watched if at.startswith(str(tmp_path))]

    strategy = mpidist.get_strategy()
    rows = files.take(2).interleave(
        lambda name: Dataset.from_tensor_slices(np.load(str(name))), cycle_length=1
    )
    batches = iter(strategy.experimental_distribute_dataset(rows.batch(2)))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="allow_pickle=False"):
        next(batches)
    opened = {at for event, at in watched if at.startswith(str(tmp_path))}
    assert opened == {str(tmp_path / f"rows-{k}.npy") for k in (0, 1)}  # by np.load
    found = {at for event, at in watched if event != "open"}
    # What ranks tell each other of elements.
    assert found <= {"numpy", "builtins", "mpidist.data"}, found
    assert not evil.exists()


STATES = [
    *(None, [], "x", {}),
    *({"shuffle_seeds": [x]} for x in (-1, 1)),
    *({"position": x} for x in (None, -1, True, 1.5, 10**30, "x", [[[]]])),
    {"position": 2, "iteration": -1},
]


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("state", STATES, ids=repr)
def test_a_state_that_makes_no_sense_moves_nothing(state, distributed):
    rows = Dataset.range(12).batch(2)
    if distributed:
        rows = mpidist.get_strategy().experimental_distribute_dataset(rows)
    iterator = iter(rows)
    next(iterator)
    good = iterator.state()
    given = {**good, **state} if isinstance(state, dict) and state else state
    with pytest.raises((ValueError, TypeError), match="restore"):
        iterator.restore(given)
    assert iterator.state() == good
    assert next(iterator).tolist() == [2, 3]
