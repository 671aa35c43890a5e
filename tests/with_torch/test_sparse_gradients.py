"""Sparse gradients: the rows of all ranks, and the training of one rank on all rows."""

import pytest
from replicas import assert_usable, everywhere, raises_everywhere

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.guests, pytest.mark.replicas(2, 3)]

TABLE, BAGS = 20, 10


def make_model(torch, sparse=True):
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "table": torch.nn.Embedding(TABLE, 4, sparse=sparse),
            "bags": torch.nn.EmbeddingBag(BAGS, 4, mode="sum", sparse=sparse),
            "unused": torch.nn.Embedding(3, 4, sparse=sparse),
            "out": torch.nn.Linear(4, 2),
        }
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def loss_of(torch, model, number, rank):
    """Return a rank's loss: sometimes without rows, or without the bags."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    count = 0 if (number + rank) % 4 == 1 else 6
    rows = torch.randint(TABLE, (count,), generator=generator)
    x = model["table"](rows)
    if number > 1 and (number + rank) % 3 == 0:  # not in the first step
        x = x + model["bags"](torch.full((len(rows), 2), (rank + number) % BAGS))
    return model["out"](x).square().sum()


def optimizers_of(torch, model, kind):
    if kind == "SparseAdam":
        dense = list(model["out"].parameters())
        tables = [p for p in model.parameters() if not any(p is x for x in dense)]
        return [torch.optim.SparseAdam(tables, 0.1), torch.optim.SGD(dense, 0.01)]
    kinds = {"SGD": {"momentum": 0.5}, "Adagrad": {}}
    return [getattr(torch.optim, kind)(model.parameters(), lr=0.01, **kinds[kind])]


def train(optimizers, backward, passes=1, reduce=lambda: None):
    for number in range(6):
        backward(number)
        if number % passes == passes - 1:
            reduce()
            for one in optimizers:
                one.step()
            for one in optimizers:
                one.zero_grad(set_to_none=number < 3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_training_of_one_rank_on_all_rows(
    strategy, rank, size, torch, mt, kind, passes
):
    alone = make_model(torch)
    train(
        optimizers_of(torch, alone, kind),
        lambda n: (
            sum(loss_of(torch, alone, n, r) for r in range(size)) / size / passes
        ).backward(),
        passes,
    )
    results = []
    for overlap in (False, True, None):
        model = make_model(torch)
        optimizers = optimizers_of(torch, model, kind)
        with strategy.scope():
            if overlap is None:
                train(
                    optimizers,
                    lambda n, x=model: (loss_of(torch, x, n, rank) / passes).backward(),
                    passes,
                    lambda x=model: mt.all_reduce_gradients(x),
                )
            else:
                options = {"overlap": overlap, "backward_passes_per_step": passes}
                wrapped = [mt.DistributedOptimizer(x, **options) for x in optimizers]
                train(wrapped, lambda n, x=model: loss_of(torch, x, n, rank).backward())
                planned = [x._overlap._plan is not None for x in wrapped]
                assert planned == [overlap and size > 1] * len(wrapped)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert model["table"].weight.grad.is_sparse
        assert model["bags"].weight.grad.is_sparse
        assert model["unused"].weight.grad is None
        assert not model["out"].weight.grad.is_sparse
        results.append([p.detach().numpy().tobytes() for p in model.parameters()])
    assert results[0] == results[1]
    assert everywhere(results) == [results] * size
    assert_usable(strategy)


def by_hand(torch, p, rows, dims=1):
    """Give a parameter a sparse gradient: a row of ones for each number."""
    p.grad = None
    if rows is not None:
        indices = torch.tensor([rows] * dims, dtype=torch.int64)
        values = torch.ones(len(rows), *p.shape[dims:], dtype=p.dtype)
        p.grad = torch.sparse_coo_tensor(
            indices, values, p.shape, check_invariants=True
        )


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize(("shape", "dims"), [((6,), 1), ((6, 6, 2), 1), ((6, 6, 2), 2)])
def test_layouts_and_dtypes(strategy, rank, size, torch, mt, dtype, shape, dims):
    p = torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))
    for rows in ([rank, 3, 3], [], None if rank else [5]):
        by_hand(torch, p, rows, dims)
        mine = torch.zeros(p.shape) if p.grad is None else p.grad.to_dense()
        total = strategy.run(
            lambda x: mpidist.get_replica_context().all_reduce("SUM", x),
            args=(mine.to(torch.complex128),),
        )
        total = strategy.experimental_local_results(total)[0]
        mt.all_reduce_gradients([p], "SUM", strategy=strategy)
        assert p.grad.is_sparse
        assert torch.equal(p.grad.to_dense().to(torch.complex128), total)
        nonzero = sum(everywhere(len(rows or []))) > 0
        assert (p.grad._nnz() > 0) is nonzero


def test_sparse_on_one_rank_and_dense_on_another(strategy, rank, size, torch, mt):
    """The sum is dense, as torch's own; what all have as rows stays sparse."""
    p, q = (torch.nn.Parameter(torch.zeros(4, 2)) for _ in range(2))
    for number in range(3):
        by_hand(torch, p, [1, rank % 4])
        by_hand(torch, q, [0])
        if rank == size - 1 and number < 2:
            p.grad = p.grad.to_dense()
        mt.all_reduce_gradients([p, q], "SUM", strategy=strategy)
        assert p.grad.is_sparse is (number == 2)
        assert q.grad.is_sparse
        counts = [
            float(size * (k == 1) + sum(r % 4 == k for r in range(size)))
            for k in range(4)
        ]
        assert p.grad.to_dense()[:, 0].tolist() == counts


def test_another_parameter_at_the_place_of_a_table(strategy, rank, size, torch, mt):
    first, table, scale = (torch.nn.Parameter(torch.ones(s)) for s in (3, (4, 2), ()))
    for last in (table, scale):
        first.grad, scale.grad = torch.ones(3), torch.tensor(2.0)
        by_hand(torch, table, [1])
        mt.all_reduce_gradients([first, last], "SUM", strategy=strategy)
    assert table.grad.is_sparse
    assert scale.grad.item() == 2 * size


def test_tables_of_other_shapes(strategy, rank, size, torch, mt):
    p = torch.nn.Parameter(torch.zeros(4, 2))
    for _ in range(2):
        by_hand(torch, p, [1])
        mt.all_reduce_gradients([p], strategy=strategy)
    if size > 1:
        p.data = torch.zeros(4 + (rank == 1), 2)
        by_hand(torch, p, [1])
        call = lambda: mt.all_reduce_gradients([p], strategy=strategy)  # noqa: E731
        kind = mpidist.CollectiveMismatchError
        assert "(4, 2)" in raises_everywhere(kind, call)[0]
    assert_usable(strategy)


def test_all_reduce(strategy, rank, size, torch, mt):
    def make(dtype):
        p = torch.zeros(4, 2, dtype=dtype)
        by_hand(torch, p, [1, rank % 4])
        return p.grad

    given, other = make(torch.float32), torch.ones(2)
    result = mt.all_reduce({"a": given, "b": other}, "MEAN", strategy=strategy)
    assert result["a"] is given
    assert given.is_sparse
    assert float(given.to_dense().sum()) == pytest.approx(4)
    assert other.tolist() == [1, 1]
    whole = make(torch.int64)
    assert mt.all_reduce(whole, "SUM", strategy=strategy).to_dense().sum() == 4 * size
    elements = torch.eye(3).to_sparse()  # not rows
    mt.all_reduce(elements, "SUM", strategy=strategy)
    assert torch.equal(elements.to_dense(), size * torch.eye(3))
    for op, kind, give in (
        ("MAX", TypeError, lambda x: x),
        ("SUM", mpidist.CollectiveMismatchError, lambda x: x if rank else x.to_dense()),
    ):
        if size > 1:
            x = give(make(torch.float32))
            call = lambda x=x, op=op: mt.all_reduce(x, op, strategy=strategy)  # noqa: E731
            raises_everywhere(kind, call)
    assert_usable(strategy)


def test_what_is_refused(strategy, rank, torch, mt):
    model = torch.nn.Embedding(40, 2, sparse=True)
    mt.broadcast_parameters(model, strategy=strategy)
    with strategy.scope():
        zero = mt.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
        sharded = mt.DistributedOptimizer(zero)
    model(torch.tensor([rank])).sum().backward()
    for message in raises_everywhere(TypeError, sharded.step):
        assert "write `torch.nn.Embedding(..., sparse=False)`" in message
    assert_usable(strategy)


def test_clipping_is_that_of_torch(strategy, rank, torch, mt):
    model = torch.nn.Embedding(40, 2, sparse=True)
    mt.broadcast_parameters(model, strategy=strategy)
    with strategy.scope():
        optimizer = mt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), max_norm=1.0
        )
    model(torch.tensor([rank])).sum().mul(10).backward()
    before = model.weight.detach().clone()
    own = torch.nn.Parameter(before.clone())
    own.grad = model.weight.grad.clone()
    try:
        torch.nn.utils.clip_grad_norm_([own], 1.0)
    except NotImplementedError:  # before torch 2.14
        for message in raises_everywhere(NotImplementedError, optimizer.step):
            assert "norm" in message
    else:
        optimizer.step()
        change = (before - model.weight.detach()).norm().item()
        assert change == pytest.approx(1.0, rel=1e-4)
    assert_usable(strategy)
