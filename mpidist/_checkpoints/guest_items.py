"""Objects of torch and JAX in a checkpoint: modules, optimizers, generators, pytrees.

Neither is imported: if a library is not, the program has no object of it.

A pytree of JAX arrays cannot be changed in place, so it has a place in a dictionary
(`Held`), where a restored one replaces it. Its structure is that of the present one:
the file has only its leaves, by their paths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from mpidist._base import backend, guests
from mpidist._checkpoints.items import GeneratorItem, StateItem
from mpidist._checkpoints.state_json import State
from mpidist._values.distributed import DistributedValues
from mpidist._values.variable import Variable

_MOST_LINES = 5


@dataclasses.dataclass(eq=False)
class Held:
    """A plain value or a pytree, at its place in a dictionary, under a name."""

    holder: MutableMapping[str, Any]
    name: str

    def get(self) -> Any:
        """Return the value."""
        return self.holder[self.name]

    def set(self, value: Any) -> None:
        """Replace the value."""
        self.holder[self.name] = value


def item_of(name: str, value: Any) -> StateItem | None:
    """Return the item of an object of torch, or of a value that is held."""
    if isinstance(value, Held):
        if is_tree(value.get()):
            return _TreeItem(name, value)
        return StateItem(name, value.get, value.set, readable=False)
    torch: Any = guests.library("torch")
    if torch is None:
        return None
    if isinstance(value, torch.nn.Module):
        return _ModuleItem(name, value)
    if isinstance(value, torch.optim.Optimizer):
        return _SharedItem(
            name,
            value.state_dict,
            functools.partial(guests.load_state, value),
            readable=not getattr(value, "state_is_collective", False),
            forget=value.zero_grad,
        )
    if isinstance(value, torch.Generator):
        return _TorchGeneratorItem(name, value)
    if guests.kind_of(value) == "torch":
        return _TensorsItem(name, lambda: value, torch.no_grad()(value.copy_))
    return None


class _SharedItem(StateItem):
    """An object whose tensors are the same on all replicas, such as an optimizer."""

    def shared(self, array: str) -> bool:
        return True


class _TensorsItem(_SharedItem):
    """A tensor, or several, of given names, dtypes and shapes."""

    def misfit(self, state: State) -> str:
        return _differences(self.name, self.get(), state)


class _ModuleItem(_TensorsItem):
    """A module: parameters are the same on all replicas, and buffers may differ."""

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(
            name,
            lambda: dict(module.state_dict()),
            module.load_state_dict,
            merge=lambda states: states[0],
            forget=module.zero_grad,
        )
        self._module = module

    def shared(self, array: str) -> bool:
        named = self._module.named_parameters(remove_duplicate=False)
        return array in {f"{self.name}/{key}" for key, _ in named}


class _TorchGeneratorItem(GeneratorItem):
    def __init__(self, name: str, generator: Any) -> None:
        def put(state: State) -> None:
            generator.set_state(state.cpu())

        def stream(seed: np.random.SeedSequence) -> State:
            (number,) = seed.generate_state(1, np.uint64)
            new = type(generator)(generator.device)
            return new.manual_seed(int(number >> 1)).get_state()

        super().__init__(name, generator.get_state, put)
        self.stream = stream

    def misfit(self, state: State) -> str:
        return _differences(self.name, self.get(), state)


def _differences(name: str, own: State, saved: State) -> str:
    """Return how saved tensors differ from an object's in names, dtypes and shapes."""
    if not isinstance(own, dict):
        own, saved = {"": own}, {"": saved}
    if not isinstance(saved, dict):
        return f"{name!r}: expected tensors by name, got {type(saved).__name__}"
    lines = []
    for key, x in own.items():
        at = f"{name}/{key}".removesuffix("/")
        if key not in saved:
            lines.append(f"{at!r}: missing in the checkpoint")
        elif _describe(x) != _describe(saved[key]):
            lines.append(
                f"{at!r}: expected {_describe(x)}, got {_describe(saved[key])}"
            )
    extra = [key for key in saved if key not in own]
    lines += [f"{f'{name}/{key}'!r}: only in the checkpoint" for key in extra]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more"]
    return "\n  ".join(lines)


def _describe(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return type(x).__name__


# --- pytrees of JAX -----------------------------------------------------------------


def is_tree(value: object) -> bool:
    """Return whether a value is a pytree of arrays and numbers, some of them JAX's."""
    jax: Any = guests.library("jax")
    if jax is None:
        return False
    # Variables are pytrees too, once `mpidist.jax` was imported.
    leaves = jax.tree_util.tree_leaves(
        value, is_leaf=lambda x: isinstance(x, (Variable, DistributedValues))
    )
    return any(guests.kind_of(x) == "jax" for x in leaves) and all(
        guests.kind_of(x) == "jax" or backend.is_number(x) or backend.is_array(x)
        for x in leaves
    )


class _TreeItem(_TensorsItem):
    """A pytree: its leaves by path, the same on all replicas but for random keys."""

    def __init__(self, name: str, held: Held) -> None:
        super().__init__(name, self._get, self._put)
        self._held = held

    def _leaves(self) -> dict[str, Any]:
        jax: Any = guests.library("jax")
        found, _ = jax.tree_util.tree_flatten_with_path(self._held.get())
        return {"/".join(map(_key, path)): x for path, x in found}

    def _get(self) -> State:
        jax: Any = guests.library("jax")
        return {
            path: jax.random.key_data(x) if _is_random_key(x) else x
            for path, x in self._leaves().items()
        }

    def _put(self, state: State) -> None:
        jax: Any = guests.library("jax")
        structure = jax.tree_util.tree_structure(self._held.get())
        new = [_like(x, state[path]) for path, x in self._leaves().items()]
        self._held.set(jax.tree_util.tree_unflatten(structure, new))

    def shared(self, array: str) -> bool:
        return not _is_random_key(
            self._leaves().get(array.removeprefix(f"{self.name}/"))
        )


def _is_random_key(x: Any) -> bool:
    jax: Any = guests.library("jax")
    extended = jax.dtypes.extended
    return guests.kind_of(x) == "jax" and jax.dtypes.issubdtype(x.dtype, extended)


def _like(x: Any, value: Any) -> Any:
    """Return a restored leaf, on the devices of the present one."""
    jax: Any = guests.library("jax")
    if guests.kind_of(x) != "jax":
        return value
    if _is_random_key(x):
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(x))
    return jax.device_put(value, x.sharding)


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
