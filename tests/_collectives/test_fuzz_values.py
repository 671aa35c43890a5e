"""Random arrays through all ways of the collectives: right, and alike on all ranks.

Every call is made from a seed, alike on all ranks. Then each rank takes a form of its
own for what it passes: a view, another order, another class, a NumPy scalar for a 0-d
array, buffers of the strategy or ordinary arrays, options that change nothing, NumPy's
errors on or off. Some calls fail on purpose. Results are compared bit for bit with the
sums in the order of the ranks, and again later, when other calls have reused memory.
Arrays are gathered too, with lengths that differ between ranks. Some strategies have
their guard off, which must change nothing but that nothing fails on purpose.

The same again with a GPU (the stand-in for CuPy, tests/posing.py): leaves on it and on
the host in one nest, and ranks with a GPU together with ranks without.

``MPIDIST_FUZZ=500`` and ``MPIDIST_FUZZ=500:510`` as in ``test_fuzz``. Without it each
number of ranks has seeds of its own.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import posing
import pytest
from replicas import (
    context,
    core_by_mpi,
    core_on_ranks,
    everywhere,
    fuzz_seeds,
)

import mpidist
from mpidist._base import checksums, reduce_op
from mpidist._base.reduce_op import RULES
from mpidist._strategy.strategy import group_of

# More than for other tests only with $MPIDIST_FUZZ: 100 seeds are 25 times as much.
pytestmark = pytest.mark.timeout(300 + 20 * len(fuzz_seeds(0)))

DEFAULT_SEEDS = 4  # with and without guard and buffers: each once
CALLS = 8
DTYPES = (
    "bool int8 uint16 int64 float16 float32 float64 longdouble complex64 complex128"
)
# Around what the transports distinguish, in bytes.
BORDERS = (1, 64, 4096, 16 * 2**10, 32 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 2**21)
COMBINE = {op.name: reduce_op.COMBINE[rule.combining] for op, rule in RULES.items()}


class Subclass(np.ndarray):
    """An array of another class."""


def _values(rng: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    if dtype.kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    x = np.asarray(x).astype(dtype)
    limits = np.finfo(dtype)
    special = [limits.max, -limits.max, limits.tiny, -0.0, 0.0, np.inf]
    if dtype.kind == "f":
        special += [np.nan, -np.inf]
    if x.size and rng.integers(2):
        for _ in range(3):
            x.flat[int(rng.integers(x.size))] = rng.choice(special)
    return x


def _expected(op: str, parts: list[Any], nodes: list[list[int]]) -> Any:
    """Return what `dtype_table` promises, added up by nodes, in rank order.

    Args:
        op: the operation.
        parts: of each rank.
        nodes: the ranks of each.
    """
    dtype = parts[0].dtype
    compute = dtype
    if op == "MEAN" and dtype.kind in "iu":
        compute = np.dtype(float)
    elif dtype == np.float16:
        compute = np.dtype(np.float32)
    with np.errstate(all="ignore"):
        sums = [
            functools.reduce(COMBINE[op], [parts[r].astype(compute) for r in ranks])
            for ranks in nodes
        ]
        total = functools.reduce(COMBINE[op], sums)
        if op == "MEAN":
            total = np.true_divide(total, compute.type(len(parts)))
        if op in ("MIN", "MAX") and dtype.kind == "f":
            # Of 0.0 and -0.0 the sign counts.
            low = op == "MIN"
            signs = np.stack([np.signbit(x) for x in parts])
            zero = np.asarray(total == 0)
            some = signs.any(0) if low else signs.all(0)
            zeros = np.stack([(x == 0) & np.signbit(x) for x in parts])
            some = zeros.any(0) if low else some
            total = np.where(zero, np.where(some, -0.0, 0.0).astype(compute), total)
        kind = np.dtype(float) if op == "MEAN" and dtype.kind in "iu" else dtype
        return np.asarray(total).astype(kind)


def _raw(x: Any) -> bytes:
    """Return the bytes of the values, with one kind of NaN."""
    x = np.array(x, order="C")
    if x.dtype.kind == "c":
        parts = np.stack([x.real, x.imag])
        return _raw(parts)
    if x.dtype.kind == "f":
        x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
    raw = x.reshape(-1).view(np.uint8)
    if x.dtype.itemsize == 16:
        raw = raw.reshape(-1, 16)[:, :10]
    return raw.tobytes()


def _form(rng: Any, x: Any, buffer: Any) -> Any:
    """Return the values in a form of this rank's own."""
    form = int(rng.integers(9))
    if form == 1:
        return np.asfortranarray(x) if x.ndim else x
    if form == 2 and x.ndim:
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if form == 3:
        x = x.copy()
        x.flags.writeable = False
        return x
    if form == 4:
        return x.view(Subclass)
    if form == 5 and x.dtype != np.longdouble:
        return x.astype(x.dtype.newbyteorder(">"))
    if form == 6 and x.ndim == 0:
        return x[()]
    if form == 7:
        shifted = np.zeros(x.nbytes + 1, np.uint8)[1:]  # not aligned
        shifted = shifted.view(x.dtype).reshape(x.shape)
        shifted[...] = x
        return shifted
    if form == 8 and buffer is not None and x.nbytes <= buffer.nbytes:
        inside = buffer[: x.nbytes].view(x.dtype).reshape(x.shape)
        inside[...] = x
        return inside
    return x


def _close(x: Any, y: Any) -> bool:
    """Return whether complex numbers are close, or have both overflown.

    Then rounding on the way decides between infinity, NaN and a number in each part.
    """
    overflown = ~np.isfinite(x) & ~np.isfinite(y)
    return bool(np.all(overflown | np.isclose(x, y, 1e-5, 1e-300, equal_nan=True)))


@contextlib.contextmanager
def _floating_errors(how: int) -> Iterator[None]:
    errors = ("warn", "raise", "ignore")[how % 3]
    with np.errstate(all=errors), warnings.catch_warnings():
        warnings.simplefilter(("ignore", "error")[how % 2])
        yield


class Calls:
    """The calls of one seed.

    Args:
        strategy: what makes them.
        seed: alike on all ranks.
        buffer: of the strategy; None: the calls use none.
        where: "host"; "gpu": leaves here and there; "mixed": all of a rank's leaves on
            its device.
    """

    def __init__(
        self,
        strategy: mpidist.MPIStrategy,
        seed: int,
        buffer: Any,
        where: str = "host",
    ) -> None:
        self.where = where
        self.on_gpu = group_of(strategy).collectives.device.kind == "gpu"
        self.dtypes = [
            d for d in DTYPES.split() if where == "host" or d != "longdouble"
        ]
        self.strategy = strategy
        self.rank = strategy.replica_id
        self.size = strategy.num_replicas_in_sync
        self.rng = np.random.default_rng([seed, 7])  # alike on all ranks
        self.mine = np.random.default_rng([seed, 8, self.rank])
        self.buffer = buffer
        self.kept: list[tuple[Any, Any]] = []
        self.exact = os.environ.get("MPIDIST_IMPLEMENTATION") is None
        ranks = range(self.size)
        comm = group_of(strategy).communicator
        number = getattr(comm, "num_nodes", 1)
        # Small nests are added up in the order of the ranks, large ones by nodes.
        self.orders = [[[r] for r in ranks]]
        if number > 1:
            by_nodes = [
                [r for r in ranks if r * number // self.size == k]
                for k in range(number)
            ]
            self.orders.append(by_nodes)
        self.guarded = group_of(strategy).guard.enabled
        self.cache: list[tuple[str, list[tuple[tuple[int, ...], Any]]]] = []
        self.gathered: list[list[tuple[list[tuple[int, ...]], Any]]] = []

    def _place(self, own: list[Any]) -> list[Any]:
        """Return the leaves where they are to be: on the GPU, or as they are."""
        if self.where == "host":
            return own
        each = self.rng.integers(3 if self.where == "gpu" else 1, size=len(own)) < 2
        if not self.on_gpu:
            return own
        xp = self.strategy.array_module
        return [
            self._on_gpu(xp, np.asarray(x)) if here else x
            for x, here in zip(own, each, strict=True)
        ]

    def _on_gpu(self, xp: Any, x: Any) -> Any:
        """Return an array that a kernel has yet to write, in a form of this rank's."""
        x = np.array(x, x.dtype.newbyteorder("="))
        there = xp.zeros((2, *x.shape), x.dtype)[int(self.mine.integers(2))]
        if x.ndim and self.mine.integers(3) == 0:
            there = xp.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
        posing.launch(lambda: np.copyto(there.memory, x))
        return there

    def _forms_of(self, values: list[Any], forms: Any) -> list[Any]:
        """Return what this rank passes: its values in forms, where they are to be."""
        own, start = [], 0
        for x in values:
            place = None
            if self.buffer is not None and start < self.buffer.nbytes:
                place = self.buffer[start:]
            own.append(_form(forms, x, place))
            start += -(-x.nbytes // 64) * 64
        return self._place(own)

    def _options(self) -> Any:
        """Return options that change nothing, or none."""
        if self.mine.integers(4):
            return None
        return mpidist.experimental.CommunicationOptions(timeout_seconds=40)

    def _misplaced(self, own: list[Any], results: list[Any]) -> str:
        kinds = [isinstance(x, posing.ndarray) for x in own]
        found = [isinstance(x, posing.ndarray) for x in results]
        return "" if kinds == found else f"on a GPU {found}, not {kinds}; "

    def _draw(self) -> tuple[str, list[tuple[tuple[int, ...], Any]]]:
        rng = self.rng
        if self.cache and rng.integers(3):  # again, by the short way
            return self.cache[int(rng.integers(len(self.cache)))]
        leaves = []
        for _ in range(1 if rng.integers(3) else int(rng.integers(2, 6))):
            dtype = np.dtype(str(rng.choice(self.dtypes)))
            nbytes = (
                int(rng.choice(BORDERS)) + int(rng.integers(-3, 4)) * dtype.itemsize
            )
            count = max(0, nbytes // dtype.itemsize)
            shape: tuple[int, ...] = (count,)
            if rng.integers(6) == 0:
                shape = ()
            elif rng.integers(3) == 0:
                shape = (3, count // 3)
            leaves.append((shape, dtype))
        op = str(rng.choice(list(COMBINE)))
        kinds = {dtype.kind for _, dtype in leaves}
        if "b" in kinds:
            op = "MAX" if "c" not in kinds else ""
        elif "c" in kinds and op in ("MIN", "MAX"):
            op = "SUM"
        if not op:
            return self._draw()
        self.cache.append((op, leaves))
        return op, leaves

    def one(self) -> str:
        """Make a call; return what is wrong with it."""
        if self.rng.integers(3) == 0:
            return self._gather()
        op, leaves = self._draw()
        fault = int(self.rng.integers(12))
        where = int(self.rng.integers(self.size))
        if fault == 0 and self.size > 1 and self.guarded:
            return self._fail(op, leaves, where)
        parts = [
            [_values(self.rng, shape, dtype) for shape, dtype in leaves]
            for _ in range(self.size)
        ]
        same = int(self.rng.integers(3))  # sometimes all have the same form
        forms = self.mine if same else np.random.default_rng(int(self.rng.integers(99)))
        own, options = self._forms_of(parts[self.rank], forms), self._options()
        tree = own[0] if len(own) == 1 else own
        how = int(self.mine.integers(6))

        def replica() -> Any:
            with _floating_errors(how):
                return context().all_reduce(op, tree, options)

        results, wrong = self._run(replica, own)
        crcs = [zlib.crc32(checksums.value_bytes(np.asarray(x))) for x in results]
        if len({*map(tuple, everywhere(crcs))}) > 1:
            wrong += f"{op} of {leaves}: not the same bits on all ranks; "
        for i, (shape, dtype) in enumerate(leaves):
            text = f"{op} of {dtype} {shape}"
            column = [row[i] for row in parts]
            expected, *more = (_expected(op, column, order) for order in self.orders)
            x = np.asarray(results[i])
            if (x.shape, x.dtype) != (expected.shape, expected.dtype):
                wrong += f"{text}: {x.dtype} {x.shape} for {expected.dtype}; "
            elif op == "PROD" and dtype.kind == "c":
                # NumPy's loops differ in whether they round between * and +; MPI's
                # also in what infinity times a complex number is.
                if not self.exact:
                    finite = np.isfinite(x) & np.isfinite(expected)
                    x, expected = x[finite], expected[finite]
                if not _close(x, expected):
                    wrong += f"{text}: {x} for {expected}; "
            elif self.exact and _raw(x) not in [_raw(y) for y in (expected, *more)]:
                wrong += f"{text}: {x} for {expected}; "
        self._use(results)
        return wrong

    def _draw_gather(self) -> tuple[int, list[tuple[list[tuple[int, ...]], Any]]]:
        """Return an axis, and for each leaf its shape on each rank, and its dtype."""
        rng = self.rng
        axis = int(rng.integers(3))
        if self.gathered and rng.integers(2):  # again, by the short way
            return axis, self.gathered[int(rng.integers(len(self.gathered)))]
        leaves = []
        for _ in range(1 if rng.integers(3) else int(rng.integers(2, 6))):
            dtype = np.dtype(str(rng.choice(self.dtypes)))
            # So that 3 dimensions and 3 axes are possible: some of them are short.
            shape = [1, 1, 1]
            shape[int(rng.integers(3))] = int(rng.integers(0, 5))
            long = int(rng.integers(3))
            count = max(1, int(rng.choice(BORDERS)) // dtype.itemsize)
            shape[long] = count // max(1, math.prod(shape))
            shapes = []
            how = int(rng.integers(3))
            for _ in range(self.size):
                own = list(shape)
                if how == 1:
                    own[axis] = int(rng.integers(0, max(2, own[axis])))
                elif how == 2 and rng.integers(2):
                    own[axis] = min(own[axis], int(rng.integers(0, 3)))
                shapes.append(tuple(own))
            leaves.append((shapes, dtype))
        self.gathered.append(leaves)
        return axis, leaves

    def _gather(self) -> str:
        """Gather; return what is wrong with it."""
        axis, leaves = self._draw_gather()
        alike = [
            len({(*s[:axis], *s[axis + 1 :]) for s in shapes}) == 1
            for shapes, _ in leaves
        ]
        if not all(alike):  # made for another axis
            if not self.guarded:
                return ""
            tree = [np.zeros(shapes[self.rank], dtype) for shapes, dtype in leaves]
            with pytest.raises(mpidist.CollectiveMismatchError):
                self.strategy.run(lambda: context().all_gather(tree, axis))
            return ""
        parts = [
            [_values(self.rng, shapes[rank], dtype) for shapes, dtype in leaves]
            for rank in range(self.size)
        ]
        own, options = self._forms_of(parts[self.rank], self.mine), self._options()
        given = own[0] if len(own) == 1 else own
        axis -= 3 * int(self.rng.integers(2))
        results, wrong = self._run(
            lambda: context().all_gather(given, axis, options), own
        )
        for i, (shapes, dtype) in enumerate(leaves):
            text = f"gather of {dtype} {shapes} along {axis}"
            expected = np.concatenate([row[i] for row in parts], axis)
            x = results[i]
            if (x.shape, x.dtype) != (expected.shape, expected.dtype):
                wrong += f"{text}: {x.dtype} {x.shape} for {expected.dtype}; "
            elif not x.flags.c_contiguous or _raw(x) != _raw(expected):
                wrong += f"{text}: {x} for {expected}; "
        self._use(results)
        return wrong

    def _run(self, replica: Any, own: list[Any]) -> tuple[list[Any], str]:
        """Make a call with these leaves; return results, and what is wrong with it."""
        before = [_raw(posing.to_host(x)) for x in own]
        value = self.strategy.run(replica)
        (found,) = self.strategy.experimental_local_results(value)
        found = [found] if len(own) == 1 else found
        results = [posing.to_host(x) for x in found]
        wrong = self._misplaced(own, found)
        for given, raw, x in zip(own, before, results, strict=True):
            given = posing.to_host(given)
            text = f"{given.dtype} {given.shape}"
            if _raw(given) != raw:
                wrong += f"{text}: what was passed was changed; "
            if isinstance(x, np.ndarray) and np.shares_memory(x, given):
                wrong += f"{text}: shares memory with what was passed; "
        return results, wrong

    def _use(self, results: list[Any]) -> None:
        """Write to some results, as their owner may, and keep some."""
        for x in results:
            if isinstance(x, np.ndarray) and self.mine.integers(2) and x.size:
                x[...] = 1
        if not self.mine.integers(2):
            return
        for x in results:
            if not isinstance(x, np.ndarray):
                continue
            how = int(self.mine.integers(4))
            if how == 1 and x.ndim:
                x = x[x.shape[0] // 2 :]
            elif how == 2:
                x = (
                    np.asarray(memoryview(x).cast("B"))
                    if x.size and x.dtype.char != "g"
                    else x
                )
            elif how == 3:
                x = x.T
            self.kept.append((x, x.copy()))
        del self.kept[:-6]

    def check_kept(self) -> str:
        """Say whether results that were kept have changed."""
        for x, copy in self.kept:
            if _raw(x) != _raw(copy):
                return (
                    f"a result of {copy.dtype} {copy.shape} that was kept has changed"
                )
        return ""

    def _fail(self, op: str, leaves: list[Any], where: int) -> str:
        shape, dtype = leaves[0]
        tree: Any = np.zeros(shape, dtype)
        kind = int(self.rng.integers(3))
        if self.rank == where:
            tree = (np.zeros((*shape, 2), dtype), None, [tree])[kind]
        error: BaseException | None = None

        def replica() -> None:
            nonlocal error
            try:
                context().all_reduce(op, tree)
            except (TypeError, mpidist.CollectiveError) as raised:
                error = raised

        self.strategy.run(replica)
        return "" if error is not None else f"{op} with fault {kind} did not raise"


@core_on_ranks
def test_all_ways_give_the_same(new_strategy):
    _run(new_strategy)


@core_by_mpi
@pytest.mark.parametrize("where", ["gpu", "mixed"])
@pytest.mark.parametrize("order", ["late", "random"])
def test_all_ways_give_the_same_with_a_gpu(new_strategy, monkeypatch, where, order):
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    with_gpu = where == "gpu" or rank % 2 == 1
    if with_gpu:
        posing.install(monkeypatch, order=order, seed=rank)
    # Half of the seeds with each order: it takes four times as long as host arrays.
    part = slice(2) if order == "late" else slice(2, None)
    _run(new_strategy, where, part, device="gpu" if with_gpu else "cpu")


@pytest.mark.mpi(min_size=3)
@pytest.mark.core
@pytest.mark.usefixtures("by_nodes")
@pytest.mark.parametrize(
    ("where", "nodes"), [("host", 2), ("host", 3), ("gpu", 2), ("mixed", 2)]
)
def test_all_ways_give_the_same_between_nodes(new_strategy, monkeypatch, where, nodes):
    """On 3 ranks as 3 nodes by MPI, with other numbers in slices as well."""
    if len(set(new_strategy().cluster_resolver.nodes)) > 1:
        pytest.skip("on hosts these are more nodes, whose sums have MPI's order")
    monkeypatch.setenv("MPIDIST_SIMULATED_NODES", str(nodes))
    if where == "host":
        _run(new_strategy)
    else:
        test_all_ways_give_the_same_with_a_gpu(
            new_strategy, monkeypatch, where, "random"
        )


def _run(new_strategy, where="host", part=slice(None), **how):
    seeds = fuzz_seeds(DEFAULT_SEEDS)
    if "MPIDIST_FUZZ" not in os.environ:
        first = DEFAULT_SEEDS * len(everywhere(None))
        seeds = range(first, first + DEFAULT_SEEDS)[part]
    for seed in seeds:
        if seed % 50 == 0 or seed == seeds.start:
            guarded = new_strategy(timeout_seconds=20, **how)
            unguarded = new_strategy(timeout_seconds=20, guard=False, **how)
        strategy = unguarded if seed % 4 > 1 else guarded
        buffer = None
        if seed % 2:
            buffer = strategy.buffers_like(np.zeros(3 * 2**20, np.uint8))
        calls = Calls(strategy, seed, buffer, where)
        for number in range(CALLS):
            wrong = calls.one() + calls.check_kept()
            found = everywhere(wrong)
            assert not any(found), f"seed {seed}, call {number}: {found}"
