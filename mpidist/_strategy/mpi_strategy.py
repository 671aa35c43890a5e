"""MPIStrategy: one replica on each rank of a communicator."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import weakref
from typing import Any, Final, TypeAlias

from mpidist._agreement import mismatch
from mpidist._agreement.channel import Channel, open_channel
from mpidist._agreement.deadline import Deadline
from mpidist._agreement.guard import Guard
from mpidist._agreement.stacks import Stacks
from mpidist._base import backend, interactive, threads
from mpidist._base.environment import Environment, read_environment
from mpidist._base.options import CommunicationImplementation, CommunicationOptions
from mpidist._base.remedies import explain_keywords
from mpidist._engine import SharedMemory, open_shared_memory
from mpidist._engine.bits import same_on_all_ranks
from mpidist._engine.collectives import Collectives
from mpidist._mpi import survival
from mpidist._mpi.buffers import BufferCollectives
from mpidist._mpi.communicator import Communicator
from mpidist._mpi.library import check_communicator, check_not_alone, local_rank
from mpidist._runtime import context, forked_child, process_exit, timelines
from mpidist._runtime.group import ReplicaGroup
from mpidist._runtime.interruptions import tells
from mpidist._strategy.cross_device_ops import CrossDeviceOps
from mpidist._strategy.outside import note_closed, note_open
from mpidist._strategy.replica_context import attach
from mpidist._strategy.strategy import Strategy

# Any: an `mpi4py.MPI.Comm`, from a library that may be missing, or a `ThreadGroup`.
Comm: TypeAlias = Any

_logger: Final = logging.getLogger("mpidist")

_NO_OPTIONS: Final = CommunicationOptions()
_numbers = threads.ReplicaLocal(lambda: itertools.count(1))


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The arguments of MPIStrategy, not yet checked, and the environment's settings.

    They are checked when the ranks can tell each other what is wrong. ``wrong`` is what
    is already known to be.
    """

    environment: Environment
    device: str
    communication_options: CommunicationOptions | None
    cross_device_ops: CrossDeviceOps | None
    wrong: Exception | None

    @property
    def _options(self) -> CommunicationOptions:
        given: object = self.communication_options
        return given if isinstance(given, CommunicationOptions) else _NO_OPTIONS

    @property
    def timeout_seconds(self) -> float:
        """The deadline of every wait; 0 for none."""
        given = self._options.timeout_seconds
        return self.environment.timeout_seconds if given is None else float(given)

    @property
    def implementation(self) -> CommunicationImplementation:
        """How data moves."""
        given = self._options.implementation
        if given is CommunicationImplementation.AUTO:
            return self.environment.implementation
        return given

    @property
    def guard(self) -> bool:
        """Whether the guard compares calls."""
        given = self._options.guard
        return self.environment.guard if given is None else given


class MPIStrategy(Strategy):
    """One replica on each rank of an MPI communicator.

    Collective: every rank of ``comm`` creates it. It communicates on a duplicate of
    ``comm``, so strategies do not interfere with each other or with other users of the
    communicator. The first strategy initializes MPI, if necessary, and installs hooks
    that abort the whole job on an uncaught exception (``MPIDIST_ABORT=0`` disables
    them). Closing the last strategy removes the hooks.

    Args:
        comm: an `mpi4py.MPI.Comm`; None is COMM_WORLD. Groups of ranks can have
            strategies of their own: ``MPIStrategy(MPI.COMM_WORLD.Split(color))``.
            In a function run by `mpidist.testing.run`, a `mpidist.testing.ThreadGroup`;
            None is all of its replicas.
        device: "auto" is this rank's GPU (by its number on the node) if CuPy finds one,
            otherwise the host; "cpu"; "gpu"; "gpu:K".
        communication_options: `mpidist.experimental.CommunicationOptions`; the same
            on all ranks.
        cross_device_ops: how values are reduced: a `CrossDeviceOps`, of the same
            class on all ranks. None is `CollectiveAllReduce`.

    Raises:
        TypeError, ValueError: if an argument is invalid, or a setting cannot be read;
            on every rank.
        CollectiveMismatchError: if the ranks' versions of Python, mpidist, NumPy or
            cloudpickle are incompatible, their number formats differ, or the ranks were
            given different arguments; on every rank.
        RuntimeError: for "gpu" if there is no GPU; on every rank. For a COMM_WORLD of
            one rank if the launcher started several processes: each would then be a
            separate program with one replica. ``MPIDIST_ALONE=1`` allows it.
        ImportError: if there is no MPI library.
    """

    _name = "MPIStrategy"

    @explain_keywords("MPIStrategy")
    def __init__(
        self,
        comm: Comm = None,
        device: str = "auto",
        communication_options: CommunicationOptions | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        """Join the other ranks of ``comm`` in a strategy. Collective."""
        self._join(comm, device, communication_options, cross_device_ops)

    def _join(
        self,
        comm: Comm,
        device: str,
        communication_options: CommunicationOptions | None,
        cross_device_ops: CrossDeviceOps | None,
        wrong: Exception | None = None,
    ) -> None:
        """Do what the constructor does.

        Args:
            comm: as for the constructor, like the next three.
            device: see there.
            communication_options: see there.
            cross_device_ops: see there.
            wrong: an error in the arguments of a subclass's constructor, perhaps on
                this rank only; all ranks raise.
        """
        problem = ""
        try:
            environment = read_environment()
        except ValueError as error:  # perhaps on this rank only: tell all ranks
            environment, problem = Environment(), str(error)
        forked_child.prepare()
        interactive.hide_own_frames()
        replica = threads.current()
        if replica is not None:
            environment = replica.adapt(environment)
        elif environment.abort:
            process_exit.install()
        settings = _Settings(
            environment, device, communication_options, cross_device_ops, wrong
        )
        if replica is not None:
            deadline = Deadline(settings.timeout_seconds)
            communicator = replica.connect(comm, deadline)
        else:
            world = check_communicator(comm)
            if not environment.alone:
                check_not_alone(world)
            deadline = Deadline(
                settings.timeout_seconds, functools.partial(survival.losses, world)
            )
            try:
                communicator = Communicator(
                    world,
                    deadline,
                    environment.simulated_nodes,
                    problem,
                    environment.allreduce,
                )
            except BaseException as error:
                raise deadline.failed(error) from error.__cause__
        try:
            self._set_up(communicator, deadline, settings)
        except BaseException as error:
            communicator.drop()
            raise deadline.failed(error) from error.__cause__

    def _set_up(
        self, communicator: Communicator, deadline: Deadline, settings: _Settings
    ) -> None:
        environment = settings.environment
        wanted = settings.implementation is not CommunicationImplementation.DIRECT
        memory = open_shared_memory(communicator, wanted=wanted)
        # The constructor itself is always guarded: ranks may have been given
        # different options, `guard` among them.
        shared = None if memory.node is None else memory.node.channel
        channel = open_channel(communicator, shared)
        calls = timelines.observe(communicator, environment)
        make_guard = Guard if calls is None else calls.observing(Guard)
        guard = make_guard(
            communicator,
            channel,
            timeout_seconds=deadline.seconds,
            stall_seconds=environment.stall_seconds,
        )
        guard.calls = calls
        if environment.timeout_abort and threads.current() is None:
            guard.when_timed_out = process_exit.end_at_deadline
        if threads.current() is None:
            guard.end_job_with(process_exit.end_at_deadline)
        deadline.hand_over(guard)
        if threads.current() is None and communicator.size > 1:
            guard.ask_missing_ranks(Stacks(communicator))
        forked_child.close_in_children(guard)

        def forget() -> None:
            process_exit.forget(guard)
            deadline.release()

        communicator.on_free(forget)
        if memory.nodes is not None:
            guard.watch_steps(memory.nodes.node.channel)
        if shared is None and communicator.size > 1 and threads.current() is None:
            peers = None if memory.nodes is None else memory.nodes.peers
            _check_bits(communicator, channel, peers)
        collectives = _make_collectives(communicator, guard, memory, settings)
        self._communicator = communicator
        # The communicator and the guard outlive the collectives: all ranks free them
        # together, when the last rank has collected its strategy.
        weakref.finalize(collectives, communicator.drop).atexit = False
        collectives.decide_device_transports(deadline.seconds)
        guard.compare_calls(settings.guard)
        group = ReplicaGroup(collectives, number=next(_numbers.get()), is_mpi=True)
        super().__init__(group)
        attach(self, settings.cross_device_ops)
        note_open(group)
        if environment.abort:
            process_exit.watch(guard, waits=settings.guard)

    @tells("MPIStrategy.close")
    def close(self) -> None:
        """Free the communicator and the resources that the ranks share. Collective.

        The strategy cannot be used afterwards; its variables can still be read, and so
        can results and `buffers_like` buffers, whose memory is kept as long as they
        exist. A strategy that is not closed but garbage-collected on every rank is
        freed when these ranks create or close another one.

        After a `ReplicaLostError` it is not collective, and waits for nobody.
        """
        group = self._group
        guard, collectives = group.guard, group.collectives
        if guard.broken and not guard.has_lost_ranks:
            return
        context.require_cross_replica(group, "MPIStrategy.close")
        if guard.has_lost_ranks:
            finish, free = collectives.abandon, self._communicator.abandon
        else:
            if group.unfinished is not None:
                group.unfinished("MPIStrategy.close")
            guard.agree(mismatch.Call("MPIStrategy.close"))
            finish, free = collectives.close, self._communicator.free
        guard.close()
        note_closed(group)
        finish()
        collectives.release()
        free()


def _check_bits(
    communicator: Communicator, channel: Channel, peers: BufferCollectives | None
) -> None:
    """Find out if MPI's sums have the same bits on all ranks. Collective."""
    same = same_on_all_ranks(communicator, channel, peers)
    communicator.buffers.same_bits = same
    if not same and communicator.rank == 0:
        _logger.warning(
            "mpidist: the all-reduce of this MPI library gives ranks different bits; "
            "sums are reduced to one rank and broadcast, which is slower"
        )


def _make_collectives(
    communicator: Communicator, guard: Guard, memory: SharedMemory, settings: _Settings
) -> Collectives:
    """Check the arguments of MPIStrategy on all ranks; build its collectives."""
    environment = settings.environment
    options: object = settings.communication_options
    cross_device_ops: object = settings.cross_device_ops
    try:
        if settings.wrong is not None:
            raise settings.wrong
        if options is not None and not isinstance(options, CommunicationOptions):
            raise TypeError(
                "MPIStrategy: expected `communication_options` to be a `mpidist."
                f"experimental.CommunicationOptions`, got {type(options).__name__}"
            )
        if cross_device_ops is not None and not isinstance(
            cross_device_ops, CrossDeviceOps
        ):
            raise TypeError(
                "MPIStrategy: expected `cross_device_ops` to be a `mpidist."
                f"CrossDeviceOps`, got {cross_device_ops!r:.80}"
            )
        merged = CommunicationOptions().merge(options)
        chosen = backend.select_device(
            settings.device, local_rank(communicator.size, communicator.machine_rank)
        )
        chosen.activate()
        make = Collectives
        if guard.calls is not None:
            make = guard.calls.observing(Collectives)
            timelines.begin(environment.timeline, communicator, guard)
        collectives = make(communicator, guard, merged, environment, chosen, memory)
    except Exception as error:
        raise guard.fail(mismatch.Call("MPIStrategy(...)"), error, "invalid") from None
    ops = ""
    if cross_device_ops is not None:
        ops = f", {type(cross_device_ops).__qualname__} as cross_device_ops"
    more = ""
    if collectives.compression.scheme != "none":
        more += f", {collectives.compression}"
    if environment.allreduce is not None:
        more += f", MPIDIST_ALLREDUCE={environment.allreduce}"
    if environment.simulated_nodes != 1:
        more += f", MPIDIST_SIMULATED_NODES={environment.simulated_nodes}"
    guard.agree(
        mismatch.Call(
            f"MPIStrategy(...) with {merged.bytes_per_pack} bytes_per_pack, "
            f"{guard.timeout_seconds} timeout_seconds, "
            f"{merged.implementation.name}, guard={settings.guard}, "
            f"MPIDIST_FUSION_MB={environment.bytes_per_pack / 2**20}{ops}{more}"
        )
    )
    return collectives
