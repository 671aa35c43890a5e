"""Objects, comparisons and damage that tests of checkpoints share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
import zlib

import numpy as np
import pytest

import mpidist
from mpidist._strategy.strategy import group_of


def values_of(dtype, shape, seed=0):
    """Return an array with other bits in every element; NaN and infinity too."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    x = np.random.default_rng(seed).normal(size=shape) * 50
    with np.errstate(all="ignore"):
        x = np.asarray(x).astype(dtype)
    if x.ndim == 2 and x.size and x.dtype.kind == "f":
        x[0, :2] = [np.nan, np.inf]
    return x


def assert_same_bits(x, y):
    assert x.dtype == y.dtype
    assert x.shape == y.shape
    np.testing.assert_array_equal(x, y)
    if x.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(x), np.signbit(y))


class Iterator:
    """An iterator whose state is a position; refuses negative ones."""

    def __init__(self, position=0):
        self.position = position

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        if state["position"] < 0:
            raise ValueError("this iterator cannot go back")
        self.position = state["position"]


def per_rank(strategy, value):
    """Return the values of all ranks, on all ranks."""
    comm = group_of(strategy).communicator
    return comm.all_gather_objects(value)


def variable(strategy, value, **kwargs):
    with strategy.scope():
        return mpidist.Variable(value, **kwargs)


def checkpoint_of(strategy, **values):
    """Return a checkpoint of variables with these values."""
    return mpidist.Checkpoint(**{k: variable(strategy, x) for k, x in values.items()})


def rewrite(manifest, change):
    """Give some entries of a manifest other values, and it the right checksum."""
    content = json.loads(manifest.read_text())
    write_manifest(manifest, {**content, **change(content)})


def write_manifest(manifest, content):
    """Write a manifest whose first entry is a checksum, with the right one."""
    manifest.write_bytes(sign(json.dumps(content, indent=1).encode()))


def sign(manifest):
    """Return the bytes of a manifest with the right checksum, at its place."""
    start = len(b'{\n "crc32": "')
    text = manifest[:start] + b"00000000" + manifest[start + 8 :].removesuffix(b"\n")
    return text[:start] + b"%08x" % zlib.crc32(text) + text[start + 8 :] + b"\n"


def flip_in_array(path, name):
    content = json.loads((path / "manifest.json").read_text())
    part = content["arrays"][name]
    with open(path / content["file"], "r+b") as file:
        file.seek(part["end"] - part["nbytes"])
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@contextlib.contextmanager
def expected_warnings(rank, patterns, every=True):
    """See that rank 0 warns of each, and other ranks of nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    # What other tests have left open is told when it is collected, perhaps now.
    caught = [w for w in caught if not issubclass(w.category, ResourceWarning)]
    texts = " ".join(str(w.message).replace("\n", " ") for w in caught)
    if rank:
        assert texts == ""
    elif every:
        assert len(caught) == len(patterns)
        assert all(re.search(pattern, texts) for pattern in patterns), texts
