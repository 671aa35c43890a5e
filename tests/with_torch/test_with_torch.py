"""mpidist.torch: two ranks do what one does with all rows, on torch's own functions."""

import collections
import copy
import functools
import os
import pickle

import numpy as np
import pytest
from replicas import ON_TWO, everywhere, raises_everywhere, split, wait_for_reports

import mpidist
from mpidist._base import hints, nest, remedies

pytestmark = [pytest.mark.guests, *ON_TWO]

ROWS = 16


def make_model(torch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def make_rows(torch):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return x, torch.arange(ROWS) % 3


def mine(rank, *arrays):
    return [x[rank::2] for x in arrays]


def loss_of(torch, model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)


def bytes_of(model):
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def assert_equal_on_all(model):
    first, *others = everywhere(bytes_of(model))
    assert all(other == first for other in others)


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_parameters(strategy, rank, torch, mt, root):
    model = make_model(torch, seed=rank)
    model.append(torch.nn.BatchNorm1d(3).bfloat16())
    model[3].num_batches_tracked += rank
    before = bytes_of_state(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    mt.broadcast_parameters(model, root, strategy=strategy)
    assert everywhere(bytes_of_state(model)) == [everywhere(before)[root]] * 2
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(p.requires_grad for p in model.parameters())
    assert int(model[3].num_batches_tracked) == root


def bytes_of_state(model):
    return {name: x.double().numpy().tobytes() for name, x in state_of(model).items()}


def state_of(model):
    return {name: x.detach() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("level", ["scope", "argument", "replica"])
def test_gradients_are_those_of_all_rows(strategy, rank, torch, mt, level):
    x, y = make_rows(torch)
    one = make_model(torch)
    loss_of(torch, one, x, y).backward()
    two = make_model(torch)
    loss_of(torch, two, *mine(rank, x, y)).backward()
    if level == "scope":
        with strategy.scope():
            mt.all_reduce_gradients(two)
    elif level == "argument":
        mt.all_reduce_gradients(two.parameters(), "MEAN", strategy=strategy)
    else:
        strategy.run(lambda: mt.all_reduce_gradients(two))
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
    grads = [p.grad.numpy().tobytes() for p in two.parameters()]
    assert everywhere(grads) == [grads] * 2


def test_uneven_rows_with_sum(strategy, rank, torch, mt):
    x, y = make_rows(torch)
    one = make_model(torch)
    loss_of(torch, one, x, y).backward()
    two = make_model(torch)
    part = slice(0, 3) if rank == 0 else slice(3, ROWS)

    def step():
        losses = torch.nn.functional.cross_entropy(
            two(x[part]), y[part], reduction="none"
        )
        mpidist.compute_average_loss(losses).backward()
        mt.all_reduce_gradients(two, "SUM")

    strategy.run(step)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


def test_parameters_without_a_gradient(strategy, rank, torch, mt):
    everywhere_, rank_1, nowhere, frozen, late = (
        torch.nn.Parameter(torch.ones(2)) for _ in range(5)
    )
    late.grad = torch.full((2,), rank + 2.0)  # with which torch makes a step
    for parameter in (frozen, late):
        parameter.requires_grad_(False)
    everywhere_.grad = torch.full((2,), rank + 1.0)
    if rank == 1:
        rank_1.grad = torch.full((2,), 4.0)
    parameters = [everywhere_, rank_1, nowhere, frozen, late]
    mt.all_reduce_gradients(parameters, strategy=strategy)
    assert late.grad.tolist() == [2.5, 2.5]
    assert everywhere_.grad.tolist() == [1.5, 1.5]
    assert rank_1.grad.tolist() == [2, 2]
    assert nowhere.grad is None
    assert frozen.grad is None
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    optimizer = mt.DistributedOptimizer(optimizer, strategy=strategy)
    optimizer.synchronize()  # torch refuses hooks of `late`
    optimizer.step()
    assert late.tolist() == [-1.5, -1.5]


def train(torch, model, optimizer, batches, closure=False):
    for x, y in batches:

        def compute(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(torch, model, x, y)
            loss.backward()
            return loss

        if closure:
            optimizer.step(compute)
        else:
            compute()
            optimizer.step()


@pytest.mark.parametrize("kind", ["SGD", "Adam", "LBFGS"])
def test_the_same_training_as_on_one_rank(strategy, rank, torch, mt, kind):
    def make(model):
        made = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR
        return made, schedule

    x, y = make_rows(torch)
    one, two = make_model(torch), make_model(torch)
    optimizer, schedule = make(one)
    scheduler = schedule(optimizer, 2)
    for _ in range(4):
        train(torch, one, optimizer, [(x, y)], kind == "LBFGS")
        scheduler.step()
    wrapped = mt.DistributedOptimizer(
        make(two)[0], strategy=strategy, named_parameters=two.named_parameters()
    )
    scheduler = schedule(wrapped, 2)
    for _ in range(4):
        train(torch, two, wrapped, [mine(rank, x, y)], kind == "LBFGS")
        scheduler.step()
    assert wrapped.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1
    assert_equal_on_all(two)
    mt.check_in_sync(two, strategy=strategy)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


def test_backward_passes_and_clipping(strategy, rank, torch, mt):
    x, y = make_rows(torch)
    one, two = make_model(torch), make_model(torch)
    reference = torch.optim.SGD(one.parameters(), lr=0.5)
    for _ in range(3):
        reference.zero_grad()
        loss_of(torch, one, x, y).backward()
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        assert norm > 0.1
        reference.step()
    wrapped = mt.DistributedOptimizer(
        torch.optim.SGD(two.parameters(), lr=0.5),
        backward_passes_per_step=2,
        max_norm=0.1,
        strategy=strategy,
    )
    x, y = mine(rank, x, y)
    calls = strategy.communication_statistics().calls
    before = bytes_of(two)
    train(torch, two, wrapped, [(x[:4], y[:4])])
    assert wrapped.passes == 1
    assert bytes_of(two) == before
    assert strategy.communication_statistics().calls == calls
    train(torch, two, wrapped, [(x[4:], y[4:])])
    assert wrapped.passes == 0
    assert bytes_of(two) != before
    for _ in range(2):
        train(torch, two, wrapped, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert_equal_on_all(two)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_clipping_after_synchronize(strategy, rank, torch, mt, caplog, passes, overlap):
    """A loop of DistributedDataParallel, in which the program clips."""
    x, y = make_rows(torch)
    one, two = make_model(torch), make_model(torch)
    reference = torch.optim.SGD(one.parameters(), lr=0.5)
    wrapped = mt.DistributedOptimizer(
        torch.optim.SGD(two.parameters(), lr=0.5),
        backward_passes_per_step=passes,
        strategy=strategy,
        overlap=overlap,
    )
    own = mine(rank, x, y)
    for _ in range(3):
        reference.zero_grad()
        loss_of(torch, one, x, y).backward()
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        reference.step()
        for part in range(passes):
            wrapped.zero_grad()
            rows = slice(part, None, passes)
            loss_of(torch, two, *(a[rows] for a in own)).backward()
            wrapped.synchronize()
            wrapped.synchronize()  # is done already
            if part + 1 == passes:
                found = torch.nn.utils.clip_grad_norm_(two.parameters(), 0.1)
                torch.testing.assert_close(found, norm)
            wrapped.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert_equal_on_all(two)
    wait_for_reports()
    assert "synchronize" not in caplog.text


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_left_out_after_synchronize(strategy, rank, torch, mt, overlap):
    """As a GradScaler does, in a loop that calls the module's zero_grad."""
    model = torch.nn.Linear(3, 1)
    mt.broadcast_parameters(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = mt.DistributedOptimizer(optimizer, strategy=strategy, overlap=overlap)
    for number in range(4):
        model.zero_grad()
        model(torch.full((1, 3), float(rank + number))).sum().backward()
        wrapped.synchronize()
        assert model.weight.grad.tolist() == [[number + 0.5] * 3]
        if number != 1:
            wrapped.step()
    mt.check_in_sync(model, strategy=strategy)


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("overlap", [False, None, True])
def test_clipping_of_what_is_not_reduced_is_told(
    strategy, rank, torch, mt, caplog, overlap, data
):
    model = make_model(torch)
    wrapped = mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), strategy=strategy, overlap=overlap
    )
    for _ in range(3):
        wrapped.zero_grad()
        loss_of(torch, model, *mine(rank, *make_rows(torch))).backward()
        if data:  # which torch does not count
            for p in model.parameters():
                p.grad.data.clamp_(-1e-3, 1e-3)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        wrapped.step()
    wait_for_reports()
    if rank == 0:
        assert caplog.text.count("`optimizer.synchronize()` before the change") == 1


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_in_shared_memory_are_accumulated_there(
    strategy, rank, torch, mt, kept
):
    # Larger than what is sent with a header.
    weight = torch.nn.Parameter(torch.zeros(1 << 16, dtype=torch.float64))
    wrapped = mt.DistributedOptimizer(torch.optim.SGD([weight], 1.0), strategy=strategy)
    for step in range(1, 4):
        wrapped.zero_grad(set_to_none=not kept)
        address = None if weight.grad is None else weight.grad.data_ptr()
        ((rank + 1.0) * step * weight).sum().backward()
        if kept and address is not None:
            assert weight.grad.data_ptr() == address
        wrapped.step()
    assert (
        everywhere(weight.detach().numpy().tobytes())
        == [np.full(1 << 16, -1.5 * 6).tobytes()] * 2
    )


def test_optimizer_state_of_rank_0(strategy, rank, torch, mt):
    model = make_model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + rank)
    if rank == 0:
        train(torch, model, optimizer, [make_rows(torch)] * 2)
    wrapped = mt.DistributedOptimizer(optimizer, strategy=strategy)
    mt.broadcast_optimizer_state(wrapped, strategy=strategy)
    assert optimizer.param_groups[0]["lr"] == 0.1
    texts = everywhere(repr(optimizer.state_dict()))
    assert texts[0] == texts[1]
    assert len(optimizer.state) == 4


def test_check_in_sync(strategy, rank, torch, mt):
    model = make_model(torch)
    mt.check_in_sync(model, strategy=strategy)
    if rank == 1:
        with torch.no_grad():
            model[2].bias[1] += 1e-15
    for text in raises_everywhere(
        mpidist.OutOfSyncError, lambda: mt.check_in_sync(model, strategy=strategy)
    ):
        assert "'2.bias' on rank 1, compared with rank 0" in text
        assert "'0.weight'" not in text


def test_a_number_of_bfloat16_for_tensorboard(torch, tmp_path):
    with mpidist.summary.create_file_writer(tmp_path).as_default(step=1):
        assert mpidist.summary.scalar("x", torch.tensor(2.5, dtype=torch.bfloat16))


def test_all_reduce_at_program_level(strategy, rank, torch, mt):
    metrics = {
        "loss": torch.tensor(1.0 + rank, requires_grad=True),
        "right": [torch.tensor([rank, 5]), torch.tensor([rank > 0])],
    }
    given = metrics["right"][0]
    assert mt.all_reduce(metrics["loss"], "MEAN", strategy=strategy).item() == 1.5
    with strategy.scope():
        assert mt.all_reduce(metrics["right"][:1], mpidist.ReduceOp.SUM)[0] is given
    assert given.tolist() == [1, 10]
    half = torch.full((2,), 0.5 + rank, dtype=torch.bfloat16)
    strategy.run(lambda: mt.all_reduce(half, "MAX"))
    assert half.tolist() == [1.5, 1.5]
    texts = raises_everywhere(
        TypeError, lambda: mt.all_reduce([given, 1.0], "SUM", strategy=strategy)
    )
    assert "write `torch.as_tensor(x)`" in texts[0]
    raises_everywhere(TypeError, lambda: mt.all_reduce(given, "SUM", strategy="all"))
    texts = raises_everywhere(
        TypeError, lambda: mt.all_reduce({"n": given}, "MEAN", strategy=strategy)
    )
    assert "write `x.float()` (it is the leaf ['n'])" in texts[0]
    average = torch.distributed.ReduceOp.AVG
    product = torch.distributed.ReduceOp.PRODUCT
    for op, name in ((average, "MEAN"), (product, "PROD")):
        texts = raises_everywhere(
            TypeError, lambda op=op: mt.all_reduce(half, op, strategy=strategy)
        )
        assert f'write "{name}"' in texts[0]
    expanded = torch.ones(1).expand(2) if rank else torch.ones(2)
    opaque = torch.ones(2).to_mkldnn() if rank else torch.ones(2)
    for call, line in (
        (lambda: mt.all_reduce(expanded, "SUM", strategy=strategy), "x.clone()"),
        (lambda: mt.broadcast_parameters({"x": expanded}, strategy=strategy), "clone"),
        (lambda: mt.all_reduce(opaque, "SUM", strategy=strategy), "x.to_dense()"),
    ):
        assert line in raises_everywhere(TypeError, call)[1]
    with torch.inference_mode():
        loss = torch.ones(2) + rank
    assert mt.all_reduce(loss, "SUM", strategy=strategy).tolist() == [3, 3]
    text = remedies.missing_name("mpidist.torch", "", "get_rank").args[0]
    assert "`strategy.replica_id`" in text
    text = remedies.missing_name("mpidist.torch", "", "all_gather").args[0]
    assert "`strategy.gather(strategy.run(lambda: value), axis=0)` outside" in text


def test_a_state_and_groups_that_the_program_replaces(strategy, torch, mt):
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=1.0)
    wrapped = mt.DistributedOptimizer(sgd, strategy=strategy)
    for number, expected in enumerate([-1, -3, -4, -4.5]):
        if number == 2:
            wrapped.state = collections.defaultdict(dict)
        if number == 3:
            wrapped.param_groups = [{**sgd.param_groups[0], "lr": 0.25}]
        weight.grad = torch.ones(1)
        wrapped.step()
        assert weight.item() == expected


def test_a_state_that_is_loaded_between_two_passes(strategy, torch, mt):
    weight = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.0)
    wrapped = mt.DistributedOptimizer(
        sgd, strategy=strategy, backward_passes_per_step=2
    )
    for loads in (True, False, False):
        weight.sum().backward()
        wrapped.step()
        if loads:
            wrapped.load_state_dict(wrapped.state_dict())
            assert weight.grad is None
            assert wrapped.passes == 0
    assert weight.grad.tolist() == [1.0]  # the mean of the two passes after it


def test_notes_on_errors_of_programs_for_process_groups(torch):
    distributed, data = torch.distributed, torch.utils.data.distributed
    for call, text in (
        (lambda: data.DistributedSampler([0]), "num_replicas=..., rank=..."),
        (lambda: distributed.all_reduce(torch.ones(1)), "mpidist.torch.all_reduce("),
        (lambda: distributed.init_process_group("gloo"), "`strategy.replica_id`"),
        (lambda: os.environ["LOCAL_RANK"], "`strategy.replica_id`"),
        (lambda: torch.nn.Linear(1, 1).module, "leave out `.module`"),
    ):
        with pytest.raises((AttributeError, KeyError, ValueError)) as caught:
            call()
        hints.add_hint(caught.value)
        assert text in caught.value.__notes__[-1]


def test_parameters_that_differ_before_the_first_step(strategy, rank, torch, mt):
    model = make_model(torch, seed=rank)
    wrapped = mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        strategy=strategy,
    )
    loss_of(torch, model, *mine(rank, *make_rows(torch))).backward()
    before = bytes_of(model)
    for text in raises_everywhere(mpidist.OutOfSyncError, wrapped.step):
        assert "'2.bias' on rank 1, compared with rank 0" in text
        assert "`mpidist.torch.broadcast_parameters(module)`" in text
    assert bytes_of(model) == before
    mt.broadcast_parameters(model, strategy=strategy)
    wrapped.step()
    mt.check_in_sync(model, strategy=strategy)


def test_models_that_differ(strategy, rank, torch, mt):
    model = torch.nn.Linear(4, 3 + rank)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for call in (mt.all_reduce_gradients, mt.broadcast_parameters, mt.check_in_sync):
        for text in raises_everywhere(
            mpidist.CollectiveMismatchError,
            lambda call=call: call(model, strategy=strategy),
        ):
            assert "float32 (3, 4)" in text
            assert "float32 (4, 4)" in text


def test_wrong_arguments(strategy, rank, torch, mt):
    model = make_model(torch)
    x = torch.ones(2)
    sgd = torch.optim.SGD(model.parameters())
    reduce = functools.partial(mt.all_reduce_gradients, strategy=strategy)
    broadcast = functools.partial(mt.broadcast_parameters, strategy=strategy)
    wrap = functools.partial(mt.DistributedOptimizer, strategy=strategy)
    share_state = functools.partial(mt.broadcast_optimizer_state, strategy=strategy)
    sizes = torch.optim.SGD([x, x.clone()][: 2 - rank])  # of the group, on each rank
    two_passes = wrap(sgd, backward_passes_per_step=2)
    grown = torch.nn.Linear(2, 1, bias=False)
    mt.broadcast_parameters(grown, strategy=strategy)
    grown(x).backward()
    grown.weight.data = torch.ones(3, 2)

    def merge():
        context = mpidist.get_replica_context()
        context.merge_call(lambda _: mt.all_reduce_gradients(model))

    bad = rank == 1  # on this rank alone
    an_optimizer = "a `torch.optim.Optimizer`"
    for kind, message, call in [
        (TypeError, "module.parameters()", lambda: reduce(x if bad else model)),
        (ValueError, "MEAN or SUM", lambda: reduce(model, "MAX" if bad else "SUM")),
        (ValueError, "no parameter requires", lambda: reduce([])),
        (ValueError, "but the parameter (3, 2)", lambda: reduce(grown)),
        (ValueError, "from 0 to 1, got 2", lambda: broadcast(model, 2 if bad else 0)),
        (TypeError, "to be an int", lambda: broadcast(model, "0")),
        (TypeError, "a dict of tensors by name", lambda: broadcast([x])),
        (RuntimeError, "no strategy is active", lambda: mt.all_reduce_gradients(model)),
        (RuntimeError, "inside merge_fn", lambda: strategy.run(merge)),
        (TypeError, an_optimizer, lambda: wrap(model)),
        (TypeError, "already", lambda: wrap(wrap(sgd))),
        (ValueError, "1 or more", lambda: wrap(sgd, backward_passes_per_step=0)),
        (ValueError, "to be above 0", lambda: wrap(sgd, max_norm=0)),
        (TypeError, "overlap", lambda: wrap(sgd, overlap="yes")),
        (ValueError, "accumulate inside", lambda: two_passes.step(x.sum)),
        (TypeError, an_optimizer, lambda: share_state(model)),
        (ValueError, "doesn't match the size", lambda: share_state(sizes)),
        (TypeError, "cannot be pickled", lambda: copy.deepcopy(wrap(sgd))),
        (TypeError, "`optimizer.state_dict()`", lambda: pickle.dumps(wrap(sgd))),
    ]:
        for text in raises_everywhere(kind, call):
            assert message in text
    mt.all_reduce_gradients(list(model.parameters()), strategy=strategy)


def test_the_optimizer_keeps_the_strategy_of_its_scope(strategy, rank, torch, mt):
    model = make_model(torch)
    with strategy.scope():
        kept = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0))
        mt.broadcast_parameters(model, root_rank=0)
        mt.broadcast_optimizer_state(kept, root_rank=0)
    outside = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float(rank))
    kept.step()  # after the scope
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old - 0.5)
    raises_everywhere(RuntimeError, outside.step)


def test_keywords_of_horovod(strategy, torch, mt):
    model = make_model(torch)
    x = torch.ones(1)
    assert mt.all_reduce(x, "SUM", group=None, async_op=False, strategy=strategy) == 2
    sgd = torch.optim.SGD(model.parameters(), 1.0)
    assert mt.DistributedOptimizer(sgd, num_groups=3, compression=None).passes == 0
    for call, text in (
        (lambda: mt.broadcast_parameters(model, root_rank=1), "write `root=1`"),
        (lambda: mt.broadcast_optimizer_state(sgd, root_rank=1), "load it on rank 0"),
        (lambda: mt.DistributedOptimizer(sgd, compression=1), 'compression="fp16"'),
        (lambda: mt.DistributedOptimizer(sgd, process_set=1), "`strategy=`"),
        (lambda: mt.DistributedOptimizer(sgd, sparse_as_dense=True), "sparse=False"),
        (lambda: mt.DistributedOptimizer(model), "torch.optim.Adam(model.parameters()"),
        (lambda: mt.broadcast_parameters(model, src=1), "write `root=1`"),
        (lambda: mt.all_reduce(x, "SUM", group=1), "`strategy=`"),
        (lambda: mt.all_reduce(x, "SUM", async_op=True), "all_reduce_async"),
    ):
        for message in raises_everywhere(TypeError, call):
            assert text in message


def test_names_of_horovod(mt):
    """Of programs that begin with ``import mpidist.torch as hvd``."""
    for name, remedy in remedies.tables()["names"]["mpidist.torch"].items():
        with pytest.raises(AttributeError) as caught:
            getattr(mt, name)
        assert remedy in str(caught.value)


def test_seeds(strategy, rank, torch, mt):
    generator = mpidist.seed_all(7, strategy=strategy)
    rows = everywhere((float(torch.rand(())), float(generator.random())))
    assert rows[0][1] != rows[1][1]


@pytest.mark.parametrize("kind", ["in step", "overlap", "sharded"])
def test_parameters_in_another_layout(strategy, rank, torch, mt, tmp_path, kind):
    """torch's fused optimizers read memory in its order, not by the strides."""
    rows = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    rows = rows.to(memory_format=torch.channels_last)

    def train(wrap, rows, steps=3):
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        optimizer = wrap(model.parameters())
        for _ in range(steps):
            go_on(model, optimizer, rows)
        return model, optimizer

    def go_on(model, optimizer, rows):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    def fused(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, fused=True)

    def wrapped(parameters):
        if kind != "sharded":
            return mt.DistributedOptimizer(fused(parameters), overlap=kind == "overlap")
        settings = {"optimizer_class": torch.optim.AdamW, "lr": 0.1, "fused": True}
        zero = mt.ZeroRedundancyOptimizer(parameters, **settings)
        return mt.DistributedOptimizer(zero)

    def weights(model):
        return pytest.approx(model.weight.detach().numpy(), abs=1e-5)

    one, single = train(fused, rows)
    with strategy.scope():
        model, optimizer = train(wrapped, rows[rank::2])
        assert model.weight.detach().numpy() == weights(one)
        assert model.weight.grad.stride() == model.weight.stride()

        path = mpidist.Checkpoint(x=optimizer).save(tmp_path / "run")
        state = optimizer.state_dict()  # collective if it is sharded
        restored = train(wrapped, rows, 0)[1]
        mpidist.Checkpoint(x=restored).restore(path)
    loaded = fused(model.parameters())
    loaded.load_state_dict(state)
    go_on(one, single, rows)
    go_on(model, loaded, rows)
    assert model.weight.detach().numpy() == weights(one)
    for p, entries in restored.state.items():
        if entries["exp_avg"].shape == p.shape:  # not a part
            assert entries["exp_avg"].stride() == p.stride()


def test_the_state_of_an_optimizer_in_another_layout(strategy, rank, torch, mt):
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    adam = torch.optim.Adam(conv.parameters())
    if rank == 0:
        conv(torch.ones(2, 3, 4, 4)).sum().backward()
        adam.step()
    mt.broadcast_optimizer_state(adam, strategy=strategy)
    assert adam.state[conv.weight]["exp_avg"].stride() == conv.weight.stride()
    other = torch.optim.SGD(conv.parameters()) if rank else adam
    for given, error in (
        (other, mpidist.CollectiveMismatchError),
        (None if rank else adam, TypeError),
    ):
        raises_everywhere(
            error, lambda x=given: mt.broadcast_optimizer_state(x, strategy=strategy)
        )


def make_counting(torch):
    class Counting(torch.optim.SGD):
        """It has a state that is of no parameter, and one that is no dictionary."""

        def step(self, closure=None):
            super().step()
            self.state["calls"] = self.state.get("calls", 0) + 1
            for p in self.param_groups[0]["params"]:
                self.state[p] = torch.ones_like(p)

    return Counting


def test_states_that_are_no_dictionary(strategy, rank, torch, mt, tmp_path):
    p = torch.nn.Parameter(torch.ones(3, 2).t())
    optimizer = make_counting(torch)([p], lr=0.1)
    p.grad = torch.ones_like(p)
    for _ in range(3 - rank):
        optimizer.step()
    mt.broadcast_optimizer_state(optimizer, strategy=strategy)
    assert optimizer.state["calls"] == 3
    assert optimizer.state[p].stride() == p.stride()

    same_path = everywhere(str(tmp_path))[0]
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(optimizer=optimizer)
        checkpoint.save(f"{same_path}/a")
        optimizer.step()
        checkpoint.restore(f"{same_path}/a")
    assert optimizer.state["calls"] == 3
    assert optimizer.state[p].stride() == p.stride()
    assert optimizer.state[p].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Adam", "sharded NAdam"])
def test_the_dtypes_of_a_state(strategy, rank, torch, mt, tmp_path, kind, dtype):
    """torch makes all of it the dtype of the parameter."""

    def make():
        p = torch.nn.Parameter(torch.ones(5, dtype=getattr(torch, dtype)))
        cls = getattr(torch.optim, kind.split()[-1])
        if "sharded" not in kind:
            return p, cls([p], lr=0.01)
        return p, mt.ZeroRedundancyOptimizer([p], cls, lr=0.01, strategy=strategy)

    def step(p, optimizer, times=1):
        for i in range(times):
            p.grad = torch.arange(1, 6, dtype=p.dtype) / 7 + i
            optimizer.step()

    def text(optimizer):
        leaves = nest.flatten(optimizer.state_dict()["state"])[0]
        return repr([(x.dtype, x.tolist()) for x in leaves if torch.is_tensor(x)])

    p, optimizer = make()
    step(p, optimizer, 3)
    expected = text(optimizer)
    if "sharded" not in kind:
        other = optimizer if rank == 0 else make()[1]
        mt.broadcast_optimizer_state(other, strategy=strategy)
        assert everywhere(text(other)) == [expected] * 2

    same_path = everywhere(str(tmp_path))[0]
    q, restored = make()
    with strategy.scope():
        mpidist.Checkpoint(p=p, optimizer=optimizer).save(f"{same_path}/a")
        mpidist.Checkpoint(p=q, optimizer=restored).restore(f"{same_path}/a")
    assert text(restored) == expected
    step(p, optimizer, 3)
    step(q, restored, 3)
    assert text(restored) == text(optimizer)
    assert torch.equal(p, q)


def test_a_loss_of_no_rows_has_a_gradient(strategy, torch, mt):
    losses = torch.ones(3, requires_grad=True) * torch.tensor(float("nan"))
    losses.retain_grad()
    share = mpidist.compute_average_loss(losses, global_batch_size=0)
    share.backward()
    assert share.item() == 0
    assert losses.grad.tolist() == [0.0] * 3
    with pytest.raises(TypeError, match=r"torch\.stack\(losses\)"):
        mpidist.compute_average_loss([losses[0], losses[1]])


def test_the_share_of_a_penalty_has_a_gradient(strategy, size, torch, mt):
    w = torch.tensor([1.0, 2.0], requires_grad=True)

    def step():
        share = mpidist.scale_regularization_loss(w**2)
        share.backward()
        return share.item()

    share = strategy.reduce("SUM", strategy.run(step), axis=None)
    assert share == pytest.approx(5.0)
    assert w.grad.tolist() == pytest.approx([2 / size, 4 / size])


@pytest.mark.parametrize("wraps", [False, True])
def test_a_grad_scaler_is_told_what_to_do(strategy, rank, torch, mt, wraps):
    model = make_model(torch).float()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mt.DistributedOptimizer(inner, strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = mine(rank, *make_rows(torch))

    def backward(value):
        loss = loss_of(torch, model, x.float(), y) * value
        used.zero_grad()
        scaler.scale(loss).backward()

    used = optimizer
    backward(1.0)
    messages = raises_everywhere(TypeError, lambda: scaler.step(optimizer))
    assert all("`optimizer.synchronize()` after each" in text for text in messages)
    clips = mt.DistributedOptimizer(inner, max_norm=1.0, strategy=strategy)
    for text in raises_everywhere(TypeError, lambda: scaler.step(clips)):
        assert "`torch.nn.utils.clip_grad_norm_` after `scaler.unscale_`" in text
    used = optimizer if wraps else inner
    before = bytes_of(model)
    for value in (1.0, float("inf") if rank == 1 else 1.0):
        scale = scaler.get_scale()
        backward(value)
        if wraps:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            mt.all_reduce_gradients(model, strategy=strategy)
        scaler.step(used)
        scaler.update()
        assert_equal_on_all(model)
        if value == 1.0 and scaler.get_scale() == scale:
            assert bytes_of(model) != before
            before = bytes_of(model)
    assert bytes_of(model) == before
    assert everywhere(scaler.get_scale()) == [2.0, 2.0]


@pytest.mark.parametrize("overlap", [False, True])
def test_learning_rates_that_differ_are_told(
    strategy, rank, torch, mt, caplog, overlap
):
    """As those of ReduceLROnPlateau, by a loss of each rank."""
    model = make_model(torch)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = mt.DistributedOptimizer(inner, strategy=strategy, overlap=overlap)
    for number in range(9):  # compared after 1, 2, 4 and 8 steps
        inner.param_groups[0]["lr"] = 0.1 + (rank if number == 2 else 0)
        train(torch, model, wrapped, [mine(rank, *make_rows(torch))])
    wait_for_reports()
    if rank == 0:
        assert caplog.text.count("before the first of") == 1
        assert "before the first of 4 steps" in caplog.text
        assert "ReduceLROnPlateau" in caplog.text


def test_all_reduce_gradients_compares_parameters(strategy, rank, torch, mt, caplog):
    model = make_model(torch, seed=rank)
    loss_of(torch, model, *mine(rank, *make_rows(torch))).backward()
    reduce = lambda: mt.all_reduce_gradients(model, strategy=strategy)  # noqa: E731
    for text in raises_everywhere(mpidist.OutOfSyncError, reduce):
        assert "`mpidist.torch.broadcast_parameters(module)`" in text
    mt.broadcast_parameters(model, strategy=strategy)
    for _ in range(5):
        reduce()
    wait_for_reports()
    assert "differ" not in caplog.text


@pytest.mark.parametrize("way", ["step", "overlap", "gradients"])
def test_modules_do_not_get_the_errors_of_each_other(on_nodes, size, torch, mt, way):
    """With `error_feedback`, though their parameters have the same names and shapes."""
    strategy = on_nodes(compression="fp16", error_feedback=True)
    large, small = (torch.nn.Linear(50_000, 1, bias=False) for _ in range(2))
    values = torch.arange(50_000.0) * 1e4
    optimizers = {}
    for model in (large, small):
        mt.broadcast_parameters(model, strategy=strategy)
        inner = torch.optim.SGD(model.parameters(), 0.0)
        wrap = functools.partial(mt.DistributedOptimizer, inner, strategy=strategy)
        optimizers[model] = wrap(overlap=way == "overlap")
    for model, x in ((large, values), (small, torch.ones(50_000))) * 2:
        optimizers[model].zero_grad()
        model(x).backward()
        if way == "gradients":
            mt.all_reduce_gradients(model, strategy=strategy)
        else:
            optimizers[model].step()
        np.testing.assert_allclose(model.weight.grad[0], x, rtol=1e-3)


def test_groups_that_reduce_the_same_gradients_count_apart(
    strategy, rank, torch, mt, new_strategy
):
    model = make_model(torch)
    alone = new_strategy(comm=split(rank))
    for _ in range(4):
        loss_of(torch, model, *mine(rank, *make_rows(torch))).backward()
        if rank == 0:
            mt.all_reduce_gradients(model, strategy=alone)
        mt.all_reduce_gradients(model, strategy=strategy)
    grads = {str(i): p.grad for i, p in enumerate(model.parameters())}
    mt.check_in_sync(grads, strategy=strategy)


def test_a_module_used_twice_under_reentrant_checkpointing(strategy, rank, torch, mt):
    """Its gradients are ready twice in a pass."""
    model = make_model(torch)
    part = torch.nn.Linear(3, 3).double()
    mt.broadcast_parameters(part, strategy=strategy)
    optimizer = mt.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), *part.parameters()], lr=0.1),
        backward_passes_per_step=2,
        strategy=strategy,
    )
    before = part.weight.detach().clone()
    for number in range(2):
        y = model(mine(rank, *make_rows(torch))[0])
        for _ in range(2):
            y = torch.utils.checkpoint.checkpoint(part, y, use_reentrant=True)
        y.sum().backward()
        optimizer.step()
        assert optimizer.passes == 1 - number
    assert not torch.equal(part.weight, before)


def test_passes_as_in_horovod(strategy, rank, torch, mt):
    """There `step` comes once after k passes, and is always made."""
    model = make_model(torch)
    optimizer = mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        backward_passes_per_step=2,
        strategy=strategy,
    )
    optimizer.zero_grad()
    for _ in range(2):
        loss_of(torch, model, *mine(rank, *make_rows(torch))).backward()
    for text in raises_everywhere(ValueError, optimizer.step):
        assert "leave backward_passes_per_step out" in text
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for text in raises_everywhere(TypeError, lambda: scaler.step(optimizer)):
        assert "after the last of 2 passes" in text
    with pytest.raises(AttributeError, match="leave it out"):
        optimizer.skip_synchronize  # noqa: B018
    with pytest.raises(AttributeError, match="only `optimizer"):
        optimizer.no_sync  # noqa: B018
    with pytest.raises(AttributeError, match=r"'SGD' object has no attribute 'other'$"):
        optimizer.other  # noqa: B018


class Perturbing:
    """Methods of an optimizer that takes two gradients for a step (SAM)."""

    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.data.clone()
            p.data.add_(p.grad, alpha=0.01)

    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["before"].sub(p.grad, alpha=0.1)

    def step(self, closure):
        self.first_step()
        closure()
        self.second_step()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("synchronizes", [False, True])
def test_other_methods_of_an_optimizer(
    strategy, rank, torch, mt, caplog, closure, synchronizes
):
    model = make_model(torch)
    kind = type("Sam", (Perturbing, torch.optim.Optimizer), {})
    optimizer = mt.DistributedOptimizer(kind(model.parameters(), {}), strategy=strategy)

    def backward():
        optimizer.zero_grad()
        loss = loss_of(torch, model, *mine(rank, *make_rows(torch)))
        loss.backward()
        return loss

    for _ in range(3):
        for name in ("first_step", "second_step"):
            backward()
            if synchronizes:
                optimizer.synchronize()
            if closure:
                optimizer.step(backward)
                break
            getattr(optimizer, name)()
    wait_for_reports()
    if synchronizes or closure:
        assert "differ" not in caplog.text
        mt.check_in_sync(model, strategy=strategy)
    if rank == 0:
        told = not (closure or synchronizes)
        assert caplog.text.count("of Sam gets this rank's own") == told


def test_calls_that_are_begun(strategy, torch, rank, size):
    """Tensors of all kinds, alone and in a nest, as of the calls that are made."""

    def tree():
        return {
            "b16": torch.full((3, 4), 1.5 + rank, dtype=torch.bfloat16),
            "f32": [torch.arange(50_000.0) * (rank + 1), torch.tensor(2.0)],
            "i64": (torch.arange(3), 1.0),
        }

    def step():
        ctx = mpidist.get_replica_context()
        alone = torch.ones(7, dtype=torch.bfloat16)
        handles = [
            ctx.all_reduce_async("SUM", tree()),
            ctx.all_reduce_async("MEAN", alone),
            ctx.all_gather_async({"x": torch.full((rank + 1, 2), rank)}, 0),
        ]
        found = [handle.result() for handle in handles]
        expected = [
            ctx.all_reduce("SUM", tree()),
            ctx.all_reduce("MEAN", alone),
            ctx.all_gather({"x": torch.full((rank + 1, 2), rank)}, 0),
        ]
        return nest.flatten(found)[0], nest.flatten(expected)[0]

    kept = []
    strategy.run(lambda: kept.append(step()))
    for x, y in zip(*kept[0], strict=True):
        assert type(x) is type(y)
        if isinstance(x, torch.Tensor):
            assert x.dtype is y.dtype
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))
    kinds = [getattr(x, "dtype", None) for x in kept[0][0]]
    assert kinds.count(torch.bfloat16) == 2
    assert kinds.count(torch.int64) == 2
