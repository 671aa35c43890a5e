"""The base of all optimizers: state, one fused reduction, updates in place.

How gradients are applied
-------------------------
1. Every rank checks its arguments, evaluates the learning rate and allocates memory. It
   reports errors to all ranks.
2. One header: the ranks agree on the optimizer, the step, the learning rate, the
   variables, and the shapes and dtypes of the gradients.
3. One fused all-reduce (SUM) of all gradients.
4. Every rank changes its own copies, with the same operations on the same bits. Nothing
   here can fail on one rank alone, and nothing is communicated.

This needs neither `merge_call` nor the function of ``update``, because no user code
runs. In cross-replica context it is one operation (`dispatch`), so inside ``merge_fn``
it is one command, which every rank executes with its own optimizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, NoReturn

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, threads
from mpidist._engine.collectives import Collectives
from mpidist._runtime import context, dispatch
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.distributed import PerReplica
from mpidist._values.synchronization import is_same
from mpidist._values.variable import Variable
from mpidist.optimizers._arguments import (
    APPLY,
    apart,
    array_of,
    as_gradient,
    check_variables,
    compute_dtype,
    listed,
    split_pairs,
    unique,
    variables_among,
)
from mpidist.optimizers._clipping import (
    blocks,
    check_clip_norm,
    clip_scale,
    global_norm,
    norm_scratch,
)
from mpidist.optimizers._gradient_sum import GradientSum
from mpidist.optimizers._schedules import LearningRate

_BUILD: Final = "Optimizer.build"

# An optimizer is the same object of the program on all ranks. It is identified by the
# variable that counts its steps or, before that exists, by its construction number.
# Replicas that are threads each have their own count.
_Known = weakref.WeakValueDictionary[Any, "Optimizer"]
_numbers = threads.ReplicaLocal(lambda: itertools.count(1))
_made: Final = threads.ReplicaLocal[_Known](weakref.WeakValueDictionary)
_built: Final = threads.ReplicaLocal[_Known](weakref.WeakValueDictionary)


@dataclasses.dataclass(frozen=True)
class _Reference:
    """How rank 0 identifies an optimizer to the other ranks."""

    iterations: Variable | None
    number: int
    text: str

    def find(self) -> Optimizer:
        """Return this rank's optimizer.

        Raises:
            RuntimeError: if this rank has none, or a different one.
        """
        if self.iterations is not None:
            found = _built.get().get(_identity(self.iterations))
        else:
            found = _made.get().get(self.number)
        if found is None or found._text != self.text:
            raise RuntimeError(
                f"{APPLY}: the coordinator uses {self.text}, which this rank "
                + ("does not have" if found is None else f"has as {found._text}")
                + "; make optimizers on all ranks, in the same order, or call "
                "`optimizer.build(variables)` before the `merge_call`"
            )
        return found


@dataclasses.dataclass(frozen=True)
class _Block:
    """A part of a variable that is processed at a time, and its scratch memory."""

    part: slice
    w: Any
    slots: tuple[Any, ...]
    t: Any
    u: Any
    wide: Any  # None if the step is computed in the variable's own dtype


@dataclasses.dataclass(frozen=True)
class _Target:
    """One variable with its slots, laid out for the update; created once."""

    variable: Variable
    index: int
    array: Any
    copy: Any  # in C order, of an array that is not in C order
    blocks: tuple[_Block, ...]


class Optimizer:
    """The base class of `SGD`, `Adam` and `AdamW`.

    Gradients are summed over the replicas: divide the loss of each replica by the
    number of rows in the whole step (`mpidist.compute_average_loss`,
    `mpidist.global_batch_size`).

    Create an optimizer on all ranks, inside or outside a scope. It belongs to the
    strategy of the first variables passed to it. Its state consists of mirrored
    variables: `iterations` and, next to each variable, its slots.
    """

    _slot_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        learning_rate: LearningRate,
        *,
        name: str | None,
        global_clipnorm: float | None,
        settings: dict[str, Any],
    ) -> None:
        kind = type(self).__name__
        if context.current().coordinator is not None:
            raise RuntimeError(
                f"{kind}: an optimizer that merge_fn makes exists on rank 0 only; make "
                "it on all ranks, before `strategy.run`"
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{kind}: expected `name` to be a str, got {name!r}")
        self._name = name or kind.lower()
        self._global_clipnorm = (
            None
            if global_clipnorm is None
            else check_clip_norm(global_clipnorm, kind, "global_clipnorm")
        )
        self._settings = settings
        self._not_decayed: list[str] = []
        self._not_decayed_variables: list[Variable] = []
        self.learning_rate = learning_rate
        self._group: ReplicaGroup | None = None
        self._iterations: Variable | None = None
        self._variables: list[Variable] = []
        self._slots: list[tuple[Variable, ...]] = []
        self._index: dict[int, int] = {}
        self._decayed: list[bool] = []
        # Buffers that are reused in each step.
        self._targets: list[_Target] = []
        self._number = next(_numbers.get())
        _made.get()[self._number] = self

    def __repr__(self) -> str:
        rate = self._learning_rate
        return f"<mpidist.optimizers.{self._text}, learning_rate={rate!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its variables have a copy on each "
            "rank. Save `optimizer.variables`, and assign to them after "
            "`optimizer.build(variables)`"
        )

    @property
    def name(self) -> str:
        """The given name, or that of the class; names of slots begin with it."""
        return self._name

    @property
    def iterations(self) -> Variable:
        """The number of completed steps: a mirrored int64 variable.

        Raises:
            RuntimeError: before `build` or the first `apply_gradients`.
        """
        if self._iterations is None:
            raise RuntimeError(self._not_built("iterations"))
        return self._iterations

    @property
    def variables(self) -> list[Variable]:
        """The whole state: `iterations`, then the slots of each variable.

        The order is that of the variables passed to `build`. Assigning to these, on all
        ranks, restores an optimizer. Names are unique, such as
        ``"adam/momentum/weights"``. The learning rate is not among them: it is a
        setting, which a schedule computes from `iterations`.

        Raises:
            RuntimeError: before `build` or the first `apply_gradients`.
        """
        if self._iterations is None:
            raise RuntimeError(self._not_built("variables"))
        return [self._iterations, *(slot for slots in self._slots for slot in slots)]

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; assign a number or a function.

        All ranks must assign the same value, and a function must return the same value
        on all of them: `apply_gradients` compares the number. Do not assign inside
        ``merge_fn``, which only rank 0 runs.
        """
        count = self._iterations
        return self._rate(0 if count is None else int(count))

    @learning_rate.setter
    def learning_rate(self, learning_rate: LearningRate) -> None:
        kind = type(self).__name__
        if not callable(learning_rate):
            learning_rate = self._check_rate(learning_rate, f"{kind}: expected")
        self._learning_rate = learning_rate

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the state, all zero, for these variables.

        Collective. Call it before restoring the state from a checkpoint; otherwise the
        first `apply_gradients` does it. Calling it again with the same variables does
        nothing.

        Args:
            variables: mirrored variables of one strategy, of floating-point dtypes.

        Raises:
            TypeError, ValueError: for invalid variables, one that is given twice, or
                variables other than those it was built for.
            RuntimeError: for variables of several strategies, or plain variables while
                a strategy is current.
        """
        given: list[Any] = []
        try:
            given.extend(variables)
            check_variables(given, _BUILD, self._index)
            group = self._group_of(given, _BUILD)
        except Exception as error:
            self._collectives(given).invalid(_BUILD, error)
        if _is_cross_replica(group):
            dispatch.perform(
                group, "build_optimizer", self._reference(), given, call=_BUILD
            )
        else:
            self._build(group, given)

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[Variable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Exclude some variables, such as biases, from weight decay.

        Call it on all ranks, before `build` and the first `apply_gradients`.

        Args:
            var_list: the variables.
            var_names: regular expressions; variables whose name one of them matches,
                anywhere in it.

        Raises:
            RuntimeError: if the state has already been created.
        """
        if self._iterations is not None:
            raise RuntimeError(
                "exclude_from_weight_decay: the optimizer has been built; call it "
                "before `build` and the first `apply_gradients`"
            )
        self._not_decayed_variables += list(var_list or ())
        self._not_decayed += list(var_names or ())

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        *,
        skip_gradients_aggregation: bool = False,
    ) -> Variable:
        """Sum the gradients over the replicas, and apply one step.

        Collective: one header, and one fused Allreduce for all gradients together
        (one for each dtype and ``bytes_per_pack``). The update itself does not
        communicate. The first call also creates the state (`build`).

        - In a replica function each replica passes its own gradients.
        - In cross-replica context, ``merge_fn`` included, a `PerReplica` is summed; a
          `Mirrored` or a plain array, the same on all ranks, is used as the sum.
        - Outside every scope, with plain variables, there is one replica.

        Args:
            grads_and_vars: pairs of a gradient and its variable. The gradient has the
                variable's shape and dtype; None, on all replicas, leaves the variable
                and its slots unchanged.
            skip_gradients_aggregation: in a replica function, whether the gradients are
                already reduced, for example by ``all_reduce``, and the same on all
                replicas (checked by checksum).

        Returns:
            `iterations`, which includes this step.

        Raises:
            TypeError, ValueError: for an item that is not a pair, a gradient of another
                shape or dtype, a variable that is given twice or that the state does
                not include, None for all, or a learning rate that is not a number.
            RuntimeError: for variables of another strategy, and inside the function
                of ``update``.
            CollectiveMismatchError: if the replicas' variables, gradients, settings or
                learning rates differ. All these errors are raised on all ranks, before
                anything has changed.
        """
        pairs: list[Any] = []
        try:
            pairs.extend(grads_and_vars)
            gradients, variables = split_pairs(pairs)
            check_variables(variables, APPLY, self._index)
            group = self._group_of(variables, APPLY)
        except Exception as error:
            self._collectives(pairs).invalid(APPLY, error)
        skip = bool(skip_gradients_aggregation)
        if _is_cross_replica(group):
            dispatch.perform(
                group, APPLY, self._reference(), gradients, variables, skip
            )
        else:
            self._apply(group, gradients, variables, in_replica=True, skip=skip)
        return self.iterations

    # --- to be defined by subclasses --------------------------------------------

    def _constants(self, step: int, rate: float, index: int) -> tuple[float, ...]:
        """Return the numbers that the update of a variable needs.

        Args:
            step: the number of this step, from 1.
            rate: its learning rate.
            index: the index of the variable.
        """
        raise NotImplementedError

    @staticmethod
    def _step(
        w: Any,
        g: Any,
        slots: tuple[Any, ...],
        t: Any,
        u: Any,
        constants: tuple[float, ...],
    ) -> None:
        """Change a block of a variable and of its slots in place.

        Args:
            w: the block of the variable: flat, float32 or wider.
            g: the block of its gradient; do not write to it.
            slots: the blocks of its slots.
            t: scratch memory of the same size.
            u: scratch memory of the same size, but possibly ``g`` itself: write to it
                only in or after the last use of ``g``.
            constants: from `_constants`.
        """
        raise NotImplementedError

    # --- arguments --------------------------------------------------------------

    @property
    def _text(self) -> str:
        """All settings except the learning rate, which is the same on all ranks."""
        settings = dict(self._settings)
        if self._global_clipnorm is not None:
            settings["global_clipnorm"] = self._global_clipnorm
        if self._not_decayed:
            settings["not_decayed"] = self._not_decayed
        settings["name"] = self._name
        inner = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        return f"{type(self).__name__}({inner})"

    def _not_built(self, what: str) -> str:
        return (
            f"{type(self).__name__}.{what}: the optimizer has no state before the "
            "first `apply_gradients`; write `optimizer.build(variables)`, for example "
            "before a checkpoint is saved or restored"
        )

    @staticmethod
    def _check_rate(rate: Any, expected: str) -> float:
        if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
            raise TypeError(
                f"{expected} `learning_rate` to be a number or a function of the step, "
                f"got {rate!r:.80} of type {type(rate).__name__}"
            )
        number = float(rate)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(
                f"{expected} `learning_rate` to be finite and 0 or more, got {rate!r}"
            )
        return number

    def _rate(self, step: int) -> float:
        schedule = self._learning_rate
        if not callable(schedule):
            return schedule
        kind = type(self).__name__
        return self._check_rate(
            schedule(step), f"{kind}: at step {step}, expected the function for"
        )

    def _reference(self) -> _Reference:
        return _Reference(self._iterations, self._number, self._text)

    def _collectives(self, given: Any) -> Collectives:
        """Return the operations that report a wrong argument to the other ranks.

        Outside every scope, and before the first `build`, the given variables determine
        the strategy.
        """
        group = context.current().group
        if not context.has_strategy():
            if self._group is not None:
                group = self._group
            elif found := variables_among(given):
                group = found[0]._group
        collectives: Collectives = group.collectives
        return collectives

    def _group_of(self, variables: list[Variable], call: str) -> ReplicaGroup:
        """Return the group of these variables, if it may use them here."""
        frame = context.current()
        group = variables[0]._group
        if frame.level is context.Level.UPDATE:
            raise RuntimeError(
                f"{call}: this code runs {frame.level.value}, which changes one "
                f"variable without communication; call `{call}` before or after the "
                "`update`"
            )
        if context.has_strategy() and frame.group is not group:
            if not group.is_mpi:
                raise RuntimeError(
                    f"{call}: Variable {variables[0].name!r} was made outside every "
                    f"scope, so each rank has one of its own, but {frame.group} is "
                    "in force; make it in `with strategy.scope():`"
                )
            raise RuntimeError(
                f"{call}: Mixing different Strategy objects: Variable "
                f"{variables[0].name!r} belongs to {group}, but {frame.group} is "
                "in force"
            )
        if self._group is not None and self._group is not group:
            raise RuntimeError(
                f"{call}: Mixing different Strategy objects: the optimizer was built "
                f"for variables of {self._group}, Variable {variables[0].name!r} "
                f"belongs to {group}; make an optimizer for each strategy"
            )
        return group

    # --- state ------------------------------------------------------------------

    def _build(self, group: ReplicaGroup, variables: list[Variable]) -> None:
        """Create the state. All ranks call this, at any level."""
        collectives = group.collectives
        try:
            if self._iterations is not None:
                self._check_known(variables, _BUILD)
                if len(variables) != len(self._variables):
                    known = [v.name for v in self._variables]
                    raise ValueError(
                        f"{_BUILD}: the optimizer was built for {len(known)} variables "
                        f"({listed(known)}), got {len(variables)}; make another "
                        "optimizer for other variables"
                    )
            decayed = [self._is_decayed(variable) for variable in variables]
            names = unique([variable.name for variable in variables])
            described = ", ".join(
                f"{v.name!r} [#{v._key[0]}] {backend.describe(v)}{'' if d else '*'}"
                for v, d in zip(variables, decayed, strict=True)
            )
            state = "again" if self._iterations is not None else "anew"
        except Exception as error:
            collectives.invalid(_BUILD, error)
        collectives.guard.agree(Call(f"build {self._text} {state} for {described}"))
        if self._iterations is not None:
            return

        def make(initial: Callable[[], Any], name: str) -> Variable:
            return Variable(initial, trainable=False, name=f"{self._name}/{name}")

        with context.entered(group.cross_frame):
            iterations = make(lambda: np.zeros((), np.int64), "iterations")
            slots = []
            for variable, name in zip(variables, names, strict=True):
                zeros = _zeros_for(variable)
                slots.append(
                    tuple(make(zeros, f"{slot}/{name}") for slot in self._slot_names)
                )
        self._group = group
        self._variables, self._slots, self._decayed = variables, slots, decayed
        self._index = {id(variable): i for i, variable in enumerate(variables)}
        self._iterations = iterations
        _built.get()[_identity(iterations)] = self

    def _is_decayed(self, variable: Variable) -> bool:
        if any(variable is other for other in self._not_decayed_variables):
            return False
        return not any(re.search(name, variable.name) for name in self._not_decayed)

    def _check_known(self, variables: list[Variable], call: str) -> None:
        for variable in variables:
            if id(variable) not in self._index:
                known = [v.name for v in self._variables]
                raise ValueError(
                    f"{call}: Variable {variable.name!r} {backend.describe(variable)} "
                    "was not there when the optimizer's state was made, for "
                    f"{listed(known)}; pass all variables to `optimizer.build"
                    "(variables)` first, or make another optimizer for this one"
                )

    # --- one step ---------------------------------------------------------------

    def _apply(
        self,
        group: ReplicaGroup,
        gradients: list[Any],
        variables: list[Variable],
        *,
        in_replica: bool,
        skip: bool,
    ) -> None:
        """Apply one step. All ranks call this, each with its own gradients."""
        collectives = group.collectives
        try:
            taken = [i for i, g in enumerate(gradients) if g is not None]
            if not taken:
                raise ValueError(
                    f"{APPLY}: No gradients provided for any variable: got None for "
                    f"{listed([v.name for v in variables])}"
                )
            moving = [
                i
                for i in taken
                if not skip and (in_replica or isinstance(gradients[i], PerReplica))
            ]
            arrays = {
                i: backend.contiguous(
                    as_gradient(group, gradients[i], variables[i], in_replica, skip)
                )
                for i in taken
            }
            checks = collectives.guard.checks
            summaries = ""
            if checks and len(moving) < len(taken):
                summaries = ", ".join(
                    backend.summarize(arrays[i])
                    for i in sorted(set(taken).difference(moving))
                    if not is_same(group, gradients[i])
                )
        except Exception as error:
            collectives.invalid(APPLY, error)
        if self._iterations is None:
            self._build(group, variables)
        try:
            self._check_known(variables, APPLY)
            indices = [self._index[id(variables[i])] for i in taken]
            count = array_of(self.iterations)
            step = int(count)
            rate = self._rate(step)
            alone = collectives.comm.size == 1
            kept = {i: x for i, x in arrays.items() if alone or i not in moving}
            arrays |= apart(kept, variables)
            reduction = GradientSum(
                group,
                [arrays[i] for i in moving],
                [variables[i] for i in moving],
            )
            place = {i: k for k, i in enumerate(taken)}
            given = [arrays[i] for i in taken]
            wide = None
            if self._global_clipnorm is not None:
                wide = norm_scratch(given)
            if not self._targets:
                self._targets = self._lay_out()
            targets = [self._targets[index] for index in indices]
            constants = [self._constants(step + 1, rate, index) for index in indices]
            text = ""
            if checks:
                keys = " ".join(f"#{t.variable._key[0]}" for t in targets)
                if summaries:
                    summaries = f", given {summaries} (which are not per replica)"
                text = (
                    f"{APPLY} of {self._text} at step {step} with learning_rate="
                    f"{rate!r}: {reduction.text} for {keys}{summaries}"
                )
        except Exception as error:
            collectives.invalid(APPLY, error)
        sums = reduction.run(Call(text or APPLY))
        # From here on nothing fails on one rank alone.
        for i, reduced in zip(moving, sums, strict=True):
            given[place[i]] = reduced
        with np.errstate(all="ignore"):
            scale = None
            if self._global_clipnorm is not None:
                scale = clip_scale(global_norm(given, wide), self._global_clipnorm)
            for target, gradient, own in zip(targets, given, constants, strict=True):
                self._update(target, gradient, scale, own)
            np.add(count, 1, out=count)

    def _lay_out(self) -> list[_Target]:
        """Divide all variables into blocks, with shared scratch memory."""
        scratch: dict[Any, list[Any]] = {}
        targets = []
        # The largest first: its scratch memory suffices for all others of its dtype.
        sizes = [variable.size for variable in self._variables]
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            array = array_of(self._variables[index])
            copy = None if array.flags.c_contiguous else backend.contiguous(array)
            flat = backend.flat(array if copy is None else copy)
            slots = [backend.flat(array_of(slot)) for slot in self._slots[index]]
            parts = list(blocks(flat))
            dtype = compute_dtype(array.dtype)
            if parts and dtype not in scratch:
                scratch[dtype] = [
                    backend.empty_like(flat, (parts[0].stop,), dtype) for _ in range(3)
                ]
            made = []
            for part in parts:
                t, u, wide = (x[: part.stop - part.start] for x in scratch[dtype])
                narrow = dtype != array.dtype
                own = tuple(slot[part] for slot in slots)
                made.append(
                    _Block(part, flat[part], own, t, u, wide if narrow else None)
                )
            variable = self._variables[index]
            targets.append(_Target(variable, index, array, copy, tuple(made)))
        return sorted(targets, key=lambda target: target.index)

    def _update(
        self, target: _Target, gradient: Any, scale: Any, constants: tuple[float, ...]
    ) -> None:
        """Apply the step to one variable, block by block."""
        array, copy = target.array, target.copy
        if copy is not None:
            copy[...] = array
        gradient = backend.flat(gradient)
        if scale is not None:
            scale = scale.astype(compute_dtype(array.dtype))
        for block in target.blocks:
            w, g = block.w, gradient[block.part]
            if block.wide is not None:
                g = block.u
                g[...] = gradient[block.part]
                w = block.wide
                w[...] = block.w
            if scale is not None:
                g = np.multiply(g, scale, out=block.u)
            self._step(w, g, block.slots, block.t, block.u, constants)
            if block.wide is not None:
                block.w[...] = w
        if copy is not None:
            array[...] = copy


def _identity(iterations: Variable) -> Any:
    return (iterations._group.number, iterations._key)


def _is_cross_replica(group: ReplicaGroup) -> bool:
    """Whether a call is an operation here, not a call by each replica."""
    if not group.is_mpi:
        return False
    frame = context.current()
    return frame.level is not context.Level.REPLICA or not context.has_strategy()


def _zeros_for(variable: Variable) -> Callable[[], Any]:
    return lambda: np.zeros(variable.shape, compute_dtype(variable.dtype))


@dispatch.operation(APPLY)
def _apply_gradients(
    group: ReplicaGroup,
    reference: _Reference,
    gradients: list[Any],
    variables: list[Variable],
    skip: bool,
) -> None:
    try:
        optimizer = reference.find()
    except Exception as error:
        group.collectives.invalid(APPLY, error)
    optimizer._apply(group, gradients, variables, in_replica=False, skip=skip)


@dispatch.operation("build_optimizer")
def _build_optimizer(
    group: ReplicaGroup, reference: _Reference, variables: list[Variable]
) -> None:
    try:
        optimizer = reference.find()
    except Exception as error:
        group.collectives.invalid(_BUILD, error)
    optimizer._build(group, variables)
