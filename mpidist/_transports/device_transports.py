"""The transport of GPU buffers: what each rank finds, and what all decide from it.

A GPU buffer is moved piece by piece, or by another library, so all ranks must use the
same transport. When a strategy is made the ranks exchange their findings (`Finding`),
and all decide the same from them (`decide`).
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Literal

from mpidist._base import backend, nest
from mpidist._base.environment import Environment
from mpidist._base.errors import level_of_caller
from mpidist._base.options import CommunicationImplementation
from mpidist._base.types import Array
from mpidist._mpi.communicator import AnyCommunicator
from mpidist._mpi.library import query_cuda_support
from mpidist._transports.direct import DirectTransport
from mpidist._transports.nccl import NcclTransport, connect
from mpidist._transports.staged import StagedTransport

_AUTO = (CommunicationImplementation.AUTO, CommunicationImplementation.RING)
_INSTEAD = (
    "write AUTO, which is direct if MPI is CUDA-aware, and otherwise staged through "
    "the host"
)

# Warnings that were given. Python's own record is invalid after each use of
# `warnings.catch_warnings`, as in the search for NCCL.
_told: set[str] = set()

DeviceTransport = DirectTransport | StagedTransport | NcclTransport


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one rank finds.

    Attributes:
        wanted: the name of the requested `CommunicationImplementation`.
        kind: "cpu" or "gpu".
        gpu: the host and the PCI address of its GPU; "" without.
        cuda_aware: the value of ``MPIDIST_CUDA_AWARE``, if it is set.
        queried: how MPI reports that it is CUDA-aware; "" if it does not.
        no_nccl: why NCCL does not load; "" if it does.
        piece_bytes: of staged copies.
    """

    wanted: str
    kind: str
    gpu: str = ""
    cuda_aware: bool | None = None
    queried: str = ""
    no_nccl: str = ""
    piece_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Decision:
    """What all ranks decide from their findings.

    Attributes:
        transport: of GPU buffers, if AUTO is requested and NCCL is not used.
        reason: why.
        mixed: whether some ranks have their arrays on a GPU and some on the host.
        try_nccl: whether to connect the ranks by NCCL, and use it if that works.
        no_nccl: why not, for the error if NCCL is requested.
        missing: why NCCL does not load, if it would be used: AUTO is requested, and
            each of several ranks has a GPU of its own.
    """

    transport: Literal["direct", "staged"]
    reason: str
    mixed: bool = False
    try_nccl: bool = False
    no_nccl: str = ""
    missing: str = ""


def look(
    wanted: CommunicationImplementation,
    device: backend.Device,
    host_name: str,
    environment: Environment,
) -> Finding:
    """Return what this rank finds. Does not raise if something is missing."""
    finding = Finding(
        wanted=wanted.name,
        kind=device.kind,
        cuda_aware=environment.cuda_aware,
        piece_bytes=environment.staging_bytes,
    )
    if device.kind != "gpu":
        return finding
    gpu = no_nccl = ""
    try:
        gpu = f"{host_name} {backend.gpu_bus_id(device)}"
        backend.nccl_module()
    except Exception as error:  # of CUDA, or of an incompatible library
        no_nccl = f"{error}"
    queried = query_cuda_support() if environment.cuda_aware is None else ""
    return dataclasses.replace(finding, gpu=gpu, queried=queried, no_nccl=no_nccl)


def decide(findings: list[Finding]) -> Decision:
    """Return the decision of all ranks: a function of the findings alone.

    Raises:
        ValueError: if the environment differs between ranks, or NCCL is requested but
            unavailable.
    """
    first = findings[0]
    for name, values in (
        ("MPIDIST_IMPLEMENTATION", [f.wanted.lower() for f in findings]),
        ("MPIDIST_STAGING_MB", [f.piece_bytes / 2**20 for f in findings]),
    ):
        if len(set(values)) > 1:
            other = next(r for r, value in enumerate(values) if value != values[0])
            raise ValueError(
                f"MPIStrategy: the environment variable {name} must be the same on all "
                f"ranks; it means {values[0]} on rank 0 and {values[other]} on rank "
                f"{other}. Launchers pass it on with `mpirun -x {name}` (Open MPI) or "
                f"`-genv {name} VALUE` (MPICH)"
            )
    mixed = len({f.kind for f in findings}) > 1
    no_nccl, loads = _why_no_nccl(findings)
    if first.wanted == "NCCL" and no_nccl:
        raise ValueError(
            "MPIStrategy: `CommunicationImplementation.NCCL` is unavailable: "
            f"{no_nccl}. TensorFlow would use AUTO here, with a warning; {_INSTEAD}"
        )
    automatic = first.wanted in ("AUTO", "RING")
    try_nccl = first.wanted == "NCCL" or (
        automatic and not no_nccl and len(findings) > 1
    )
    missing = "" if loads or not automatic or len(findings) == 1 else no_nccl
    decision = Decision("staged", "", mixed, try_nccl, no_nccl, missing)
    if mixed:
        reason = "staged: some ranks have no GPU"
        return dataclasses.replace(decision, reason=reason)
    said = {f.cuda_aware for f in findings}
    if len(said) > 1:
        reason = "staged: MPIDIST_CUDA_AWARE is not the same on all ranks"
    elif first.cuda_aware is not None:
        reason = f"MPIDIST_CUDA_AWARE={int(first.cuda_aware)}"
        if first.cuda_aware:
            return dataclasses.replace(decision, transport="direct", reason=reason)
    elif all(f.queried for f in findings):
        reason = f"direct: the MPI says it is CUDA-aware ({first.queried})"
        return dataclasses.replace(decision, transport="direct", reason=reason)
    else:
        reason = "staged: the MPI does not say that it is CUDA-aware"
    return dataclasses.replace(decision, reason=reason)


def _why_no_nccl(findings: list[Finding]) -> tuple[str, bool]:
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


class Devices:
    """The transports of a strategy's GPU buffers, each made at its first use."""

    def __init__(
        self, comm: AnyCommunicator, device: backend.Device, environment: Environment
    ) -> None:
        self._comm = comm
        self._device = device
        self._environment = environment
        self._staged: dict[str, StagedTransport] = {}
        self._nccl: NcclTransport | None = None
        # Until the ranks have decided: what works on any rank.
        self.decision: Decision = Decision("staged", "staged: one replica", mixed=True)

    def decide(
        self,
        wanted: CommunicationImplementation,
        host: DirectTransport,
        deadline: float | None,
    ) -> None:
        """Decide, with the other ranks, how GPU buffers move. Collective.

        Args:
            wanted: the request of the options or the environment.
            host: moves host arrays.
            deadline: seconds for NCCL to connect the ranks; None: no limit.

        Raises:
            ValueError: on all ranks, if the request is unavailable.
        """
        mine = look(wanted, self._device, self._comm.host_name, self._environment)
        rows = self._comm.all_gather_objects(
            json.dumps(dataclasses.asdict(mine)).encode()
        )
        decision = decide([Finding(**json.loads(row)) for row in rows])
        self.decision = decision
        self._staged.clear()
        if not decision.try_nccl:
            if decision.missing and decision.transport == "staged":
                reason = f"{decision.reason}; {decision.missing}"
                self.decision = dataclasses.replace(decision, reason=reason)
                self._warn(decision.missing)
            return
        communicator, problem = connect(self._comm, self._device, deadline)
        if problem and wanted is CommunicationImplementation.NCCL:
            raise ValueError(
                "MPIStrategy: `CommunicationImplementation.NCCL` is unavailable: NCCL "
                f"did not connect the ranks ({problem}). NCCL_DEBUG=INFO makes it "
                f"print more; {_INSTEAD}"
            )
        if problem:
            reason = f"{decision.reason}; NCCL did not connect the ranks ({problem})"
            self.decision = dataclasses.replace(
                decision, reason=reason, no_nccl=problem
            )
            self._warn(f"NCCL did not connect the ranks ({problem})")
            return
        self._nccl = NcclTransport(
            communicator, self._comm.rank, self.staged(host), self._comm.traffic.count
        )

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
        raised = b""
        if self._comm.rank == 0 and text not in _told:
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=level_of_caller())
                _told.add(text)
            except RuntimeWarning as error:
                raised = str(error).encode()
        raised = self._comm.all_gather_objects(raised)[0]
        if raised:
            raise RuntimeWarning(raised.decode())

    def pick(
        self, wanted: CommunicationImplementation, host: DirectTransport
    ) -> tuple[DeviceTransport, str]:
        """Return the transport of GPU buffers, and why. Not collective.

        Raises:
            ValueError: if NCCL is requested and did not connect the ranks.
            RuntimeError: if NCCL has failed.
        """
        kind = CommunicationImplementation
        if wanted is kind.DIRECT and not self.decision.mixed:
            return DirectTransport(self._comm), "direct: asked for in the options"
        if wanted is kind.DIRECT:
            # MPI does not match the blocking calls of GPU buffers with those of others.
            return self.staged(host), "staged: some ranks have no GPU"
        if wanted is kind.STAGED:
            return self.staged(host), "staged: asked for in the options"
        if wanted is kind.NCCL:
            if self._nccl is None:
                why = self.decision.no_nccl or "it was not asked for at first"
                raise ValueError(
                    "`CommunicationImplementation.NCCL` is not there: the ranks were "
                    f"not connected by it when the strategy was made ({why}); "
                    f"{_INSTEAD}"
                )
            return self._nccl, "nccl: asked for in the options"
        if self._nccl is not None and wanted in _AUTO:
            return self._nccl, "nccl: each rank has a GPU of its own"
        if self.decision.transport == "direct":
            return DirectTransport(self._comm), self.decision.reason
        return self.staged(host), self.decision.reason

    def staged(self, host: DirectTransport) -> StagedTransport:
        """Return the staged transport whose pieces ``host`` moves."""
        found = self._staged.get(host.name)
        if found is None:
            pieces = None if self.decision.mixed else self._environment.staging_bytes
            found = self._staged[host.name] = StagedTransport(host, pieces)
        return found

    def close(self) -> None:
        """Release the resources of NCCL and the host transports. Collective."""
        self._staged.clear()
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None

    def abandon(self) -> None:
        """Do what `close` does, without the other ranks. Not collective."""
        self._staged.clear()
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None


def place_text(arrays: list[Array], structure: nest.Structure, mixed: bool) -> str:
    """Return, for a call's text, which of its arrays are on a GPU; "" for none.

    If the ranks have devices of different kinds (``mixed``), GPU buffers make the same
    calls of MPI as host buffers; it is enough if devices are equal within one call.
    """
    places = [backend.is_device_array(x) for x in arrays]
    if not any(places) or (mixed and all(places)):
        return ""
    if all(places):
        return " on the GPU"
    names = ["GPU" if place else "host" for place in places]
    return f" on {structure.render(names)}"
