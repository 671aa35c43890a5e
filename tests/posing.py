"""Host memory that poses as a GPU array: a stand-in for the parts of CuPy we use.

`ndarray` is no NumPy array and has no buffer: MPI finds its memory only through
``__cuda_array_interface__``, as it finds that of a CuPy array. Like CuPy it refuses to
be converted to NumPy or to be mixed with NumPy arrays. `install` puts it in the place
of CuPy; the library then runs the very code that it runs on a GPU.

Work on a stream is queued, as on a GPU, and done when somebody waits for it: so a copy
that nothing waits for has not happened yet (`Stream.early` has the other extreme). An
array's own operations are done at once, after all that the current stream has queued
before them, but for copies from array to array, which are queued. `launch` queues a
kernel.

`nccl` is a stand-in for `cupy.cuda.nccl` that moves buffers by MPI.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np


def unwrap(x: Any) -> Any:
    if isinstance(x, ndarray):
        return x._host
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("posing: Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, (list, tuple)):
        return type(x)(unwrap(item) for item in x)
    return x


def wrap(x: Any) -> Any:
    if isinstance(x, (np.ndarray, np.generic)):
        return ndarray(np.asarray(x))
    if isinstance(x, tuple):
        return tuple(wrap(item) for item in x)
    return x


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801 - CuPy's name
    synchronized = 0

    def __init__(self, host: np.ndarray) -> None:
        self._memory = host

    @property
    def _host(self) -> np.ndarray:
        """What a kernel on the current stream finds in the memory."""
        Stream.current.finish()
        return self._memory

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self._memory.ctypes.data)

    @property
    def device(self) -> _Device:
        return _Device(_Device.current)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self._memory.__array_interface__)  # no stream waits for it
        return {**interface, "version": 3, "stream": None}

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("posing: Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kw: Any) -> Any:
        if not all(
            isinstance(x, (ndarray, int, float, complex, np.generic)) for x in inputs
        ):
            return NotImplemented
        out = kw.pop("out", None)
        if out is not None:
            kw["out"] = tuple(unwrap(x) for x in out)
        result = getattr(ufunc, method)(*(unwrap(x) for x in inputs), **kw)
        return out[0] if out is not None else wrap(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kw: Any) -> Any:
        return wrap(func(*unwrap(tuple(args)), **{k: unwrap(v) for k, v in kw.items()}))

    def __getitem__(self, index: Any) -> Any:
        found = self._memory[unwrap(index)]
        if not np.may_share_memory(found, self._memory):  # no view
            found = np.asarray(self._host[unwrap(index)])
        return ndarray(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        index = unwrap(index)
        if isinstance(value, ndarray):
            launch(lambda: self._memory.__setitem__(index, value._memory))
        else:
            self._host[index] = unwrap(value)

    def __len__(self) -> int:
        return len(self._host)

    def __bool__(self) -> bool:
        return bool(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __float__(self) -> float:
        return float(self._host)

    def __repr__(self) -> str:
        return f"posing.{self._host!r}"

    def get(
        self,
        stream: Any = None,
        order: str = "C",
        out: Any = None,
        blocking: bool = True,
    ) -> Any:
        stream = stream or Stream.current
        if out is None:
            out = np.empty_like(self._memory)
        elif out.dtype != self._memory.dtype or out.shape != self._memory.shape:
            raise TypeError("posing: get() wants `out` of the same dtype and shape")
        elif not blocking and not is_pinned(out):
            raise ValueError("posing: a copy to memory that is not pinned blocks")
        stream.queue(lambda: np.copyto(out, self._memory))
        if blocking:
            stream.synchronize()
        return out

    def set(self, values: np.ndarray, stream: Any = None) -> None:
        if type(values) is not np.ndarray or values.dtype != self._memory.dtype:
            raise TypeError("posing: set() takes a NumPy array of the same dtype")
        if values.shape != self._memory.shape or not values.flags.c_contiguous:
            raise ValueError("posing: set() takes a C-contiguous array of this shape")
        if not is_pinned(values):
            values = values.copy()  # the driver does, before it returns
        (stream or Stream.current).queue(lambda: np.copyto(self._memory, values))

    def view(self, *args: Any) -> Any:
        return ndarray(self._memory.view(*args))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._memory, name)
        if not callable(found):
            return wrap(found) if isinstance(found, np.ndarray) else found

        def method(*args: Any, **kwargs: Any) -> Any:
            if name != "reshape":  # which reads nothing
                Stream.current.finish()
            result = found(*unwrap(args), **{k: unwrap(v) for k, v in kwargs.items()})
            return result if name in ("item", "tolist") else wrap(result)

        return method


class Event:
    """A place in the queue of a stream; before it is recorded, it is past."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self._place: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        self._place = (stream, stream.queued)

    def synchronize(self) -> None:
        _finish(self._place)


class Stream:
    """A queue of work, which is done when somebody waits for it.

    Attributes:
        early: whether streams that a program makes do their work at once, where they
            have not been told to wait; the null stream never does.
    """

    null: Stream
    current: Stream
    early = False
    _numbers = itertools.count(0)

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = next(Stream._numbers)
        self.device_id = _Device.current
        self.queued = 0
        self._done = 0
        self._work: list[Callable[[], None]] = []
        _streams[self.ptr] = self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> Stream:
        self._before = Stream.current
        return self.use()

    def __exit__(self, *error: object) -> None:
        Stream.current = self._before

    def use(self) -> Stream:
        Stream.current = self
        return self

    def queue(self, work: Callable[[], None], waits_for: Any = None) -> None:
        waiting = waits_for is not None and waits_for[0]._done < waits_for[1]
        self._work.append(work)
        self.queued += 1
        behind = self.queued - self._done > 1
        if Stream.early and self.ptr and not waiting and not behind:
            self.finish()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        place = event._place  # recording it again changes nothing
        self.queue(lambda: _finish(place), place)

    def finish(self, number: int | None = None) -> None:
        """Do all that is queued, or the first so many."""
        number = self.queued if number is None else number
        while self._done < number:
            self._done += 1
            self._work.pop(0)()

    def synchronize(self) -> None:
        ndarray.synchronized += 1
        self.finish()


def _finish(place: tuple[Stream, int] | None) -> None:
    if place is not None:
        place[0].finish(place[1])


_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


def launch(kernel: Callable[[], None]) -> None:
    """Queue a kernel on the current stream."""
    Stream.current.queue(kernel)


class _Device:
    current = 0

    def __init__(self, index: int) -> None:
        self.id = index

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def pci_bus_id(self) -> str:
        return f"0000:0{self.id}:00.0"

    def use(self) -> None:
        _Device.current = self.id


Stream.null = Stream.current = Stream(null=True)
_pinned: dict[int, int] = {}  # address: bytes


def empty_pinned(shape: Any, dtype: Any = float) -> np.ndarray:
    memory = np.empty(shape, dtype)
    memory.view(np.uint8)[...] = 0xEE  # nobody counts on zeros
    _pinned[memory.ctypes.data] = memory.nbytes
    weakref.finalize(memory, _pinned.pop, memory.ctypes.data, None)
    return memory


def is_pinned(x: np.ndarray) -> bool:
    first = x.ctypes.data
    return any(a <= first and first + x.nbytes <= a + n for a, n in _pinned.items())


class Nccl(types.ModuleType):
    """What the library uses of `cupy.cuda.nccl`: by MPI, on COMM_WORLD.

    A call is done at once, after what its stream has queued before it.

    Attributes:
        calls: the names of the calls of this rank.
        error: raised by `check_async_error`, where it is set.
        refuses: raised when a communicator is made, where it is set.
        waits: what a rank waits for in vain when a communicator is made.
    """

    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
    DTYPES = ("b", "B", "i", "I", "q", "Q", "e", "f", "d")
    OPS = ("SUM", "PROD", "MAX", "MIN")

    def __init__(self, available: bool = True) -> None:
        super().__init__("cupy.cuda.nccl")
        self.available = available
        self.calls: list[str] = []
        self.open = 0
        self.error: Exception | None = None
        self.refuses: Exception | None = None
        self.waits: threading.Event | None = None
        self.grouped: list[Callable[[], None]] | None = None
        nccl = self

        class NcclCommunicator:
            def __init__(self, ndev: int, key: tuple[int, ...], rank: int) -> None:
                from mpi4py import MPI

                assert key == tuple(range(-64, 64))
                assert (ndev, rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
                if nccl.refuses is not None:
                    raise nccl.refuses
                if nccl.waits is not None:
                    nccl.waits.wait()
                    raise OSError("the other ranks have gone")
                self._comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group)
                nccl.open += 1

            def _call(self, name: str, stream: int, work: Callable[[], None]) -> None:
                nccl.calls.append(name)
                if nccl.grouped is None:
                    _streams[stream].finish()
                    work()
                else:
                    nccl.grouped += [_streams[stream].finish, work]

            def allReduce(self, send, receive, count, kind, op, stream):  # noqa: N802
                from mpi4py import MPI

                x, y = _at(send, count, kind), _at(receive, count, kind)
                source = MPI.IN_PLACE if send == receive else x
                how = getattr(MPI, nccl.OPS[op])
                self._call(
                    "allReduce", stream, lambda: self._comm.Allreduce(source, y, how)
                )

            def reduce(self, send, receive, count, kind, op, root, stream):
                from mpi4py import MPI

                x, y = _at(send, count, kind), _at(receive, count, kind)
                how = getattr(MPI, nccl.OPS[op])
                here = self._comm.rank == root
                source = MPI.IN_PLACE if here and send == receive else x
                self._call(
                    "reduce",
                    stream,
                    lambda: self._comm.Reduce(source, y if here else None, how, root),
                )

            def broadcast(self, send, receive, count, kind, root, stream):
                x, y = _at(send, count, kind), _at(receive, count, kind)

                def work() -> None:
                    if self._comm.rank == root:
                        y[...] = x
                    self._comm.Bcast(y, root)

                self._call("broadcast", stream, work)

            def allGather(self, send, receive, count, kind, stream):  # noqa: N802
                x, y = (
                    _at(send, count, kind),
                    _at(receive, count * self._comm.size, kind),
                )
                self._call("allGather", stream, lambda: self._comm.Allgather(x, y))

            def check_async_error(self) -> None:
                if nccl.error is not None:
                    raise nccl.error

            def destroy(self) -> None:
                if self._comm is not None:
                    self._comm.Free()
                    nccl.open -= 1
                self._comm = None

            abort = destroy

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self) -> tuple[int, ...]:
        return tuple(range(-64, 64))

    def groupStart(self) -> None:  # noqa: N802
        self.grouped = []

    def groupEnd(self) -> None:  # noqa: N802
        works, self.grouped = self.grouped, None
        for work in works or []:
            work()


def _at(address: int, count: int, kind: int) -> np.ndarray:
    dtype = np.dtype(Nccl.DTYPES[kind])
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


def _make_module(num_devices: int) -> types.ModuleType:
    module = types.ModuleType("cupy")
    module.ndarray = ndarray  # type: ignore[attr-defined]

    def asarray(x: Any, dtype: Any = None) -> Any:
        if isinstance(x, ndarray):
            return x if dtype is None else x.astype(dtype)
        if hasattr(x, "__cuda_array_interface__"):
            return ndarray(np.asarray(_Interface(x.__cuda_array_interface__)))
        return ndarray(np.array(x, dtype=dtype))  # a copy: host to device

    def from_numpy(name: str) -> Any:
        function = getattr(np, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs = {k: unwrap(v) for k, v in kwargs.items()}
            return wrap(function(*unwrap(args), **kwargs))

        return call

    module.asarray = module.array = asarray  # type: ignore[attr-defined]
    for name in (
        *("arange", "argmin", "ascontiguousarray", "concatenate", "empty", "exp"),
        *("full", "isnan", "max", "mean", "min", "moveaxis", "ones", "prod", "sqrt"),
        *("stack", "sum", "where", "zeros"),
    ):
        setattr(module, name, from_numpy(name))
    cuda = types.SimpleNamespace(
        Device=_Device,
        get_current_stream=lambda device_id=-1: Stream.current,
        Stream=Stream,
        Event=Event,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: num_devices),
    )
    module.cuda = cuda  # type: ignore[attr-defined]
    return module


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = {**interface, "version": 3}


def install(
    monkeypatch: Any, num_devices: int = 1, nccl: Nccl | None = None
) -> types.ModuleType:
    """Put the stand-in in the place of CuPy, for one test; return it.

    Args:
        monkeypatch: pytest's.
        num_devices: number of GPUs of this machine.
        nccl: the stand-in for NCCL; None: NCCL does not load.
    """
    module = _make_module(num_devices)
    cupyx = types.ModuleType("cupyx")
    cupyx.empty_pinned = empty_pinned  # type: ignore[attr-defined]
    nccl = Nccl(available=False) if nccl is None else nccl
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    monkeypatch.setattr(Stream, "current", Stream.null)
    monkeypatch.setattr(_Device, "current", 0)
    return module
