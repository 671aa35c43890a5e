"""Damaged, malformed and incomplete checkpoints: found, named, and nothing executed."""

from __future__ import annotations

import itertools
import json
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from checkpoint_objects import (
    Iterator,
    flip_in_array,
    rewrite,
    variable,
    write_manifest,
)
from replicas import (
    a_third,
    on_ranks,
)

import mpidist


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_every_flipped_byte_is_found_and_named(tmp_path, format):
    v, w = mpidist.Variable([1.0, 2.0]), mpidist.Variable(np.arange(3))
    path = tmp_path / "a"
    checkpoint = mpidist.Checkpoint(v=v, w=w, rng=np.random.default_rng(0))
    checkpoint.save(path, format=format)
    parts = json.loads((path / "manifest.json").read_text())["arrays"]
    v.assign([5.0, 5.0])
    for file in (path / "manifest.json", path / f"arrays-1.{format}"):
        good = file.read_bytes()
        for position in range(len(good)):
            flipped = bytearray(good)
            flipped[position] ^= 1 << position % 8
            file.write_bytes(flipped)
            with pytest.raises(mpidist.CheckpointError) as caught:
                mpidist.load_checkpoint(path).verify()
            assert caught.value.damaged
            assert str(file) in str(caught.value)
            named = [
                name
                for name, part in parts.items()
                if part["start"] <= position < part["end"]
            ]
            if file.suffix != ".json":  # also in headers, and at the end
                what = f"array '{named[0]}'" if named else "the part after all arrays"
                assert what in str(caught.value)
            if position % 50 == 0:
                with pytest.raises(mpidist.CheckpointError):
                    checkpoint.restore(path)
                assert v.numpy().tolist() == [5.0, 5.0]
        for length in {0, 1, len(good) // 2, len(good) - 1}:
            file.write_bytes(good[:length])
            with pytest.raises(mpidist.CheckpointError, match="is damaged"):
                mpidist.load_checkpoint(path).verify()
        file.write_bytes(good)
    checkpoint.restore(path)
    assert v.numpy().tolist() == [1.0, 2.0]


def test_a_missing_file_and_a_later_version(tmp_path):
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable([1.0, 2.0]))
    checkpoint.save(tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    for version in (1, 4):
        rewrite(manifest, lambda content, version=version: {"version": version})
        text = (
            rf"expected version 2 or 3.*version {version}; version 1 can be .* before"
        )
        with pytest.raises(mpidist.CheckpointError, match=text) as caught:
            checkpoint.restore(tmp_path / "a")
        assert not caught.value.damaged
    checkpoint.save(tmp_path / "a")
    (tmp_path / "a" / "arrays-2.npz").unlink()
    with pytest.raises(mpidist.CheckpointError, match=r"arrays-2.npz is missing"):
        checkpoint.restore(tmp_path / "a")


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


@pytest.mark.parametrize("format", ["npz", "safetensors"])
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


EVIL = [
    None,
    True,
    -1,
    10**30,
    1.5,
    "x",
    "../../etc/passwd",
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
    v, w = mpidist.Variable([1.0, 2.0]), mpidist.Variable(np.arange(3))
    rng, iterator = np.random.default_rng(0), Iterator(3)
    iterator.state = lambda: {"position": 3, "large": np.arange(3000.0)}
    checkpoint = mpidist.Checkpoint(v=v, w=w, rng=rng, it=iterator)
    path = tmp_path / "a"
    checkpoint.save(path)
    manifest = path / "manifest.json"
    text = manifest.read_text()
    content = json.loads(text)
    places = [at for at in places_in(content) if at != ("crc32",)]
    assert ("arrays", "v", "shape", 0) in places
    assert ("states", "rng", 0, "state", "state") in places
    assert ("states", "it", 0, "large", "$tensor", 1) in places
    refused = 0
    cases = a_third([*itertools.product(places, [*EVIL, "deleted"])])
    for at, evil in cases:
        changed = json.loads(text)
        inner = changed
        for key in at[:-1]:
            inner = inner[key]
        if evil == "deleted":
            del inner[at[-1]]
        else:
            inner[at[-1]] = evil
        write_manifest(manifest, json.dumps(changed, indent=1))
        before = v.numpy(), rng.bit_generator.state
        iterator.restore = lambda state: None  # says nothing: its state is the user's
        error = None
        try:
            checkpoint.restore(path)
        except mpidist.CheckpointError as refusal:
            error = refusal
        if error is None:
            continue  # it says the same, or what only the user's iterator knows
        refused += 1
        assert str(path) in str(error)
        if error.damaged:
            assert re.search(r"the entry \['\w+'\]|arrays-1.npz", str(error)), error
        else:
            assert at[0] in ("format", "version", "arrays", "states"), error
        np.testing.assert_array_equal(v.numpy(), before[0])
        assert repr(rng.bit_generator.state) == repr(before[1])
    assert refused > 0.75 * len(cases)
    changed = json.loads(text)
    changed["arrays"]["v"]["note"] = "of a later version"
    write_manifest(manifest, json.dumps(changed, indent=1))
    checkpoint.restore(path)
    for key in content["arrays"]["v"]:
        changed = json.loads(text)
        del changed["arrays"]["v"][key]
        write_manifest(manifest, json.dumps(changed, indent=1))
        with pytest.raises(
            mpidist.CheckpointError, match=r"\['v'\].*no checkpoint has"
        ):
            checkpoint.restore(path)
    manifest.write_text(text)
    assert checkpoint.restore(path) == ["it", "rng", "v", "w"]


@pytest.mark.parametrize(
    ("kind", "position"),
    [("MT19937", 10**6), ("MT19937", -1), ("Philox", -(10**6)), ("Philox", 5)],
)
def test_positions_outside_of_a_generators_buffer(tmp_path, kind, position):
    """NumPy before 2.5 takes them, and reads other memory, or ends the process."""
    rng = np.random.Generator(getattr(np.random, kind)(0))
    checkpoint = mpidist.Checkpoint(rng=rng)
    checkpoint.save(tmp_path / "a")

    def change(content):
        state = content["states"]["rng"][0]
        (state["state"] if kind == "MT19937" else state).update(
            {"pos": position} if kind == "MT19937" else {"buffer_pos": position}
        )
        return {}

    rewrite(tmp_path / "a" / "manifest.json", change)
    text = (
        r"manifest\.json is malformed.*\['rng'\].*(expected a position.*"
        rf"{position}|(position|buffer_pos) must be between)"
    )
    with pytest.raises(mpidist.CheckpointError, match=text) as caught:
        checkpoint.restore(tmp_path / "a")
    assert caught.value.damaged


def test_manifests_that_are_nested_too_deep_or_no_object(tmp_path):
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable(1.0))
    manager = mpidist.CheckpointManager(checkpoint, tmp_path)
    good, bad = manager.save(), Path(manager.save())
    manifest = bad / "manifest.json"
    head = '{\n "crc32": "00000000",\n "format": "mpidist checkpoint", '
    for text in (
        head + '"version": 2, "states": ' + "[" * 10**5 + "]" * 10**5 + "}",
        head + '"version": 2}',
        head + '"version": 1' + "0" * 5000 + "}",
        head + '"version": 2, \udcff }',
    ):
        data = text.encode(errors="surrogateescape")
        checksum = f"{zlib.crc32(data):08x}".encode()
        manifest.write_bytes(data.replace(b"00000000", checksum, 1) + b"\n")
        with pytest.raises(mpidist.CheckpointError, match=r"manifest\.json") as caught:
            mpidist.load_checkpoint(bad)
        assert caught.value.damaged
        with pytest.warns(RuntimeWarning, match="ckpt-2.* is skipped"):
            again = mpidist.CheckpointManager(checkpoint, tmp_path)
        assert again.latest_checkpoint == good


@pytest.mark.parametrize("name", ["manifest.json", "arrays-1.npz"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_files_that_are_not_regular_are_refused(tmp_path, name, kind):
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable(1.0))
    checkpoint.save(tmp_path / "a")
    file = tmp_path / "a" / name
    file.unlink()
    os.mkfifo(file) if kind == "pipe" else file.mkdir()
    with pytest.raises(mpidist.CheckpointError, match=f"{name} .* not a regular file"):
        checkpoint.restore(tmp_path / "a")


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
