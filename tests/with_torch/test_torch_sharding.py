"""ZeroRedundancyOptimizer: divided among n ranks, it does what the optimizer does."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import re

import pytest
from replicas import (
    ON_TWO,
    assert_usable,
    everywhere,
    outcomes,
    raises_everywhere,
    split,
)

import mpidist
from mpidist import elastic, testing
from mpidist._base import partition
from tests.elastic.test_state import _hold

pytestmark = [pytest.mark.guests]

ROWS = 12
ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
)  # fmt: skip


def on_ranks(function):
    return pytest.mark.mpi(pytest.mark.replicas(1, 2, 3, 4)(function))


def on_two(function):
    return functools.reduce(lambda f, mark: mark(f), ON_TWO, function)


def make_model(torch, dtype="float64"):
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    ).to(getattr(torch, dtype))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def make_pair(torch, mt, kind, strategy, groups=lambda m: m.parameters(), **defaults):
    """Return a model with an optimizer of torch, and one with a sharded one."""
    cls = getattr(torch.optim, kind) if isinstance(kind, str) else kind
    plain, sharded = make_model(torch), make_model(torch)
    return (
        (plain, cls(groups(plain), **defaults)),
        (
            sharded,
            mt.ZeroRedundancyOptimizer(
                groups(sharded), cls, strategy=strategy, **defaults
            ),
        ),
    )


def backward(torch, model, seed=5, rows=slice(None)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, generator=generator, dtype=model[0].weight.dtype)
    loss = model(x[rows]).square().mean()
    loss.backward()
    return loss


def assert_alike(torch, one, two, **tolerance):
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-11}
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)
    bits = [p.detach().contiguous().numpy().tobytes() for p in two.parameters()]
    assert everywhere(bits) == [bits] * len(everywhere(0))


def numbers_in(torch, state):
    """Return how many numbers the tensors of a state have, without step counts."""
    tensors = [x for entries in state.values() for x in entries.values()]
    return sum(x.numel() for x in tensors if torch.is_tensor(x) and x.dim())


@on_ranks
@pytest.mark.parametrize("kind", [*ELEMENTWISE, "Adafactor"])
def test_the_same_training_with_a_part_of_the_state(
    strategy, rank, size, torch, mt, kind
):
    (one, optimizer), (two, sharded) = make_pair(torch, mt, kind, strategy, lr=0.1)
    wrapped = mt.DistributedOptimizer(sharded, strategy=strategy)
    for seed in range(4):
        optimizer.zero_grad()
        backward(torch, one, seed)
        optimizer.step()
        wrapped.zero_grad()
        backward(torch, two, seed, slice(rank, None, size))
        wrapped.step()
    assert_alike(torch, one, two, rtol=1e-6, atol=1e-8)
    own = numbers_in(torch, sharded.state)
    whole = numbers_in(torch, optimizer.state)
    assert sum(everywhere(own)) == whole
    if kind != "Adafactor":  # which keeps whole parameters
        slots = whole // sum(p.numel() for p in one.parameters())
        assert whole // size - slots <= own <= whole // size + 2 * slots
    # The state has the form of the optimizer's own.
    expected, found = optimizer.state_dict(), wrapped.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-6, atol=1e-8)
    assert [*map(list, found["state"].values())] == [
        *map(list, expected["state"].values())
    ]


@on_ranks
@pytest.mark.parametrize("parts", ["all", "one"])
def test_a_state_that_the_program_begins_anew(strategy, rank, size, torch, mt, parts):
    (one, optimizer), (two, sharded) = make_pair(torch, mt, "Adam", strategy, lr=0.1)
    wrapped = mt.DistributedOptimizer(sharded, strategy=strategy)
    for seed in range(4):
        for model, each, rows in (
            (one, optimizer, slice(None)),
            (two, wrapped, slice(rank, None, size)),
        ):
            if seed == 2 and parts == "all":
                each.state = collections.defaultdict(dict)
            elif seed == 2:
                each.state.pop(model[0].weight, None)
            each.zero_grad()
            backward(torch, model, seed, rows)
            each.step()
    assert_alike(torch, one, two, rtol=1e-6, atol=1e-8)


@on_ranks
def test_groups_schedulers_clipping_and_accumulation(strategy, rank, size, torch, mt):
    def groups(model):
        return [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
            {"params": [model[0].bias, model[2].bias], "lr": 0.5},
        ]

    pair = make_pair(torch, mt, "AdamW", strategy, groups, lr=0.1)
    (one, optimizer), (two, sharded) = pair
    wrapped = mt.DistributedOptimizer(
        sharded, strategy=strategy, backward_passes_per_step=2, max_norm=0.1
    )
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(x, [0.1, 0.5], total_steps=9)
        for x in (optimizer, wrapped)
    ]
    for step in range(4):
        optimizer.zero_grad()
        for half in range(2):
            backward(torch, one, 2 * step + half)
            wrapped.zero_grad()
            backward(torch, two, 2 * step + half, slice(rank, None, size))
            wrapped.step()
        for p in one.parameters():
            p.grad /= 2
        assert torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) > 0.1
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert sharded.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"]
    assert "betas" in sharded.defaults
    assert_alike(torch, one, two)


@on_ranks
def test_dtypes_parameters_without_gradient_and_odd_ones(strategy, torch, mt):
    def parameters():
        made = {
            "half": torch.full((3, 3), 0.5, dtype=torch.bfloat16),
            "scalar": torch.tensor(2.0),
            "empty": torch.zeros(0, 2),
            "turned": torch.arange(6.0).reshape(2, 3).T,
            "complex": torch.full((5,), 1 + 2j),
            "unused": torch.ones(11),
            "frozen": torch.ones(100),
            "double": torch.ones(1, 5, dtype=torch.float64),
        }
        return {
            name: torch.nn.Parameter(x, requires_grad=name != "frozen")
            for name, x in made.items()
        }

    one, two = parameters(), parameters()
    adam = torch.optim.Adam(one.items(), lr=0.1)
    sharded = mt.ZeroRedundancyOptimizer(
        two.items(), torch.optim.Adam, lr=0.1, strategy=strategy
    )

    def step():
        for each in (one, two):
            for name, p in each.items():
                if name not in off:
                    p.grad = torch.full_like(p, 0.25)
        adam.step()
        sharded.step()
        for name, p in two.items():
            assert torch.equal(p, one[name]), name

    off = {"unused", "frozen"}
    step()
    step()
    # Used later, by all ranks, and not any more.
    off = {"scalar"}
    for each in (one, two):
        each["scalar"].grad = None
        each["frozen"].requires_grad_(True)
    step()
    with pytest.raises(AttributeError, match="on all ranks: it is collective"):
        sharded.consolidate_state_dict(to=0)
    state = sharded.state_dict()
    assert state["param_groups"] == adam.state_dict()["param_groups"]
    torch.testing.assert_close(state["state"], adam.state_dict()["state"])
    assert state["state"][0]["exp_avg"].dtype is torch.bfloat16
    # Parameters whose memory was replaced, as `module.to` does.
    for p in two.values():
        p.data = p.data.clone()
    step()
    for each in (one, two):
        each["double"].requires_grad_(False)  # torch goes by the gradient
    step()


def test_a_state_without_elements(strategy, torch, mt):
    empty = torch.nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))
    sharded = mt.ZeroRedundancyOptimizer([empty], torch.optim.Adam, strategy=strategy)
    empty.grad = torch.zeros_like(empty)
    sharded.step()
    assert sharded.state_dict()["state"][0]["exp_avg"].shape == (0, 4)


@on_ranks
def test_more_parameters_later(strategy, torch, mt):
    (one, adam), (two, sharded) = make_pair(
        torch, mt, "Adam", strategy, lambda m: m[0].parameters(), lr=0.1
    )
    for optimizer, model in ((adam, one), (sharded, two)):
        backward(torch, model)
        optimizer.step()
        optimizer.add_param_group({"params": [*model[2].parameters()], "lr": 0.01})
        optimizer.step()
    assert_alike(torch, one, two)
    assert sharded.state_dict()["param_groups"] == adam.state_dict()["param_groups"]
    for text in raises_everywhere(
        ValueError, lambda: sharded.add_param_group({"params": [two[0].weight]})
    ):
        assert "more than one parameter group" in text
    sharded.step()


@on_ranks
def test_closures_and_results_without_a_wrapper(strategy, rank, size, torch, mt):
    (one, sgd), (two, sharded) = make_pair(
        torch, mt, "SGD", strategy, lr=0.1, momentum=0.9
    )

    def closure():
        sharded.zero_grad(set_to_none=False)
        loss = backward(torch, two, rows=slice(rank, None, size))
        mt.all_reduce_gradients(two, strategy=strategy)
        return loss

    for _ in range(3):
        sgd.zero_grad()
        backward(torch, one)
        sgd.step()
        assert sharded.step(closure).requires_grad
    assert_alike(torch, one, two)


@on_ranks
def test_a_closure_that_raises_on_one_rank(strategy, rank, size, torch, mt):
    """The others may be in a call of the closure; all raise once."""
    _, (model, sharded) = make_pair(torch, mt, "SGD", strategy, lr=0.1)

    def closure(failing):
        backward(torch, model)
        if rank == failing:
            raise ZeroDivisionError
        mt.all_reduce_gradients(model, strategy=strategy)

    for failing in (0, size - 1):
        call = functools.partial(closure, failing)
        raises_everywhere(ZeroDivisionError, lambda: sharded.step(call))  # noqa: B023
    assert_usable(strategy)


@on_ranks
def test_a_scaler_skips_the_same_steps(strategy, rank, size, torch, mt):
    _, (model, sharded) = make_pair(torch, mt, "Adam", strategy, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        sharded.zero_grad()
        scaler.scale(model(torch.ones(2, 4).double()).square().mean()).backward()
        if step == 1 and rank == size - 1:
            model[0].bias.grad[0] = float("inf")
        mt.all_reduce_gradients(model, strategy=strategy)
        before = model[0].weight.detach().clone()
        scaler.step(sharded)
        scaler.update()
        assert torch.equal(before, model[0].weight) == (step == 1)
    mt.check_in_sync(model, strategy=strategy)


@on_ranks
def test_large_parameters(strategy, rank, size, torch, mt):
    """What is moved in pieces, in memory that ranks share."""
    weight = torch.nn.Parameter(torch.zeros(1000, 700))
    small = torch.nn.Parameter(torch.zeros(3))
    optimizer = mt.DistributedOptimizer(
        mt.ZeroRedundancyOptimizer(
            [weight, small], torch.optim.SGD, lr=1.0, momentum=0.5, strategy=strategy
        ),
        op="SUM",
        strategy=strategy,
    )
    for _ in range(3):
        optimizer.zero_grad()
        ((weight * torch.arange(700)).sum() / size + small.sum()).backward()
        optimizer.step()
    expected = -torch.arange(700.0) * (1 + 1.5 + 1.75)
    torch.testing.assert_close(weight.detach(), expected.expand(1000, 700))
    assert small.tolist() == [-4.25 * size] * 3
    moments = optimizer.state_dict()["state"][0]["momentum_buffer"]
    torch.testing.assert_close(moments, torch.arange(700.0).expand(1000, 700) * 1.75)


# --- checkpoints ----------------------------------------------------------------------


def train(torch, mt, model, optimizer, strategy, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        backward(torch, model)
        optimizer.step()


@on_ranks
@pytest.mark.parametrize("kind", ["Adam", "Adafactor"])
def test_checkpoints_on_another_number_of_ranks(
    strategy, new_strategy, same_folder, rank, torch, mt, kind
):
    (one, optimizer), (two, sharded) = make_pair(torch, mt, kind, strategy, lr=0.1)
    train(torch, mt, one, optimizer, strategy)
    wrapped = mt.DistributedOptimizer(sharded, strategy=strategy)
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(model=two, optimizer=wrapped)
        train(torch, mt, two, wrapped, strategy)
        manager = mpidist.CheckpointManager(checkpoint, same_folder, max_to_keep=2)
        path = manager.save()
        train(torch, mt, two, wrapped, strategy)
        manager.restore_or_initialize()
    train(torch, mt, one, optimizer, strategy)
    train(torch, mt, two, wrapped, strategy)
    assert_alike(torch, one, two)
    # On one rank, divided or not, and back.
    alone = new_strategy(comm=split(rank))
    with alone.scope():
        (three, plain), (four, other) = make_pair(torch, mt, kind, alone, lr=0.5)
        for model, restored in ((three, plain), (four, other)):
            again = mpidist.Checkpoint(model=model, optimizer=restored)
            again.restore(path)
            assert restored.param_groups[0]["lr"] == 0.1
            train(torch, mt, model, restored, alone)
        if rank == 0:
            mpidist.Checkpoint(model=three, optimizer=plain).save(same_folder / "b")
    for p, q, r in zip(
        one.parameters(), three.parameters(), four.parameters(), strict=True
    ):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(p, r)
    with strategy.scope():
        checkpoint.restore(same_folder / "b")
    train(torch, mt, one, optimizer, strategy)
    train(torch, mt, two, wrapped, strategy)
    assert_alike(torch, one, two)


@on_ranks
def test_a_checkpoint_before_the_first_step(strategy, same_folder, torch, mt):
    _, (model, sharded) = make_pair(torch, mt, "Adam", strategy, lr=0.1)
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(model=model, optimizer=sharded)
        checkpoint.save(same_folder / "a")
        train(torch, mt, model, sharded, strategy)
        checkpoint.restore(same_folder / "a")
    assert not any(sharded.state.values())
    assert sharded.state_dict()["state"] == {}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (1, 4)])
def test_an_elastic_training_goes_on_with_other_ranks(torch, mt, before, after):
    kept = {}

    def make():
        model = make_model(torch)

        def build(strategy):
            optimizer = mt.ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, lr=0.1
            )
            return {"optimizer": optimizer}

        return elastic.State(build, model=model)

    def step(state):
        state.model.zero_grad()
        backward(torch, state.model)
        state.optimizer.step()

    def train():
        state = kept[testing.current_group().rank] = make()
        _hold(state)
        step(state)
        step(state)
        state.commit()
        step(state)

    def go_on():
        rank = testing.current_group().rank
        state = kept.get(rank) or make()
        _, storage = _hold(state)
        has = [rank < before for rank in range(after)]
        storage.put_back(1, has, list(range(after)))
        step(state)
        return [p.detach().clone() for p in state.model.parameters()]

    testing.run(before, train)
    model = make_model(torch)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        adam.zero_grad()
        backward(torch, model)
        adam.step()
    for found in testing.run(after, go_on):
        torch.testing.assert_close(found, list(model.parameters()))


# --- mistakes -------------------------------------------------------------------------


@on_two
def test_gradients_that_are_not_reduced_are_found(strategy, rank, torch, mt):
    _, (model, sharded) = make_pair(torch, mt, "Adam", strategy, lr=0.1)
    backward(torch, model, rows=slice(rank, None, 2))
    for text in raises_everywhere(mpidist.OutOfSyncError, sharded.step):
        assert "DistributedOptimizer(optimizer)" in text
        assert "all_reduce_gradients(model)" in text
    mt.all_reduce_gradients(model, strategy=strategy)
    sharded.step()
    mt.check_in_sync(model, strategy=strategy)


@on_two
def test_what_differs_between_ranks(strategy, rank, torch, mt):
    _, (model, sharded) = make_pair(torch, mt, "Adam", strategy, lr=0.1)
    backward(torch, model)
    sharded.step()
    sharded.param_groups[0]["lr"] += rank
    for text in raises_everywhere(mpidist.CollectiveMismatchError, sharded.step):
        assert "lr=0.1" in text
        assert "lr=1.1" in text
    sharded.param_groups[0]["lr"] = 0.1
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(3)]
    several = mt.ZeroRedundancyOptimizer(
        groups, torch.optim.SGD, strategy=strategy, lr=0.1
    )
    several.param_groups[1 + rank]["lr"] = 0.2  # the same two rates on both
    raises_everywhere(mpidist.CollectiveMismatchError, several.step)
    if rank == 1:
        model[0].bias.grad = None
    for text in raises_everywhere(mpidist.CollectiveMismatchError, sharded.step):
        assert "without gradients for 1" in text
    backward(torch, model)
    state = sharded.state_dict()
    if rank == 1:
        sharded.load_state_dict(state)
    error, loads = mpidist.CollectiveMismatchError, "after 1 calls of load_state_dict"
    raises_everywhere(error, sharded.step, loads)
    if rank == 0:
        sharded.load_state_dict(state)
    sharded.step()
    if rank == 1:
        model[0].weight.data = torch.zeros(9)
    raises_everywhere(ValueError, sharded.step, "got shape (9,)")

    def make(model, kind="Adam", **defaults):
        cls = getattr(torch.optim, kind)
        parameters = model.parameters()
        return mt.ZeroRedundancyOptimizer(
            parameters, cls, strategy=strategy, **defaults
        )

    for call, message in (
        (lambda: make(torch.nn.Linear(2, 3 + rank)), r"\(4, 2\)"),
        (lambda: make(model, "Adam" if rank else "AdamW"), "of AdamW with"),
        (lambda: make(model, lr=0.5 + rank), "lr=1.5"),
    ):
        for text in raises_everywhere(mpidist.CollectiveMismatchError, call):
            assert re.search(message, text)


@on_two
def test_wrong_arguments(strategy, rank, torch, mt):
    model = make_model(torch)
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    bad = rank == 1  # on this rank alone

    def make(kind, parameters=None, **kwargs):
        parameters = model.parameters() if parameters is None else parameters
        return mt.ZeroRedundancyOptimizer(
            parameters, kind, **{"strategy": strategy, **kwargs}
        )

    def merge():
        mpidist.get_replica_context().merge_call(lambda _: zero.step())

    zero, made = make(adam), adam(model.parameters())
    other = adam([model[0].weight]).state_dict()
    wrong = copy.deepcopy(zero.state_dict())
    wrong["state"] = {i: {"exp_avg": torch.ones(5)} for i in range(4)}
    share_state = functools.partial(mt.broadcast_optimizer_state, strategy=strategy)
    a_class, wrap = "a class of optimizers, got a Adam", mt.DistributedOptimizer
    on_all = "`optimizer.load_state_dict(state)` on all ranks"
    rate = -1.0 if bad else 1.0
    for kind, message, call in [
        (TypeError, a_class, lambda: make(made if bad else adam)),
        (TypeError, "got Linear", lambda: make(torch.nn.Linear, [])),
        (TypeError, "write `DistributedOptimizer(Zero", lambda: make(wrap)),
        (ValueError, "LBFGS", lambda: make(torch.optim.LBFGS)),
        (ValueError, "dense", lambda: make(torch.optim.SparseAdam)),
        (ValueError, "empty parameter list", lambda: make(sgd, [])),
        (ValueError, "learning rate", lambda: make(sgd, lr=rate)),
        (TypeError, "write `strategy=`", lambda: make(sgd, process_group=1)),
        (RuntimeError, "no strategy is active", lambda: make(sgd, strategy=None)),
        (TypeError, on_all, lambda: share_state(zero)),
        (ValueError, "of [4] parameters, got [1]", lambda: zero.load_state_dict(other)),
        (TypeError, "cannot be pickled", lambda: pickle.dumps(zero)),
        (RuntimeError, "inside merge_fn", lambda: strategy.run(merge)),
    ]:
        for text in raises_everywhere(kind, call):
            assert message in text
    # A rank may have no part of this state.
    messages = [row.message for row in outcomes(lambda: zero.load_state_dict(wrong))]
    assert any("got (5,)" in text for text in messages)
    make(sgd, parameters_as_bucket_view=True).state_dict()


@on_two
def test_an_error_in_the_step_of_one_rank(strategy, rank, torch, mt):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            if rank == 1:
                raise MemoryError("no memory for the state")
            return super().step(closure)

    _, (model, sharded) = make_pair(torch, mt, Failing, strategy, lr=0.1)
    backward(torch, model)
    for text in raises_everywhere(MemoryError, sharded.step):
        assert "no memory for the state" in text


# --- the division ---------------------------------------------------------------------


def test_partitions():
    even = partition.evenly([5, 0, 1, 6], 4)
    assert even.bounds == (0, 3, 6, 9, 12)
    assert [even.pieces(rank) for rank in range(4)] == [
        [(0, 0, 3)],
        [(0, 3, 5), (1, 0, 0), (2, 0, 1)],
        [(3, 0, 3)],
        [(3, 3, 6)],
    ]
    small = partition.evenly([1, 0], 3)
    assert [small.pieces(r) for r in range(3)] == [[], [], [(0, 0, 1), (1, 0, 0)]]
    assert [partition.evenly([0], 2).pieces(r) for r in range(2)] == [[], [(0, 0, 0)]]
    whole = partition.by_load([2, 9, 4, 3], [0, 1, 8])
    assert whole.order == (1, 2, 3, 0)
    assert whole.bounds == (0, 9, 18, 18)
    assert whole.pieces(1) == [(1, 0, 4), (2, 0, 3), (3, 0, 2)]
