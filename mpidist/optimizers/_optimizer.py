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
import re
from collections.abc import Callable, Iterable
from typing import ClassVar, Final, NoReturn

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Array, HostArray
from mpidist._runtime import context, dispatch, interruptions
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.variable import Variable, array_of, storage_of
from mpidist.optimizers._arguments import (
    APPLY,
    GivenGradients,
    Gradient,
    array_functions,
    check_variables,
    collect,
    compute_dtype,
    group_among,
    group_for,
    listed,
    split_pairs,
    unique,
)
from mpidist.optimizers._blocks import Target, lay_out
from mpidist.optimizers._clipping import Clipping
from mpidist.optimizers._gradient_sum import GradientSum
from mpidist.optimizers._reference import Referable, Reference
from mpidist.optimizers._schedules import LearningRate, check_rate

_BUILD: Final = "Optimizer.build"


@dataclasses.dataclass(slots=True)
class _PreparedStep:
    """One step, after everything that can fail on one rank alone."""

    call: Call
    reduction: GradientSum
    arrays: list[Array]  # the gradients; sums are put here
    targets: list[Target]  # for each of them
    constants: list[tuple[float, ...]]
    count: Array  # of completed steps
    norm_scratch: Array | None  # None without clipping by norms


@explain_attributes
class Optimizer(Referable):
    """The base class of `SGD`, `Adam`, `AdamW` and `RMSprop`.

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
        clipping: Clipping,
        settings: dict[str, float | bool],
    ) -> None:
        kind = type(self).__name__
        if context.current().coordinator is not None:
            raise RuntimeError(
                f"{kind}: an optimizer created in merge_fn exists on rank 0 only; "
                "create it on all ranks, before `strategy.run`"
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{kind}: expected `name` to be a str, got {name!r}")
        self._name = name or kind.lower()
        self._clipping = clipping.checked(kind)
        self._settings = settings
        self._not_decayed: list[str] = []
        self._not_decayed_variables: list[Variable] = []
        self.learning_rate = learning_rate
        self._group: ReplicaGroup | None = None
        self._variables: list[Variable] = []
        self._slots: list[tuple[Variable, ...]] = []
        self._index: dict[int, int] = {}
        self._decayed: list[bool] = []
        # Buffers that are reused in each step.
        self._targets: list[Target] = []
        self._register()

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
            learning_rate = check_rate(learning_rate, f"{kind}: expected")
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
        given: list[Variable] = []
        try:
            given.extend(variables)
            check_variables(given, _BUILD, self._index)
            group = group_for(given, self._group, _BUILD)
        except Exception as error:
            group_among(given, self._group).collectives.invalid(_BUILD, error)
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
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        experimental_aggregate_gradients: bool = True,
    ) -> Variable:
        """Sum the gradients over the replicas, and apply one step.

        Collective: one header, and one fused all-reduce of all gradients together
        (between nodes one for each dtype and ``bytes_per_pack``). The update itself
        does not communicate. The first call also creates the state (`build`).

        - In a replica function each replica passes its own gradients.
        - In cross-replica context, ``merge_fn`` included, a `PerReplica` is summed; a
          `Mirrored` or a plain array, the same on all ranks, is used as the sum.
        - Outside every scope, with plain variables, there is one replica.

        Args:
            grads_and_vars: pairs of a gradient and its variable. The gradient has the
                variable's shape and dtype; None, on all replicas, leaves the variable
                and its slots unchanged.
            name: accepted and ignored, as in Keras.
            skip_gradients_aggregation: in a replica function, whether the gradients are
                already reduced, for example by ``all_reduce``, and the same on all
                replicas (checked by checksum).
            experimental_aggregate_gradients: the opposite, by its older name in Keras.

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
        pairs: list[tuple[Gradient, Variable]] = []
        try:
            try:
                pairs.extend(grads_and_vars)
                gradients, variables = split_pairs(pairs)
                check_variables(variables, APPLY, self._index)
                group = group_for(variables, self._group, APPLY)
            except Exception as error:
                group_among(pairs, self._group).collectives.invalid(APPLY, error)
            skip = bool(
                skip_gradients_aggregation or not experimental_aggregate_gradients
            )
            if _is_cross_replica(group):
                dispatch.perform(
                    group, APPLY, self._reference(), gradients, variables, skip
                )
            else:
                self._apply(group, gradients, variables, in_replica=True, skip=skip)
        except BaseException as error:
            interruptions.left(group_among(pairs, self._group), APPLY, error)
            raise
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
        w: Array,
        g: Array,
        slots: tuple[Array, ...],
        t: Array,
        u: Array,
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
        settings: dict[str, object] = dict(self._settings)
        settings |= self._clipping.settings
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

    def _rate(self, step: int) -> float:
        schedule = self._learning_rate
        if not callable(schedule):
            return schedule
        kind = type(self).__name__
        return check_rate(
            schedule(step), f"{kind}: at step {step}, expected the function for"
        )

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
                        f"({listed(known)}), got {len(variables)}; create another "
                        "optimizer for other variables"
                    )
            decayed = self._which_decay(variables)
            names = unique([variable.name for variable in variables])
            described = ", ".join(
                f"{v.name!r} [#{storage_of(v).key[0]}] {backend.describe(v)}"
                f"{'' if d else '*'}"
                for v, d in zip(variables, decayed, strict=True)
            )
            state = "again" if self._iterations is not None else "anew"
        except Exception as error:
            collectives.invalid(_BUILD, error)
        collectives.guard.agree(Call(f"build {self._text} {state} for {described}"))
        if self._iterations is not None:
            return

        def make(initial: Callable[[], HostArray], name: str) -> Variable:
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
        self._register_built(iterations)

    def _which_decay(self, variables: list[Variable]) -> list[bool]:
        excluded = {id(variable) for variable in self._not_decayed_variables}
        return [
            id(variable) not in excluded
            and not any(re.search(name, variable.name) for name in self._not_decayed)
            for variable in variables
        ]

    def _check_known(self, variables: list[Variable], call: str) -> None:
        for variable in variables:
            if id(variable) not in self._index:
                known = [v.name for v in self._variables]
                raise ValueError(
                    f"{call}: Variable {variable.name!r} {backend.describe(variable)} "
                    f"is not one of those that the optimizer was built for: "
                    f"{listed(known)}; pass all variables to `optimizer.build"
                    "(variables)` first, or create another optimizer for this one"
                )

    # --- one step ---------------------------------------------------------------

    def _apply(
        self,
        group: ReplicaGroup,
        gradients: list[Gradient],
        variables: list[Variable],
        *,
        in_replica: bool,
        skip: bool,
    ) -> None:
        """Apply one step. All ranks call this, each with its own gradients."""
        collectives = group.collectives
        try:
            given = collect(group, gradients, variables, in_replica, skip)
        except Exception as error:
            collectives.invalid(APPLY, error)
        if self._iterations is None:
            self._build(group, variables)
        try:
            step = self._prepare(group, given)
        except Exception as error:
            collectives.invalid(APPLY, error)
        sums = step.reduction.run(step.call)
        # From here on nothing fails on one rank alone.
        arrays = step.arrays
        for place, reduced in zip(given.summed, sums, strict=True):
            arrays[place] = reduced
        with np.errstate(all="ignore"):
            scales = self._clipping.scales(arrays, step.norm_scratch)
            limit = self._clipping.clipvalue
            for target, gradient, scale, constants in zip(
                step.targets, arrays, scales, step.constants, strict=True
            ):
                target.update(self._step, gradient, scale, limit, constants)
            array_functions.add(step.count, 1, out=step.count)

    def _prepare(self, group: ReplicaGroup, given: GivenGradients) -> _PreparedStep:
        """Do everything that can fail on one rank alone."""
        collectives = group.collectives
        variables = given.variables
        self._check_known(variables, APPLY)
        indices = [self._index[id(variable)] for variable in variables]
        count = array_of(self.iterations)
        step = int(count.item())
        rate = self._rate(step)
        arrays = given.copied_if_views(keep_sums=collectives.comm.size > 1)
        reduction = GradientSum(
            group,
            [arrays[i] for i in given.summed],
            [variables[i] for i in given.summed],
        )
        scratch = self._clipping.scratch(arrays)
        if not self._targets:
            self._targets = lay_out(self._variables, self._slots)
        targets = [self._targets[index] for index in indices]
        constants = [self._constants(step + 1, rate, index) for index in indices]
        text = APPLY
        if collectives.guard.checks:
            keys = " ".join(f"#{storage_of(t.variable).key[0]}" for t in targets)
            text = (
                f"{APPLY} of {self._text} at step {step} with learning_rate="
                f"{rate!r}: {reduction.text} for {keys}{given.summaries}"
            )
        return _PreparedStep(
            Call(text), reduction, arrays, targets, constants, count, scratch
        )


def _is_cross_replica(group: ReplicaGroup) -> bool:
    """Whether a call is an operation here, not a call by each replica."""
    if not group.is_mpi:
        return False
    frame = context.current()
    return frame.level is not context.Level.REPLICA or not context.has_strategy()


def _zeros_for(variable: Variable) -> Callable[[], HostArray]:
    return lambda: np.zeros(variable.shape, compute_dtype(variable.dtype))


@dispatch.operation(APPLY)
def _apply_gradients(
    group: ReplicaGroup,
    reference: Reference,
    gradients: list[Gradient],
    variables: list[Variable],
    skip: bool,
) -> None:
    try:
        optimizer = reference.find(Optimizer, APPLY)
    except Exception as error:
        group.collectives.invalid(APPLY, error)
    optimizer._apply(group, gradients, variables, in_replica=False, skip=skip)


@dispatch.operation("build_optimizer")
def _build_optimizer(
    group: ReplicaGroup, reference: Reference, variables: list[Variable]
) -> None:
    try:
        optimizer = reference.find(Optimizer, _BUILD)
    except Exception as error:
        group.collectives.invalid(_BUILD, error)
    optimizer._build(group, variables)
