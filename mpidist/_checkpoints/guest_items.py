"""Objects of torch and JAX in a checkpoint: modules, optimizers, generators, pytrees.

Neither is imported: if a library is not, the program has no object of it.

A pytree of JAX arrays cannot be changed in place, so it has a place in a dictionary
(`Held`), where a restored one replaces it. Its structure is that of the present one:
the file has only its leaves, by their paths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, MutableMapping
from typing import Any

import numpy as np

from mpidist._base import backend, guests, nest
from mpidist._base.state_json import State
from mpidist._checkpoints.items import GeneratorItem, StateItem, first_state
from mpidist._values.distributed import DistributedValues
from mpidist._values.variable import Variable


@dataclasses.dataclass(eq=False)
class Held:
    """A plain value or a pytree, at its place in a dictionary, under a name."""

    holder: MutableMapping[str, Any]
    name: str

    def get(self) -> Any:
        """Return the value."""
        return self.holder[self.name]

    def set(self, value: Any) -> None:
        """Replace the value; dicts in it get the classes of those that were there."""
        self.holder[self.name] = _dicts_like(self.get(), value)


def _dicts_like(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and type(new) is dict:
        items = {key: _dicts_like(old.get(key), x) for key, x in new.items()}
        return nest.with_items(old, items)
    if type(old) is type(new) and type(new) in (list, tuple):
        return type(new)(map(_dicts_like, [*old, *new[len(old) :]], new))
    return new


def item_of(name: str, value: Any) -> StateItem | None:
    """Return the item of an object of torch, or of a value that is held."""
    if isinstance(value, Held):
        if is_tree(value.get()):
            return _tree_item(name, value)
        return StateItem(name, value.get, value.set, readable=False)
    torch: Any = guests.library("torch")
    if torch is None:
        return None
    if isinstance(value, torch.nn.Module):
        return _module_item(name, value)
    if isinstance(value, torch.optim.Optimizer):
        return StateItem(
            name,
            value.state_dict,
            functools.partial(load_state, value),
            readable=not getattr(value, "state_is_collective", False),
            forget=value.zero_grad,
            shared=lambda names: names,
        )
    if isinstance(value, torch.Generator):
        return _generator_item(name, value)
    if guests.kind_of(value) == "torch":
        get, put = lambda: value, torch.no_grad()(value.copy_)
        return StateItem(name, get, put, shared=lambda names: names, is_fixed=True)
    return None


def _module_item(name: str, module: Any) -> StateItem:
    """Return the item of a module: its parameters are the same on all replicas."""

    def parameters(names: Collection[str]) -> set[str]:
        named = module.named_parameters(remove_duplicate=False)
        return {f"{name}/{key}" for key, _ in named}

    return StateItem(
        name,
        lambda: dict(module.state_dict()),
        module.load_state_dict,
        merge=first_state,
        forget=module.zero_grad,
        shared=parameters,
        is_fixed=True,
    )


def _generator_item(name: str, generator: Any) -> GeneratorItem:
    def put(state: State) -> None:
        generator.set_state(state.cpu())

    def stream(seed: np.random.SeedSequence) -> State:
        (number,) = seed.generate_state(1, np.uint64)
        new = type(generator)(generator.device)
        return new.manual_seed(int(number >> 1)).get_state()

    return GeneratorItem(name, generator.get_state, put, is_fixed=True, stream=stream)


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
        guests.kind_of(x) == "jax"
        or isinstance(x, (int, float, complex))  # and bool
        or backend.is_array(x)
        for x in leaves
    )


def _tree_item(name: str, held: Held) -> StateItem:
    """Return the item of a pytree: its leaves by path, equal but for random keys."""
    jax: Any = guests.library("jax")

    def leaves() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, x in jax.tree_util.tree_flatten_with_path(held.get())[0]:
            at = "/".join(map(_key, path))
            while at in found:  # of a key with a slash, for example
                at += "'"
            found[at] = x
        return found

    def get() -> State:
        return {
            path: jax.random.key_data(x) if _is_random_key(x) else x
            for path, x in leaves().items()
        }

    def put(state: State) -> None:
        structure = jax.tree_util.tree_structure(held.get())
        new = [_like(x, state[path]) for path, x in leaves().items()]
        held.set(jax.tree_util.tree_unflatten(structure, new))

    def shared(names: Collection[str]) -> set[str]:
        keys = {f"{name}/{path}" for path, x in leaves().items() if _is_random_key(x)}
        return {*names} - keys

    return StateItem(name, get, put, shared=shared, is_fixed=True, is_held=True)


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


# --- the state of torch optimizers ----------------------------------------------------


def load_state(optimizer: Any, state: Any) -> None:
    """Set the state of a torch optimizer, in the layouts of its parameters.

    torch casts it to the dtypes of the parameters, and so changes what is float32 for
    a parameter in bfloat16, such as the ``mu_product`` of NAdam.

    Args:
        optimizer: it.
        state: from ``state_dict``, of contiguous tensors.
    """
    optimizer.load_state_dict(state)
    groups = state.get("param_groups", ())  # a class may have a form of its own
    numbers = [number for group in groups for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        if parameter in optimizer.state:  # a defaultdict
            loaded, sent = optimizer.state[parameter], state["state"].get(number)
            optimizer.state[parameter] = lay_out(_as_sent(loaded, sent), parameter)


def lay_out(entries: Any, parameter: guests.Guest) -> Any:
    """Give tensors of the state of an optimizer the layout of their parameter.

    Args:
        entries: of the parameter: a dict, which is changed; a tensor; or another value,
            as torch lets optimizers have.
        parameter: it.

    Returns:
        The entries.
    """
    if isinstance(entries, dict):
        for key, x in entries.items():
            if guests.kind_of(x) == "torch":
                entries[key] = guests.in_layout_of(x, parameter)
    elif guests.kind_of(entries) == "torch":
        return guests.in_layout_of(entries, parameter)
    return entries


def _as_sent(x: Any, sent: Any) -> Any:
    """Return what torch has loaded of a state, in the dtypes of what was sent."""
    if guests.kind_of(x) == "torch" and guests.kind_of(sent) == "torch":
        same = x.dtype == sent.dtype or x.shape != sent.shape  # a part of it
        return x if same else sent.detach().to(x.device, copy=True)
    if isinstance(x, dict) and isinstance(sent, dict):
        for key in x.keys() & sent.keys() - {"step"}:  # fused ones need their dtype
            x[key] = _as_sent(x[key], sent[key])
    elif type(x) in (list, tuple) and type(x) is type(sent) and len(x) == len(sent):
        return type(x)(map(_as_sent, x, sent))
    return x
