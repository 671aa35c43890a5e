"""Sums of many arrays in one call, such as gradients, against packing them by hand."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist import ReplicaContext
from mpidist._cli.bench_command import in_replicas
from mpidist._cli.measuring import Bench, Row, show_size

Shape = tuple[int, ...]
NESTS = ((20, 2**10), (100, 2**20))  # arrays, and bytes of each
SLOWER = 5.0  # a network is measured this many times as long as an array
MOST_BYTES = 128 * 2**20  # of a network in a quick run


@in_replicas
def nest(bench: Bench, context: ReplicaContext) -> None:
    """Sum arrays of one size. Collective."""
    for count, nbytes in NESTS:
        work = f"{count} arrays of {show_size(nbytes)}"
        if bench.has_room(work, count * nbytes, copies=8):
            arrays = [bench.numbers(nbytes // 4) for _ in range(count)]
            ours = functools.partial(context.all_reduce, "SUM", arrays)
            expected = [bench.total(nbytes // 4)] * count
            by_hand, total = packed(bench, arrays), count * nbytes
            bench.compare("nest", by_hand, ours, expected, work=work, nbytes=total)


def packed(bench: Bench, arrays: Sequence[Any]) -> Callable[[], list[Any]]:
    """Return a function that packs, calls one `Allreduce` in place, and unpacks.

    This is what a careful user writes by hand: the flat buffer and the arrays for the
    sums are allocated once.
    """
    comm, mpi = bench.job.comm, bench.job.mpi
    flat = np.empty(sum(x.size for x in arrays), np.float32)
    out = [np.empty_like(x) for x in arrays]
    ends = np.cumsum([x.size for x in arrays])[:-1]
    parts = np.split(flat, ends)
    views = [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]

    def call() -> list[Any]:
        for view, x in zip(views, arrays, strict=True):
            np.copyto(view, x)
        comm.Allreduce(mpi.IN_PLACE, flat, mpi.SUM)
        for view, x in zip(views, out, strict=True):
            np.copyto(x, view)
        return out

    return call


def resnet50() -> list[Shape]:
    """Return the shapes of ResNet-50, as torchvision lists them.

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
    table 1: four stages of bottlenecks, for 1,000 classes.
    """
    shapes: list[Shape] = []

    def convolution(outputs: int, inputs: int, width: int) -> None:
        shapes.append((outputs, inputs, width, width))
        shapes.extend([(outputs,), (outputs,)])  # the batch normalisation after it

    convolution(64, 3, 7)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolution(width, inputs, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def bert_base() -> list[Shape]:
    """Return the shapes of BERT-base, as Hugging Face lists them.

    Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of Deep Bidirectional
    Transformers for Language Understanding", NAACL 2019: 12 layers of width 768, with
    3,072 in the middle, and 30,522 word pieces.
    """
    width, middle = 768, 3072
    norm: list[Shape] = [(width,), (width,)]

    def dense(outputs: int, inputs: int) -> list[Shape]:
        return [(outputs, inputs), (outputs,)]

    shapes: list[Shape] = [(30522, width), (512, width), (2, width), *norm]
    for _ in range(12):
        shapes += [*dense(width, width) * 4, *norm]  # query, key, value, output
        shapes += [*dense(middle, width), *dense(width, middle), *norm]
    return shapes + dense(width, width)


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "ResNet-50": resnet50,
    "BERT-base": bert_base,
}


def networks(bench: Bench) -> None:
    """Sum the gradients of each network, in arrays and in buffers. Collective."""
    for name, shapes in MODELS.items():
        nbytes = sum(4 * math.prod(shape) for shape in shapes())
        if bench.quick and nbytes > MOST_BYTES:
            bench.notes.append(f"{name} was left out: it is too large for a quick run.")
            continue
        if not bench.has_room(name, nbytes, copies=8):
            continue
        gradients = [bench.numbers(math.prod(s)).reshape(s) for s in shapes()]
        buffers = bench.strategy.buffers_like(gradients)  # other ranks read these
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer[...] = gradient
        network(bench, name, gradients, buffers)


@in_replicas
def network(
    bench: Bench, context: ReplicaContext, name: str, gradients: Any, buffers: Any
) -> None:
    by_hand = packed(bench, gradients)

    def ours() -> Any:
        return context.all_reduce("SUM", gradients)

    def in_buffers() -> Any:
        return context.all_reduce("SUM", buffers)

    expected = [bench.total(x.size).reshape(x.shape) for x in gradients]
    bench.check(name, expected, mpi4py=by_hand, mpidist=ours, buffers_like=in_buffers)
    raw, *times = bench.measure([by_hand, ours, in_buffers], times=SLOWER)
    nbytes = sum(x.nbytes for x in gradients)
    for kind, time in zip(("nest", "nest in buffers_like"), times, strict=True):
        bench.add(Row(kind, f"{name} {kind}", nbytes, raw, time))
