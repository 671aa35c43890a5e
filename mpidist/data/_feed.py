"""The data that a distributed dataset and its iterators share, and its description."""

from __future__ import annotations

import collections
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, nest
from mpidist._base.errors import CollectiveMismatchError, format_ranks, on_rank
from mpidist._base.types import Array, DType, Nest, Shape
from mpidist._engine.collectives import Collectives
from mpidist._runtime.group import ReplicaGroup
from mpidist.data._inputs import Source
from mpidist.data._options import AutoShardPolicy
from mpidist.data._rows import (
    RowBlock,
    batch_spec,
    split_as_it_comes,
    split_by_plan,
)

# --- empty blocks: what all ranks know of the elements ------------------------------
# Row shapes may differ between steps and between ranks; those of an empty block are the
# last ones that this rank has seen, or another rank's if it has seen none.


def empty_like(block: RowBlock) -> RowBlock:
    """Return arrays without rows, on the host; a scalar becomes a column."""
    leaves = [np.empty((0, *leaf.shape[1:]), leaf.dtype) for leaf in block.leaves]
    return RowBlock(leaves, block.structure)


def empty_of_specs(specs: Nest) -> RowBlock | None:
    """Return such arrays for specs of batches; None if a size is not known."""
    leaves, structure = nest.flatten(specs)
    shapes = [leaf.shape[1:] for leaf in leaves]
    if any(size is None for shape in shapes for size in shape):
        return None
    both = zip(leaves, shapes, strict=True)
    empty = [np.empty((0, *shape), leaf.dtype) for leaf, shape in both]
    return RowBlock(empty, structure)


def describe(block: RowBlock) -> str:
    """Return the text that must be the same on all ranks: ``{'x': float32 (*, *)}``."""
    return block.structure.render(
        [
            f"{x.dtype.name} ({', '.join('*' * x.ndim) if x.ndim > 1 else '*,'})"
            for x in block.leaves
        ]
    )


def dump_empty(block: RowBlock | None) -> bytes:
    """Return a message for `load_empty`: what the rows of a block are like.

    Its structure may have named tuples that pickle cannot find by name.
    """
    if block is None:
        return b""
    file = io.BytesIO()
    dtypes = [leaf.dtype for leaf in block.leaves]
    shapes = [tuple(map(int, leaf.shape[1:])) for leaf in block.leaves]
    _Pickler(file).dump((block.structure.unflatten(range(len(dtypes))), dtypes, shapes))
    return file.getvalue()


def load_empty(data: bytes) -> RowBlock | None:
    """Return arrays without rows, or None, as `dump_empty` was given."""
    if not data:
        return None
    found: tuple[Nest, list[DType], list[Shape]] = pickle.loads(data)
    skeleton, dtypes, shapes = found
    both = zip(shapes, dtypes, strict=True)
    leaves = [np.empty((0, *shape), dtype) for shape, dtype in both]
    return RowBlock(leaves, nest.flatten(skeleton)[1])


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        fields = getattr(obj, "_fields", None)
        if fields is None or not isinstance(obj, tuple):
            return NotImplemented
        try:
            pickle.dumps(type(obj))
        except (pickle.PicklingError, AttributeError, ImportError):
            return named_tuple, (type(obj).__name__, fields, tuple(obj))
        return NotImplemented


def named_tuple(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Return a named tuple like that of another rank, whose class is not known here."""
    return collections.namedtuple(name, fields)(*values)


# --- the feed ----------------------------------------------------------------------


@dataclasses.dataclass
class Feed:
    """An input of all ranks.

    Attributes:
        group: the group of the strategy.
        source: the input that this rank reads.
        number: the number of the dataset, the same on all ranks.
        policy: how global batches are split; None if each rank has its own input.
        to_device: whether arrays are moved to the replica's device.
        empty: elements without rows, once all ranks know what they are like.
        iterations: the number of iterators created.
        checked: whether global batches are compared (``MPIDIST_DEBUG``).
    """

    group: ReplicaGroup
    source: Source
    number: int
    policy: AutoShardPolicy | None
    to_device: bool
    empty: RowBlock | None = None
    iterations: int = 0
    checked: bool = False

    @property
    def collectives(self) -> Collectives:
        """The operations of the strategy."""
        return self.group.collectives

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.group.num_replicas

    def split(self, rows: int, replica: int) -> tuple[int, int]:
        """Return the range of rows of a global batch that a replica gets."""
        if self.policy is AutoShardPolicy.OFF:
            size = self.source.batch_size or rows
            return split_by_plan(rows, self.replicas, replica, size)
        return split_as_it_comes(rows, self.replicas, replica)

    def why_it_ends_with_a_replica(self) -> str:
        """Return why nobody can read this input when a replica has died, or ""."""
        if self.policy is None:
            return (
                "is an input of its own on each replica, which cannot be split anew "
                "when replicas are lost; write `strategy.experimental_distribute_"
                "dataset(dataset)`, with the same global batches on all of them"
            )
        if self.source.one_shot:
            return (
                f"is a {self.source.text}, which can be read only once, and after a "
                "loss it is read again; give an object whose `__iter__` starts from "
                "the beginning, or a `mpidist.data.Dataset.from_generator`"
            )
        return ""

    def next_iteration(self) -> int:
        """Count an iteration; return its number."""
        self.iterations += 1
        return self.iterations - 1

    def place(self, leaf: Array) -> Array:
        """Return an array on the device where it belongs."""
        device = self.collectives.device
        if not self.to_device or device.kind == "cpu" or backend.is_device_array(leaf):
            return leaf
        if leaf.dtype.kind not in "biufcV":
            return leaf  # of strings, for example: a GPU cannot hold it
        placed: Array = backend.place(leaf, device)
        return placed

    def element_spec(self) -> Nest:
        """Return the nest of specs of a replica's part."""
        if self.empty is not None:
            return self.empty.spec(batched=True)
        if self.source.dataset is None:
            raise ValueError(
                f"element_spec: the elements of a {self.source.text} are not known "
                "before the first was read; call `next(iterator)` first"
            )
        spec = self.source.dataset.element_spec
        return spec if self.policy is None else batch_spec(spec)

    def seen(self, block: RowBlock) -> None:
        """Remember the shapes of the rows that this rank has seen last."""
        known = self.empty
        if known is None or any(
            one.shape[1:] != leaf.shape[1:]
            for one, leaf in zip(known.leaves, block.leaves, strict=True)
        ):
            self.empty = empty_like(block)

    def learn(self, own: bytes) -> None:
        """Tell ranks that may not know it what elements are like. Collective."""
        comm = self.collectives.comm
        with comm.traffic.timed():
            found = [load_empty(data) for data in comm.all_gather_objects(own)]
        texts = [None if block is None else describe(block) for block in found]
        if len(set(texts) - {None}) > 1:
            lines = by_value(texts, lambda text: text or "")
            raise CollectiveMismatchError(
                on_rank(
                    comm.rank,
                    "the elements of the ranks' datasets differ in structure, dtype or "
                    f"number of dimensions:\n{lines}",
                )
            )
        others = (block for block in found if block is not None)
        self.empty = found[comm.rank] or next(others, None)

    def differing(self, what: str, number: int) -> str:
        """Return what each rank has of a batch that differs. Collective.

        Args:
            what: the batch, for the message.
            number: the rows of this rank's plus one; 0: its input has ended.
        """
        found = self.collectives.comm.all_gather_integers([number])
        lines = by_value(
            [other for (other,) in found],
            lambda n: f"{n - 1} rows" if n else "the input has ended",
        )
        return (
            f"{what} is not the same on all ranks:\n{lines}\n{_SAME_BATCHES}; for "
            "inputs that differ write `strategy.distribute_datasets_from_function`"
        )

    def compare(self, what: str, call: Call, checksum: int) -> None:
        """Check that all ranks have the same global batch. Collective.

        Args:
            what: the batch, for the message.
            call: the call that reads it.
            checksum: that of this rank's batch; 0: its input has ended.

        Raises:
            ValueError: on all ranks, if the batches differ.
        """
        comm = self.collectives.comm
        asked = Call(f"{call.text} (MPIDIST_DEBUG: the same batch on all ranks?)")
        if self.collectives.guard.agree_and_compare(asked, checksum):
            return
        with comm.traffic.timed():
            sums = comm.all_gather_integers([checksum])
        lines = by_value(
            [other for (other,) in sums],
            lambda x: f"checksum {x:x}" if x else "no batch",
        )
        raise ValueError(
            on_rank(
                comm.rank,
                f"{what} is not the same on all ranks:\n{lines}\n{_SAME_BATCHES}. Give "
                "every shuffle and every random function of the input the same seed on "
                "all ranks",
            )
        )


_SAME_BATCHES: Final = (
    "`experimental_distribute_dataset` needs the same global batches on every rank, of "
    "which each replica gets its part"
)


def by_value(values: list[Any], say: Callable[[Any], str]) -> str:
    """Return a line for each value, with the ranks that have it; none for None."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    return "\n".join(f"  {format_ranks(r)}: {say(v)}" for v, r in groups.items())
