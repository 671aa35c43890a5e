"""Compression between nodes: sums of float32 and float64, sent as 16-bit floats.

A buffer is what one rank reduces for its node. If the ranks of a node do not share
memory, it is the buffer of one rank, and "node" below means a rank. It is all-reduced
over the nodes in two steps, each of which sends 16-bit floats:

1. every node receives a part of the buffer from all others (``MPI_Ialltoall``), and
   adds them in the full dtype, in the order of the nodes, with its own part
   uncompressed;
2. every node sends its sum to all others (``MPI_Iallgather``). All nodes, including the
   sender, use the compressed sum, so results are bit-identical.

So each value is rounded twice, whatever the number of nodes; summing 16-bit floats in
one all-reduce would round at each addition.

**Formats.** ``fp16`` is IEEE 754 binary16: 11 bits of precision, from 6e-8 to 65504.
``bf16`` is the upper half of a float32: 8 bits of precision, its range. Both round to
nearest, ties to even. Values are scaled by a power of two, which is exact, so that the
largest is just below 2**15; bf16 only if necessary. So no finite value becomes
infinite, as it would beyond 65504, and small values keep their precision down to 2**-29
of the largest. Infinities and NaN are sent unchanged.

**Error feedback.** Rounding errors are kept, and added to the same buffer of the next
call before it is rounded: those of the parts that a node sends, and of its sum. Over
many calls only the errors still kept are lost. Sources: F. Seide, H. Fu, J. Droppo,
G. Li, D. Yu, "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014; S. P. Karimireddy, Q. Rebjock,
S. U. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient compression
schemes", ICML 2019; the second residual, of the sum: H. Tang, C. Yu, X. Lian, T. Zhang,
J. Liu, "DoubleSqueeze", ICML 2019.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from mpidist._base.types import HostArray
from mpidist._mpi.buffers import BufferCollectives

LEAST_BYTES: Final = 32 * 1024
"""Arrays up to this size are not compressed, such as a loss beside gradients."""

_HEAD_BYTES: Final = 8
_BLOCK: Final = 16 * 1024  # elements, so that temporary arrays fit into the cache
_TOP: Final = 15  # numbers are scaled to be just below 2**15
# The largest power of two such that the dtype has its inverse as well.
_MOST_SCALE: Final = {4: 126, 8: 1020}


class Codec:
    """A 16-bit format: fp16."""

    def scale_exponent(self, exponent: int, itemsize: int) -> int:
        """Return the exponent of the scale, if all values are below 2**exponent."""
        limit = _MOST_SCALE[itemsize]
        return min(max(_TOP - exponent, -limit), limit)

    def encode(self, x: HostArray, out: HostArray, *, finite: bool) -> None:
        """Round floats into ``out`` (uint16); ``finite``: all are finite."""
        out.view(np.float16)[...] = x

    def decode(self, halves: HostArray, out: HostArray) -> None:
        """Write uint16 as floats into ``out``."""
        out[...] = halves.view(np.float16)


class _Bf16(Codec):
    def scale_exponent(self, exponent: int, itemsize: int) -> int:
        if -80 < exponent < 120:
            return 0
        return super().scale_exponent(exponent, itemsize)

    def encode(self, x: HostArray, out: HostArray, *, finite: bool) -> None:
        bits = x.astype(np.float32, copy=False).view(np.uint32)
        rounded = bits >> 16
        rounded &= 1  # the last bit that stays: ties go to even
        rounded += bits
        rounded += 0x7FFF
        rounded >>= 16
        out[...] = rounded
        if not finite:  # rounding may have carried a NaN into the sign
            out[np.isnan(x)] = 0x7FC0

    def decode(self, halves: HostArray, out: HostArray) -> None:
        bits = halves.astype(np.uint32)
        bits <<= 16
        out[...] = bits.view(np.float32)


CODECS: Final[dict[str, Codec]] = {"fp16": Codec(), "bf16": _Bf16()}


def encode(codec: Codec, x: HostArray, packet: HostArray) -> None:
    """Write floats into a packet.

    Args:
        codec: the format.
        x: float32 or float64, one-dimensional.
        packet: uint8, `packet_bytes` of it, aligned to 8 bytes.
    """
    exponent, finite = _exponent(x) if x.size else (0, True)
    exponent = codec.scale_exponent(exponent, x.itemsize)
    packet[:_HEAD_BYTES].view(np.int64)[0] = exponent
    scale = x.dtype.type(2.0**exponent)
    halves = packet[_HEAD_BYTES : _HEAD_BYTES + 2 * x.size].view(np.uint16)
    for i in range(0, x.size, _BLOCK):
        part = x[i : i + _BLOCK]
        scaled = part * scale if exponent else part
        codec.encode(scaled, halves[i : i + _BLOCK], finite=finite)


def decode(codec: Codec, packet: HostArray, out: HostArray) -> None:
    """Write the floats of a packet into ``out``."""
    exponent = int(packet[:_HEAD_BYTES].view(np.int64)[0])
    scale = out.dtype.type(2.0**-exponent)
    halves = packet[_HEAD_BYTES : _HEAD_BYTES + 2 * out.size].view(np.uint16)
    for i in range(0, out.size, _BLOCK):
        part = out[i : i + _BLOCK]
        codec.decode(halves[i : i + _BLOCK], part)
        if exponent:
            part *= scale


def packet_bytes(count: int) -> int:
    """Return the bytes of a packet of ``count`` floats: a multiple of 8."""
    return _HEAD_BYTES + (2 * count + 7) // 8 * 8


def _exponent(x: HostArray) -> tuple[int, bool]:
    """Return e, the largest finite number being below 2**e, and if all are finite."""
    largest = max(float(x.max()), -float(x.min()))  # NaN if there is one
    finite = math.isfinite(largest)
    if not finite:
        largest = float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
    return math.frexp(largest)[1] if largest else 0, finite


class Compression:
    """All-reduces the buffers of one bucket of a plan over the nodes.

    Args:
        scheme: "fp16" or "bf16".
        error_feedback: keep rounding errors, and add them in the next call.
    """

    def __init__(self, scheme: str, error_feedback: bool) -> None:
        self._codec = CODECS[scheme]
        self._error_feedback = error_feedback
        # Errors of the n-th buffer of a call: of this node's parts, and of the sum.
        self._lost: list[tuple[HostArray, HostArray]] = []
        self._next = 0

    def begin(self) -> Compression:
        """Begin a call: its buffers have the errors of the last call's, in order."""
        self._next = 0
        return self

    def allreduce(self, peers: BufferCollectives, buffer: HostArray) -> None:
        """Sum ``buffer`` of all peers into itself.

        Args:
            peers: one rank of each node, or all ranks.
            buffer: float32 or float64, of the same size on all peers. Infinities are
                passed on, so NumPy's errors are to be ignored.
        """
        codec, me, nodes = self._codec, peers.rank, peers.size
        count = -(-buffer.size // nodes)
        parts = [buffer[k * count : (k + 1) * count] for k in range(nodes)]
        size = packet_bytes(count)
        sent, received = np.zeros((2, nodes, size), np.uint8)
        mine = parts[me]
        kept = self._kept(buffer, mine)
        if kept is not None:
            buffer += kept[0]
            kept[0][...] = 0
        for k, part in enumerate(parts):
            if k == me:
                continue
            encode(codec, part, sent[k])
            if kept is not None:
                _keep(codec, part, sent[k], kept[0][k * count : (k + 1) * count])
        peers.exchange(sent, received)
        total = np.zeros_like(mine)
        scratch = np.empty_like(mine)
        for k in range(nodes):
            if k == me:
                total += mine
            else:
                decode(codec, received[k], scratch)
                total += scratch
        if kept is not None:
            total += kept[1]
        encode(codec, total, sent[me])
        if kept is not None:
            _keep(codec, total, sent[me], kept[1])
        peers.all_gather(sent[me], received.reshape(-1), [size] * nodes)
        for k, part in enumerate(parts):
            decode(codec, received[k], part)

    def _kept(
        self, buffer: HostArray, mine: HostArray
    ) -> tuple[HostArray, HostArray] | None:
        if not self._error_feedback:
            return None
        number = self._next
        self._next += 1
        if number == len(self._lost):
            self._lost.append((np.zeros_like(buffer), np.zeros_like(mine)))
        return self._lost[number]


def _keep(codec: Codec, x: HostArray, packet: HostArray, lost: HostArray) -> None:
    """Write the rounding errors of a packet into ``lost``; 0 for infinite values."""
    decode(codec, packet, lost)
    np.subtract(x, lost, out=lost)
    if lost.size and not math.isfinite(float(lost.max()) - float(lost.min())):
        lost[~np.isfinite(lost)] = 0
