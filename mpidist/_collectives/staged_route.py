"""The route *staged* of nests with leaves on a GPU: by the plan of host arrays.

For the other ranks it is the same as that plan: the same headers and payloads. So a
nest may have leaves on the host and on a GPU, and a strategy ranks with and without a
GPU: each rank copies its own arrays to the host and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.types import Array
from mpidist._collectives.between_route import between
from mpidist._collectives.bucket_route import BucketReduce, mpi
from mpidist._collectives.core_routes import on_node
from mpidist._collectives.hierarchical_route import hierarchical
from mpidist._collectives.plan import Plan, Results, Signature
from mpidist._collectives.resources import Resources
from mpidist._collectives.staged import store


def staged(resources: Resources, signature: Signature) -> Plan | None:
    """Return the plan of a nest with leaves on a GPU."""
    if not signature.on_device:
        return None
    if resources.comm.size == 1:  # a copy on the GPU
        host = signature.transports.host
        here = dataclasses.replace(signature.transports, device=host)
        signature = dataclasses.replace(signature, transports=here)
        return BucketReduce(resources, signature, "staged")
    leaves = [dataclasses.replace(leaf, on_device=False) for leaf in signature.leaves]
    on_host = dataclasses.replace(signature, leaves=leaves)
    routes = (on_node, between, hierarchical, mpi)
    plan = next(filter(None, (route(resources, on_host) for route in routes)))
    return StagedReduce(resources, signature, plan)


class StagedReduce(Plan):
    """All-reduces nests on GPUs through the host.

    Args:
        resources: of the strategy.
        signature: of the calls.
        plan: of host arrays.
    """

    route = "staged"

    def __init__(self, resources: Resources, signature: Signature, plan: Plan) -> None:
        super().__init__(resources, signature.call)
        self._memory = resources.transport_choice.memory
        self._leaves = signature.leaves
        self._wanted = signature.root in (None, resources.comm.rank)
        self.plan = plan

    def _run(
        self, arrays: Sequence[Array], call: Call, timeout: float | None
    ) -> Results:
        guard = self._guard
        near = next(x for x in arrays if backend.is_device_array(x))
        guard.settle()  # calls begun before, in a thread, still read that memory
        with guard.checking(call), near.device:
            hosts = self._memory.load(arrays)
            results = self._new_results(arrays)
        sums = self.plan(hosts, call, timeout)
        try:
            with near.device:
                for i, result in enumerate(results):
                    if result is not None:
                        store(sums[i], result)
                        sums[i] = result
        except Exception as error:
            raise guard.fail(call, error, "raised") from None
        return sums

    def _new_results(self, arrays: Sequence[Array]) -> Results:
        """Return memory on GPUs; None for leaves on the host."""
        return [
            backend.empty_like(x, leaf.shape, leaf.reduction.result)
            if leaf.on_device and self._wanted
            else None
            for x, leaf in zip(arrays, self._leaves, strict=True)
        ]
