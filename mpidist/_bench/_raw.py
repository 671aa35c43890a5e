"""What a user would write by hand with mpi4py: careful, but short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist._bench._job import Job


class PackedAllReduce:
    """Pack, `Allreduce` in place, unpack: with a flat buffer that is kept.

    Nothing is allocated after the first call, neither the flat buffer nor the arrays
    that the sums are unpacked into.
    """

    def __init__(self, job: Job, like: Sequence[Any]) -> None:
        """Allocate the flat buffer for arrays like these; all of one dtype."""
        self._comm = job.comm
        self._in_place, self._sum = job.mpi.IN_PLACE, job.mpi.SUM
        sizes = [x.size for x in like]
        ends = np.cumsum(sizes)
        self.flat: Any = np.empty(int(ends[-1]), like[0].dtype)
        self._views = [
            self.flat[end - size : end].reshape(x.shape)
            for x, size, end in zip(like, sizes, ends, strict=True)
        ]

    def __call__(self, arrays: Sequence[Any], out: Sequence[Any]) -> None:
        """Sum ``arrays`` over the ranks into the existing arrays ``out``."""
        for view, x in zip(self._views, arrays, strict=True):
            np.copyto(view, x)
        self._comm.Allreduce(self._in_place, self.flat, self._sum)
        for view, x in zip(self._views, out, strict=True):
            np.copyto(x, view)


class Descent:
    """Subtract from each variable the sum of all ranks' gradients times a rate."""

    def __init__(
        self, job: Job, variables: Sequence[Any], rate: float, *, packed: bool
    ) -> None:
        """Allocate what the steps need.

        Args:
            job: the ranks.
            variables: one-dimensional arrays, which are updated in place.
            rate: the learning rate.
            packed: one `Allreduce` for all gradients in place of one for each.
        """
        self._comm, self._sum = job.comm, job.mpi.SUM
        self._variables = list(variables)
        self._rate = rate
        self._totals = [np.empty_like(v) for v in variables]
        self._all = PackedAllReduce(job, self._totals) if packed else None

    def __call__(self, gradients: Sequence[Any]) -> None:
        """Make one step."""
        if self._all is not None:
            self._all(gradients, self._totals)
        pairs = zip(gradients, self._totals, self._variables, strict=True)
        for gradient, total, variable in pairs:
            if self._all is None:
                self._comm.Allreduce(gradient, total, self._sum)
            np.multiply(total, self._rate, out=total)
            np.subtract(variable, total, out=variable)
