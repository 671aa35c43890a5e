"""Objects of torch and JAX in a checkpoint: modules, optimizers, generators, pytrees.

Neither is imported: if a library is not, the program has no object of it.

A pytree of JAX arrays cannot be changed in place, so it has a place in a dictionary
(`Held`), where a restored one replaces it. Its structure is that of the present one:
the file has only its leaves, by their paths.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from mpidist._base import backend, guests
from mpidist._checkpoints.state_items import StateItem
from mpidist._checkpoints.state_json import State
from mpidist._values.distributed import DistributedValues
from mpidist._values.variable import Variable

_MOST_LINES = 5


class Held:
    """A plain value or a pytree, at its place in a dictionary.

    Args:
        holder: the dictionary.
        name: its key.
    """

    def __init__(self, holder: MutableMapping[str, Any], name: str) -> None:
        self._holder, self._name = holder, name

    def get(self) -> Any:
        """Return the value."""
        return self._holder[self._name]

    def set(self, value: Any) -> None:
        """Replace the value."""
        self._holder[self._name] = value


def item_of(name: str, value: object) -> StateItem | None:
    """Return the item of an object of torch, or of a value that is held."""
    if isinstance(value, Held):
        if is_tree(value.get()):
            return _tree_item(name, value)
        return StateItem(name, "object", value.get, value.set)
    torch: Any = guests.library("torch")
    if torch is None:
        return None
    given: Any = value
    if isinstance(value, torch.nn.Module):
        return _module_item(name, given)
    if isinstance(value, torch.optim.Optimizer):
        return StateItem(
            name,
            "object",
            given.state_dict,
            given.load_state_dict,
            readable=not getattr(given, "state_is_collective", False),
            shared=lambda array: True,
        )
    if isinstance(value, torch.Generator):
        return _generator_item(name, given, torch)
    if guests.kind_of(value) == "torch":
        return _tensor_item(name, given, torch)
    return None


def _module_item(name: str, module: Any) -> StateItem:
    """Return the item of a module: parameters are shared, and buffers may differ."""

    def shared(array: str) -> bool:
        named = module.named_parameters(remove_duplicate=False)
        return array in {f"{name}/{key}" for key, _ in named}

    def misfit(state: State) -> str:
        return _differences(name, dict(module.state_dict()), state)

    return StateItem(
        name,
        "object",
        lambda: dict(module.state_dict()),
        module.load_state_dict,
        merge=lambda states: states[0],
        readable=True,
        shared=shared,
        misfit=misfit,
    )


def _tensor_item(name: str, tensor: Any, torch: Any) -> StateItem:
    def put(state: State) -> None:
        with torch.no_grad():
            tensor.copy_(state)

    return StateItem(
        name,
        "object",
        lambda: tensor,
        put,
        readable=True,
        shared=lambda array: True,
        misfit=lambda state: _differences(name, {"": tensor}, {"": state}),
    )


def _generator_item(name: str, generator: Any, torch: Any) -> StateItem:
    def stream(seed: np.random.SeedSequence) -> State:
        (number,) = seed.generate_state(1, np.uint64)
        made = torch.Generator(generator.device).manual_seed(int(number >> 1))
        return made.get_state()

    def misfit(state: State) -> str:
        own = generator.get_state()
        return _differences(name, {"": own}, {"": state})

    def put(state: State) -> None:
        generator.set_state(state.cpu())

    return StateItem(
        name, "generator", generator.get_state, put, stream=stream, readable=True,
        misfit=misfit,
    )  # fmt: skip


def _differences(name: str, own: Mapping[str, Any], saved: State) -> str:
    """Return how saved tensors differ from an object's in names, dtypes and shapes."""
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
    lines += [
        f"{f'{name}/{key}'!r}: only in the checkpoint"
        for key in saved
        if key not in own
    ]
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


def _tree_item(name: str, held: Held) -> StateItem:
    jax: Any = guests.library("jax")

    def is_key(x: Any) -> bool:
        extended = jax.dtypes.extended
        return guests.kind_of(x) == "jax" and jax.dtypes.issubdtype(x.dtype, extended)

    def leaves() -> dict[str, Any]:
        found, _ = jax.tree_util.tree_flatten_with_path(held.get())
        return {"/".join(map(_key, path)): x for path, x in found}

    def get() -> State:
        return {
            path: jax.random.key_data(x) if is_key(x) else x
            for path, x in leaves().items()
        }

    def put(state: State) -> None:
        structure = jax.tree_util.tree_structure(held.get())
        new = [_like(x, state[path], is_key(x)) for path, x in leaves().items()]
        held.set(jax.tree_util.tree_unflatten(structure, new))

    def shared(array: str) -> bool:
        keys = {f"{name}/{path}" for path, x in leaves().items() if is_key(x)}
        return array not in keys

    return StateItem(
        name,
        "object",
        get,
        put,
        readable=True,
        shared=shared,
        misfit=lambda state: _differences(name, get(), state),
    )


def _like(x: Any, value: Any, is_key: bool) -> Any:
    """Return a restored leaf, on the devices of the present one."""
    jax: Any = guests.library("jax")
    if guests.kind_of(x) != "jax":
        return value
    if is_key:
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(x))
    return jax.device_put(value, x.sharding)


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
