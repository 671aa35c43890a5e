"""The state of a sharded optimizer: parts of parameters, and their state as bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

_ALIGNED: Final = 16  # bytes: where the tensors of a state begin in a message


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The elements of a parameter that this rank has.

    Attributes:
        number: of the parameter, as in a state dict.
        parameter: the parameter.
        start: its first element that is here.
        stop: the end of those.
        tensor: the parameter itself if it is all here, else a flat view.
    """

    number: int
    parameter: torch.Tensor
    start: int
    stop: int
    tensor: torch.Tensor

    @property
    def is_cut(self) -> bool:
        return self.tensor is not self.parameter

    def refresh(self) -> None:
        """Take the memory that the parameter has now, and its gradient."""
        if not self.is_cut:
            return
        here = slice(self.start, self.stop)
        gradient = self.parameter.grad
        self.tensor.data = self.parameter.detach().view(-1)[here]
        self.tensor.grad = None if gradient is None else gradient.reshape(-1)[here]


class Entry(NamedTuple):
    """An entry of the state of a parameter.

    Attributes:
        number: of the parameter.
        key: of the entry.
        value: of the entry. A tensor with dimensions has no memory here (torch's device
            "meta"): its bytes travel separately.
        shape: of the whole tensor, of which a rank may have a part.
    """

    number: int
    key: str
    value: Any
    shape: tuple[int, ...]


def pack(
    parts: Iterable[Part], state: Mapping[torch.Tensor, dict[str, Any]]
) -> tuple[list[Entry], torch.Tensor]:
    """Return the entries of the state of parts, and their tensors as bytes."""
    entries: list[Entry] = []
    raw: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)]
    for part in parts:
        for key, x in state.get(part.tensor, {}).items():
            shape: tuple[int, ...] = ()
            if isinstance(x, torch.Tensor):
                x = x.detach().cpu()
            if isinstance(x, torch.Tensor) and x.dim() > 0:
                is_cut = part.is_cut and x.shape == part.tensor.shape
                shape = tuple(part.parameter.shape if is_cut else x.shape)
                flat = x.contiguous().view(-1).view(torch.uint8)
                raw += [flat, flat.new_zeros(-len(flat) % _ALIGNED)]
                x = x.to("meta")
            entries.append(Entry(part.number, key, x, shape))
    return entries, torch.cat(raw)


def unpack(rows: list[list[Entry]], data: torch.Tensor) -> dict[int, dict[str, Any]]:
    """Return the state of all ranks: views of the bytes, but for tensors of several."""
    state: dict[int, dict[str, Any]] = {}
    pieces: dict[tuple[int, str, tuple[int, ...]], list[torch.Tensor]] = {}
    start = 0
    for number, key, value, shape in (entry for entries in rows for entry in entries):
        state.setdefault(number, {})[key] = value
        if isinstance(value, torch.Tensor) and value.is_meta:
            stop = start + value.nbytes
            piece = data[start:stop].view(value.dtype)
            pieces.setdefault((number, key, shape), []).append(piece)
            start = stop + -stop % _ALIGNED
    for (number, key, shape), found in pieces.items():
        whole = found[0] if len(found) == 1 else torch.cat(found)
        state[number][key] = whole.view(shape)
    return dict(sorted(state.items()))


def cut(x: Any, key: str, part: Part, call: str) -> Any:
    """Return this rank's part of a value in a state, in memory of its own.

    Raises:
        ValueError: if the shape is not that of the parameter.
    """
    if not isinstance(x, torch.Tensor):
        return x
    if not part.is_cut or x.dim() == 0:
        return x.clone()
    if x.shape != part.parameter.shape:
        raise ValueError(
            f"{call}: expected {key!r} of parameter {part.number} of shape "
            f"{tuple(part.parameter.shape)}, got {tuple(x.shape)}"
        )
    return x.reshape(-1)[part.start : part.stop].clone()
