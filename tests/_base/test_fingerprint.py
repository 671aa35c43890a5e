"""Fingerprints: the same numbers in every process, and different ones otherwise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from launching import run_python

from mpidist._base import checksums
from mpidist._base.fingerprint import fingerprint, fingerprint_of

# Ranks compare them, so they are a form in which ranks talk: a change of these numbers
# is one of the protocol, and `versions` has to tell such ranks apart.
TEXTS = {"": 3255150753318709689, "a": 851349202560073232}


def test_a_fingerprint_has_62_bits_and_fits_a_header_with_its_complement():
    for number in (
        fingerprint("x"),
        fingerprint_of((1, "x", b"x")),
        fingerprint_of([]),
    ):
        assert 0 <= number < 2**62
        np.array([number, ~number], np.int64)


def test_texts_have_the_fingerprints_that_they_always_had():
    assert {text: fingerprint(text) for text in TEXTS} == TEXTS
    assert fingerprint("\ud800") != fingerprint("\ud801")  # as of undecodable names


def test_different_objects_have_different_fingerprints():
    cases = [
        (),
        (0,),
        (-1,),
        (-2,),  # hash(-1) == hash(-2)
        (2**64,),
        (2**61 - 1,),  # whose hash is 0
        ("1",),
        (b"1",),
        ("1i",),
        (1, 2),
        (2, 1),
        (12,),
        ("a", "b"),
        ("ab",),
        ("", "ab"),
        (b"a", "b"),
        ("1:a",),
    ]
    assert len({fingerprint_of(case) for case in cases}) == len(cases)


def test_other_processes_find_the_same_whatever_their_hash_seed():
    code = (
        "import numpy as np; from mpidist._base import checksums; "
        "from mpidist._base.fingerprint import *; x = np.arange(20000.0); "
        "print(fingerprint('x'), fingerprint_of([-3, 'y', b'z']), "
        "checksums.fingerprint_of_array(x, 7), checksums.fingerprinter(x)(7))"
    )
    outputs = {
        run_python("-c", code, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex128"])
@pytest.mark.parametrize("size", [0, 1, 7, 5000, 300_000])
def test_prints_of_arrays_differ_with_values_dtypes_and_shapes(dtype, size):
    x = np.arange(size).astype(dtype)
    whole = checksums.fingerprint_of_array(x, 3)
    assert (
        whole
        == checksums.fingerprinter(x)(3)
        == checksums.fingerprint_of_array(x.copy(), 3)
    )
    assert 0 <= whole < 2**62
    others = [x.view(f"u{x.itemsize}") if x.itemsize <= 8 else x.view("f8")]
    others.append(x.reshape(1, size))
    assert len({*map(checksums.summarize, (x, *others))}) == 3
    if size:
        first = x.copy()
        first[0] = 1 if first[0] == 0 else 0
        others.append(first)
    prints = [whole, *(checksums.fingerprint_of_array(other, 3) for other in others)]
    for one, other in itertools.pairwise(prints):
        assert one != other


@pytest.mark.parametrize("size", [600, 5000, 300_000])
def test_values_that_have_moved_give_another_summary(size):
    x = np.arange(size)
    middle = slice(size // 2, size // 2 + 2)
    swapped = x.copy()
    swapped[middle] = x[middle][::-1]
    assert checksums.summarize(x) != checksums.summarize(swapped)
