"""The native core compiled for aarch64, and run by QEMU: right, and with equal bits.

QEMU does not reorder memory accesses as a processor may: what a missing fence does is
found by tests/_native/test_native_stress.py, under ThreadSanitizer.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import a_third, slow
from test_native_kernels import (
    CASES,
    FLAGS,
    INEXACT,
    all_pairs,
    assert_same,
    random_source,
    special_values,
)
from test_native_stress import NATIVE, Tools, build, run

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
DRIVER = pathlib.Path(__file__).with_name("kernel_bits.c")
CROSS = Tools(COMPILER, ("-O2", "-static"), (EMULATOR,))
STRESS_SECONDS = 3
COUNT = 4099  # more than a block of any dtype, and a rest
LONG = ("f16", "c32")  # long double is another format there

pytestmark = [
    slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason="no gcc-aarch64-linux-gnu, or no qemu-user",
    ),
]


def test_the_stress_test() -> None:
    ran = run(*CROSS.prefix, build(CROSS), "1", str(STRESS_SECONDS), seconds=300)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    assert "all right" in ran.stdout


def test_the_python_module_compiles(tmp_path: pathlib.Path) -> None:
    """With the headers of this machine's Python, whose types have the same sizes."""
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{np.get_include()}"]
    (tmp_path / "python.c").write_text("#include <Python.h>\n")
    command = [COMPILER, "-std=c11", "-fPIC", *includes, "-c", "-o", "/dev/null"]
    if run(*command, str(tmp_path / "python.c")).returncode:
        pytest.skip("the headers of this Python are for its own machine alone")
    for source in sorted(NATIVE.glob("*.c")):
        made = run(*command, "-Wall", "-Werror", str(source))
        assert made.returncode == 0, made.stderr


@pytest.fixture(scope="session")
def drivers(built_once: Callable[..., pathlib.Path]) -> tuple[str, str]:
    """Return the program that reduces: for this machine, and for aarch64."""

    def make(path: pathlib.Path, *compiler: str) -> None:
        files = [str(DRIVER), str(NATIVE / "kernels.c"), f"-I{NATIVE}", "-o", str(path)]
        made = run(*compiler, *FLAGS.split(), "-Wall", *files, "-lm")
        assert (made.returncode, made.stderr) == (0, ""), made.stderr

    here = built_once("kernel_bits", lambda path: make(path, "cc"))
    there = built_once("kernel_bits64", lambda path: make(path, COMPILER, "-static"))
    return str(here), str(there)


def reduced(program: list[str], name: str, op: str, sources: list[Any], by: int) -> Any:
    """Return what a driver computes, as bytes of numbers."""
    numbers = [name, op, len(sources), sources[0].size // (1 + (name == "c32")), by]
    done = subprocess.run(
        [*program, *map(str, numbers)],
        input=b"".join(x.tobytes() for x in sources),
        capture_output=True,
        timeout=100,
        check=True,
    )
    return np.frombuffer(done.stdout, sources[0].dtype)


def sources_of(name: str) -> list[list[Any]]:
    if name in LONG:  # numbers that are exact in any format
        rng = np.random.default_rng(0)
        return [[rng.integers(-99, 99, 2 * COUNT).astype(float) for _ in range(3)]]
    x, y = all_pairs(special_values(name))
    return [[random_source(name, COUNT, k) for k in range(3)], [x, y], [x, y, x[::-1]]]


@pytest.mark.parametrize(("name", "op"), a_third(CASES))
def test_the_kernels_give_the_same_bits(
    name: str, op: str, drivers: tuple[str, str]
) -> None:
    here, there = [drivers[0]], [EMULATOR, drivers[1]]
    for sources in sources_of(name):
        for divisor in (0, 3) if op == "SUM" and name in INEXACT else (0,):
            exact = [x * 3 for x in sources] if name in LONG and divisor else sources
            got = reduced(there, name, op, exact, divisor)
            assert got.size == exact[0].size
            assert_same(got, reduced(here, name, op, exact, divisor), op)
