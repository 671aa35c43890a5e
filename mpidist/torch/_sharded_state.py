"""Parts of the state of an optimizer: classes that have them, settings, and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from mpidist._base.partition import Partition
from mpidist.torch._optimizer import DistributedOptimizer

# Their steps treat each element by itself, so that a parameter may be cut.
ELEMENTWISE: Final = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam",
        "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip
_REFUSED: Final = {
    torch.optim.LBFGS: "it needs the products of all gradients",
    torch.optim.SparseAdam: "only dense gradients can be",
}
_NOT_SETTINGS: Final = ("params", "param_names")
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


class Sequence(NamedTuple):
    """Parameters that are divided together, in the order of the partition."""

    parameters: list[torch.Tensor]
    partition: Partition

    def check(self, call: str) -> None:
        """Check the parameters before a step.

        Raises:
            TypeError: if a gradient is sparse.
            ValueError: if a parameter has another number of elements now.
        """
        starts = self.partition.starts
        for p, start, stop in zip(self.parameters, starts, starts[1:], strict=False):
            if p.numel() != stop - start:
                raise ValueError(
                    f"{call}: expected a parameter of {stop - start} elements, as when "
                    f"the optimizer was made, got shape {tuple(p.shape)}; make the "
                    "optimizer after the parameters have changed"
                )
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise TypeError(
                    f"{call}: got a sparse gradient; write "
                    "`torch.nn.Embedding(..., sparse=False)`"
                )

    def elements_of(self, rank: int) -> torch.Tensor:
        """Return the elements that a rank has."""
        pieces = [
            self.parameters[place].detach().reshape(-1)[start:stop]
            for place, start, stop in self.partition.pieces(rank)
        ]
        return torch.cat(pieces or [self.parameters[0].new_empty(0)]).detach()

    def put(self, flat: torch.Tensor) -> None:
        """Set the parameters to all elements."""
        for p, start in zip(self.parameters, self.partition.starts, strict=False):
            p.copy_(flat[start : start + p.numel()].view(p.shape))


class Entry(NamedTuple):
    """An entry of the state of a parameter.

    Attributes:
        number: of the parameter.
        key: of the entry.
        value: of the entry. A tensor has no memory here (torch's device "meta"): its
            bytes travel separately.
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
        # A number, such as the steps, is the same on all ranks.
        whole = torch.cat(found) if shape and len(found) > 1 else found[0]
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


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group: all but the parameters."""
    return {key: x for key, x in group.items() if key not in _NOT_SETTINGS}


def text_of_settings(groups: list[dict[str, Any]]) -> str:
    """Return the settings of parameter groups as a text, the same on all ranks."""
    texts = []
    for group in groups:
        shown = {key: _shown(x) for key, x in settings_of(group).items()}
        texts.append(", ".join(f"{key}={text}" for key, text in shown.items() if text))
    return "; ".join(texts if len(set(texts)) > 1 else texts[:1])


def _shown(x: object) -> str:
    """Return a setting as a text that is the same on all ranks, or ""."""
    if isinstance(x, torch.Tensor):
        return repr(x.item()) if x.numel() == 1 and x.device.type == "cpu" else ""
    return repr(x) if isinstance(x, (bool, int, float, str, tuple)) else ""


def check_class(given: object, call: str) -> None:
    """Check the class of the local optimizer.

    Raises:
        TypeError, ValueError: if it cannot be used.
    """
    if not isinstance(given, type) or not issubclass(given, torch.optim.Optimizer):
        kind = type(given).__name__
        what = f"a {kind}" if not isinstance(given, type) else given.__name__
        raise TypeError(
            f"{call}: expected `optimizer_class` to be a class of optimizers, got "
            f"{what}; write `{call}(model.parameters(), torch.optim.Adam, lr=0.001)`"
        )
    if issubclass(given, DistributedOptimizer) or hasattr(given, "state_is_collective"):
        raise TypeError(
            f"{call}: expected `optimizer_class` to be a class of torch, got "
            f"{given.__name__}; write `DistributedOptimizer({call}(model.parameters(), "
            "torch.optim.Adam, lr=0.001))`"
        )
    for refused, why in _REFUSED.items():
        if issubclass(given, refused):
            raise ValueError(
                f"{call}: the state of {given.__name__} cannot be divided, as {why}"
            )
