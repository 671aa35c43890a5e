"""The input of all replicas: what a rank reads of it, and what all ranks know of it.

If the spec of a source's elements is known only after reading, the ranks exchange it in
the first step. A rank without rows gets empty arrays, for which all ranks have to know
what elements are like. Row shapes may differ between steps and between ranks; those of
empty arrays are the last ones that this rank has seen, or another rank's if it has seen
none.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Final

from mpidist._base import backend
from mpidist._base.environment import debugging
from mpidist._base.errors import CollectiveMismatchError, by_value, on_rank
from mpidist._base.types import Array, Nest
from mpidist._merge.commands import Pickler
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import PerReplica
from mpidist.data._items import Items
from mpidist.data._options import AutoShardPolicy, spec_with_rows
from mpidist.data._rows import (
    ONE_KIND,
    PAD,
    LazyBlock,
    RowBlock,
    count_rows,
    describe,
    describe_rows,
    empty_of,
)
from mpidist.data._shards import split_rows
from mpidist.data._stages import Block, Stage

_OWN_INPUTS: Final = (
    "for inputs that differ write `strategy.distribute_datasets_from_function`"
)


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


ENDED: Final = Piece(-1, None)
"""What is read at the end of the input."""


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


@dataclasses.dataclass(eq=False)
class Input:
    """The input of all replicas: what this rank reads, and what all know of it.

    Attributes:
        group: the group of the strategy.
        stage: the input that this rank reads.
        policy: how global batches are split; None for inputs from a function.
        to_device: whether arrays are moved to the replica's device.
        iterations: so far: the number of the next one.
        number: of the dataset, the same on all ranks.
        is_own: whether each rank has its own input: rows of ranks differ.
        checked: whether global batches are compared.
        empty: elements without rows, once all ranks know what they are like.
        varies: whether the shapes of rows are compared.
        batch_size: the rows of a full batch; None if not known (yet).
    """

    group: ReplicaGroup
    stage: Stage
    policy: AutoShardPolicy | None
    to_device: bool
    iterations: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        stage, policy = self.stage, self.policy
        self.is_own: bool = policy in (None, AutoShardPolicy.FILE)
        self.checked: bool = bool(stage.whole) and debugging() and not self.is_own
        self.empty: RowBlock | None = None if policy is None else empty_of(stage.spec())
        self.varies: bool = self.empty is None and not (self.is_own or self.checked)
        self.batch_size: int | None = stage.batch_size

    @property
    def text(self) -> str:
        """How the input was made."""
        text = self.stage.text
        return text if isinstance(self.stage, Items) else f"Dataset of {text}"

    def element_spec(self) -> Nest:
        """Return the specs of a replica's part of an element."""
        if self.empty is not None:
            return self.empty.spec(batched=True)
        spec = self.stage.element_spec
        return spec if self.is_own else spec_with_rows(spec)

    def elastic_problem(self) -> str:
        """Return why nobody can read this input when a replica has died, or ""."""
        if self.is_own:
            return (
                "is an input of its own on each replica, which cannot be split anew "
                "when replicas are lost; write `strategy.experimental_distribute_"
                "dataset(dataset)`, with the same global batches on all of them"
            )
        if self.stage.one_shot:
            return (
                f"is a {self.stage.text}, which can be read only once, and after a "
                "loss it is read again; give an object whose `__iter__` starts from "
                "the beginning, or a `mpidist.data.Dataset.from_generator`"
            )
        return ""

    def pieces(self, stream: Iterator[Block]) -> Iterator[Piece]:
        """Yield this rank's parts of elements. May run in a thread; no MPI."""
        for block in stream:
            rows, checksum = block.rows, 0
            replicas, own = self.group.num_replicas, self.group.replica_id
            if self.is_own:
                whole = block.part(0, rows) if isinstance(block, LazyBlock) else block
                yield Piece(rows, whole)
                continue
            if isinstance(block, RowBlock):
                rows = count_rows(block, replicas)
                checksum = block.checksum() if self.checked else 0
            if self.batch_size is None:
                self.batch_size = rows
            own_rows = split_rows(self.policy, rows, self.batch_size, replicas, own)
            yield Piece(rows, block.part(*own_rows), checksum)

    def wrap(self, block: RowBlock | None) -> Nest:
        """Return this rank's rows as an element, where they belong.

        Remembers the shapes of the rows that this rank has seen last.
        """
        if block is None:
            block = self.empty
            assert block is not None  # some rank has rows, and has told the others
        else:
            known = [] if self.empty is None else self.empty.leaves
            if [x.shape[1:] for x in known] != [x.shape[1:] for x in block.leaves]:
                self.empty = empty_of(block.spec())
        placed = block.structure.unflatten(map(self._place, block.leaves))
        return self.group.registry.wrap_tree(PerReplica, placed)

    def _place(self, leaf: Array) -> Array:
        """Return an array on the device where it belongs."""
        device = self.group.device
        if not self.to_device or device.kind == "cpu" or backend.is_device_array(leaf):
            return leaf
        if leaf.dtype.kind not in "biufcV":
            return leaf  # of strings, for example: a GPU cannot hold it
        return backend.place(leaf, device)

    def learn(self, own: bytes) -> None:
        """Tell all ranks what elements are like, by each `dump_spec`. Collective."""
        texts = self._exchange(own, describe)
        if len(set(texts) - {None}) > 1:
            lines = by_value(texts, lambda text: text or "")
            raise CollectiveMismatchError(
                on_rank(
                    self.group.replica_id,
                    "the elements of the ranks' datasets differ in structure, dtype or "
                    f"number of dimensions:\n{lines}",
                )
            )

    def _exchange(
        self, own: bytes, text_of: Callable[[RowBlock], str]
    ) -> list[str | None]:
        """Return the texts of all ranks' elements; None for one without. Collective.

        Keeps empty arrays like this rank's elements, or another's, if all are alike.

        Args:
            own: the `dump_spec` of this rank.
            text_of: returns the text of a rank's elements.
        """
        comm = self.group.communicator
        with comm.traffic:
            dumped = comm.all_gather_objects(own)
        found = [empty_of(pickle.loads(x)) if x else None for x in dumped]
        texts = [None if block is None else text_of(block) for block in found]
        if len(set(texts) - {None}) == 1:
            others = (block for block in found if block is not None)
            self.empty = found[comm.rank] or next(others)
        return texts

    def differing(self, what: str, piece: Piece, own: bytes) -> tuple[str, bool]:
        """Return what each rank has of a batch that differs. Collective.

        Args:
            what: the batch.
            piece: this rank's part.
            own: its `dump_spec`, if the shapes of rows are compared.

        Returns:
            The text, which is "" if some rank has no rows, and the others agree; and
            whether it is the number of rows that differs.
        """
        comm = self.group.communicator
        with comm.traffic:
            found = comm.all_gather_integers([piece.rows, piece.checksum])
        numbers, checksums = map(list, zip(*found, strict=True))
        by_rows = len(set(numbers)) > 1
        if by_rows:
            texts = ["the input has ended" if n < 0 else f"{n} rows" for n in numbers]
            remedy = f"; {_OWN_INPUTS}"
        elif self.varies:
            kinds = self._exchange(own, describe_rows)
            if len(set(kinds) - {None}) == 1:
                return "", False
            lines = by_value([kind or "no rows" for kind in kinds])
            return f"{what}: {ONE_KIND}\n{lines}\n{PAD}; {_OWN_INPUTS}", False
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
