"""Numbers for TensorBoard, with the functions of tf.summary: rank 0 writes them.

Every rank makes these calls, without an ``if``: in the scope of a strategy its replica
0 writes, outside every scope rank 0 of the job. Nothing here communicates, but
arguments may: ``metric.result()`` is for all ranks.
"""

from __future__ import annotations

import contextlib as _contextlib
import math as _math
import os as _os
import platform as _platform
import struct as _struct
import time as _time
import weakref as _weakref
from collections import abc as _abc

from mpidist._base import backend as _backend, threads as _threads
from mpidist._base.expect import (
    as_int as _as_int,
    as_path as _as_path,
    expect as _expect,
)
from mpidist._base.remedies import publish as _publish
from mpidist._runtime import context as _context
from mpidist._values.distributed import is_per_replica as _is_per_replica
from mpidist.cluster import this_process as _this_process


class SummaryWriter:
    """Writes the numbers of `scalar` to a file; `create_file_writer` returns it."""

    def __init__(self, logdir: str | None, suffix: str = "") -> None:
        """Make the file at the first number, on the rank that writes."""
        self._logdir = logdir
        self._suffix = suffix
        self._file = -1
        self._close: _abc.Callable[[], object] | None = None

    @_contextlib.contextmanager
    def as_default(self, step: object = None) -> _abc.Iterator[SummaryWriter]:
        """Return a context in which `scalar` writes here, by default at ``step``."""
        here = _state()
        before = here.writer, here.step
        self.set_as_default(step)
        try:
            yield self
        finally:
            here.writer = before[0]
            if step is not None:
                here.step = before[1]

    def set_as_default(self, step: object = None) -> None:
        """Let `scalar` write here from now on, by default at ``step``."""
        here = _state()
        here.writer = self
        if step is not None:
            here.step = step

    def init(self) -> None:
        """Do nothing: the first number makes the file."""

    def flush(self) -> None:
        """Do nothing: each number is written at once."""

    def close(self) -> None:
        """Close the file; the next number makes another one."""
        if self._close is not None:
            self._close()
            self._close = None

    def _write(self, event: bytes) -> None:
        if self._logdir is None:
            return
        if self._close is None:
            _os.makedirs(self._logdir, exist_ok=True)
            now, host, pid = int(_time.time()), _platform.node(), _os.getpid()
            name = f"events.out.tfevents.{now}.{host}.{pid}.{id(self)}{self._suffix}"
            path = _os.path.join(self._logdir, name)
            flags = _os.O_WRONLY | _os.O_CREAT | _os.O_APPEND
            self._file = _os.open(path, flags, 0o666)
            # Programs of TensorFlow close no writers.
            self._close = _weakref.finalize(self, _os.close, self._file)
            _os.write(self._file, _record(_event(_field(3, b"brain.Event:2"))))
        _os.write(self._file, _record(event))


class _State:
    """What `scalar` uses if it is not told: for each replica."""

    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None
        self.step: object = None
        self.condition: object = True


_state = _threads.ReplicaLocal(_State).get


def create_file_writer(
    logdir: str | _os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
) -> SummaryWriter:
    """Return a writer of files for TensorBoard, in a directory. Not collective.

    Args:
        logdir: the directory, which the rank that writes makes.
        max_queue: accepted and ignored: each number is written at once.
        flush_millis: as ``max_queue``.
        filename_suffix: the end of the file's name; None: ".v2".
        name: accepted and ignored.
    """
    logdir = _as_path("summary.create_file_writer", logdir)
    return SummaryWriter(logdir, filename_suffix or ".v2")


def create_noop_writer() -> SummaryWriter:
    """Return a writer that writes nothing. Not collective."""
    return SummaryWriter(None)


def scalar(
    name: str, data: object, step: object = None, description: str | None = None
) -> bool:
    """Write a number, on rank 0. Not collective.

    Args:
        name: its name in TensorBoard.
        data: a real number or a bool, an array of no dimensions, or a variable.
        step: an int or a variable of one; None: that of `set_step`.
        description: accepted and ignored.

    Returns:
        Whether there is a writer, and `record_if` lets it write; on the other ranks
        too.

    Raises:
        TypeError: if this would return True, and ``name`` is no str, ``data`` is not a
            number, or there is no step.
    """
    here = _state()
    if here.writer is None or not should_record_summaries():
        return False
    hint = 'write `strategy.reduce("MEAN", value, axis=None)` for a PerReplica'
    call, what = "summary.scalar", "`data` to be a number"
    _expect(isinstance(name, str), call, "`name` to be a str", name)
    _expect(not _is_per_replica(data), call, what, data, hint)
    array, _ = _backend.as_array(data, call)
    is_real = array.shape == () and _backend.number_kind(array.dtype) in "biuf"
    _expect(is_real, call, what, data, hint)
    value = float(_backend.to_host(array))
    step = here.step if step is None else step
    hint = "write `step=optimizer.iterations`, or call `mpidist.summary.set_step(step)`"
    number = _as_int(call, "step", step, hint=hint)
    if _is_writer():
        text = _field(1, name.encode()) + b"\x15" + _float_32(value)
        here.writer._write(_event(_field(5, _field(1, text)), number))
    return True


@_contextlib.contextmanager
def record_if(condition: object) -> _abc.Iterator[None]:
    """Let `scalar` write in a ``with`` only if the condition holds. Not collective.

    Args:
        condition: a bool, or a function that returns one, called for each number.
    """
    here = _state()
    before, here.condition = here.condition, condition
    try:
        yield
    finally:
        here.condition = before


def should_record_summaries() -> bool:
    """Return whether there is a writer, and `record_if` lets it write."""
    here = _state()
    condition = here.condition
    holds = condition() if callable(condition) else condition
    return here.writer is not None and bool(holds)


def set_step(step: object) -> None:
    """Set the step of the calls of `scalar` that have none: an int, or a variable."""
    _state().step = step


def get_step() -> object:
    """Return what `set_step` has set."""
    return _state().step


def flush(writer: SummaryWriter | None = None, name: str | None = None) -> None:
    """Do nothing: each number is written at once."""


def _is_writer() -> bool:
    if _context.has_strategy():
        return _context.current().group.replica_id == 0
    replica = _threads.current()
    return (replica.rank if replica is not None else _this_process().rank) == 0


def _float_32(value: float) -> bytes:
    try:
        return _struct.pack("<f", value)
    except OverflowError:  # such as a loss that diverges
        return _struct.pack("<f", _math.copysign(_math.inf, value))


def _event(content: bytes, step: int = 0) -> bytes:
    """Return a message `Event` of TensorFlow's event.proto."""
    head = b"\x09" + _struct.pack("<d", _time.time())
    return head + b"\x10" + _varint(step % 2**64) + content


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protocol buffer that has a length."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    rest, least = divmod(number, 128)
    return bytes([least | 128]) + _varint(rest) if rest else bytes([least])


def _record(content: bytes) -> bytes:
    """Return a record of a TFRecord file: lengths and contents, with checksums."""
    size = _struct.pack("<Q", len(content))
    return size + _checksum(size) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    """Return the masked CRC-32C."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC_OF[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return _struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_OF = [_crc_of(byte) for byte in range(256)]


_publish(__name__)
