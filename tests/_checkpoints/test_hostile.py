"""Files that someone or something has changed: never executed, never half restored.

Each change is drawn from a seed. ``MPIDIST_FUZZ=5000`` tries that many instead of a
few, ``MPIDIST_FUZZ=500:510`` these seeds.
"""

from __future__ import annotations

import os
import re
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_objects import Iterator
from replicas import fuzz_seeds

import mpidist

DEFAULT_SEEDS = 60
MOST_BYTES = 32 * 2**20  # that a reader may allocate; most are a chunk of 8 MiB
HEAD = b'{\n "crc32": "'


class Watch:
    """What the reader opens and finds by name, while it is on."""

    on = False
    opened: list[str]
    unpickled: list[str]

    def __init__(self) -> None:
        self.opened, self.unpickled = [], []
        sys.addaudithook(self._hear)  # for good: it cannot be removed

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if self.on and event == "open":
            self.opened.append(os.fspath(str(args[0])))
        elif self.on and args[:2] == ("mpidist", "CheckpointError"):
            pass  # the exception itself, which ranks send each other
        elif self.on and event in ("pickle.find_class", "exec", "os.system"):
            self.unpickled.append(f"{event} {args!r:.200}")


WATCH = Watch()


def sign(manifest: bytes) -> bytes:
    """Return a manifest with the right checksum."""
    start, stop = len(HEAD), len(HEAD) + 8
    text = manifest[:start] + b"00000000" + manifest[stop:].removesuffix(b"\n")
    return text[:start] + b"%08x" % zlib.crc32(text) + text[stop:] + b"\n"


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


def change_words(data: bytes, rng: np.random.Generator) -> bytes:
    """Return JSON with one number or text exchanged for another one."""
    tokens = [match.span() for match in re.finditer(rb'\d+|"[^"]*"', data)]
    a, b = tokens[int(rng.integers(1, len(tokens)))]
    evil = [
        *(b"%d" % n for n in (0, 1, 7, 2**31, 2**62, 10**30)),
        *(b"-1", b"1e308", b"NaN", b"null", b"[]", b"{}", b"[[[[]]]]"),
        *(b'"float64"', b'"object"', b'"O"', b'"V8"', b'"arrays-2.npz"'),
        *(b'"../../../etc/passwd"', b'"/etc/passwd"', b'"manifest.json"'),
        data[slice(*tokens[int(rng.integers(len(tokens)))])],
    ]
    return data[:a] + evil[int(rng.integers(len(evil)))] + data[b:]


def saved(path: Path, file_format: str) -> tuple[mpidist.Checkpoint, list[np.ndarray]]:
    values = [np.arange(300.0), np.arange(7, dtype=np.int8).reshape(7, 1)]
    variables = [mpidist.Variable(value) for value in values]
    large = Iterator()  # its array is not in the manifest
    large.state = lambda: {"large": np.arange(2100.0)}
    large.restore = lambda state: None  # what it gets is for the user to check
    checkpoint = mpidist.Checkpoint(
        v=variables[0], w=variables[1], rng=np.random.default_rng(1), it=large
    )
    checkpoint.save(path, file_format)
    return checkpoint, values


@pytest.mark.parametrize("file_format", ["npz", "safetensors"])
def test_changed_files_are_refused_or_say_the_same(tmp_path, file_format):
    path = tmp_path / "saved"
    checkpoint, values = saved(path, file_format)
    names = ["manifest.json", f"arrays-1.{file_format}"]
    good = {name: (path / name).read_bytes() for name in names}
    refused = 0
    WATCH.opened.clear()
    seeds = fuzz_seeds(DEFAULT_SEEDS)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        name = names[int(rng.integers(2))]
        signs = name == "manifest.json" and rng.random() < 0.8
        words = signs and rng.random() < 0.8
        bad = (change_words if words else change)(good[name], rng)
        (path / name).write_bytes(sign(bad) if signs else bad)
        WATCH.on = True
        tracemalloc.start()
        text = str(path)
        try:
            checkpoint.restore(path)
        except mpidist.CheckpointError as error:
            refused += 1
            text = str(error)
        finally:
            WATCH.on = False
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            (path / name).write_bytes(good[name])
        assert str(path) in text, seed
        assert peak < MOST_BYTES, seed
        for variable, value in zip((checkpoint.v, checkpoint.w), values, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value, str(seed))
    assert refused > 0.8 * len(seeds)
    assert WATCH.unpickled == []
    # By name, and not by a descriptor; for tracebacks Python reads its sources, and
    # Python 3.13 parses single lines, where an error in one opens "<unknown>".
    opened = {at for at in WATCH.opened if not at.isdigit() and at != "<unknown>"}
    assert {os.path.dirname(at) for at in opened if ".py" not in at} == {str(path)}


def test_a_manifest_without_end(tmp_path):
    checkpoint, _ = saved(tmp_path / "saved", "npz")
    with open(tmp_path / "saved" / "manifest.json", "r+b") as file:
        file.truncate(2**40)
    with pytest.raises(mpidist.CheckpointError, match="more than 268,435,456 bytes"):
        checkpoint.restore(tmp_path / "saved")
