"""A torch optimizer of whose state each rank keeps and updates a part.

Each *sequence* of parameters (of one dtype, on one kind of device) is divided among the
ranks. An optimizer of torch, the *local* one, has this rank's parts as its parameters:
a parameter itself if it is all here, or a flat view of some of its elements. So it
makes the state of these parts only, and changes the parameters in place. Then one
all-gather gives all ranks the parameters that the others have changed.

Rejected: reducing the gradients here, by a reduce-scatter. It would exclude what
`DistributedOptimizer` and `all_reduce_gradients` offer (accumulation, clipping of the
global norm, ``GradScaler``), for which all ranks have all sums; and the engine has
none: on one node its all-reduce already divides the additions among the ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import backend, partition
from mpidist._base.errors import OutOfSyncError, on_rank
from mpidist._base.fingerprint import fingerprint_of
from mpidist._base.remedies import explain_attributes, explain_keywords
from mpidist._checkpoints import guest_items
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.current import group_of_call
from mpidist._strategy.strategy import Strategy
from mpidist._values.consistency import digest
from mpidist.torch._gradients import is_stepped
from mpidist.torch._sharded_state import (
    ELEMENTWISE,
    Part,
    Sequence,
    check_class,
    cut,
    pack,
    settings_of,
    text_of_settings,
    unpack,
)


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """An optimizer of whose state each rank keeps and updates only a part (ZeRO-1).

    With n ranks each has 1/n of the state (Adam: of two numbers for each parameter).
    The results are those of the optimizer itself. Name and arguments are those of
    ``torch.distributed.optim.ZeroRedundancyOptimizer``, and as there it does not reduce
    gradients: wrap it in `DistributedOptimizer`, which also accumulates and clips them,
    or call `all_reduce_gradients` before each step.

    The gradients are all-reduced, not reduce-scattered, so that every rank has all of
    them: the memory for gradients is that of other optimizers, and between nodes a step
    moves 3 times the bytes of the parameters, where other optimizers move 2 times (on
    one node the ranks share the additions, and read the sums in shared memory).

    The elements of all parameters of a dtype are divided evenly, for the optimizers of
    torch that treat each element by itself: ASGD, Adadelta, Adagrad, Adam, AdamW,
    Adamax, NAdam, RAdam, RMSprop, Rprop and SGD. For others, subclasses too, each
    parameter is on one rank (and so are those that are not contiguous), so the division
    is as even as their sizes allow. Parameters with ``requires_grad=False`` at the
    start are divided separately.

    Creating one is collective, and so are `step`, `state_dict` and `add_param_group`.
    ``param_groups`` has the whole parameters, and schedulers set it as usual; ``state``
    has this rank's part only, flat where a parameter is cut. In `mpidist.Checkpoint`
    and in the ``build`` of an `mpidist.elastic.State` it is saved as the state of the
    optimizer itself, for any number of ranks, sharded or not.

    Args:
        params: parameters, or dicts of parameter groups, the same on all ranks.
        optimizer_class: the class of the optimizer, such as ``torch.optim.Adam``.
        strategy: the ranks; default: the current strategy.
        defaults: the arguments of the class, such as ``lr=0.01``.

    Raises:
        TypeError, ValueError: for other arguments, for LBFGS and SparseAdam, and what
            the class raises.
        CollectiveMismatchError: if classes, settings, dtypes or shapes differ between
            ranks.
        RuntimeError: if no strategy is active.

    Example::

        with strategy.scope():
            model = torch.nn.Linear(2, 1)
            mpidist.torch.broadcast_parameters(model)
            optimizer = mpidist.torch.ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, lr=0.001
            )
            optimizer = mpidist.torch.DistributedOptimizer(optimizer)
    """

    state_is_collective = True
    """Tells `mpidist.Checkpoint` that `state_dict` is a collective call."""

    _local: Any = None  # the optimizer of the parts, before it is made

    @explain_keywords("mpidist.torch.ZeroRedundancyOptimizer")
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        strategy: Strategy | None = None,
        **defaults: Any,
    ) -> None:
        self._name = call = type(self).__name__
        group = group_of_call(strategy, call)
        self._strategy: Strategy = group.strategy
        self._rank, self._ranks = group.replica_id, group.num_replicas
        self._loads = [0] * self._ranks
        self._restored = 0  # how often `load_state_dict` was called
        self._sequences: list[Sequence] = []
        self._parts: list[list[Part]] = []
        self._checked = self._ranks == 1
        with group.guard.checking(call):
            check_class(optimizer_class, call)
            self._cuts = optimizer_class in ELEMENTWISE
            super().__init__(params, {})
            self._divide(self.param_groups)
            groups = [self._local_group(i) for i in range(len(self._parts))]
            self._local = optimizer_class(groups, **defaults)
            self.defaults: dict[str, Any] = self._local.defaults
            self._read_local(only_new=True)
            self._name = f"{call} of {optimizer_class.__name__}"
            told = Call(f"{self._name} with {self._described()}")
        group.guard.agree(told)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{self._name} cannot be pickled or copied: its state is on all ranks. "
            "Write `state = optimizer.state_dict()`, on all ranks"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's part of the parameters, and gather them. Collective.

        The gradients are the same on all ranks; the first step checks that by
        checksums. One header, then an all-gather.

        Args:
            closure: computes the gradients, and returns the loss.

        Returns:
            What ``closure`` returns.

        Raises:
            OutOfSyncError: if the gradients of the first step differ between ranks.
            CollectiveMismatchError: if settings, such as the learning rate, differ, or
                which parameters have a gradient.
        """
        group, call = self._begin("step")
        guard = group.guard
        loss = None
        if closure is not None:  # it may be collective, and raise on one rank
            compute = closure

            def body(_: SectionResult) -> Any:
                with torch.enable_grad():
                    return compute()

            loss = run_section(guard, Call(f"{call}, the closure"), body)
        with group.guard.checking(call):
            for sequence in self._sequences:
                sequence.check(call)
            for part in self._all_parts():
                part.refresh()
                if part.parameter not in self.state:  # the program begins anew
                    self._local.state.pop(part.tensor, None)
            pairs = zip(self._local.param_groups, self.param_groups, strict=True)
            for local, one in pairs:  # such as ``lr``
                local.update(settings_of(one))
            text = self._text_of_step(call) if guard.checks else call
            digests = [] if self._checked else self._digests()
        if self._checked:
            guard.agree(Call(text))
        elif guard.agree_on(Call(text), fingerprint_of(digests)):
            self._checked = True
        else:
            raise OutOfSyncError(
                on_rank(
                    self._rank,
                    f"{call}: the gradients are not the same on all ranks. Reduce "
                    "them: wrap this optimizer, `optimizer = mpidist.torch."
                    "DistributedOptimizer(optimizer)`, or call `mpidist.torch."
                    "all_reduce_gradients(model)` between `backward()` and `step()`",
                )
            )
        with group.guard.checking(call):
            self._local.step()
            self._read_local()
            own = {  # of the sequences that may have changed
                str(i): sequence.elements_of(self._rank)
                for i, sequence in enumerate(self._sequences)
                if self._ranks > 1 and any(map(is_stepped, sequence.parameters))
            }
        if own:
            gathered = group.collectives.all_gather(own, 0, None, call)
            with torch.no_grad():
                for key, flat in gathered.items():
                    self._sequences[int(key)].put(flat)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are divided separately. Collective.

        Args:
            param_group: their settings, as in torch.
        """
        if self._local is None:  # called by the constructor of the base class
            super().add_param_group(param_group)
            return
        group, call = self._begin("add_param_group")
        with group.guard.checking(call):
            super().add_param_group(param_group)
            self._divide(self.param_groups[-1:])
            self._local.add_param_group(self._local_group(len(self._parts) - 1))
            self._read_local(only_new=True)
            text = f"{call} with {self._described()}"
        group.guard.agree(Call(text))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, that of all ranks. Collective.

        It has the form of the optimizer's own, and can be loaded there; its tensors are
        on the host. Each rank needs memory for the whole state while it has it.
        """
        group, call = self._begin("state_dict")
        with group.guard.checking(call):
            entries, data = pack(self._all_parts(), self._local.state)
            own = pickle.dumps(entries)
        group.guard.agree(Call(call))
        rows = [pickle.loads(x) for x in group.communicator.all_gather_objects(own)]
        (data,) = group.collectives.all_gather([data], 0, None, call)
        groups = super().state_dict()["param_groups"]
        state = unpack(rows, data)
        parameters = self._parameters()
        for number, values in state.items():
            guest_items.lay_out(values, parameters[number])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state: each rank takes its part. Not collective; all ranks call it.

        Args:
            state_dict: from `state_dict`, of this class or of the optimizer's own, on
                any number of ranks; the same on all ranks.

        Raises:
            ValueError: if its groups, or the shapes in it, do not fit the parameters.
        """
        call = f"{self._name}.load_state_dict"
        self._restored += 1
        saved = state_dict["param_groups"]
        expected = [len(group["params"]) for group in self.param_groups]
        got = [len(group["params"]) for group in saved]
        if expected != got:
            raise ValueError(
                f"{call}: expected parameter groups of {expected} parameters, got "
                f"{got}; make the optimizer for the same parameters, in the same groups"
            )
        # As torch does, by the order of the saved numbers.
        numbers = [number for group in saved for number in group["params"]]
        state = {}
        for i, part in enumerate(self._all_parts()):
            values = state_dict["state"].get(numbers[part.number])
            if values is not None:
                state[i] = {key: cut(x, key, part, call) for key, x in values.items()}
        groups = self._local.state_dict()["param_groups"]
        for group, other in zip(groups, saved, strict=True):
            group.update(settings_of(other))
        guest_items.load_state(self._local, {"state": state, "param_groups": groups})
        self._read_local()

    # --- the division -----------------------------------------------------------

    def _divide(self, groups: list[dict[str, Any]]) -> None:
        """Divide the parameters of new groups."""
        alike: dict[Any, list[tuple[int, int, torch.Tensor]]] = {}
        first = sum(len(sequence.parameters) for sequence in self._sequences)
        place = len(self._parts)
        every = [(place + i, p) for i, g in enumerate(groups) for p in g["params"]]
        for number, (index, p) in enumerate(every, first):
            key = (self._cuts and p.is_contiguous(), p.dtype, p.device, p.requires_grad)
            alike.setdefault(key, []).append((index, number, p))
        self._parts += [[] for _ in groups]
        for (cuts, *_), members in alike.items():
            sizes = [p.numel() for _, _, p in members]
            divided = (
                partition.evenly(sizes, self._ranks)
                if cuts
                else partition.by_load(sizes, self._loads)
            )
            members = [members[i] for i in divided.order]
            self._sequences.append(Sequence([p for _, _, p in members], divided))
            for piece in divided.pieces(self._rank):
                index, number, p = members[piece.place]
                tensor = p
                if piece.stop - piece.start < p.numel():
                    flat = p.detach().view(-1)[piece.start : piece.stop]
                    tensor = torch.nn.Parameter(flat, p.requires_grad)
                self._parts[index].append(Part(number, p, *piece[1:], tensor))
        for parts in self._parts[place:]:
            parts.sort(key=lambda part: part.number)

    def _all_parts(self) -> Iterator[Part]:
        """Yield this rank's parts, in the order of the local optimizer."""
        for parts in self._parts:
            yield from parts

    def _described(self) -> str:
        shapes = [
            f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}"
            for sequence in self._sequences
            for p in sequence.parameters
        ]
        settings = text_of_settings(self.param_groups)
        return f"{settings} for {len(shapes)} parameters: {', '.join(shapes)}"

    # --- the local optimizer ----------------------------------------------------

    def _local_group(self, index: int) -> dict[str, Any]:
        parts = self._parts[index]
        settings = settings_of(self.param_groups[index])
        return {**settings, "params": [part.tensor for part in parts]}

    def _read_local(self, *, only_new: bool = False) -> None:
        """Take the settings and the state of the local optimizer.

        A step may change both. ``state`` has that of this rank's parts, by parameters.
        """
        pairs = zip(self.param_groups, self._local.param_groups, strict=True)
        for group, local in pairs:
            settings = settings_of(local)
            group.update({**settings, **group} if only_new else settings)
        self.state.clear()
        for part in self._all_parts():
            if part.is_cut:
                part.tensor.grad = None
            if part.tensor in self._local.state:
                self.state[part.parameter] = self._local.state[part.tensor]

    def _text_of_step(self, call: str) -> str:
        without = [
            str(i)
            for i, p in enumerate(self._parameters())
            if p.requires_grad and p.grad is None
        ]
        text = f", without gradients for {', '.join(without)}" if without else ""
        if self._restored:
            text += f", after {self._restored} calls of load_state_dict"
        return f"{call} with {text_of_settings(self.param_groups)}{text}"

    def _digests(self) -> list[bytes]:
        given = [p.grad for p in self._parameters() if p.grad is not None]
        return [digest(backend.as_array(x, self._name)[0]) for x in given]

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _begin(self, method: str) -> tuple[ReplicaGroup, str]:
        """Return the ranks of a collective method, and its name for messages."""
        call = f"{self._name}.{method}"
        return group_of_call(self._strategy, call), call


explain_attributes(ZeroRedundancyOptimizer, "mpidist.torch.ZeroRedundancyOptimizer")
