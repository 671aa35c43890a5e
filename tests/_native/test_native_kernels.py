"""The reductions of mpidist/_native/kernels.c give NumPy's bits.

The file is compiled here, alone, and called through ctypes. MPIDIST_TEST_KERNELS names
a shared library to test in its place: one built with a sanitizer, which is preloaded.
"""

import ctypes
import functools
import itertools
import os
import pathlib
import shlex
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpidist._base.reduce_op import COMBINE, ReduceOp
from mpidist._collectives import dtype_table

SOURCE = pathlib.Path(__file__).parents[2] / "mpidist" / "_native" / "kernels.c"
FLAGS = "-O3 -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
COUNTS = (0, 1, 7, 4095, 4096, 4097, 20011)
OPS = tuple(COMBINE)
EXTREMES = ("MIN", "MAX")

DTYPES: dict[str, np.dtype[Any]] = {"b1": np.dtype(bool), "bf2": BFLOAT16} | {
    f"{kind}{size}": np.dtype(f"{kind}{size}")
    for kind, sizes in (("i", (1, 2, 4, 8)), ("u", (1, 2, 4, 8)), ("f", (2, 4, 8)))
    for size in sizes
}
DTYPES |= {"c8": np.dtype(np.complex64), "c16": np.dtype(np.complex128)}
if np.dtype(np.longdouble).itemsize == 16:
    DTYPES |= {"f16": np.dtype(np.longdouble), "c32": np.dtype(np.clongdouble)}
INEXACT = [name for name in DTYPES if name[0] in "fc" or name == "bf2"]


def has_kernel(name: str, op: str) -> bool:
    if DTYPES[name].kind == "b":
        return op in EXTREMES
    return DTYPES[name].kind != "c" or op not in EXTREMES


CASES = [(n, op) for n in DTYPES for op in OPS if has_kernel(n, op)]


# --- the library --------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(built_once: Callable[..., pathlib.Path]) -> ctypes.CDLL:
    prebuilt = os.environ.get("MPIDIST_TEST_KERNELS")
    if prebuilt:
        return load(prebuilt)
    names = (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang")
    commands = [shlex.split(name) for name in names if name]
    compiler = next((c for c in commands if shutil.which(c[0])), None)
    if compiler is None:
        pytest.skip("no C compiler: none of $CC, cc, gcc, clang")
    command = [*compiler, *FLAGS.split(), "-fPIC", "-shared", str(SOURCE), "-lm", "-o"]

    def make(path: pathlib.Path) -> None:
        subprocess.run([*command, str(path)], check=True)

    return load(str(built_once("kernels.so", make)))


def load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.md_find_kernel.restype = ctypes.c_void_p
    library.md_find_kernel.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.md_itemsize.restype = ctypes.c_size_t
    library.md_itemsize.argtypes = [ctypes.c_void_p]
    library.md_reduce.restype = None
    library.md_reduce.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.c_uint,
    ]
    return library


def pointers(arrays: list[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))


def reduce(
    library: ctypes.CDLL,
    name: str,
    op: str,
    destinations: list[Any],
    sources: list[Any],
    count: int | None = None,
    divisor: int = 0,
) -> None:
    kernel = library.md_find_kernel(name.encode(), op.encode())
    assert kernel
    library.md_reduce(
        kernel,
        pointers(destinations),
        len(destinations),
        pointers(sources),
        len(sources),
        sources[0].size if count is None else count,
        divisor,
    )


def result(
    library: ctypes.CDLL, name: str, op: str, sources: list[Any], divisor: int = 0
) -> Any:
    out = np.empty_like(sources[0])
    reduce(library, name, op, [out], sources, divisor=divisor)
    return out


# --- what NumPy gives ---------------------------------------------------------------


def multiply(x: Any, y: Any) -> Any:
    """Multiply as `np.multiply` does where it has no fused multiply-add."""
    if x.dtype.kind != "c":
        return x * y
    out = np.empty_like(x)
    out.real = x.real * y.real - x.imag * y.imag
    out.imag = x.real * y.imag + x.imag * y.real
    return out


def extreme(op: str) -> Callable[[Any, Any], Any]:
    """Return what MPI computes for an operation, between two arrays."""
    numpy_function = np.minimum if op == "MIN" else np.maximum

    def combine(x: Any, y: Any) -> Any:
        if x.dtype.itemsize > 8:
            left = np.signbit(x) == (op == "MIN")  # of zeros
            return np.where((x == y) & left, x, numpy_function(y, x))
        entry = dtype_table.reduction(x.dtype, ReduceOp[op], "test")
        out, left, right = np.empty_like(x), *np.empty((2, *x.shape), entry.wire)
        entry.encode(x, left)
        entry.encode(y, right)
        entry.decode(numpy_function(left, right), 2, out)
        return out

    return combine


def expected(name: str, op: str, sources: list[Any], divisor: int = 0) -> Any:
    dtype = DTYPES[name]
    if op in EXTREMES:
        combine = extreme(op)
        if len(sources) == 1:
            return combine(sources[0], sources[0])
        return functools.reduce(combine, sources)
    half = dtype.itemsize == 2 and name in INEXACT
    compute = np.dtype(np.float32) if half else dtype
    wide = [x.astype(compute, copy=False) for x in sources]
    total = functools.reduce(np.add if op == "SUM" else multiply, wide)
    if divisor:
        total = np.true_divide(total, compute.type(divisor))
    return total.astype(dtype)


def parts(x: Any) -> Any:
    return x.view(x.real.dtype) if x.dtype.kind == "c" else x


def bits(x: Any) -> Any:
    """Return the bits of each number; of a long double, its value and sign."""
    if x.dtype.itemsize > 8:
        return np.where(np.signbit(x) & (x == 0), x.dtype.type(2) ** 16000, x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same(got: Any, wanted: Any, op: str) -> None:
    got, wanted = parts(got), parts(wanted)
    if np.array_equal(bits(got), bits(wanted)):
        return
    if op in EXTREMES and got.dtype.itemsize <= 8:
        np.testing.assert_array_equal(bits(got), bits(wanted))
        return
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, wanted)
        return
    nan = np.isnan(wanted)  # whose sign and payload are left open
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(bits(got[~nan]), bits(wanted[~nan]))


# --- sources ------------------------------------------------------------------------

RNG_SEED = 9
SPECIAL_FLOATS = (
    0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan,
    "smallest_subnormal", "tiny", "max", "min", "eps",
)  # fmt: skip


def random_source(name: str, count: int, seed: int) -> Any:
    dtype = DTYPES[name]
    rng = np.random.default_rng([RNG_SEED, seed])
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, count, dtype, endpoint=True)
    numbers = rng.standard_normal(count).astype(np.longdouble)
    numbers += rng.standard_normal(count) * 1e-17
    if dtype.kind == "c":
        out = np.empty(count, dtype)
        out.real, out.imag = numbers, rng.standard_normal(count)
        return out
    return numbers.astype(dtype)


def special_values(name: str) -> Any:
    dtype = DTYPES[name]
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        edges = [limits.min, limits.min + 1, limits.max - 1, limits.max]
        return np.array([*edges, 0, 1, 2, limits.max // 2 + 1], dtype)
    limits = (ml_dtypes.finfo if name == "bf2" else np.finfo)(dtype)
    values = [getattr(limits, v) if isinstance(v, str) else v for v in SPECIAL_FLOATS]
    if name in ("f4", "f8"):  # NaN of any payload becomes one
        unsigned = f"u{name[1]}"
        payloads = np.array([1, -1, 1 << 10], f"i{name[1]}").view(unsigned)
        infinity = np.array(np.inf, dtype).view(unsigned)
        return np.concatenate(
            [np.array(values, dtype), (payloads | infinity).view(dtype)]
        )
    if dtype.kind != "c":
        return np.array(values, dtype)
    real = np.array(values, np.empty(0, dtype).real.dtype)
    out = np.empty((len(real), len(real)), dtype)
    out.real, out.imag = real[:, None], real[None, :]
    return out.ravel()


def all_pairs(x: Any) -> tuple[Any, Any]:
    return np.repeat(x, len(x)), np.tile(x, len(x))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


# --- tests --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "op"), CASES)
def test_random_values(library: ctypes.CDLL, name: str, op: str) -> None:
    largest = max(COUNTS)
    guard = 3  # elements behind the result that stay as they are
    sources = [random_source(name, largest, k) for k in range(5)]
    filler = random_source(name, largest + guard, 99)
    for n in range(1, 6):
        wanted = expected(name, op, sources[:n])
        for m, count in [*((1, count) for count in COUNTS), (2, 4097), (3, 20011)]:
            before = filler[: count + guard]
            out = [before.copy() for _ in range(m)]
            reduce(library, name, op, out, sources[:n], count)
            for x in out:
                assert_same(x[:count], wanted[:count], op)
                assert_same(x[count:], before[count:], op)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_special_values(library: ctypes.CDLL, name: str, op: str) -> None:
    x, y = all_pairs(special_values(name))
    rng = np.random.default_rng(RNG_SEED)
    z = rng.permutation(x)
    for sources in ([x], [x, y], [y, x, z], [z, x, z, y]):
        wanted = expected(name, op, sources)
        assert_same(result(library, name, op, sources), wanted, op)


@pytest.mark.parametrize("name", INEXACT)
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 2**31 + 1])
def test_mean(library: ctypes.CDLL, name: str, divisor: int) -> None:
    sources = [random_source(name, 9001, k) for k in range(4)]
    x, y = all_pairs(special_values(name))
    for arrays in (*(sources[:n] for n in range(1, 5)), [x], [x, y], [y, x, y]):
        wanted = expected(name, "SUM", arrays, divisor)
        got = result(library, name, "SUM", arrays, divisor)
        assert_same(got, wanted, "SUM")


@pytest.mark.parametrize(("name", "op"), CASES)
def test_destinations_that_are_sources(
    library: ctypes.CDLL, name: str, op: str
) -> None:
    originals = [random_source(name, 9001, k) for k in range(4)]
    for n in range(1, 5):
        wanted = expected(name, op, originals[:n])
        choices = itertools.chain.from_iterable(
            itertools.product(range(n), repeat=m) for m in (1, 2)
        )
        for aliased in choices:
            sources = [x.copy() for x in originals[:n]]
            out = [sources[k] for k in aliased]
            reduce(library, name, op, out, sources)
            for k, x in enumerate(sources):
                assert_same(x, wanted if k in aliased else originals[k], op)


@pytest.mark.parametrize("name", ["f2", "bf2"])
def test_all_16_bit_floats(library: ctypes.CDLL, name: str) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(DTYPES[name])
    numbers = ~np.isnan(x)
    for op in OPS:
        got = result(library, name, op, [x])
        assert_same(got, expected(name, op, [x]), op)
        np.testing.assert_array_equal(got.view("u2")[numbers], x.view("u2")[numbers])
    for k in range(32):
        y = np.random.default_rng([RNG_SEED, k]).permutation(x)
        for op in OPS:
            got = result(library, name, op, [x, y])
            assert_same(got, expected(name, op, [x, y]), op)
        assert_same(
            result(library, name, "SUM", [x, y], 3),
            expected(name, "SUM", [x, y], 3),
            "SUM",
        )


@pytest.mark.parametrize(
    ("op", "wanted"), [("MIN", [0, 0, 0, 1]), ("MAX", [0, 1, 1, 1])]
)
def test_any_byte_but_0_is_true(
    library: ctypes.CDLL, op: str, wanted: list[int]
) -> None:
    x = np.array([0, 0, 255, 128], np.uint8)
    y = np.array([0, 4, 0, 2], np.uint8)
    assert result(library, "b1", op, [x, y]).tolist() == wanted
    assert result(library, "b1", op, [x, y, y]).tolist() == wanted
    assert result(library, "b1", op, [x]).tolist() == [0, 0, 1, 1]


def test_what_has_no_kernel(library: ctypes.CDLL) -> None:
    for name, op in itertools.product(DTYPES, OPS):
        kernel = library.md_find_kernel(name.encode(), op.encode())
        assert bool(kernel) == has_kernel(name, op)
        if kernel:
            assert library.md_itemsize(kernel) == DTYPES[name].itemsize
    for name in ("", "f", "f3", "m8", "M8", "f4 ", "O8"):
        assert not library.md_find_kernel(name.encode(), b"SUM")
