"""MPIStrategy: one replica on each rank of a communicator."""

from __future__ import annotations

from collections.abc import Callable

from mpidist._agreement import mismatch
from mpidist._agreement.breakdown import State
from mpidist._base.options import CommunicationOptions
from mpidist._base.remedies import explain_keywords
from mpidist._runtime import context
from mpidist._runtime.interruptions import tells
from mpidist._strategy.cross_device_ops import CrossDeviceOps
from mpidist._strategy.setup import Arguments, Comm, join
from mpidist._strategy.strategy import Strategy


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

    Example, on two replicas::

        strategy = mpidist.MPIStrategy()
        ranks = strategy.run(lambda: strategy.replica_id)
        strategy.reduce("MAX", ranks, axis=None)  # 1
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
        arguments = Arguments(device, communication_options, cross_device_ops)
        self._join(comm, lambda: arguments)

    def _join(self, comm: Comm, make: Callable[[], Arguments]) -> None:
        self._communicator = join(self, comm, make)

    @tells("MPIStrategy.close")
    def close(self) -> None:
        """Free the communicator and the resources that the ranks share. Collective.

        The strategy cannot be used afterwards; its variables can still be read, and so
        can results and `buffers_like` buffers, whose memory is kept as long as they
        exist. A strategy that is not closed but garbage-collected on every rank is
        freed when these ranks create or close another one.

        It first waits for a `Checkpoint.save` with ``wait=False``; if that save has
        failed, its error is raised here, and the strategy stays open. After a
        `ReplicaLostError` this call is not collective, and does not wait.
        """
        group = self._group
        guard, collectives = group.guard, group.collectives
        transports = collectives.resources.transport_choice
        lost = guard.breakdown.state is State.LOST
        if guard.broken and not lost:
            return
        context.require_cross_replica(group, "MPIStrategy.close")
        if lost:
            finish = transports.abandon
        else:
            if group.unfinished is not None:
                group.unfinished("MPIStrategy.close")
            guard.agree(mismatch.Call("MPIStrategy.close"))
            finish = transports.close
        with guard.payload():  # the others wait for this rank until all are here
            finish()
            collectives.release()
            if not lost:
                self._communicator.release_unused()
        guard.close()
        self._communicator.give_back()
