"""Sums of ranks whose floating-point state differs: all get the same bits."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from replicas import (
    all_reduce,
    core_by_mpi,
    everywhere,
)

from mpidist import _native

core = pytest.mark.core
pytestmark = pytest.mark.skipif(  # it sets the state
    not _native.available(), reason="the native core is not built"
)

UPWARD = 0x800  # FE_UPWARD of x86
SOURCE = """
#include <xmmintrin.h>
unsigned get(void) { return _mm_getcsr(); }
void set(unsigned state) { _mm_setcsr(state); }
"""
FLUSHES = 0x8040  # flush to zero, and denormals are zero


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Functions that read and write MXCSR."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    found = platform.machine() == "x86_64" and compiler is not None
    if not all(everywhere(found)):
        pytest.skip("for x86-64 with a C compiler")
    folder: Path = tmp_path_factory.mktemp("state")
    (folder / "state.c").write_text(SOURCE)
    library = folder / "state.so"
    subprocess.run(
        [str(compiler), "-shared", "-fPIC", "-o", library, folder / "state.c"],
        check=True,
    )
    return ctypes.CDLL(str(library))


@contextlib.contextmanager
def in_state(control: ctypes.CDLL, state: str) -> Iterator[None]:
    libm = ctypes.CDLL("libm.so.6")
    before, rounding = control.get(), libm.fegetround()
    try:
        if state == "flushes":
            control.set(before | FLUSHES)
        else:
            libm.fesetround(UPWARD)
        yield
    finally:
        libm.fesetround(rounding)
        control.set(before)


def arrays_of(rank: int, count: int, dtype: str) -> np.ndarray:
    """Return numbers whose sums are subnormal, or have to be rounded."""
    rng = np.random.default_rng([rank, count])
    x = rng.normal(size=count)
    x[::2] *= float(np.finfo(dtype).smallest_normal)
    return x.astype(dtype)


@core_by_mpi
@pytest.mark.parametrize("simulated", ["1", "2", "3"])
@pytest.mark.parametrize("implementation", ["AUTO", "DIRECT"])
def test_all_ranks_get_the_same_bits(
    new_strategy, rank, size, control, simulated, implementation, monkeypatch
):
    if int(simulated) > size:
        pytest.skip("more nodes than ranks")
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", simulated)
    strategy = new_strategy(implementation=implementation)
    wrong = []
    for dtype in ("float32", "float64", "float16"):
        for count in (1, 50, 3_000, 40_000, 600_000):
            x = arrays_of(rank, count, dtype)
            for op in ("SUM", "MEAN"):
                usual = zlib.crc32(all_reduce(strategy, op, x))
                for state in ("flushes", "rounds up"):
                    with contextlib.ExitStack() as stack:
                        if rank == size - 1:
                            stack.enter_context(in_state(control, state))
                        found = [all_reduce(strategy, op, x) for _ in range(2)]
                    if {*map(zlib.crc32, found)} != {*everywhere(usual)}:
                        wrong.append((dtype, count, op, state))
    assert everywhere(wrong) == [[]] * size
