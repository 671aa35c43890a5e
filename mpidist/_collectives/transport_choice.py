"""The choice of transports: NCCL, direct (MPI) or staged; host arrays: shared or MPI.

A GPU buffer is moved piece by piece, or by another library, so all ranks must use the
same transport. When a strategy is made the ranks exchange their findings (`Finding`),
and all decide the same from them (`decide`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from mpidist._base import gpus, reporting
from mpidist._base.environment import Environment
from mpidist._base.errors import warn_caller
from mpidist._base.options import CommunicationImplementation
from mpidist._base.types import record
from mpidist._collectives.nccl import NcclTransport, connect
from mpidist._collectives.nodes import LEAST_RANKS
from mpidist._collectives.staged import HostMemory, StagedTransport
from mpidist._collectives.transports import DirectTransport, Transport, Transports
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._mpi.communicator import Communicator

_BY_MPI = "MPI_Iallreduce and others (`mpidist docs mpi`)"
_AUTO = (CommunicationImplementation.AUTO, CommunicationImplementation.RING)
_INSTEAD = (
    "write AUTO, which is direct if MPI is CUDA-aware, and otherwise staged through "
    "the host"
)

# Warnings that were given. Python's own record is invalid after each use of
# `warnings.catch_warnings`, as in the search for NCCL.
_told: set[str] = set()


@record
class Finding:
    """The facts of one rank on which the choice of transports depends.

    Attributes:
        wanted: the name of the requested `CommunicationImplementation`.
        kind: "cpu" or "gpu".
        index: of its device.
        gpu: the host and the PCI address of its GPU; "" without.
        cuda_aware: the value of ``MPIDIST_CUDA_AWARE``, if it is set.
        queried: how MPI reports that it is CUDA-aware; "" if it does not.
        no_nccl: why NCCL does not load; "" if it does.
    """

    wanted: str
    kind: Literal["cpu", "gpu"]
    index: int = 0
    gpu: str = ""
    cuda_aware: bool | None = None
    queried: str = ""
    no_nccl: str = ""


@record
class Decision:
    """The choice of transports, the same on all ranks.

    Attributes:
        transport: of GPU buffers, if AUTO is requested and NCCL is not used.
        reason: why that one.
        mixed: whether some ranks have their arrays on a GPU and some on the host.
        try_nccl: whether to connect the ranks by NCCL, and use it if that works.
        no_nccl: why the ranks cannot use NCCL, for the error if it is requested.
        missing: why NCCL does not load, where it would be used otherwise: AUTO is
            requested, and each of several ranks has a GPU of its own.
    """

    transport: Literal["direct", "staged"]
    reason: str
    mixed: bool = False
    try_nccl: bool = False
    no_nccl: str = ""
    missing: str = ""


def decide(findings: Sequence[Finding], num_nodes: int) -> Decision:
    """Return the decision of all ranks: a function of what all of them know.

    Raises:
        ValueError: if the environment differs between ranks, or NCCL is requested but
            unavailable, and there are GPUs.
    """
    _check_environment(findings)
    wanted, several = findings[0].wanted, len(findings) > 1
    no_nccl, loads = _why_no_nccl(findings)
    kinds = {f.kind for f in findings}
    if wanted == "NCCL" and no_nccl and "gpu" in kinds:
        raise ValueError(
            "MPIStrategy: `CommunicationImplementation.NCCL` is unavailable: "
            f"{no_nccl}. TensorFlow would use AUTO here, with a warning; {_INSTEAD}"
        )
    automatic = several and wanted in ("AUTO", "RING")
    return Decision(
        *_direct_or_staged(findings, num_nodes),
        mixed=len(kinds) > 1,
        try_nccl=not no_nccl and (automatic or wanted == "NCCL"),
        no_nccl=no_nccl,
        missing=no_nccl if automatic and not loads else "",
    )


def _check_environment(findings: Sequence[Finding]) -> None:
    name, first = "MPIDIST_IMPLEMENTATION", findings[0].wanted
    for rank, finding in enumerate(findings):
        if finding.wanted != first:
            raise ValueError(
                f"MPIStrategy: the environment variable {name} must be the same on all "
                f"ranks; it means {first.lower()} on rank 0 and "
                f"{finding.wanted.lower()} on rank {rank}. Launchers pass it on with "
                f"`mpirun -x {name}` (Open MPI) or `-genv {name} VALUE` (MPICH)"
            )


def _direct_or_staged(
    findings: Sequence[Finding], num_nodes: int
) -> tuple[Literal["direct", "staged"], str]:
    """Return the transport without NCCL, and why."""
    first = findings[0]
    if len({f.kind for f in findings}) > 1:
        return "staged", "staged: some ranks have no GPU"
    if len({f.cuda_aware for f in findings}) > 1:
        return "staged", "staged: MPIDIST_CUDA_AWARE is not the same on all ranks"
    if first.cuda_aware is not None:
        reason = f"MPIDIST_CUDA_AWARE={int(first.cuda_aware)}"
        return ("direct" if first.cuda_aware else "staged"), reason
    if num_nodes == 1:
        # Also if MPI takes GPU buffers: Open MPI's reductions copy them to new host
        # memory, and 16 MiB took 30 ms in place of 4 (`mpidist docs gpu`).
        return "staged", "staged: all ranks are on one node"
    if all(f.queried for f in findings):
        return "direct", f"direct: the MPI says it is CUDA-aware ({first.queried})"
    return "staged", "staged: the MPI does not say that it is CUDA-aware"


def _why_no_nccl(findings: Sequence[Finding]) -> tuple[str, bool]:
    """Return why the ranks cannot use NCCL, and whether its library loads.

    The reason is "" if they can, as far as is known.
    """
    seen: dict[str, int] = {}
    for rank, finding in enumerate(findings):
        if finding.kind != "gpu":
            return f"rank {rank} has its arrays on the host", True
        if finding.gpu and finding.gpu in seen:
            return (
                f"ranks {seen[finding.gpu]} and {rank} share a GPU, and NCCL wants one "
                "for each rank"
            ), True
        seen[finding.gpu] = rank
    for rank, finding in enumerate(findings):
        if finding.no_nccl:
            return f"NCCL does not load on rank {rank} ({finding.no_nccl})", False
    return "", True


class TransportChoice:
    """Chooses the transports of a strategy.

    Attributes:
        memory: page-locked memory for staged GPU arrays.
        decision: what the ranks have decided; until then, what works on any rank.
    """

    def __init__(
        self, comm: AnyCommunicator, device: gpus.Device, environment: Environment
    ) -> None:
        self._comm = comm
        self._device = device
        self.memory: HostMemory = HostMemory(environment.staging_bytes)
        self._nccl: NcclTransport | None = None
        self.decision: Decision = Decision("staged", "staged: one replica", mixed=True)

    def decide(
        self,
        wanted: CommunicationImplementation,
        findings: Sequence[Finding],
        deadline: float | None,
    ) -> None:
        """Decide, with the other ranks, how GPU buffers move. Collective.

        Args:
            wanted: the request of the options or the environment.
            findings: of all ranks.
            deadline: seconds for NCCL to connect the ranks; None: no limit.

        Raises:
            ValueError: on all ranks, if the request is unavailable.
        """
        comm = self._comm
        self.decision = decision = decide(findings, comm.num_nodes)
        problem = decision.missing if decision.transport == "staged" else ""
        no_nccl = decision.no_nccl
        if decision.try_nccl:
            communicator, no_nccl = connect(comm, self._device, deadline)
            if not no_nccl:
                self._nccl = NcclTransport(communicator, comm.rank, comm.traffic.count)
                return
            problem = f"NCCL did not connect the ranks ({no_nccl})"
            if wanted is CommunicationImplementation.NCCL:
                raise ValueError(
                    "MPIStrategy: `CommunicationImplementation.NCCL` is unavailable: "
                    f"{problem}. NCCL_DEBUG=INFO makes it print more; {_INSTEAD}"
                )
        if problem:
            reason = f"{decision.reason}; {problem}"
            self.decision = dataclasses.replace(
                decision, reason=reason, no_nccl=no_nccl
            )
            self._warn(problem)

    def _warn(self, problem: str) -> None:
        """Warn on rank 0, once, that AUTO does not use NCCL. Collective.

        Each rank has a GPU of its own, so NCCL would be faster, and nothing else would
        show it: the results are right. It is a warning, which a program can turn off or
        into an error, and not only a line of `mpidist info`, which users may never
        read. If a filter makes it an error, all ranks raise it.

        Raises:
            RuntimeWarning: on all ranks, if warnings are errors on rank 0.
        """
        transport = self.decision.transport
        text = (
            f"MPIStrategy: each rank has a GPU of its own, but {problem}; GPU arrays "
            f"go {transport}, which is usually slower. To accept that, without this "
            f"warning, write MPIDIST_IMPLEMENTATION={transport}"
        )
        raised = ""
        if self._comm.rank == 0 and text not in _told:
            try:
                warn_caller(text)
                _told.add(text)
            except RuntimeWarning as error:
                raised = str(error)
        raised = self._comm.all_gather_objects(raised)[0]
        if raised:
            raise RuntimeWarning(raised)

    def choose(
        self,
        wanted: CommunicationImplementation,
        shared: DirectTransport | None,
        why_not_shared: str,
    ) -> Transports:
        """Return the transports for a request. Not collective.

        Args:
            wanted: what the options ask for, or the environment.
            shared: the transport of host arrays through memory that ranks share.
            why_not_shared: why there is none.

        Raises:
            ValueError: if the request is not available here.
        """
        comm, kind = self._comm, CommunicationImplementation
        why_not_shared = why_not_shared or "see /dev/shm"
        if wanted is kind.SHARED and shared is None and comm.num_nodes < comm.size:
            raise ValueError(
                "MPIStrategy: `CommunicationImplementation.SHARED` needs room in "
                "/dev/shm, the native core, and the same request on all ranks when the "
                f"strategy is made ({why_not_shared}); write AUTO"
            )
        host, reason = shared, "asked for"
        if host is None or wanted is kind.DIRECT:
            host = DirectTransport(comm)
        if wanted not in (kind.DIRECT, kind.SHARED) or comm.size == 1:
            reason = _where_ranks_are(comm, shared is not None, why_not_shared)
        if isinstance(comm, Communicator) and not comm.buffers.same_bits:
            reason += "; summed on one rank, as MPI gives ranks different bits"
        device, why = self._of_gpu_arrays(wanted, host)
        return Transports(host, device, why, reason)

    def _of_gpu_arrays(
        self, wanted: CommunicationImplementation, host: DirectTransport
    ) -> tuple[Transport, str]:
        """Return the transport of GPU arrays for a request, and why."""
        kind, asked = CommunicationImplementation, "asked for in the options"
        if (
            wanted is kind.NCCL
            and self._device.kind == "cpu"
            and not self.decision.mixed
        ):
            self._tell_that_nccl_has_no_gpus()
        elif wanted is kind.NCCL and self._nccl is None:
            why = self.decision.no_nccl or "it was not asked for at first"
            raise ValueError(
                "`CommunicationImplementation.NCCL` is not there: the ranks were not "
                f"connected by it when the strategy was made ({why}); {_INSTEAD}"
            )
        staged, direct = StagedTransport(host, self.memory), DirectTransport(self._comm)
        if wanted is kind.DIRECT and self.decision.mixed:
            # MPI does not match the blocking calls of GPU buffers with those of others.
            return staged, "staged: some ranks have no GPU"
        if wanted is kind.DIRECT:
            return direct, f"direct: {asked}"
        if wanted is kind.STAGED:
            return staged, f"staged: {asked}"
        if self._nccl is not None and wanted in (kind.NCCL, *_AUTO):
            one = "each rank has a GPU of its own"
            return self._nccl, f"nccl: {asked if wanted is kind.NCCL else one}"
        chosen = direct if self.decision.transport == "direct" else staged
        return chosen, self.decision.reason

    def _tell_that_nccl_has_no_gpus(self) -> None:
        text = (
            "mpidist: `CommunicationImplementation.NCCL` has no effect, since all "
            "ranks have their arrays on the host; write AUTO"
        )
        if self._comm.rank == 0 and text not in _told:
            _told.add(text)
            reporting.warn(text)

    def close(self) -> None:
        """Release the resources of NCCL and the host transports. Collective."""
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None

    def abandon(self) -> None:
        """Release them without the other ranks, which may be lost. Not collective."""
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None


def _where_ranks_are(comm: AnyCommunicator, shares: bool, why_not: str) -> str:
    """Return why host arrays move as they do, if nothing else was asked for."""
    if comm.size == 1:
        return "one rank"
    if comm.num_nodes == 1 and shares:
        return "all ranks are on one node"
    if comm.num_nodes == 1:
        return f"the ranks share no memory: {why_not}; by {_BY_MPI}"
    nodes = f"{comm.num_nodes} nodes"
    if comm.num_nodes == comm.size:
        return f"{nodes} of one rank; by {_BY_MPI}"
    if shares and comm.smallest_node < LEAST_RANKS:
        return f"{nodes} of few ranks: only compressed sums; the rest by {_BY_MPI}"
    if shares:
        return f"{nodes}, whose ranks share memory for large arrays"
    return f"{nodes}, whose ranks share no memory: {why_not}; by {_BY_MPI}"
