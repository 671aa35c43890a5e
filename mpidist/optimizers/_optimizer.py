"""The base of all optimizers: state, one fused reduction, updates in place.

How gradients are applied:

1. Every rank checks its arguments, evaluates the learning rate and allocates memory. It
   reports errors to all ranks.
2. One header: the ranks agree on the optimizer, the step, the learning rate, the
   variables, and the shapes and dtypes of the gradients.
3. One fused all-reduce (SUM) of all gradients.
4. Every rank changes its own copies, with the same operations on the same bits. Nothing
   here can fail on one rank alone, and nothing is communicated. With a sharded state it
   changes its part, and an all-gather follows; without memory for it the strategy is
   unusable.

In cross-replica context it is one operation (`dispatch`), so inside ``merge_fn``
it is one command, which every rank executes with its own optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import weakref
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar, Final, NoReturn, Self, TypeAlias

import numpy as np

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, threads
from mpidist._base.errors import CollectiveMismatchError
from mpidist._base.expect import expect
from mpidist._base.names import listed
from mpidist._base.remedies import explain_attributes
from mpidist._base.types import Array, HostArray
from mpidist._runtime import context, dispatch, interruptions
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.variable import Variable, array_of, storage_of
from mpidist.optimizers._arguments import (
    APPLY,
    Gradient,
    collect,
    group_among,
    group_for,
    split_pairs,
)
from mpidist.optimizers._clipping import check_limits
from mpidist.optimizers._schedules import AssignableRate, LearningRate, Rate, of_step
from mpidist.optimizers._state import Block, Numbers, State, counter

_BUILD: Final = "Optimizer.build"
_READ_ALONE: Final = (
    "the first read of `optimizer.iterations` makes it, on all ranks; write "
    "`iterations = optimizer.iterations` on all of them, before what one rank does"
)
_NAME: Final = "`name` to be a str"

_Known: TypeAlias = weakref.WeakValueDictionary[Hashable, "Optimizer"]
_Reference: TypeAlias = tuple[Variable | None, int, str]
"""What a command carries in place of an optimizer: the count of its steps, the number
of its construction, and its settings."""
_numbers: Final = threads.ReplicaLocal(lambda: itertools.count(1))
_known: Final = threads.ReplicaLocal[_Known](weakref.WeakValueDictionary)


@explain_attributes
class Optimizer:
    """The base class of `SGD`, `Adam`, `AdamW`, `RMSprop` and `Adagrad`.

    Gradients are summed over the replicas: divide the loss of each replica by the
    number of rows in the whole step (`mpidist.compute_average_loss`,
    `mpidist.global_batch_size`).

    Create an optimizer on all ranks, inside or outside a scope. Inside ``merge_fn``,
    which only rank 0 runs, it is a RuntimeError; invalid arguments are a TypeError or a
    ValueError. It belongs to the strategy of the first variables passed to it. Its
    state consists of mirrored variables: `iterations` and, next to each variable, its
    slots.

    With ``shard_state=True`` (ZeRO-1, Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054) the slots are divided among the ranks: the
    elements of all variables of a dtype evenly, and each rank updates its part of the
    variables, with the same results. Gradients are all-reduced, not reduce-scattered,
    so only the memory of the slots becomes smaller; then one all-gather gives all ranks
    the other parts: between nodes a step moves 1.5 times the bytes. A slot is an
    ON_READ variable: in a replica function its value is this rank's part, flat, and in
    cross-replica context the whole. Assigning takes the whole in both, the same on all
    ranks. `mpidist.Checkpoint` and `mpidist.elastic.State` save the whole, which can be
    restored on any number of ranks, sharded or not; each rank needs memory for it then.
    """

    # The settings of a class: what a number has to be less than; None: a truth.
    _limits: ClassVar[Mapping[str, float | None]] = {}
    # The slots of each variable, with the setting that has to be given for one, or "".
    _slots: ClassVar[Mapping[str, str]] = {}
    # By the formulas of Keras some slots have another meaning, and so another name.
    _keras_slots: ClassVar[Mapping[str, str]] = {}
    _as_keras = False

    def __init__(
        self,
        learning_rate: LearningRate,
        name: str | None = None,
        shard_state: bool = False,
        **settings: float | None,
    ) -> None:
        # Each class passes all its arguments on by name (`locals()`): those above, the
        # settings in `_limits`, and the limits of gradients.
        kind = type(self).__name__
        if not self._limits:
            raise TypeError(
                f"{kind}: the constructor of `mpidist.optimizers.Optimizer` is not "
                "Keras's. For other settings derive from an optimizer: write `class "
                f"{kind}(mpidist.optimizers.SGD)`; for one that uses another write "
                f"`class {kind}:`, with a property `variables`, so that checkpoints "
                "have it, and a method `apply_gradients` that calls that of the other"
            )
        if context.current().coordinator is not None:
            raise RuntimeError(
                f"{kind}: an optimizer created in merge_fn exists on rank 0 only; "
                "create it on all ranks, before `strategy.run`"
            )
        expect(name is None or isinstance(name, str), kind, _NAME, name)
        self._name = name or kind.lower()
        self._shard_state = bool(shard_state)
        self._settings: dict[str, float] = {
            key: _check_setting(kind, key, settings[key], limit)
            for key, limit in self._limits.items()
        }
        self._clipping: dict[str, float] = check_limits(kind, settings)
        self._not_decayed: list[str] = []  # regular expressions
        self._not_decayed_variables: list[Variable] = []
        self._describe_settings()
        self.learning_rate = learning_rate
        self._first_rate = self._learning_rate
        self._assigned_rate: Rate | None = None  # since then
        self._state: State | None = None  # before it is built
        self._iterations: Variable | None = None  # the same, or read before
        group = context.current().group
        self._made_in = group if context.has_strategy() else None
        self._group: ReplicaGroup | None = None
        self._index: dict[int, int] = {}  # of the variables, by id
        # What was restored before it was built, and whether something may be missing.
        self._restored: tuple[dict[str, HostArray], bool, str, int] | None = None
        # An optimizer is the same object of the program on all ranks. Commands of
        # rank 0 refer to it by the variable that counts its steps or, before that
        # exists, by the number of its construction.
        self._number = next(_numbers.get())
        _known.get()[self._number] = self

    @classmethod
    def of_keras(cls, *args: Any, **kwargs: Any) -> Self:
        """Return an optimizer with the formulas of Keras, for programs from there.

        They are those of keras/src/optimizers of Keras 3. Slots that differ in meaning
        have other names, so that neither restores the other's.

        Args:
            args: as for the class.
            kwargs: as for the class.
        """
        self = cls(*args, **kwargs)
        self._as_keras = self._settings["of_keras"] = True
        self._describe_settings()
        return self

    def __setattr__(self, name: str, value: object) -> None:
        # Without it a setting that is assigned later would change nothing.
        if not name.startswith("_") and not hasattr(type(self), name):
            kind = type(self).__name__
            raise AttributeError(
                f"{kind}: {name!r} cannot be assigned: the settings of an optimizer "
                f"are those of its constructor; write `{kind}(..., {name}=...)`. "
                "`optimizer.learning_rate = 0.1` is the one that can change"
            )
        super().__setattr__(name, value)

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

        Collective if it is read before `build` and the first `apply_gradients`: read it
        on all ranks then, not only on the one that prints it.

        Raises:
            RuntimeError: before these, if the optimizer was not made in a scope.
        """
        if self._iterations is None:
            group = self._made_in
            if group is None or context.current().coordinator is not None:
                return self._built("iterations").iterations
            try:
                with group.cross_frame:
                    self._iterations = counter(self._name)
            except CollectiveMismatchError as error:
                error.add_note(_READ_ALONE)
                raise
            self._restore_iterations()
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
        state = self._built("variables")
        return [state.iterations, *(slot for slots in state.slots for slot in slots)]

    @property
    def learning_rate(self) -> AssignableRate:
        """The learning rate of the next step; assign a number or a function.

        ``optimizer.learning_rate.assign(value)``, of Keras, does the same. All ranks
        must assign the same value, and a function must return the same value
        on all of them: `apply_gradients` compares the number. Do not assign inside
        ``merge_fn``, which only rank 0 runs.

        Checkpoints have a number that was assigned, and restoring one sets it. If none
        was assigned, the rate becomes that of the constructor again. A function is not
        saved: assign it again in a new process.
        """
        count = self.__saved_unbuilt__()[f"{self._name}/iterations"].item()
        rate = self._rate(count)
        return AssignableRate(rate, functools.partial(setattr, self, "learning_rate"))

    @learning_rate.setter
    def learning_rate(self, learning_rate: LearningRate) -> None:
        kind = type(self).__name__
        if isinstance(learning_rate, Variable):
            raise TypeError(
                f"{kind}: `learning_rate` is Variable {learning_rate.name!r}; write "
                "`learning_rate=lambda step: float(variable)` to follow it, or "
                "`learning_rate=float(variable)` for its value now, as Keras 3 does"
            )
        if callable(learning_rate):
            learning_rate = of_step(learning_rate)
        else:
            learning_rate = _check_rate(kind, learning_rate)
        self._learning_rate: Rate = learning_rate
        self._assigned_rate = learning_rate

    lr = learning_rate  # the older name in Keras

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the state, all zero, for these variables.

        Collective. Otherwise the first `apply_gradients` does it. If a checkpoint was
        restored before, its values replace the zeros. Calling it again with the same
        variables does nothing.

        Args:
            variables: mirrored variables of one strategy, of floating-point dtypes.

        Raises:
            TypeError, ValueError: for invalid variables, one that is given twice, or
                variables other than those it was built for.
            RuntimeError: for variables of several strategies, or plain variables while
                a strategy is current.
            CheckpointError: if a checkpoint that was restored before does not match.
        """
        given: list[Variable] = []
        try:
            is_list = hasattr(variables, "__iter__")
            expect(is_list, _BUILD, "a list of variables", variables)
            given.extend(variables)
            group, is_cross_replica = group_for(given, self._index, self._group, _BUILD)
        except Exception as error:
            group_among(given, self._group).collectives.invalid(_BUILD, error)
        if is_cross_replica:
            reference = self._reference()
            dispatch.perform(group, "build_optimizer", reference, given, call=_BUILD)
        else:
            self._build(group, given)

    def __saved_unbuilt__(self) -> dict[str, Array]:
        """Return what a checkpoint has before `build`: `iterations`, and what waits."""
        kept = {} if self._restored is None else self._restored[0]
        name, count = f"{self._name}/iterations", self._iterations
        if count is not None:
            return {**kept, name: storage_of(count).view}
        return {name: np.zeros((), np.int64), **kept}

    def __restore_later__(
        self, arrays: dict[str, HostArray], partial: bool, path: str, number: int
    ) -> None:
        """Keep what `build` is to restore; of a checkpoint that was restored before.

        Args:
            arrays: the values of variables by name, the same on all ranks.
            partial: whether some may be missing, or others be there.
            path: of the checkpoint, for messages.
            number: of the restore, which the variables get.
        """
        self._restored = arrays, partial, path, number
        self._restore_iterations()

    def __saved_rate__(self) -> float | str | None:
        """Return an assigned learning rate, for a checkpoint; None: the first one."""
        rate = self._assigned_rate
        return "a function" if callable(rate) else rate

    def __restore_rate__(self, saved: float | str | None) -> None:
        """Set the learning rate to what a checkpoint has of it."""
        if saved is None:
            self._learning_rate, self._assigned_rate = self._first_rate, None
        elif not isinstance(saved, str):
            self.learning_rate = saved

    def _restore_iterations(self) -> None:
        count = self._iterations
        if count is not None and self._restored is not None:
            value, storage = self._restored[0].get(count.name), storage_of(count)
            # `build` says that another one does not fit.
            if value is not None and value.shape == () and value.dtype == count.dtype:
                storage.apply("assign", storage.prepare("assign", value))

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
            TypeError: if they are not in a list or the like: one name alone; for what
                is not a variable in ``var_list``.
            RuntimeError: if the state has already been created.
        """
        call, what = "exclude_from_weight_decay", "a list"
        for given in (var_list, var_names):
            expect(not isinstance(given, (str, Variable)), call, what, given)
        variables, hint = list(var_list or ()), "write `var_names=` for names"
        for x in variables:
            expect(isinstance(x, Variable), call, "variables", x, hint)
        if self._state is not None:
            raise RuntimeError(
                "exclude_from_weight_decay: the optimizer has been built; call it "
                "before `build` and the first `apply_gradients`"
            )
        self._not_decayed_variables += variables
        self._not_decayed += var_names or ()
        self._describe_settings()

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        experimental_aggregate_gradients: bool = True,
        global_step: Variable | None = None,
    ) -> Variable:
        """Sum the gradients over the replicas, and apply one step.

        Collective: one header, and one fused all-reduce of all gradients together
        (between nodes one for each dtype and ``bytes_per_pack``). The update itself
        does not communicate; with ``shard_state`` an all-gather follows it. The first
        call also creates the state (`build`).

        - In a replica function each replica passes its own gradients.
        - In cross-replica context, ``merge_fn`` included, a `PerReplica` is summed; a
          `Mirrored` or a plain array, the same on all ranks, is used as the sum.
        - Outside every scope, with plain variables, there is one replica.

        Args:
            grads_and_vars: pairs of a gradient and its variable. The gradient has the
                variable's shape, and is cast to its dtype if it is of floats; None, on
                all replicas, leaves the variable and its slots unchanged.
            name: accepted and ignored, as in Keras.
            skip_gradients_aggregation: in a replica function, whether the gradients are
                already reduced, for example by ``all_reduce``, and the same on all
                replicas (checked by checksum).
            experimental_aggregate_gradients: the opposite, by its older name in Keras.
            global_step: a variable to increase by 1 after the step, as in TensorFlow 1.

        Returns:
            `iterations`, which includes this step.

        Raises:
            TypeError, ValueError: for an item that is not a pair, a gradient of another
                shape, or not of floats, a variable that is given twice or that the
                state does not include, None for all, or a learning rate that is not a
                number.
            RuntimeError: for variables of another strategy, and inside the function
                of ``update``.
            CollectiveMismatchError: if the replicas' variables, gradients, settings or
                learning rates differ. All these errors are raised on all ranks, before
                anything has changed.

        Example, on two replicas::

            with strategy.scope():
                weights = mpidist.Variable(np.array([1.0, 2.0]))
            optimizer = mpidist.optimizers.SGD(learning_rate=0.1)


            def replica_fn():
                optimizer.apply_gradients([(np.ones(2), weights)])


            strategy.run(replica_fn)
            weights.numpy()  # array([0.8, 1.8])
        """
        pairs: list[tuple[Gradient, Variable]] = []
        try:
            try:
                what = "an iterable of (gradient, variable) pairs"
                expect(
                    isinstance(grads_and_vars, Iterable), APPLY, what, grads_and_vars
                )
                pairs.extend(grads_and_vars)
                if name is not None:
                    hint = "write `global_step=step`, or one list of pairs: `zip(g, v)`"
                    expect(isinstance(name, str), APPLY, _NAME, name, hint)
                if global_step is not None:
                    what = "`global_step` to be a `mpidist.Variable`"
                    expect(isinstance(global_step, Variable), APPLY, what, global_step)
                gradients, variables = split_pairs(pairs)
                found = group_for(variables, self._index, self._group, APPLY)
                group, is_cross_replica = found
            except Exception as error:
                group_among(pairs, self._group).collectives.invalid(APPLY, error)
            skip = skip_gradients_aggregation or not experimental_aggregate_gradients
            if is_cross_replica:
                reference = self._reference()
                dispatch.perform(group, APPLY, reference, gradients, variables, skip)
            else:
                self._apply(group, gradients, variables, in_replica=True, skip=skip)
        except BaseException as error:
            interruptions.left(group_among(pairs, self._group), APPLY, error)
            raise
        if global_step is not None:
            home = storage_of(global_step).group
            alone = context.is_in_replica(home)  # a sum would add 1 for each replica
            with home.cross_frame if alone else contextlib.nullcontext():
                global_step.assign_add(1)
        return self.iterations

    # --- to be defined by subclasses --------------------------------------------

    def _constants(self, step: int, rate: float, decays: bool) -> Numbers:
        """Return the numbers that the update of a variable needs.

        Args:
            step: the number of this step, from 1.
            rate: its learning rate.
            decays: whether the weights of the variable decay.
        """
        raise NotImplementedError

    @staticmethod
    def _step(w: Array, g: Array, block: Block, constants: Numbers) -> None:
        """Change a block of a variable and of its slots in place.

        Args:
            w: the block of the variable, float32 or wider: its own array, or a copy.
            g: the block of its gradient; do not write to it.
            block: its slots and scratch memory.
            constants: from `_constants`.
        """
        raise NotImplementedError

    # ----------------------------------------------------------------------------

    def _describe_settings(self) -> None:
        """Note all settings except the learning rate, the same on all ranks."""
        settings: dict[str, object] = {**self._settings, **self._clipping}
        if self._shard_state:
            settings["shard_state"] = True
        if self._not_decayed:
            settings["not_decayed"] = self._not_decayed
        settings["name"] = self._name
        inner = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        self._text = f"{type(self).__name__}({inner})"

    @property
    def _slot_names(self) -> tuple[str, ...]:
        names = self._keras_slots if self._as_keras else {}
        return tuple(
            names.get(slot, slot)
            for slot, setting in self._slots.items()
            if not setting or self._settings[setting]
        )

    def _decays(self, variable: Variable) -> bool:
        if any(variable is excluded for excluded in self._not_decayed_variables):
            return False
        return not any(re.search(name, variable.name) for name in self._not_decayed)

    def _built(self, what: str) -> State:
        if self._state is None:
            raise RuntimeError(
                f"{type(self).__name__}.{what}: the optimizer has no state before the "
                "first `apply_gradients`; write `optimizer.build(variables)`, for "
                "example before a checkpoint is saved or restored"
            )
        return self._state

    def _rate(self, step: int) -> float:
        schedule = self._learning_rate
        if not callable(schedule):
            return schedule
        call, rate = f"{type(self).__name__} at step {step}", schedule(step)
        what = "the function for `learning_rate` to return a number"
        expect(backend.as_real(rate) is not None, call, what, rate)
        return _check_rate(call, rate)

    def _reference(self) -> _Reference:
        state = self._state
        return None if state is None else state.iterations, self._number, self._text

    def _build(self, group: ReplicaGroup, variables: list[Variable]) -> None:
        """Create the state. All ranks call this, at any level."""
        collectives, state = group.collectives, self._state
        with collectives.guard.checking(_BUILD):
            if state is not None:
                state.check_known(variables, _BUILD)
                if len(variables) != len(state.variables):
                    known = [v.name for v in state.variables]
                    raise ValueError(
                        f"{_BUILD}: the optimizer was built for {len(known)} variables "
                        f"({listed(known)}), got {len(variables)}; create another "
                        "optimizer for other variables"
                    )
            count = self._iterations
            if count is not None and storage_of(count).group is not group:
                raise RuntimeError(
                    f"{_BUILD}: `iterations` was read in the scope of another strategy "
                    "than that of the variables; make the optimizer in theirs"
                )
            decayed = [self._decays(v) for v in variables]
            described = ", ".join(
                f"{v.name!r} [#{storage_of(v).key[0]}] {backend.describe(v)}"
                f"{'' if d else '*'}"
                for v, d in zip(variables, decayed, strict=True)
            )
            when = "anew" if state is None else "again"
        collectives.guard.agree(Call(f"build {self._text} {when} for {described}"))
        if state is None:
            state = State(
                group,
                variables,
                decayed,
                self._name,
                self._slot_names,
                self._shard_state,
                self._iterations,
            )
            if self._restored is not None:
                arrays, partial, path, number = self._restored
                with collectives.guard.checking(_BUILD):
                    values = state.prepared(arrays, partial, path, _BUILD)
                collectives.guard.agree(Call(f"{_BUILD}, restoring {len(values)}"))
                for variable, value in values:
                    if variable is not count:  # the program may have changed it since
                        storage_of(variable).apply("assign", value)
                for variable in (state.iterations, *itertools.chain(*state.slots)):
                    storage_of(variable).restored = number
                self._restored = None
            self._state, self._group, self._index = state, group, state.index
            self._iterations = state.iterations
            _known.get()[storage_of(state.iterations)] = self

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
        try:  # not `checking`, which takes three calls of Python
            given = collect(group, gradients, variables, in_replica, skip)
        except Exception as error:
            collectives.invalid(APPLY, error)
        if self._state is None:
            self._build(group, variables)
        state = self._built(APPLY)
        try:  # what can fail on one rank alone
            state.check_known(given.variables, APPLY)
            plan = state.find_plan(given)
            state.prepare(self._clipping, given.arrays)
            step = int(array_of(state.iterations).item())
            rate = self._rate(step)
            constants = (
                self._constants(step + 1, rate, False),
                self._constants(step + 1, rate, True),
            )
            text = APPLY
            if group.guard.checks:
                keys = [f"#{storage_of(v).key[0]}" for v in given.variables]
                many = len(given.summed)
                gradients_text = plan.call.text if plan else f"{many} gradients"
                text += (
                    f" of {self._text} at step {step} with learning_rate={rate!r}: "
                    f"{gradients_text} for {' '.join(keys)}"
                )
            if given.summaries:
                summaries = ", ".join(given.summaries)
                text += (
                    f", given {summaries} (which are not per replica; call it in a "
                    "function that you pass to `strategy.run`)"
                )
        except Exception as error:
            collectives.invalid(APPLY, error)
        state.sum(plan, Call(text), given)
        # From here on nothing fails on one rank alone.
        state.update(self._step, constants, self._clipping, given)
        state.share(given.variables, f"{APPLY} of {self._name}, sharing the parts")


def _check_setting(kind: str, key: str, x: object, limit: float | None) -> float:
    if limit is None:
        return bool(x)
    which = f"0 or more{f' and below {limit:g}' if limit < math.inf else ''}"
    return backend.as_number(kind, key, x, lambda x: 0 <= x < limit, which)


def _check_rate(call: str, rate: object) -> float:
    return backend.as_number(
        call,
        "learning_rate",
        rate,
        lambda x: 0 <= x < math.inf,
        "finite and 0 or more",
        "a number or a function of the step",
    )


def _find(group: ReplicaGroup, reference: _Reference, call: str) -> Optimizer:
    """Return this rank's optimizer. All ranks raise if one has none, or another one."""
    iterations, number, text = reference
    found = _known.get().get(number if iterations is None else storage_of(iterations))
    mine = "" if found is None else found._text
    if found is None or mine != text:
        with group.guard.checking(call):
            raise RuntimeError(
                f"{call}: the coordinator uses {text}, which this rank "
                + ("does not have" if found is None else f"has as {mine}")
                + "; create optimizers on all ranks, in the same order, or call "
                "`optimizer.build(variables)` before the `merge_call`"
            )
    return found


@dispatch.operation(APPLY)
def _apply_gradients(
    group: ReplicaGroup,
    reference: _Reference,
    gradients: list[Gradient],
    variables: list[Variable],
    skip: bool,
) -> None:
    optimizer = _find(group, reference, APPLY)
    optimizer._apply(group, gradients, variables, in_replica=False, skip=skip)


@dispatch.operation("build_optimizer")
def _build_optimizer(
    group: ReplicaGroup, reference: _Reference, variables: list[Variable]
) -> None:
    _find(group, reference, _BUILD)._build(group, variables)
