"""The data that a distributed dataset and its iterators share."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.errors import CollectiveMismatchError, format_ranks, on_rank
from mpidist._base.types import Array, DType, Nest, Shape
from mpidist._engine.collectives import Collectives
from mpidist._runtime.group import ReplicaGroup
from mpidist.data._blocks import RowBlock
from mpidist.data._distributed_sources import Source
from mpidist.data._records import ArraySpec, AutoShardPolicy
from mpidist.data._sharding import split_as_it_comes, split_by_plan


@dataclasses.dataclass(frozen=True)
class Spec:
    """The common properties of the ranks' parts of an element.

    Row shapes may differ between steps and between ranks; these are the last ones that
    this rank has seen, or another rank's if it has seen none.
    """

    structure: nest.Structure
    dtypes: tuple[DType, ...]
    shapes: tuple[Shape, ...]  # full shapes, of an array with 0 rows

    @classmethod
    def of(cls, block: RowBlock) -> Spec:
        """Return the spec of a block with any number of rows."""
        shapes = tuple((0, *map(int, leaf.shape[1:])) for leaf in block.leaves)
        return cls(block.structure, tuple(x.dtype for x in block.leaves), shapes)

    def fits(self, block: RowBlock) -> bool:
        """Return whether the rows of a block have the shapes of this spec."""
        return all(
            shape[1:] == leaf.shape[1:]
            for shape, leaf in zip(self.shapes, block.leaves, strict=True)
        )

    def empty(self) -> RowBlock:
        """Return arrays without rows, on the host."""
        leaves = [
            np.empty(shape, dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        return RowBlock(leaves, self.structure)

    def nest(self) -> Nest:
        """Return the nest of `ArraySpec`."""
        return self.structure.unflatten(
            [
                ArraySpec((None, *shape[1:]), dtype)
                for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            ]
        )

    def __reduce__(self) -> tuple[object, ...]:
        skeleton = self.structure.unflatten(range(len(self.dtypes)))
        return _rebuild_spec, (skeleton, self.dtypes, self.shapes)


def _rebuild_spec(
    skeleton: Nest, dtypes: tuple[DType, ...], shapes: tuple[Shape, ...]
) -> Spec:
    return Spec(nest.flatten(skeleton)[1], dtypes, shapes)


def spec_from_nest(specs: Nest) -> Spec | None:
    """Return the spec for a nest of `ArraySpec` of batches."""
    leaves, structure = nest.flatten(specs)
    shapes = [leaf.shape[1:] for leaf in leaves]
    if any(size is None for shape in shapes for size in shape):
        return None
    return Spec(
        structure,
        tuple(leaf.dtype for leaf in leaves),
        tuple((0, *shape) for shape in shapes),
    )


def describe(block: RowBlock) -> str:
    """Return the text that must be the same on all ranks: ``{'x': float32 (*, *)}``.

    A scalar is shown as a column, because a rank without rows has a column for it.
    """
    return block.structure.render(
        [
            f"{x.dtype.name} ({', '.join('*' * x.ndim) if x.ndim > 1 else '*,'})"
            for x in block.leaves
        ]
    )


@dataclasses.dataclass
class Feed:
    """An input of all ranks.

    Attributes:
        group: the group of the strategy.
        source: the input that this rank reads.
        number: the number of the dataset, the same on all ranks.
        policy: how global batches are split; None if each rank has its own input.
        to_device: whether arrays are moved to the replica's device.
        spec: the spec of elements, once all ranks know it.
        iterations: the number of iterators created.
        checked: whether global batches are compared (``MPIDIST_DEBUG``).
    """

    group: ReplicaGroup
    source: Source
    number: int
    policy: AutoShardPolicy | None
    to_device: bool
    spec: Spec | None = None
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
            return split_by_plan(
                rows, self.replicas, replica, self.source.batch_size or rows
            )
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
        """Return the nest of specs of a replica's part.

        Raises:
            ValueError: if it is known only after reading, and nothing has been read.
        """
        if self.spec is not None:
            return self.spec.nest()
        dataset = getattr(self.source, "dataset", None)
        if dataset is None:
            raise ValueError(
                f"element_spec: the elements of a {self.source.text} are not known "
                "before the first was read; call `next(iterator)` first"
            )
        if self.policy is None:
            return dataset.element_spec
        return nest.map_structure(
            lambda one: ArraySpec((None, *one.shape[1:]), one.dtype),
            dataset.element_spec,
        )

    def learn(self, own: bytes) -> None:
        """Send the spec of elements to ranks that may not know it. Collective.

        Args:
            own: a pickled tuple of a `Spec` and its text, or of None for both.

        Raises:
            CollectiveMismatchError: if the ranks' elements differ; on all ranks.
        """
        comm = self.collectives.comm
        with comm.traffic.timed():
            found = comm.all_gather_objects(own)
        known: list[tuple[int, Spec, str]] = []
        for rank, data in enumerate(found):
            spec, text = pickle.loads(data)
            if spec is not None:
                known.append((rank, spec, text))
        groups: dict[str, list[int]] = {}
        for rank, _, text in known:
            groups.setdefault(text, []).append(rank)
        if len(groups) > 1:
            lines = [f"  {format_ranks(r)}: {text}" for text, r in groups.items()]
            raise CollectiveMismatchError(
                on_rank(
                    comm.rank,
                    "the elements of the ranks' datasets differ in structure, dtype or "
                    "number of dimensions:\n" + "\n".join(lines),
                )
            )
        for rank, spec, _ in known:
            if self.spec is None or rank == comm.rank:
                self.spec = spec
