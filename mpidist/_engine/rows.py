"""One list of values per rank, to and from rank 0: `collect` and `scatter`."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._engine.array_heads import ArrayHead, head_of, join_bytes, split_bytes
from mpidist._engine.observed import has_values, values_of_ranks
from mpidist._engine.resources import Resources, timed
from mpidist._timeline.observer import observed


class Rows(Resources):
    """Moves a list of values per rank; the arguments of `Resources`."""

    @observed(values_of_ranks)
    @timed
    def collect(self, values: list[Any], call: str) -> list[list[Any]]:
        """Return the values of all ranks on rank 0; an empty list on the others.

        Collective. The values may differ in dtype and shape between ranks.

        Returns:
            On rank 0 a list with, for each rank, the list of its values.
        """
        try:
            heads = [head_of(value, call) for value in values]
            data = pickle.dumps(heads)
            arrays = [
                backend.to_host(backend.contiguous(backend.as_array(value, call)[0]))
                for value, head in zip(values, heads, strict=True)
                if head.dtype is not None
            ]
            send = join_bytes(arrays)
        except Exception as error:
            self.invalid(call, error)
        self.guard.agree(Call(f"{call} of {len(values)} values"))
        all_heads: list[list[ArrayHead]] = [
            pickle.loads(item) for item in self.comm.all_gather_objects(data)
        ]
        counts = [sum(head.nbytes for head in heads) for heads in all_heads]
        room = sum(counts) if self.comm.rank == 0 else 0
        receive = self.comm.together(lambda: np.empty(room, np.uint8), call)
        if self.comm.rank != 0:
            self.comm.gather(send, None, counts, 0)
            return []
        self.comm.gather(send, receive, counts, 0)
        result = []
        start = 0
        for heads, count in zip(all_heads, counts, strict=True):
            result.append(
                split_bytes(receive[start : start + count], heads, self.device)
            )
            start += count
        result[0] = list(values)
        return result

    @observed(values_of_ranks, has_values)
    @timed
    def scatter(self, values: list[list[Any]] | None, call: str) -> list[Any]:
        """Give each rank its list of values from rank 0. Collective.

        Args:
            values: on rank 0 a list of values for each rank; elsewhere None.
            call: the name of the call in messages.
        """
        heads: list[list[ArrayHead]] = []
        joined = np.empty(0, np.uint8)
        if values is not None:
            try:
                heads = [[head_of(v, call) for v in row] for row in values]
                data = pickle.dumps(heads)
                joined = join_bytes(
                    [
                        backend.to_host(backend.as_array(value, call)[0])
                        for row, row_heads in zip(values, heads, strict=True)
                        for value, head in zip(row, row_heads, strict=True)
                        if head.dtype is not None
                    ]
                )
            except Exception as error:
                self.invalid(call, error)
        self.guard.agree(Call(call))
        if values is not None:
            self.messages.send(data)
        else:
            heads = pickle.loads(self.messages.receive())
        counts = [sum(head.nbytes for head in row) for row in heads]
        own = counts[self.comm.rank]
        receive = self.comm.together(lambda: np.empty(own, np.uint8), call)
        self.comm.scatter(None if values is None else joined, receive, counts, 0)
        if values is not None:
            return list(values[0])
        return split_bytes(receive, heads[self.comm.rank], self.device)
