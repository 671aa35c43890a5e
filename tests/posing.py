"""Host memory that poses as a GPU array: a stand-in for the parts of CuPy we use.

`ndarray` is no NumPy array and has no buffer: MPI finds its memory only through
``__cuda_array_interface__``, as it finds that of a CuPy array. Like CuPy it refuses to
be converted to NumPy or to be mixed with NumPy arrays. `install` puts it in the place
of CuPy; the library then runs the very code that it runs on a GPU.

Work on a stream is queued, as on a GPU, and a `Driver` does it in an order that CUDA
allows: as late as it may, so that a copy that nothing waits for has not happened yet;
as early as it may; or at random, some streams fast and others slow, which changes. The
rules are those of CUDA (driver API, "Stream synchronization behavior"): a stream does
its work in order; what waits for an event waits for where it was recorded last; the
null stream waits for all blocking streams and they for it, non-blocking ones for
nobody. That the host, waiting for the null stream, waits for blocking streams too is
not written there: it does not, until something is queued.
An array's own operations are done at once, after all that the current stream has queued
before them, but for copies from array to array, which are queued. `launch` queues a
kernel.

Page-locked memory that is let go is somebody else's at once, who writes to it.

`Nccl` is a stand-in for `cupy.cuda.nccl` that moves buffers by MPI.

What is here has the names, signatures and types of the real package: it is compared
with tests/cupy_records, which tests/record_cupy.py makes from it (test_posing.py).
Names that are not recorded are refused, wherever NumPy would have them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import operator
import pathlib
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

RECORDS = pathlib.Path(__file__).parent / "cupy_records"
NEWEST, OLDER = "14.2.0", "13.6.0"


@functools.cache
def record(version: str = NEWEST) -> dict[str, Any]:
    """Return what tests/record_cupy.py wrote about a version of CuPy."""
    found: dict[str, Any] = json.loads((RECORDS / f"{version}.json").read_text())
    return found


def known(owner: str, name: str) -> bool:
    """Return whether CuPy has a name, in a module or class such as "cupy.ndarray"."""
    return name in record()["names"][owner]


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
        self.memory = host

    @property
    def _host(self) -> np.ndarray:
        """What a kernel on the current stream finds in the memory."""
        Stream.current.queue(_nothing)  # the kernel
        Stream.current.finish()
        return self.memory

    @property
    def flags(self) -> Any:
        return _Flags(self.memory.flags)

    @property
    def data(self) -> Any:
        return _MemoryPointer(self.memory.ctypes.data)

    @property
    def device(self) -> _Device:
        return _Device(_Device.current)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self.memory.__array_interface__)  # no stream waits for it
        return {**interface, "version": 3, "stream": None}

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` "
            "to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kw: Any) -> Any:
        if not all(
            isinstance(x, (ndarray, int, float, complex, np.generic)) for x in inputs
        ):
            return NotImplemented
        if not known("cupy", ufunc.__name__):
            return NotImplemented
        out = kw.pop("out", None)
        if out is not None:
            kw["out"] = tuple(unwrap(x) for x in out)
        result = getattr(ufunc, method)(*(unwrap(x) for x in inputs), **kw)
        return out[0] if out is not None else wrap(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kw: Any) -> Any:
        if not known("cupy", func.__name__):
            return NotImplemented
        return wrap(func(*unwrap(tuple(args)), **{k: unwrap(v) for k, v in kw.items()}))

    def __getitem__(self, index: Any) -> Any:
        found = self.memory[unwrap(index)]
        if not np.may_share_memory(found, self.memory):  # no view
            found = np.asarray(self._host[unwrap(index)])
        return ndarray(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        index = unwrap(index)
        if isinstance(value, ndarray):
            launch(lambda: self.memory.__setitem__(index, value.memory))
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
            out = np.empty_like(self.memory)
        elif type(out) is not np.ndarray or out.dtype != self.memory.dtype:
            raise TypeError("posing: get() wants a NumPy array `out` of the same dtype")
        elif out.shape != self.memory.shape:
            raise ValueError("posing: get() wants `out` of the same shape")
        elif not blocking and not is_pinned(out):
            raise ValueError("posing: a copy to memory that is not pinned blocks")
        # What is queued knows addresses, and keeps no page-locked memory.
        target, source = (_at_address(out) if is_pinned(out) else out), self.memory
        stream.queue(lambda: np.copyto(target, source))
        if blocking:
            stream.synchronize()
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.memory.dtype:
            raise TypeError(
                f"{arr.dtype} array cannot be set to {self.memory.dtype} array"
            )
        if arr.shape != self.memory.shape:
            raise ValueError(
                f"Shape mismatch. Old shape: {self.memory.shape}, "
                f"new shape: {arr.shape}"
            )
        # Of memory that is not page-locked the driver makes a copy at once.
        pinned = is_pinned(arr) and arr.flags.c_contiguous
        source, target = (_at_address(arr) if pinned else arr.copy()), self.memory
        (stream or Stream.current).queue(lambda: np.copyto(target, source))

    def view(self, *args: Any) -> Any:
        return ndarray(self.memory.view(*args))

    def __getattr__(self, name: str) -> Any:
        if not known("cupy.ndarray", name):
            raise AttributeError(f"'ndarray' object has no attribute {name!r}")
        found = getattr(self.memory, name)
        if not callable(found):
            return wrap(found) if isinstance(found, np.ndarray) else found

        def method(*args: Any, **kwargs: Any) -> Any:
            if name != "reshape":  # which reads nothing
                Stream.current.queue(_nothing)
                Stream.current.finish()
            result = found(*unwrap(args), **{k: unwrap(v) for k, v in kwargs.items()})
            return result if name in ("item", "tolist") else wrap(result)

        return method


class _MemoryPointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class _Flags:
    """The flags of an array: CuPy has fewer than NumPy."""

    def __init__(self, flags: Any) -> None:
        self._of_numpy = flags

    def __getattr__(self, name: str) -> Any:
        if not known("cupy.ndarray.flags", name):
            raise AttributeError(f"'Flags' object has no attribute {name!r}")
        return getattr(self._of_numpy, name)


class Driver:
    """Does what is queued on streams, in an order that CUDA allows.

    Attributes:
        order: "late": when somebody waits for it; "early": on streams that a program
            makes at once, where nothing holds it up, and on the null stream late;
            "random": some of it at each call that a program makes, on streams that
            are faster or slower, as a seed says.
        busy: the streams that have something to do. They live until it is done.
    """

    def __init__(self, order: str = "late", seed: int = 0) -> None:
        assert order in ("late", "early", "random")
        self.order = order
        self.busy: dict[int, Stream] = {}
        self._random = random.Random(seed)
        self._speeds: dict[int, float] = {}

    def queued(self, stream: Stream) -> None:
        """Take notice of work that was queued last on ``stream``."""
        self.busy[stream.ptr] = stream
        if self.order == "early" and stream.ptr and stream.left() == 1:
            stream.advance()
        self.pass_time()

    def pass_time(self) -> None:
        """Let streams go on by themselves, as they may at any moment."""
        if self.order != "random":
            return
        for number in self._random.sample(sorted(self.busy), len(self.busy)):
            if self._random.random() < 1 / 8:  # another one is fast now
                self._speeds.pop(number, None)
            speed = self._speeds.setdefault(number, self._random.choice(_SPEEDS))
            stream = self.busy.get(number)
            while stream is not None and self._random.random() < speed:
                if not stream.advance():
                    break


_SPEEDS = (0.0, 0.0, 0.3, 0.95)  # how often a stream does the next thing


class Event:
    """A place in the queue of a stream; before it is recorded, it is past."""

    def __init__(
        self,
        block: bool = False,
        disable_timing: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._place: _Place | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = Stream.current if stream is None else stream
        # A thing to do like others: on the null stream it waits for blocking streams.
        stream.queue(_nothing)
        self._place = (stream, stream.queued)

    def synchronize(self) -> None:
        driver.pass_time()
        _finish(self._place)
        driver.pass_time()


class Stream:
    """A queue of work, which the `driver` does."""

    null: Stream
    current: Stream
    _numbers = itertools.count(0)

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False
    ) -> None:
        self.ptr = next(Stream._numbers)
        self.device_id = _Device.current
        self.queued = 0
        self._blocking = not null and not non_blocking
        self._done = 0
        self._work: list[tuple[Callable[[], None], list[_Place]]] = []
        _streams[self.ptr] = self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Stream:
        self._before = Stream.current
        return self.use()

    def __exit__(self, *error: object) -> None:
        Stream.current = self._before

    def use(self) -> Stream:
        Stream.current = self
        return self

    def queue(self, work: Callable[[], None], after: _Place | None = None) -> None:
        """Have work done after what is queued here, and after a place elsewhere."""
        places = [] if after is None else [after]
        if self.ptr == 0:
            others = [s for s in list(driver.busy.values()) if s._blocking]
            places += [(s, s.queued) for s in others]
        elif self._blocking and Stream.null.left():
            places.append((Stream.null, Stream.null.queued))
        self._work.append((work, places))
        self.queued += 1
        driver.queued(self)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue(_nothing, event._place)  # recording it again changes nothing

    def left(self) -> int:
        """Return how much is still to do."""
        return self.queued - self._done

    def advance(self) -> bool:
        """Do the next thing, unless it has to wait; return whether it was done."""
        if not self._work or any(s._done < n for s, n in self._work[0][1]):
            return False
        work, _ = self._work.pop(0)
        self._done += 1
        if not self._work:
            driver.busy.pop(self.ptr, None)
        work()
        return True

    def finish(self, number: int | None = None) -> None:
        """Do all that is queued, or the first so many, and what they wait for."""
        number = self.queued if number is None else number
        while self._done < number:
            for place in self._work[0][1]:
                _finish(place)
            self.advance()

    def synchronize(self) -> None:
        ndarray.synchronized += 1
        driver.pass_time()
        self.finish()
        driver.pass_time()


_Place = tuple[Stream, int]  # the first so many things that are queued on a stream


def _nothing() -> None:
    pass


def _finish(place: _Place | None) -> None:
    if place is not None:
        place[0].finish(place[1])


driver = Driver()
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


def finish_all() -> None:
    """Do all that is queued."""
    for stream in [Stream.null, *driver.busy.values()]:
        stream.finish()


def launch(kernel: Callable[[], None]) -> None:
    """Queue a kernel on the current stream."""
    Stream.current.queue(kernel)


class _Device:
    current = 0

    def __init__(self, device: int = 0) -> None:
        self.id = device

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
_blocks: dict[int, list[Any]] = {}  # of page-locked memory that nobody has, by size


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    """Return page-locked memory, of which nobody may count on what is in it."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    free = _blocks.setdefault(nbytes, [])
    block = free.pop() if free else (ctypes.c_char * max(nbytes, 1))()
    layout: Any = order
    memory = np.ndarray(shape, dtype, buffer=block, order=layout)
    address = memory.ctypes.data
    ctypes.memset(address, 0xEE, nbytes)
    _pinned[address] = nbytes
    weakref.finalize(memory, _let_go, address, nbytes, block)
    return memory


def _let_go(address: int, nbytes: int, block: Any) -> None:
    """Give page-locked memory to somebody else, who writes to it at once."""
    _pinned.pop(address, None)
    ctypes.memset(address, 0xDD, nbytes)
    _blocks[nbytes].append(block)


def is_pinned(x: np.ndarray) -> bool:
    first = x.ctypes.data
    return any(
        a <= first and first + x.nbytes <= a + n for a, n in _pinned.copy().items()
    )


def _at_address(x: np.ndarray) -> np.ndarray:
    """Return the memory of ``x``, by its address: it is not kept for that."""
    assert x.flags.c_contiguous
    raw: Any = (ctypes.c_char * x.nbytes).from_address(x.ctypes.data)
    shared: np.ndarray = np.frombuffer(raw, np.uint8).view(x.dtype).reshape(x.shape)
    return shared


class CUDARuntimeError(RuntimeError):
    """An error of CUDA."""


class Nccl(types.ModuleType):
    """What the library uses of `cupy.cuda.nccl`: by MPI, on COMM_WORLD.

    A call does what its stream has queued before it, and moves the data at once. It
    queues on its stream that the result is written, with a kernel's work to come.

    Attributes:
        calls: the names of the calls of this rank.
        error: raised by `check_async_error`, where it is set.
        refuses: raised when a communicator is made, where it is set.
        waits: what a rank waits for in vain when a communicator is made.
        id_type: of the id: bytes, and before CuPy 14 tuple.
    """

    DTYPES = ("b", "B", "i", "I", "q", "Q", "e", "f", "d")
    OPS = ("SUM", "PROD", "MAX", "MIN")
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)

    def __init__(self, available: bool = True, id_type: type = bytes) -> None:
        super().__init__("cupy.cuda.nccl")
        self.available = available
        self.id_type = id_type
        self.calls: list[str] = []
        self.open = 0
        self.error: Exception | None = None
        self.refuses: Exception | None = None
        self.waits: threading.Event | None = None
        self.grouped: list[Callable[[], None]] | None = None
        self.NcclCommunicator = functools.partial(NcclCommunicator, self)

    def get_unique_id(self) -> bytes | tuple[int, ...]:
        return ID if self.id_type is bytes else tuple(memoryview(ID).cast("b"))

    def groupStart(self) -> None:  # noqa: N802
        self.grouped = []

    def groupEnd(self) -> None:  # noqa: N802
        works, self.grouped = self.grouped, None
        for work in works or []:
            work()


ID = bytes(range(192, 256)) + bytes(range(64))  # every sign of C's char, and zero


class NcclCommunicator:
    """A communicator; made with the module that it is in."""

    def __init__(
        self,
        nccl: Nccl,
        ndev: int,
        commId: Any,  # noqa: N803 - CuPy's name
        rank: int,
        config: Any = None,
    ) -> None:
        from mpi4py import MPI

        given: Any = commId  # whose type is narrowed here
        if type(given) is not nccl.id_type:
            raise TypeError(
                "Argument 'commId' has incorrect type (expected "
                f"{nccl.id_type.__name__}, got {type(commId).__name__})"
            )
        if len(commId) != len(ID):
            raise ValueError(f"commId length {len(commId)} != {len(ID)}.")
        assert commId == nccl.get_unique_id()
        assert (ndev, rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
        if nccl.refuses is not None:
            raise nccl.refuses
        if nccl.waits is not None:
            nccl.waits.wait()
            raise OSError("the other ranks have gone")
        self._nccl = nccl
        self._comm: Any = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group)
        nccl.open += 1

    def _call(
        self,
        name: str,
        stream: int,
        result: np.ndarray | None,
        move: Callable[[Any], None],
    ) -> None:
        """Move data of all ranks into a copy of ``result``, and queue the rest."""
        nccl, queue = self._nccl, _streams[operator.index(stream)]
        nccl.calls.append(name)

        def work() -> None:
            queue.queue(_nothing)  # the kernel
            queue.finish()
            if result is None:
                move(None)
                return
            found = result.copy()
            move(found)
            queue.queue(lambda: np.copyto(result, found))

        if nccl.grouped is None:
            work()
        else:
            nccl.grouped.append(work)

    def allReduce(  # noqa: N802
        self,
        sendbuf: Any,
        recvbuf: Any,
        count: int,
        datatype: int,
        op: int,
        stream: Any,
    ) -> None:
        from mpi4py import MPI

        x, y = _at(sendbuf, count, datatype), _at(recvbuf, count, datatype)
        how = getattr(MPI, Nccl.OPS[op])
        self._call("allReduce", stream, y, lambda z: self._comm.Allreduce(x, z, how))

    def reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        count: int,
        datatype: int,
        op: int,
        root: int,
        stream: Any,
    ) -> None:
        from mpi4py import MPI

        x, y = _at(sendbuf, count, datatype), _at(recvbuf, count, datatype)
        how = getattr(MPI, Nccl.OPS[op])
        mine = y if self._comm.rank == root else None
        self._call("reduce", stream, mine, lambda z: self._comm.Reduce(x, z, how, root))

    def broadcast(
        self,
        sendbuff: Any,
        recvbuff: Any,
        count: int,
        datatype: int,
        root: int,
        stream: Any,
    ) -> None:
        x, y = _at(sendbuff, count, datatype), _at(recvbuff, count, datatype)

        def move(z: Any) -> None:
            if self._comm.rank == root:
                z[...] = x
            self._comm.Bcast(z, root)

        self._call("broadcast", stream, y, move)

    def allGather(  # noqa: N802
        self, sendbuf: Any, recvbuf: Any, count: int, datatype: int, stream: Any
    ) -> None:
        x = _at(sendbuf, count, datatype)
        y = _at(recvbuf, count * self._comm.size, datatype)
        self._call("allGather", stream, y, lambda z: self._comm.Allgather(x, z))

    def check_async_error(self) -> None:
        if self._nccl.error is not None:
            raise self._nccl.error

    def destroy(self) -> None:
        if self._comm is not None:
            self._comm.Free()
            self._nccl.open -= 1
        self._comm = None

    abort = destroy


def _at(address: int, count: int, kind: int) -> np.ndarray:
    address, count, kind = map(operator.index, (address, count, kind))
    dtype = np.dtype(Nccl.DTYPES[kind])
    raw: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    shared: np.ndarray = np.frombuffer(raw, dtype)
    return shared


def _make_module(num_devices: int) -> types.ModuleType:
    module = types.ModuleType("cupy")
    module.ndarray = ndarray  # type: ignore[attr-defined]

    def asarray(a: Any, dtype: Any = None) -> Any:
        if isinstance(a, ndarray):
            return a if dtype is None else a.astype(dtype)
        if hasattr(a, "__cuda_array_interface__"):
            return ndarray(np.asarray(_Interface(a.__cuda_array_interface__)))
        return ndarray(np.array(a, dtype=dtype))  # a copy: host to device

    def from_numpy(name: str) -> Any:
        function = getattr(np, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs = {k: unwrap(v) for k, v in kwargs.items()}
            return wrap(function(*unwrap(args), **kwargs))

        return call

    def array(obj: Any, dtype: Any = None) -> Any:
        return asarray(obj, dtype)

    module.asarray, module.array = asarray, array  # type: ignore[attr-defined]
    for name in (
        *("arange", "argmin", "ascontiguousarray", "concatenate", "empty", "exp"),
        *("full", "isnan", "max", "mean", "min", "moveaxis", "ones", "prod", "sqrt"),
        *("stack", "sum", "where", "zeros"),
    ):
        setattr(module, name, from_numpy(name))
    cuda = types.SimpleNamespace(
        Device=_Device,
        MemoryPointer=_MemoryPointer,
        get_current_stream=lambda device_id=-1: Stream.current,
        Stream=Stream,
        Event=Event,
        runtime=types.SimpleNamespace(
            getDeviceCount=lambda: num_devices,
        ),
    )
    module.cuda = cuda  # type: ignore[attr-defined]
    return module


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = {**interface, "version": 3}


def refuse(*args: Any) -> NoReturn:
    """Raise what CUDA does where a call is not supported."""
    raise CUDARuntimeError("cudaErrorNotSupported")


def to_host(x: Any) -> Any:
    """Return a NumPy array; what is none of the stand-in's as it is."""
    return x.get() if isinstance(x, ndarray) else x


def _seed(seed: Any = None) -> None:
    """Do nothing: the stand-in has no random numbers."""


def install(
    monkeypatch: Any,
    num_devices: int = 1,
    nccl: Nccl | None = None,
    order: str = "late",
    seed: int = 0,
) -> types.ModuleType:
    """Put the stand-in in the place of CuPy, for one test; return it.

    Args:
        monkeypatch: pytest's.
        num_devices: number of GPUs of this machine.
        nccl: the stand-in for NCCL; None: NCCL does not load.
        order: in which work on streams is done; see `Driver`.
        seed: of that order, where it is random.
    """
    finish_all()  # of the test before
    module = _make_module(num_devices)
    module.random = types.ModuleType("cupy.random")  # type: ignore[attr-defined]
    module.random.seed = _seed
    cupyx = types.ModuleType("cupyx")
    cupyx.empty_pinned = empty_pinned  # type: ignore[attr-defined]
    nccl = Nccl(available=False) if nccl is None else nccl
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    monkeypatch.setattr(sys.modules[__name__], "driver", Driver(order, seed))
    monkeypatch.setattr(Stream, "current", Stream.null)
    monkeypatch.setattr(_Device, "current", 0)
    return module
