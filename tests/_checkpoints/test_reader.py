"""Files that are damaged, malformed or missing: found, named, and nothing executed.

Some changes are drawn from a seed. ``MPIDIST_FUZZ=5000`` tries that many instead of a
few, ``MPIDIST_FUZZ=500:510`` these seeds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_objects import (
    Iterator,
    flip_in_array,
    rewrite,
    sign,
    variable,
    write_manifest,
)
from replicas import (
    a_third,
    fuzz_seeds,
    on_ranks,
)

import mpidist

DEFAULT_SEEDS = 60
MOST_BYTES = 32 * 2**20  # that a reader may allocate; most are a chunk of 8 MiB
FORMATS = pytest.mark.parametrize("format", ["npz", "safetensors"])


class Watch:
    """What this process opens and finds by name, while it is on."""

    on = False

    def __init__(self):
        self.opened, self.executed = [], []
        sys.addaudithook(self._hear)  # for good: it cannot be removed

    def _hear(self, event, args):
        if self.on and event == "open":
            self.opened.append(os.fspath(str(args[0])))
        elif self.on and args[:2] == ("mpidist", "CheckpointError"):
            pass  # the exception itself, which ranks send each other
        elif self.on and event in ("pickle.find_class", "exec", "os.system"):
            self.executed.append(f"{event} {args!r:.200}")

    @contextlib.contextmanager
    def restoring(self):
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def check(self, folder):
        """Check that nothing was executed, and files of that folder opened only."""
        assert self.executed == []
        # By name, and not by a descriptor; for tracebacks Python reads its sources, and
        # Python 3.13 parses single lines, where an error in one opens "<unknown>".
        names = {x for x in self.opened if not x.isdigit() and x != "<unknown>"}
        assert {os.path.dirname(x) for x in names if ".py" not in x} == {str(folder)}
        self.opened.clear()


WATCH = Watch()


class Saved:
    """A checkpoint of two arrays, a generator, and an iterator."""

    def __init__(self, path, format="npz", large=0):
        self.path, self.manifest = path, path / "manifest.json"
        self.v, self.w = mpidist.Variable([1.0, 2.0]), mpidist.Variable(np.arange(3))
        self.rng, iterator = np.random.default_rng(0), Iterator()
        iterator.state = lambda: {"position": 3, "large": np.arange(float(large))}
        iterator.restore = lambda state: None  # what it gets is for the user to check
        self.checkpoint = mpidist.Checkpoint(
            v=self.v, w=self.w, rng=self.rng, it=iterator
        )
        self.checkpoint.save(path, format=format)
        self.files = {file: file.read_bytes() for file in path.iterdir()}
        self.content = json.loads(self.manifest.read_text())

    def restore(self):
        """Restore it; return the error that refuses it, which has changed nothing."""
        self.v.assign([5.0, 6.0])
        self.w.assign([7, 8, 9])
        state, values = repr(self.rng.bit_generator.state), [[1, 2], [0, 1, 2]]
        error = None
        try:
            with WATCH.restoring():
                self.checkpoint.restore(self.path)
        except mpidist.CheckpointError as refusal:
            error, values = refusal, [[5, 6], [7, 8, 9]]
            assert str(self.path) in str(error)
            assert repr(self.rng.bit_generator.state) == state
        assert [x.numpy().tolist() for x in (self.v, self.w)] == values
        return error

    def refused(self, match):
        """Return the error of what refuses it."""
        error = self.restore()
        assert re.search(match, str(error)), error
        return error


@pytest.fixture
def saved(tmp_path):
    return Saved(tmp_path / "a")


# --- all bytes, and files -----------------------------------------------------------


@FORMATS
def test_every_flipped_byte_is_found_and_named(tmp_path, format):
    saved = Saved(tmp_path / "a", format)
    parts = saved.content["arrays"]
    for file, good in saved.files.items():
        for position in range(len(good)):
            flipped = bytearray(good)
            flipped[position] ^= 1 << position % 8
            file.write_bytes(flipped)
            with pytest.raises(mpidist.CheckpointError) as caught:
                mpidist.load_checkpoint(saved.path).verify()
            assert caught.value.damaged
            assert str(file) in str(caught.value)
            if file != saved.manifest:  # also in headers, and at the end
                what = "the part after all arrays"
                for name, part in parts.items():
                    if part["start"] <= position < part["end"]:
                        what = f"array '{name}'"
                assert what in str(caught.value)
            if position % 50 == 0:
                assert saved.restore().damaged
        for length in {0, 1, len(good) // 2, len(good) - 1}:
            file.write_bytes(good[:length])
            with pytest.raises(mpidist.CheckpointError, match="is damaged"):
                mpidist.load_checkpoint(saved.path).verify()
        file.write_bytes(good)
    assert saved.restore() is None


def test_a_missing_file_and_a_later_version(saved):
    for version in (1, 4):
        rewrite(saved.manifest, lambda content, version=version: {"version": version})
        text = f"expected version 2 or 3.*version {version}; version 1 can be .* before"
        assert not saved.refused(text).damaged
    saved.checkpoint.save(saved.path)
    (saved.path / "arrays-2.npz").unlink()
    saved.refused("arrays-2.npz is missing")


@pytest.mark.parametrize("name", ["manifest.json", "arrays-1.npz"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_files_that_are_not_regular_are_refused(saved, name, kind):
    file = saved.path / name
    file.unlink()
    os.mkfifo(file) if kind == "pipe" else file.mkdir()
    saved.refused(f"{name} .* not a regular file")


def test_a_manifest_without_end(saved):
    with open(saved.manifest, "r+b") as file:
        file.truncate(2**40)
    saved.refused("more than 268,435,456 bytes")


@on_ranks
def test_damage_is_told_to_all_ranks(strategy, folder, rank):
    w = variable(strategy, np.arange(100.0))
    checkpoint = mpidist.Checkpoint(w=w)
    checkpoint.save(folder / "a")
    if rank == 0:
        flip_in_array(folder / "a", "w")
    w.assign(np.zeros(100))
    with pytest.raises(mpidist.CheckpointError, match=r"arrays-1.npz.*array 'w'") as e:
        checkpoint.restore(folder / "a")
    assert e.value.damaged
    assert w.numpy().sum() == 0


def test_a_reader_outlives_its_checkpoint(tmp_path):
    v = mpidist.Variable([1.0, 2.0])
    checkpoint = mpidist.Checkpoint(v=v)
    checkpoint.save(tmp_path / "a")
    reader = mpidist.load_checkpoint(tmp_path / "a")
    v.assign([3.0, 4.0])
    checkpoint.save(tmp_path / "a")
    assert reader["v"].tolist() == [1.0, 2.0]
    assert mpidist.load_checkpoint(tmp_path / "a")["v"].tolist() == [3.0, 4.0]
    assert len(list((tmp_path / "a").iterdir())) == 2  # the old file is gone
    with pytest.raises(KeyError, match=r"'w' is not among the arrays of .*: 'v'"):
        reader["w"]


@FORMATS
def test_a_checkpoint_of_version_2_can_be_read(format):
    """Written by the mpidist of commit ed7e5e9."""
    path = Path(__file__).parent / "version_2" / format
    reader = mpidist.load_checkpoint(path)
    reader.verify()
    half = reader["model/half"]
    assert (half.dtype.name, half.tolist()) == ("bfloat16", [1.5, -2.25])
    weights = mpidist.Variable(np.zeros((2, 3), np.float32))
    model = {"w": weights, "half": mpidist.Variable(np.zeros(2, half.dtype))}
    step, rng, it = mpidist.Variable(0), np.random.default_rng(0), Iterator()
    it.restore = it.__dict__.update
    mpidist.Checkpoint(model=model, step=step, rng=rng, it=it).restore(path)
    assert weights.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model["half"].numpy().tolist() == [1.5, -2.25]
    assert step.numpy() == 7
    assert rng.random() == np.random.default_rng(5).random()
    assert it.position == 11
    assert it.history == [1.5, None, (2, b"x")]
    assert it.__dict__[3].tolist() == [0, 1, 2, 3]


def test_what_is_there_is_listed_if_there_is_no_checkpoint(tmp_path):
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable([1.0, 2.0]))
    manager = mpidist.CheckpointManager(checkpoint, tmp_path / "run", None)
    for _ in range(12):
        manager.save()
    for path, place, read in (
        ("run", "in it", checkpoint.restore),
        ("run/ckpt-13", "beside it", checkpoint.restore),
        ("run/ckpt-13", "beside it", mpidist.load_checkpoint),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            read(tmp_path / path)
        text = str(caught.value)
        assert f"; {place} are 2 others and 'ckpt-11', 'ckpt-12'" in text
        assert f"mpidist.latest_checkpoint('{tmp_path / 'run'}')" in text
    with pytest.raises(FileNotFoundError, match=r"manifest.json there\. A relative"):
        mpidist.load_checkpoint(tmp_path)


# --- changes that the checksum does not show ----------------------------------------


EVIL = [
    *(None, True, -1, 0, 7, 2**31, 2**62, 10**30, 1.5, 1e308, float("nan")),
    *("x", "float64", "object", "V8"),
    *("../../etc/passwd", "/etc/passwd", "manifest.json", "arrays-2.npz"),
    [],
    [[]],
    [-1],
    [0, 10**30],
    [2**40, 2**40],
    {},
    {"$array": 1},
    {"$array": {"dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}},
    {"$array": {"dtype": "<f8", "shape": [10**12], "base64": "AAAAAAAAAAA="}},
    {"$tuple": 3},
    {"$dict": [[[], 1]]},
    {"$bytes": "not base 64"},
    {"$unknown": 1},
    {"$scalar": {}, "$float": "x"},
    {"$tensor": ["numpy", "absent", "cpu"]},
    {"$tensor": ["os", "v", "cpu"]},
    {"$tensor": ["numpy", "v", "__class__.x"]},
]


def places_in(content, at=()):
    """Return the paths of all entries of nested dictionaries and lists."""
    keys = list(content) if isinstance(content, dict) else range(len(content))
    for key in keys:
        yield (*at, key)
        if isinstance(content[key], (dict, list)):
            yield from places_in(content[key], (*at, key))


def test_malformed_manifests_with_the_right_checksum(tmp_path):
    saved = Saved(tmp_path / "a", large=3000)  # its array is not in the manifest
    places = [at for at in places_in(saved.content) if at != ("crc32",)]
    assert ("arrays", "v", "shape", 0) in places
    assert ("states", "rng", 0, "state", "state") in places
    assert ("states", "it", 0, "large", "$tensor", 1) in places
    refused = 0
    WATCH.opened.clear()
    cases = a_third([*itertools.product(places, [*EVIL, "deleted"])])
    text = json.dumps(saved.content)
    for at, evil in cases:
        changed = inner = json.loads(text)
        for key in at[:-1]:
            inner = inner[key]
        if evil == "deleted":
            del inner[at[-1]]
        else:
            inner[at[-1]] = evil
        write_manifest(saved.manifest, changed)
        error = saved.restore()
        if error is None:
            continue  # it says the same, or what only the user's iterator knows
        refused += 1
        if error.damaged:
            assert re.search(r"the entry \['\w+'\]|arrays-1.npz", str(error)), error
        else:
            assert at[0] in ("format", "version", "arrays", "states"), error
    assert refused > 0.75 * len(cases)
    WATCH.check(saved.path)
    changed = json.loads(text)
    changed["arrays"]["v"]["note"] = "of a later version"
    write_manifest(saved.manifest, changed)
    assert saved.restore() is None
    for key in saved.content["arrays"]["v"]:
        changed = json.loads(text)
        del changed["arrays"]["v"][key]
        write_manifest(saved.manifest, changed)
        saved.refused(r"\['v'\].*no checkpoint has")


@pytest.mark.parametrize(
    ("kind", "key", "position"),
    [
        ("MT19937", "pos", 10**6),
        ("MT19937", "pos", -1),
        ("Philox", "buffer_pos", -(10**6)),
        ("Philox", "buffer_pos", 5),
    ],
)
def test_positions_outside_of_a_generators_buffer(tmp_path, kind, key, position):
    """NumPy before 2.5 takes them, and reads other memory, or ends the process."""
    rng = np.random.Generator(getattr(np.random, kind)(0))
    checkpoint = mpidist.Checkpoint(rng=rng)
    checkpoint.save(tmp_path / "a")

    def change(content):
        state = content["states"]["rng"][0]
        (state["state"] if key == "pos" else state)[key] = position
        return {}

    rewrite(tmp_path / "a" / "manifest.json", change)
    text = (
        r"manifest\.json is malformed.*\['rng'\].*(expected a position.*"
        rf"{position}|(position|buffer_pos) must be between)"
    )
    with pytest.raises(mpidist.CheckpointError, match=text) as caught:
        checkpoint.restore(tmp_path / "a")
    assert caught.value.damaged


@pytest.mark.parametrize(
    "rest",
    [
        b'"version": 2, "states": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        b'"version": 2}',
        b'"version": 1' + b"0" * 5000 + b"}",
        b'"version": 2, \xff }',
    ],
    ids=["nested too deep", "without entries", "a large number", "no UTF-8"],
)
def test_manifests_that_are_no_manifests(saved, rest):
    head = b'{\n "crc32": "00000000",\n "format": "mpidist checkpoint", '
    saved.manifest.write_bytes(sign(head + rest))
    assert saved.refused(r"manifest\.json").damaged
    with pytest.warns(RuntimeWarning, match="a' is skipped"):
        assert mpidist.latest_checkpoint(saved.path.parent) is None


def change(data: bytes, rng: np.random.Generator) -> bytes:
    """Return bytes with one change of any kind."""
    a, b = sorted(int(x) for x in rng.integers(0, len(data), 2))
    middle = data[a:b]
    kinds: list[Callable[[], bytes]] = [
        lambda: (
            data[:a] + bytes([data[a] ^ (1 << int(rng.integers(8)))]) + data[a + 1 :]
        ),
        lambda: data[:a],
        lambda: data[:a] + data[b:],
        lambda: data[:b] + middle + data[b:],
        lambda: data[:a] + bytes(len(middle)) + data[b:],
        lambda: data[:a] + rng.bytes(len(middle)) + data[b:],
        lambda: data[b:] + data[:b],
        lambda: data + rng.bytes(int(rng.integers(1, 100))),
    ]
    return kinds[int(rng.integers(len(kinds)))]()


@FORMATS
def test_changed_files_are_refused_or_say_the_same(tmp_path, format):
    saved = Saved(tmp_path / "saved", format, large=2100)
    names = [saved.manifest, saved.path / f"arrays-1.{format}"]
    refused = 0
    WATCH.opened.clear()
    seeds = fuzz_seeds(DEFAULT_SEEDS)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        file = names[int(rng.integers(2))]
        bad = change(saved.files[file], rng)
        signs = file == saved.manifest and rng.random() < 0.8
        file.write_bytes(sign(bad) if signs else bad)
        tracemalloc.start()
        try:
            refused += saved.restore() is not None
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            file.write_bytes(saved.files[file])
        assert peak < MOST_BYTES, seed
    assert refused > 0.8 * len(seeds)
    WATCH.check(saved.path)
