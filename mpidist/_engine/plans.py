"""Plans of all-reduces, made once for each signature and kept.

All reductions use `Plans.all_reduce`: of Python numbers, arrays, nests, the gradients
of an optimizer. The *signature* of a call is its name, operation, structure and
options, and for each leaf the dtype, the shape and the kind of device. The first route
that accepts a signature makes the plan (`ROUTES`), and all calls with the signature use
it, including the first one.

A plan agrees with the other ranks, by a header with its `Call`, and reduces. All ranks
that agree have the same plan: a route decides by the text of the call, or by what is
the same on all ranks of a strategy. What may differ between ranks, such as whether an
array is contiguous, or where the memory of a result is, is known to the plan alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import numpy as np

from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Call
from mpidist._base import backend, nest
from mpidist._base.cache import Cache
from mpidist._base.indexed_slices import IndexedSlices
from mpidist._base.options import CommunicationOptions
from mpidist._base.reduce_op import ReduceOp
from mpidist._base.types import Array, HostArray, Nest
from mpidist._engine import dtype_table
from mpidist._engine.buckets import FlatBuffers, Leaf, Results
from mpidist._engine.compression import Compression
from mpidist._engine.core_calls import CoreCalls
from mpidist._engine.node import Node
from mpidist._engine.nodes import Nodes
from mpidist._engine.observed import ObservedPlan
from mpidist._engine.pool import Pool
from mpidist._engine.staging import Staging
from mpidist._engine.transports import Transports
from mpidist._mpi.communicator import AnyCommunicator

_Key: TypeAlias = tuple[object, ...]

_MOST_PLANS: Final = 1024
_USUAL: Final = ("all_reduce", None, None)  # call, options and root
_NUMBERS: Final = frozenset((float, int, np.float32, np.float64))


@dataclasses.dataclass(frozen=True)
class PlanResources:
    """What routes need to build plans.

    Attributes:
        comm: the ranks.
        guard: of the strategy.
        node: the memory of all ranks, if they are on one node and share memory.
        nodes: the memory of each of several nodes, if their ranks share memory.
        pool: private memory for large results.
        buffers: flat buffers, kept between calls.
        staging: copies between GPUs and a node's memory; None without such memory.
        wide: whether 16-bit floats are summed as float32 on their way, and small
            integers as 32-bit ones: MPI adds two ranks at a time.
    """

    comm: AnyCommunicator
    guard: Guard
    node: Node | None
    nodes: Nodes | None
    pool: Pool
    buffers: FlatBuffers
    staging: Staging | None
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Signature:
    """What is known of a call before its values.

    Attributes:
        call: what the header says.
        leaves: of the nest.
        root: the one rank that wants the results; None: all do.
        transports: of the options.
        bytes_per_pack: the maximum size of a bucket of several leaves.
        compress: makes the compression of a bucket, if sums are compressed.
    """

    call: Call
    leaves: list[Leaf]
    root: int | None
    transports: Transports
    bytes_per_pack: int
    compress: Callable[[], Compression] | None = None


class Plan(Protocol):
    """An all-reduce of nests of one signature."""

    call: Call

    def __call__(
        self,
        arrays: list[Array],
        call: Call | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Agree with the other ranks, and reduce. Collective.

        Args:
            arrays: the leaves, with any memory layout. They are not changed.
            call: the contents of the header, if they differ from `call`.
            timeout: seconds to wait for the others; None: the strategy's.

        Returns:
            The results: new arrays, with the same bits on all ranks. If only the root
            wants them, None for each on the other ranks.
        """


class CheckingPlan(Plan, Protocol):
    """A plan that checks by itself if arrays have its signature."""

    def attempt(self, arrays: list[Array], timeout: float | None) -> Results | None:
        """Do as a call; or return None, without effect, if the signature differs.

        Args:
            arrays: NumPy arrays.
            timeout: seconds to wait for the others; None: the strategy's.
        """


Route = Callable[[PlanResources, Signature], Plan | None]
"""Makes a plan for a signature; None if it does not accept it."""

ReduceRows = Callable[
    [ReduceOp, Nest, CommunicationOptions | None, str, int | None], Nest
]
"""All-reduces a nest with `IndexedSlices`; arguments as of `Plans.all_reduce`."""

Describe = Callable[
    [ReduceOp, nest.Structure, list[Array], str, CommunicationOptions, int | None],
    Signature,
]


class Plans:
    """The plans of a strategy.

    Attributes:
        by_signature: the plans, by what is known of calls before their values.
        small: calls with small arrays; ``entry`` is `all_reduce` for callers.

    Args:
        resources: what routes build them with.
        routes: in order; the last accepts everything.
        describe: returns the signature of a call.
        merge: overrides the strategy's options by those of a call.
        report: raises an error that this rank found in its arguments, on all ranks.
        reduce_rows: all-reduces a nest that has `IndexedSlices`: gets the arguments of
            `all_reduce`.
    """

    def __init__(
        self,
        resources: PlanResources,
        routes: tuple[Route, ...],
        describe: Describe,
        merge: Callable[[CommunicationOptions | None], CommunicationOptions],
        report: Callable[[str, BaseException], NoReturn],
        reduce_rows: ReduceRows,
    ) -> None:
        self._resources = resources
        self._routes = routes
        self._describe = describe
        self._merge = merge
        self._report = report
        self._reduce_rows = reduce_rows
        self.by_signature: Cache[_Key, Plan] = Cache(_MOST_PLANS)
        # For nests: the `CheckingPlan` of the last such call.
        self._last_checking: Cache[_Key, Any] = Cache(_MOST_PLANS)
        self.small: CoreCalls = CoreCalls(resources.guard, self.all_reduce, 1)

    def restart(self, resources: PlanResources) -> None:
        """Forget all plans, and build new ones with other resources."""
        self._resources = resources
        self.by_signature.clear()
        self._last_checking.clear()
        self.small.forget()

    def all_reduce(
        self,
        op: ReduceOp,
        tree: Nest,
        options: CommunicationOptions | None = None,
        call: str = "all_reduce",
        root: int | None = None,
    ) -> Nest:
        """Reduce each leaf of ``tree`` over the ranks. Collective.

        Args:
            op: the operation.
            tree: a nest of arrays and numbers; the same structure, shapes and dtypes
                on all ranks.
            options: of this call.
            call: the name of the call in messages.
            root: the one rank that wants the results (MPI Reduce); None: all do.

        Returns:
            The nest of results, new arrays, bit-identical on all ranks; with a
            ``root`` a nest of None on the others.
        """
        if options is not None and type(options) is not CommunicationOptions:
            return self._first_time(op, tree, options, call, root)  # which refuses it
        kind = type(tree)
        if kind is np.ndarray:
            key = (call, op._name_, options, root, tree.dtype, tree.shape)
            plan = self.by_signature.get(key)
            if plan is not None:
                if (call, options, root) == _USUAL:
                    self.small.keep(op, tree, plan)
                return plan([tree], None, self._timeout_of(options))[0]
        elif kind in _NUMBERS:
            x = np.asarray(tree)
            plan = self.by_signature.get(
                (call, op._name_, options, root, kind, x.dtype)
            )
            if plan is not None:
                result = plan([x], None, self._timeout_of(options))[0]
                return result if result is None else _as_number(result, kind)
        else:
            try:
                leaves, structure = nest.flatten(tree)
                timeout = self._timeout_of(options)
            except Exception:  # raised again there, where all ranks are told
                return self._first_time(op, tree, options, call, root)
            if {*map(type, leaves)} == _ARRAYS:
                how = (call, op._name_, options, root, structure)
                last = self._last_checking.get(how)
                if last is not None:
                    results = last.attempt(leaves, timeout)
                    if results is not None:
                        return structure.unflatten(results)
                plan = self.by_signature.get((*how, _describe_all(leaves)))
                if plan is not None:
                    self._remember(how, plan)
                    return structure.unflatten(plan(leaves, None, timeout))
        return self._first_time(op, tree, options, call, root)

    def _remember(self, how: _Key, plan: Plan) -> None:
        if hasattr(plan, "attempt"):  # as isinstance of a protocol, which is slow
            self._last_checking[how] = plan

    def _timeout_of(self, options: CommunicationOptions | None) -> float | None:
        return None if options is None else self._merge(options).timeout_seconds

    def _first_time(
        self,
        op: ReduceOp,
        tree: Nest,
        options: CommunicationOptions | None,
        call: str,
        root: int | None,
    ) -> Nest:
        """Check every leaf, keep the plan, and run it."""
        try:
            merged = self._merge(options)
            leaves, structure = nest.flatten(tree)
            if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
                return self._reduce_rows(op, tree, options, call, root)
            pairs = [backend.as_array(leaf, call) for leaf in leaves]
            arrays = [array for array, _ in pairs]
            plan = self._find(op, structure, arrays, call, merged, root)
            key = _short_key(
                tree, leaves, structure, arrays, (call, op._name_, options, root)
            )
            if key is not None:
                self.by_signature[key] = plan
        except Exception as error:
            self._report(call, error)
            raise
        results = plan(arrays, None, merged.timeout_seconds)
        return structure.unflatten(
            [
                None if x is None else backend.restore(x, kind)
                for x, (_, kind) in zip(results, pairs, strict=True)
            ]
        )

    def find(
        self,
        op: ReduceOp,
        arrays: list[Array],
        call: str,
        options: CommunicationOptions,
    ) -> Plan:
        """Return the plan for a list of arrays. Not collective."""
        return self._find(op, nest.flatten(arrays)[1], arrays, call, options, None)

    def _find(
        self,
        op: ReduceOp,
        structure: nest.Structure,
        arrays: list[Array],
        call: str,
        options: CommunicationOptions,
        root: int | None,
    ) -> Plan:
        described = tuple(
            (x.dtype, tuple(x.shape), backend.is_device_array(x)) for x in arrays
        )
        key = (op._name_, structure, call, options, root, described)
        plan = self.by_signature.get(key)
        if plan is None:
            signature = self._describe(op, structure, arrays, call, options, root)
            plan = self.by_signature[key] = self._make(signature)
        return plan

    def _make(self, signature: Signature) -> Plan:
        for route in self._routes:
            plan = route(self._resources, signature)
            if plan is not None:
                calls = self._resources.guard.calls
                return (
                    plan if calls is None else ObservedPlan(plan, route.__name__, calls)
                )
        raise AssertionError("the last route takes everything")


def _short_key(
    tree: Nest,
    leaves: list[Nest],
    structure: nest.Structure,
    arrays: list[Array],
    how: _Key,
) -> _Key | None:
    """Return the key by which `Plans.all_reduce` finds the plan of such calls, if any.

    Args:
        tree: of the call.
        leaves: of the tree.
        structure: of the tree.
        arrays: the leaves as arrays.
        how: the rest of the key.
    """
    kind = type(tree)
    if kind in _NUMBERS:
        return (*how, kind, arrays[0].dtype)
    if any(x is not leaf for x, leaf in zip(arrays, leaves, strict=True)):
        return None
    if kind is np.ndarray:
        return (*how, tree.dtype, tree.shape)
    if {*map(type, leaves)} == _ARRAYS:
        return (*how, structure, _describe_all(leaves))
    return None


_ARRAYS: Final = {np.ndarray}


def _describe_all(arrays: list[Array]) -> _Key:
    return tuple([(x.dtype, x.shape) for x in arrays])


def _as_number(x: HostArray, kind: type) -> Any:
    return x.item() if kind in (int, float) else x[()]


def leaves_of(op: ReduceOp, arrays: list[Array], call: str) -> list[Leaf]:
    """Return what a plan knows of these arrays.

    Raises:
        TypeError: if the operation is not defined for a dtype.
    """
    return [
        Leaf(
            tuple(x.shape),
            dtype_table.reduction(x.dtype, op, call),
            backend.is_device_array(x),
        )
        for x in arrays
    ]
