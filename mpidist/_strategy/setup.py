"""The composition root: makes the communicator, guard and collectives of a strategy.

`join` makes them together with the other ranks; every wait in it has the deadline of
the strategy. `complete` connects a group of replicas with the classes that users see.
The default strategy is made when this module is imported.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from mpidist._agreement import mismatch, stacks
from mpidist._agreement.channel import open_channel
from mpidist._agreement.communicator_waits import CommunicatorWaits
from mpidist._agreement.guard import Guard
from mpidist._agreement.mismatch import Key
from mpidist._base import backend, gpus, interactive, reporting, threads
from mpidist._base.environment import Environment, debugging, read_environment
from mpidist._base.expect import expect
from mpidist._base.options import CommunicationImplementation, CommunicationOptions
from mpidist._collectives import bits, node
from mpidist._collectives.collectives import Collectives
from mpidist._collectives.nodes import SharedMemory, open_shared_memory
from mpidist._collectives.resources import Resources
from mpidist._mpi import survival
from mpidist._mpi.any_communicator import AnyCommunicator
from mpidist._mpi.communicator import Communicator
from mpidist._mpi.library import check_communicator, check_not_alone, local_rank
from mpidist._runtime import context, forked_child, process_exit, timelines
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.contexts import checked, note_open, warn_of_own_value
from mpidist._strategy.cross_device_ops import CrossDeviceOps
from mpidist._strategy.reductions import reduce_by_ops
from mpidist._strategy.replica_context import ReplicaContext
from mpidist._strategy.strategy import Strategy, group_of
from mpidist._values.distributed import RegistryOfOne
from mpidist._values.variable import array_of

# Any: an `mpi4py.MPI.Comm`, from a library that may be missing, or a `ThreadGroup`.
Comm: TypeAlias = Any

_numbers = threads.ReplicaLocal(lambda: itertools.count(1))


class Arguments(NamedTuple):
    """The arguments of `MPIStrategy` but ``comm``, not yet checked.

    They are checked when the ranks can tell each other what is wrong. ``wrong`` is an
    error that was found before.
    """

    device: str = "auto"
    communication_options: CommunicationOptions | None = None
    cross_device_ops: CrossDeviceOps | None = None
    wrong: Exception | None = None


def join(strategy: Strategy, comm: Comm, make: Callable[[], Arguments]) -> Communicator:
    """Join the other ranks of ``comm`` in a strategy. Collective.

    Args:
        strategy: the strategy, whose constructor runs.
        comm: as for `MPIStrategy`.
        make: returns the other arguments. A TypeError or ValueError that it raises,
            perhaps on this rank only, is raised on all ranks.

    Returns:
        The strategy's own communicator.
    """
    try:
        arguments = make()
    except (TypeError, ValueError) as error:
        arguments = Arguments(wrong=error)
    problem = ""
    try:
        environment = read_environment()
    except ValueError as error:  # perhaps on this rank only: tell all ranks
        environment, problem = Environment(), str(error)
    forked_child.prepare()
    interactive.hide_own_frames()
    replica = threads.current()
    options: object = arguments.communication_options
    if not isinstance(options, CommunicationOptions):
        options = CommunicationOptions()
    if replica is not None:
        environment = replica.adapt(environment)
    elif environment.abort:
        process_exit.install()
    seconds = options.timeout_seconds
    seconds = environment.timeout_seconds if seconds is None else float(seconds)
    implementation = options.implementation
    if implementation is CommunicationImplementation.AUTO:
        implementation = environment.implementation
    wanted = implementation is not CommunicationImplementation.DIRECT
    communicator, waits = _connect(comm, seconds, environment, problem, wanted)
    try:
        checks = environment.guard if options.guard is None else options.guard
        memory = open_shared_memory(communicator)
        guard = _make_guard(communicator, waits, environment, memory)
        collectives = _make_collectives(
            communicator, guard, memory, arguments, environment, checks, strategy
        )
        # The communicator and the guard outlive the collectives: all ranks free them
        # together, when the last rank has collected its strategy.
        weakref.finalize(collectives, communicator.drop).atexit = False
        guard.enable(checks)
        group = ReplicaGroup(collectives, number=next(_numbers.get()), is_mpi=True)
        complete(strategy, group, arguments.cross_device_ops)
        note_open(group)
        if environment.abort:
            process_exit.watch(guard, waits=checks)
    except BaseException as error:
        communicator.drop()
        raise waits.failed(error) from error.__cause__
    return communicator


def _connect(
    comm: Comm, seconds: float, environment: Environment, problem: str, wanted: bool
) -> tuple[Communicator, CommunicatorWaits]:
    """Make the strategy's own communicator, and what its waits end by.

    Args:
        comm: as for `MPIStrategy`.
        seconds: of the deadline.
        environment: of this rank.
        problem: why this rank cannot take part; "": it can.
        wanted: whether it wants to share memory.
    """
    replica = threads.current()
    if replica is not None:
        waits = CommunicatorWaits(seconds)
        return replica.connect(comm, waits), waits
    world = check_communicator(comm)
    if not environment.alone:
        check_not_alone(world)
    waits = CommunicatorWaits(seconds, functools.partial(survival.losses, world))
    try:
        communicator = Communicator(
            world,
            waits,
            environment.simulated_nodes,
            problem,
            environment.allreduce,
            lambda: {**node.rank_info(wanted=wanted), **stacks.rank_info()},
        )
    except BaseException as error:
        raise waits.failed(error) from error.__cause__
    return communicator, waits


def complete(
    strategy: Strategy, group: ReplicaGroup, ops: CrossDeviceOps | None = None
) -> None:
    """Connect a group of replicas, its strategy and the contexts of its code."""
    collectives, guard = group.collectives, group.guard
    # What `ReplicaContext.all_reduce` and `all_gather` call, and variables, too.
    group.all_reduce = collectives.all_reduce
    group.all_gather = collectives.all_gather
    if ops is not None:
        group.custom_ops = ops
        group.all_reduce = functools.partial(reduce_by_ops, group)
    Strategy.__init__(strategy, group)
    replica_context = ReplicaContext(strategy, None)
    group.public_objects = (strategy, strategy.extended, replica_context, group)
    group.cross_frame = context.Frame(group, context.Level.CROSS_REPLICA)
    group.replica_frame = context.Frame(
        group, context.Level.REPLICA, replica_context=replica_context
    )
    guard.reports.repair = _repairer(group)


def _make_guard(
    communicator: Communicator,
    waits: CommunicatorWaits,
    environment: Environment,
    memory: SharedMemory,
) -> Guard:
    """Make the guard, and hand it the waits that the deadline had so far.

    It compares calls until `join` sets `Guard.enabled` at its end, whatever the options
    say: the ranks may have been given different ones.
    """
    shared = None if memory.node is None else memory.node.channel
    channel = open_channel(communicator, shared)
    guard = Guard(
        communicator,
        channel,
        timeout_seconds=waits.seconds,
        stall_seconds=environment.stall_seconds,
    )
    guard.observers = timelines.observe(communicator, environment)
    is_process = threads.current() is None
    if is_process:
        guard.waits.watchdog.end = process_exit.end_at_deadline
        if environment.timeout_abort:
            guard.breakdown.when_timed_out = process_exit.end_at_deadline
    waits.guard = guard
    if is_process and communicator.size > 1:
        replicas = stacks.Stacks(communicator.rank, communicator.rank_infos)
        guard.waits.ask_missing_ranks(replicas)
    forked_child.close_in_children(guard)

    def forget() -> None:
        process_exit.forget(guard)
        waits.guard = None
        if not guard.closed:
            guard.close()  # a dropped one: its memory must not wait for the collector

    communicator.on_free(forget)
    if memory.nodes is not None:
        guard.waits.watch(memory.nodes.node.channel, is_for_data=True)
    return guard


def _make_collectives(
    communicator: Communicator,
    guard: Guard,
    memory: SharedMemory,
    arguments: Arguments,
    environment: Environment,
    checks: bool,
    strategy: Strategy,
) -> Collectives:
    """Check the arguments on all ranks; make the collectives. Collective.

    Raises:
        CollectiveMismatchError: if the ranks were given different arguments.
    """
    sums = bits.NONE
    if memory.node is None and threads.current() is None and communicator.size > 1:
        peers = None if memory.nodes is None else memory.nodes.peers
        sums = bits.digests_of_sums(communicator, guard.channel, peers)
    with guard.checking(mismatch.Call("MPIStrategy(...)")):
        options = _check_arguments(arguments)
        chosen = gpus.select_device(
            arguments.device, local_rank(communicator.size, communicator.machine_rank)
        )
        chosen.activate()
        guard.waits.watchdog.prepare = chosen.activate
        make = Collectives
        if guard.observers is not None:
            make = guard.observers.observing(Collectives)
            timelines.begin(environment.timeline, communicator, guard)
        resources = Resources(communicator, guard, options, environment, chosen, memory)
        collectives = make(resources)
        finding = resources.find_transports()
    kind, ops = type(strategy).__name__, arguments.cross_device_ops
    text = f"{kind}(...) with {_describe(collectives, ops, checks)}"
    rows = guard.values_of_all(mismatch.Call(text), (finding, sums))
    guard.call = mismatch.call_of("MPIStrategy(...)")  # in messages as the last call
    findings, all_sums = zip(*rows, strict=True)
    if not bits.are_same(all_sums):
        communicator.buffers.same_bits = False
        if communicator.rank == 0:
            reporting.warn(
                "mpidist: the all-reduce of this MPI library gives ranks different "
                "bits; sums are reduced to one rank and broadcast, which is slower"
            )
    resources.decide_devices(findings, guard.timeout_seconds)
    return collectives


def _describe(
    collectives: Collectives, ops: CrossDeviceOps | None, checks: bool
) -> str:
    """Return what the ranks compare of the arguments and settings of a strategy."""
    resources = collectives.resources
    options, environment = resources.options, resources.environment
    unusual = {
        f"{type(ops).__qualname__} as cross_device_ops": ops is not None,
        f"{resources.compression}": resources.compression.scheme != "none",
        "MPIDIST_DEBUG=1": debugging(),  # it compares more
        "MPIDIST_ABORT=0": not environment.abort,  # at the end it waits for no rank
        f"MPIDIST_ALLREDUCE={environment.allreduce}": environment.allreduce is not None,
        f"MPIDIST_SIMULATED_NODES={environment.simulated_nodes}": (
            environment.simulated_nodes != 1
        ),
    }
    parts = [
        f"{options.bytes_per_pack} bytes_per_pack",
        f"{resources.guard.timeout_seconds} timeout_seconds",
        options.implementation.name,
        f"guard={checks}",
        f"MPIDIST_FUSION_MB={environment.bytes_per_pack / 2**20}",
        *(text for text, is_set in unusual.items() if is_set),
    ]
    return ", ".join(parts)


def _check_arguments(arguments: Arguments) -> CommunicationOptions:
    """Return the options, with the defaults for what is not set.

    Raises:
        Exception: the error that was found before.
        TypeError: if an argument has another type.
    """
    if arguments.wrong is not None:
        raise arguments.wrong
    for name, kind, where in (
        ("communication_options", CommunicationOptions, "mpidist.experimental"),
        ("cross_device_ops", CrossDeviceOps, "mpidist"),
    ):
        given = getattr(arguments, name)
        fits = given is None or isinstance(given, kind)
        what = f"`{name}` to be a `{where}.{kind.__name__}`"
        expect(fits, "MPIStrategy", what, given)
    return CommunicationOptions().merge(arguments.communication_options)


def _repairer(group: ReplicaGroup) -> Callable[[Sequence[Key]], None]:
    """Return what copies rank 0's variables to all ranks, after a failed update.

    Collective, but without a header: the guard calls it on all ranks, together with the
    exchange of reports. The guard holds it, and is itself kept until all ranks have
    collected the strategy; a rank that already has takes part, without variables.
    """
    reference, comm = weakref.ref(group), group.communicator

    def repair(keys: Sequence[Key]) -> None:
        alive = reference()
        values: list[Any] = [alive and alive.registry.get(key) for key in keys]
        rows = comm.all_gather_integers([int(x is not None) for x in values])
        for variable, column in zip(values, zip(*rows, strict=True), strict=True):
            if alive is not None and all(column):
                array = array_of(variable)
                transport = alive.collectives.resources.transports.of(array)
                transport.broadcast(backend.as_bytes(array), 0)

    return repair


class DefaultStrategy(Strategy):
    """The strategy outside every scope: one replica, on the host, no MPI."""

    _name = "default strategy"

    def __init__(self) -> None:
        complete(self, _group_of_one())
        for name in ("run", "reduce", "gather"):
            warn = functools.partial(warn_of_own_value, f"Strategy.{name}")
            setattr(self, name, checked(warn, getattr(self, name)))

    def __repr__(self) -> str:
        return "<mpidist default strategy: 1 replica, without MPI>"


def _group_of_one() -> ReplicaGroup:
    comm = AnyCommunicator()
    guard = Guard(comm, None, timeout_seconds=0.0, stall_seconds=0.0, enabled=False)
    resources = Resources(
        comm, guard, CommunicationOptions(), Environment(), gpus.Device("cpu")
    )
    collectives = Collectives(resources)
    return ReplicaGroup(
        collectives, number=0, is_mpi=False, make_registry=RegistryOfOne
    )


context.set_default(group_of(DefaultStrategy()).replica_frame)
