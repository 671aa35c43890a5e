"""The names of strategies in TensorFlow.

Programs that create a strategy by these names, and libraries that test its class, run
unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from mpidist._base import reporting, threads
from mpidist._base.expect import as_int, expect
from mpidist._base.options import CommunicationImplementation, CommunicationOptions
from mpidist._base.types import Nest
from mpidist._mpi.library import mpi_module, world_rank, world_size
from mpidist._runtime import context
from mpidist._strategy.cross_device_ops import CrossDeviceOps
from mpidist._strategy.current import get_replica_context
from mpidist._strategy.mpi_strategy import MPIStrategy
from mpidist._strategy.setup import Arguments
from mpidist._strategy.strategy import Strategy
from mpidist.cluster import ClusterResolver, ReplicaDevice

_DEVICE: Final = re.compile(r"(?:.*[/:])?(CPU|GPU)(?::(\d+|\*))?", re.IGNORECASE)


class RunOptions(NamedTuple):
    """Options of `Strategy.run` for TPUs; accepted there, without effect.

    Attributes:
        experimental_enable_dynamic_batch_size: no effect: shapes may always change.
        experimental_bucketizing_dynamic_shape: no effect.
        experimental_xla_options: no effect.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object = None


class _AnyMPIStrategy(type):
    """The type of the classes below: every `MPIStrategy` is an instance of them."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls in (MirroredStrategy, MultiWorkerMirroredStrategy):
            return isinstance(instance, MPIStrategy)
        return super().__instancecheck__(instance)


class MirroredStrategy(MPIStrategy, metaclass=_AnyMPIStrategy):
    """An `MPIStrategy` with the name and the arguments that TensorFlow uses.

    Collective: every rank creates it, and is one replica. TensorFlow's has all replicas
    in one process; here ``mpirun -n`` sets their number. ``isinstance`` is true for
    every `MPIStrategy`.

    As there, `PerReplica.values` and `Strategy.experimental_local_results` have the
    components of all replicas, which they gather: all ranks read them. The function
    that `Strategy.distribute_datasets_from_function` calls makes one input for all
    replicas, which take its elements in turn: every rank calls it, and must get the
    same input.

    Args:
        devices: None, the default, is each rank's GPU if there is one, and otherwise
            the host. Or the devices of all ranks, such as ``["GPU:0", "GPU:1"]``, or
            `mpidist.cluster.replica_devices`: one for each, in their order.
        cross_device_ops: as for `MPIStrategy`.
        num_gpus: in place of ``devices``, the number of ranks, each with a GPU; 0: one
            rank on the host. The argument of TensorFlow 1.

    Raises:
        TypeError, ValueError: if ``devices`` is not a list with a device for each rank,
            or ``num_gpus`` not their number; on all ranks. Otherwise as `MPIStrategy`.
    """

    _deals = True

    def __init__(
        self,
        devices: Sequence[str | ReplicaDevice] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        num_gpus: int | None = None,
    ) -> None:
        """Join the other ranks in a strategy. Collective."""

        def arguments() -> Arguments:
            device = _own_device(_devices(devices, num_gpus))
            return Arguments(device, cross_device_ops=cross_device_ops)

        self._join(None, arguments)
        self._group.registry.shows_all = True


class MultiWorkerMirroredStrategy(MPIStrategy, metaclass=_AnyMPIStrategy):
    """An `MPIStrategy` with the name and the arguments that TensorFlow uses.

    Collective: every rank creates it, and is one replica. ``isinstance`` is true for
    every `MPIStrategy`.

    Args:
        cluster_resolver: None, or one of `mpidist.cluster`, which is ignored: the
            launcher tells MPI about the ranks. Or ``communication``, which is the first
            argument of ``tf.distribute.experimental.MultiWorkerMirroredStrategy``.
        communication_options: as for `MPIStrategy`.
        communication: a `CommunicationImplementation`, or its name.

    Raises:
        TypeError: for another cluster resolver, or if both ``communication`` and
            ``communication_options`` are given; on all ranks. Otherwise as
            `MPIStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | CommunicationImplementation | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        communication: CommunicationImplementation | str | None = None,
    ) -> None:
        """Join the other ranks in a strategy. Collective."""
        given = cluster_resolver, communication_options, communication
        self._join(None, lambda: Arguments(communication_options=_options(*given)))


class _NoStrategy(Strategy):
    """A class of TensorFlow that no strategy here is an instance of."""

    _instead: ClassVar[str]

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{type(self).__name__}: {self._instead}")


class TPUStrategy(_NoStrategy):
    """A name for ``isinstance``, which is False: there are no TPUs here.

    Creating one raises a NotImplementedError, which says what to write.
    """

    _instead = "there are no TPUs here; write `mpidist.MPIStrategy()`"


class OneDeviceStrategy(MPIStrategy):
    """An `MPIStrategy` of one replica, by the name and the argument of TensorFlow.

    Not collective. Each of several ranks has one of its own, as with
    ``MPIStrategy(MPI.COMM_SELF)``, and they do the same work; rank 0 warns of that.

    Args:
        device: such as "/gpu:0" or "/cpu:0".

    Raises:
        ValueError: if it is no device. Otherwise as `MPIStrategy`.
    """

    def __init__(self, device: str) -> None:
        """Make a strategy of this rank alone."""
        name, comm = "OneDeviceStrategy", None
        own = _as_device(device, name, "write `mpidist.MPIStrategy()`")
        rank, size = _start_mpi()
        if size > 1:
            one = threads.current()
            comm = mpi_module().COMM_SELF if one is None else one.group_of_itself()
            if rank == 0:
                reporting.warn(
                    f"mpidist: {name}: each of the {size} ranks has one of its "
                    "own, of one replica, and all do the same work; for one strategy "
                    "of all ranks write `mpidist.MPIStrategy()`"
                )
        self._join(comm, lambda: Arguments(device=own))


class ParameterServerStrategy(_NoStrategy):
    """A name of TensorFlow for ``isinstance``, which is always False.

    Creating one raises a NotImplementedError, which says what to write.
    """

    _instead = (
        "there are no parameter servers over MPI, every rank computes; write "
        "`mpidist.MPIStrategy()`"
    )


class CentralStorageStrategy(ParameterServerStrategy):
    """A name of TensorFlow for ``isinstance``, which is always False.

    Creating one raises a NotImplementedError, which says what to write.
    """


def strategy_supports_no_merge_call() -> bool:
    """Return whether code may skip `merge_call`: True outside every scope only.

    Not collective. False with any `MPIStrategy`, even of one replica. In TensorFlow in
    ``tf.__internal__.distribute``.
    """
    return not context.has_strategy()


def maybe_merge_call(
    fn: Callable[..., Nest], strategy: Strategy, *args: Any, **kwargs: Any
) -> Nest:
    """Call ``fn(strategy, *args, **kwargs)`` in a `merge_call` of this replica.

    Collective, like `ReplicaContext.merge_call`: every replica must call this, in the
    same order. Outside every scope it only calls the function. In TensorFlow in
    ``tf.__internal__.distribute.interim``.

    Args:
        fn: the function; see `ReplicaContext.merge_call`.
        strategy: the strategy.
        args: further positional arguments of ``fn``.
        kwargs: its keyword arguments.
    """
    if strategy_supports_no_merge_call():
        return fn(strategy, *args, **kwargs)
    return get_replica_context().merge_call(fn, args=args, kwargs=kwargs)


def _options(
    cluster_resolver: object,
    options: CommunicationOptions | None,
    communication: CommunicationImplementation | str | None,
) -> CommunicationOptions | None:
    """Check the arguments of `MultiWorkerMirroredStrategy`; return its options."""
    if isinstance(cluster_resolver, CommunicationImplementation) and not communication:
        cluster_resolver, communication = None, cluster_resolver
    expect(
        cluster_resolver is None or isinstance(cluster_resolver, ClusterResolver),
        "MultiWorkerMirroredStrategy",
        "`cluster_resolver` to be None",
        cluster_resolver,
        "leave it out, since the launcher tells MPI about the ranks (and write "
        "`communication=...` with its name)",
    )
    if communication is None:
        return options
    if options is not None:
        raise TypeError(
            "MultiWorkerMirroredStrategy: got both `communication_options` and "
            "`communication`; write `communication_options=mpidist."
            "experimental.CommunicationOptions(implementation=...)`"
        )
    return CommunicationOptions(implementation=communication)


def _devices(devices: object, num_gpus: object) -> object:
    """Return the devices of all ranks, given the arguments of `MirroredStrategy`."""
    if num_gpus is None:
        return devices
    if devices is not None:
        raise TypeError(
            "MirroredStrategy: got both `devices` and `num_gpus`; leave out `num_gpus`"
        )
    n = as_int("MirroredStrategy", "num_gpus", num_gpus, least=0)
    return ["GPU"] * n or ["CPU"]


def _own_device(devices: Any) -> str:
    """Return this rank's device among those of all, as `MPIStrategy` names it."""
    call, instead = "MirroredStrategy", "leave out `devices`"
    if devices is None:
        return "auto"
    expect(
        isinstance(devices, (list, tuple)),
        call,
        '`devices` to be a list of strings such as ["GPU:0", "GPU:1"]',
        devices,
        "leave it out for each rank's GPU, or write `mpidist.MPIStrategy(comm)` for a "
        "communicator",
    )
    found = [_as_device(x, call, instead) for x in devices]
    rank, size = _start_mpi()
    if len(devices) != size:
        raise ValueError(
            f"{call}: got {len(devices)} devices for {size} ranks, each of which is "
            f"one replica; start the program with `mpirun -n {len(devices)}`, or "
            f"{instead}"
        )
    return found[rank]


def _as_device(device: object, call: str, instead: str) -> str:
    """Return a device of TensorFlow as `MPIStrategy` names it.

    Raises:
        ValueError: if it is no device.
    """
    name = device.name if isinstance(device, ReplicaDevice) else device
    match = _DEVICE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            f'{call}: {device!r} is not a device; write "CPU:0" or "GPU:0", or '
            f"{instead}"
        )
    kind, index = match[1].lower(), match[2]
    return kind if kind == "cpu" or index in (None, "*") else f"{kind}:{index}"


def _start_mpi() -> tuple[int, int]:
    """Start MPI, if replicas are processes; return this rank, and their number."""
    if (replica := threads.current()) is not None:
        return replica.rank, replica.size
    mpi_module()
    return world_rank() or 0, world_size()
