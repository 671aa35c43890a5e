"""The input that a distributed dataset and its iterators share.

A rank without rows gets empty arrays, for which all ranks have to know what elements
are like. Row shapes may differ between steps and between ranks; those of empty arrays
are the last ones that this rank has seen, or another rank's if it has seen none.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
from collections.abc import Iterator

import numpy as np

from mpidist._base import backend, nest
from mpidist._base.errors import CollectiveMismatchError, by_value, on_rank
from mpidist._base.types import Array, Nest
from mpidist._merge.commands import Pickler
from mpidist._runtime.group import ReplicaGroup
from mpidist.data._inputs import Items
from mpidist.data._options import AutoShardPolicy
from mpidist.data._rows import (
    LazyBlock,
    RowBlock,
    batch_spec,
    count_rows,
    name_of_dtype,
    split_as_it_comes,
    split_by_plan,
)
from mpidist.data._stage import Block, Stage


def empty_of(spec: Nest | None) -> RowBlock | None:
    """Return arrays without rows, on the host; None if a size is not known.

    Args:
        spec: the nest of specs of a batch. A scalar becomes a column.
    """
    if spec is None:
        return None
    leaves, structure = nest.flatten(spec)
    shapes = [leaf.shape[1:] for leaf in leaves]
    if any(None in shape for shape in shapes):
        return None
    both = zip(leaves, shapes, strict=True)
    empty = [np.empty((0, *shape), leaf.dtype) for leaf, shape in both]
    return RowBlock(empty, structure)


def describe(block: RowBlock) -> str:
    """Return the text that must be the same on all ranks: ``{'x': float32 (*, *)}``."""
    return block.structure.render(
        [
            f"{name_of_dtype(x.dtype)} "
            f"({', '.join('*' * x.ndim) if x.ndim > 1 else '*,'})"
            for x in block.leaves
        ]
    )


def dump_spec(block: RowBlock | None) -> bytes:
    """Return the pickled specs of a block; none of None."""
    if block is None:
        return b""
    spec = block.spec()
    try:
        return pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, ImportError):
        # A named tuple that pickle cannot find by name. (cloudpickle would copy one of
        # the program's main module, too, which all ranks have.)
        file = io.BytesIO()
        Pickler(file).dump(spec)
        return file.getvalue()


@dataclasses.dataclass
class Piece:
    """This rank's part of an element.

    Attributes:
        rows: rows of the global batch, or of this rank's batch if each rank has its own
            input.
        block: this rank's rows; None if there are none and their spec is unknown.
        checksum: the checksum of the whole batch, if batches are compared.
    """

    rows: int
    block: RowBlock | None
    checksum: int = 0


@dataclasses.dataclass
class Feed:
    """An input of all ranks.

    Attributes:
        group: the group of the strategy.
        stage: the input that this rank reads.
        policy: how global batches are split; None if each rank has its own input.
        to_device: whether arrays are moved to the replica's device.
        by_file: whether the input is the rank's part of a dataset, by files.
        checked: whether global batches are compared (``MPIDIST_DEBUG``).
        empty: elements without rows, once all ranks know what they are like.
        batch_size: the number of rows in a full batch, None if not known (yet).
        iterations: the number of iterators created.
        number: the number of the dataset, the same on all ranks.
    """

    group: ReplicaGroup
    stage: Stage
    policy: AutoShardPolicy | None
    to_device: bool = True
    by_file: bool = False
    checked: bool = False
    empty: RowBlock | None = None
    iterations: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.batch_size = self.stage.batch_size

    @property
    def text(self) -> str:
        """The description of the input."""
        text = self.stage.text
        return text if isinstance(self.stage, Items) else f"Dataset of {text}"

    def split(self, rows: int, replica: int) -> tuple[int, int]:
        """Return the range of rows of a global batch that a replica gets."""
        if self.policy is AutoShardPolicy.OFF:
            size = self.batch_size or rows
            return split_by_plan(rows, self.group.num_replicas, replica, size)
        return split_as_it_comes(rows, self.group.num_replicas, replica)

    def pieces(self, stream: Iterator[Block]) -> Iterator[Piece]:
        """Yield this rank's parts of elements. May run in a thread; no MPI."""
        for block in stream:
            rows, checksum = block.rows, 0
            if self.policy is None:
                whole = block.part(0, rows) if isinstance(block, LazyBlock) else block
                yield Piece(rows, whole)
                continue
            if isinstance(block, RowBlock):
                rows = count_rows(
                    block, "experimental_distribute_dataset", self.group.num_replicas
                )
                checksum = block.checksum() if self.checked else 0
            if self.batch_size is None:
                self.batch_size = rows
            start, stop = self.split(rows, self.group.replica_id)
            yield Piece(rows, block.part(start, stop), checksum)

    def why_it_ends_with_a_replica(self) -> str:
        """Return why nobody can read this input when a replica has died, or ""."""
        if self.policy is None:
            return (
                "is an input of its own on each replica, which cannot be split anew "
                "when replicas are lost; write `strategy.experimental_distribute_"
                "dataset(dataset)`, with the same global batches on all of them"
            )
        if self.stage.one_shot:
            return (
                f"is a {self.text}, which can be read only once, and after a "
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
        device = self.group.device
        if not self.to_device or device.kind == "cpu" or backend.is_device_array(leaf):
            return leaf
        if leaf.dtype.kind not in "biufcV":
            return leaf  # of strings, for example: a GPU cannot hold it
        return backend.place(leaf, device)

    def element_spec(self) -> Nest:
        """Return the nest of specs of a replica's part."""
        if self.empty is not None:
            return self.empty.spec(batched=True)
        spec = self.stage.element_spec
        return spec if self.policy is None else batch_spec(spec)

    def seen(self, block: RowBlock) -> None:
        """Remember the shapes of the rows that this rank has seen last."""
        known = [] if self.empty is None else self.empty.leaves
        if [x.shape[1:] for x in known] != [x.shape[1:] for x in block.leaves]:
            self.empty = empty_of(block.spec())

    def learn(self, own: bytes) -> None:
        """Tell all ranks what elements are like, by each `dump_spec`. Collective."""
        comm = self.group.communicator
        with comm.traffic:
            dumped = comm.all_gather_objects(own)
        found = [empty_of(pickle.loads(x)) if x else None for x in dumped]
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

    def differing(self, what: str, number: int, checksum: int) -> tuple[str, bool]:
        """Return what each rank has of a batch that differs. Collective.

        Args:
            what: the batch.
            number: the rows of this rank's batch plus one; 0: its input has ended.
            checksum: that of the batch, if batches are compared.

        Returns:
            The text, and whether it is the number of rows that differs.
        """
        comm = self.group.communicator
        with comm.traffic:
            found = comm.all_gather_integers([number, checksum])
        numbers, checksums = map(list, zip(*found, strict=True))
        by_rows = len(set(numbers)) > 1
        if by_rows:
            texts = [f"{n - 1} rows" if n else "the input has ended" for n in numbers]
            remedy = (
                "; for inputs that differ write "
                "`strategy.distribute_datasets_from_function`"
            )
        else:
            texts = [f"checksum {x:x}" for x in checksums]
            remedy = (
                ". Give every shuffle and every random function of the input the same "
                "seed on all ranks"
            )
        text = (
            f"{what} is not the same on all ranks:\n{by_value(texts)}\n"
            "`experimental_distribute_dataset` needs the same global batches on every "
            f"rank, of which each replica gets its part{remedy}"
        )
        return text, by_rows


# --- the description ---------------------------------------------------------------


def describe_feed(feed: Feed) -> str:
    """Return the text of `DistributedDataset.describe`."""
    spec = feed.stage.spec() if feed.empty is None else feed.element_spec()
    elements = "not known before the first is read"
    if spec is not None:
        leaves, structure = nest.flatten(spec)
        elements = structure.render([str(leaf) for leaf in leaves])
    facts = {"input": feed.text, "elements": elements}
    facts |= _own_facts(feed) if feed.policy is None else _facts_of_batches(feed)
    count = feed.group.num_replicas
    plural = "" if count == 1 else "s"
    lines = [f"DistributedDataset #{feed.number} on {count} replica{plural}"]
    return "\n".join(lines + [f"  {name:<16}{text}" for name, text in facts.items()])


def _own_facts(feed: Feed) -> dict[str, str]:
    count = feed.stage.cardinality()
    steps = f"{count} on this rank; all ranks make as many as the longest input has"
    names = {-1: "without end", -2: "as many as the longest input of a rank has"}
    rows = "each rank reads its own input, and its replica gets all of it"
    if feed.by_file:
        rows = (
            f"FILE: each replica opens 1 of {feed.group.num_replicas} inputs of the "
            f"`interleave`; this one takes up to {feed.batch_size} rows in a step"
        )
    ends = "a rank without rows gets empty arrays until all are done"
    return {"steps": names.get(count, steps), "rows": rows, "uneven ends": ends}


def _facts_of_batches(feed: Feed) -> dict[str, str]:
    count, size, n = feed.stage.cardinality(), feed.batch_size, feed.group.num_replicas
    names = {-1: "without end", -2: "their number is not known"}
    many = names.get(count, f"{count} an epoch")
    rule = f"each batch as it comes, in pieces of ceil(rows / {n})"
    if feed.policy is AutoShardPolicy.OFF:
        rule = (
            "by a plan for the full batch, in pieces that differ by one row at most; a "
            "partial batch fills them in order"
        )
    assert feed.policy is not None
    facts = {
        "global batches": f"of {size or 'the same number of'} rows, {many}",
        "split": f"{feed.policy.name}: {rule}",
        "reading": _reading(feed.stage),
    }
    if size is None:
        return facts
    bounds = [feed.split(size, replica) for replica in range(n)]
    pieces = itertools.groupby(stop - start for start, stop in bounds)
    runs = [(rows, len(list(run))) for rows, run in pieces]
    shown = ", ".join(f"{rows} on {replicas}" for rows, replicas in runs)
    facts["rows"] = f"of a full batch on how many replicas: {shown}"
    if idle := sum(replicas for rows, replicas in runs if not rows):
        remedy = f"batches of {n} rows or more"
        if size >= n:
            remedy = f'a multiple of {n} rows, or auto_shard_policy="OFF"'
        facts["note"] = f"{idle} of {n} replicas never get a row; take {remedy}"
    return facts


def _reading(stage: Stage) -> str:
    text = "each rank reads whole batches, and keeps the rows of its replica"
    if not stage.whole:
        text = "each rank goes through all elements, and keeps those of its replica"
        if stage.indexed:
            text = "each rank reads the rows of its replica, and no others"
    elif not isinstance(stage, Items):
        text += f", because of {stage.whole}"
    return f"{text}; a thread reads {stage.depth} ahead" if stage.depth else text
