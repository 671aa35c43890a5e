"""SyncBatchNorm: two ranks do what torch's BatchNorm does with all rows."""

import copy
import pickle

import pytest
from replicas import ON_TWO, everywhere, raises_everywhere

import mpidist

pytestmark = [pytest.mark.guests, *ON_TWO]

# Of rank 0; the others have the rest of 8 rows.
SPLITS = [4, 7, 8]


@pytest.fixture
def norm(torch):
    import mpidist.torch

    return mpidist.torch.SyncBatchNorm


def input_of(torch, shape, dtype=None):
    generator = torch.Generator().manual_seed(3)
    dtype = dtype or torch.float64
    return 100 + 5 * torch.randn(shape, generator=generator).to(dtype)


def rows_of(x, rank, first):
    return x[:first] if rank == 0 else x[first:]


def train(torch, module, x, weights, reduce=lambda x: x):
    """Return outputs of two steps, gradients and state."""
    seen = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        module.zero_grad()
        y = module(x)
        (y.cos() * weights).sum().backward()
        seen += [y.detach(), x.grad]
        seen.append(reduce(torch.cat([p.grad for p in module.parameters()])))
    seen += [module.running_mean, module.running_var]
    return seen


@pytest.mark.parametrize("first", SPLITS)
@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (8, 3, 2, 4)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_it_is_the_batch_norm_of_all_rows(
    strategy, rank, torch, norm, first, shape, momentum
):
    kind = getattr(torch.nn, f"BatchNorm{max(len(shape) - 2, 1)}d")
    own = norm(3, momentum=momentum, strategy=strategy).double()
    one = kind(3, momentum=momentum).double()
    with torch.no_grad():
        for module in (own, one):
            module.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
            module.bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
    x = input_of(torch, shape)
    weights = torch.arange(x.numel()).reshape(shape).double().sin()

    def reduce(gradient):
        context = mpidist.get_replica_context
        return strategy.experimental_local_results(
            strategy.run(lambda: context().all_reduce("SUM", gradient))
        )[0]

    mine, its = (rows_of(t, rank, first) for t in (x, weights))
    got = train(torch, own, mine, its, reduce)
    expected = train(torch, one, x, weights)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        b = rows_of(b, rank, first) if i in (0, 1, 3, 4) else b
        torch.testing.assert_close(a, b)
    assert own.num_batches_tracked == 2
    own.eval()
    one.eval()
    torch.testing.assert_close(own(x), one(x))  # not collective
    for module in (own, one):
        module.running_mean = module.running_var = None
    if rank == 0:
        torch.testing.assert_close(own(x), one(x))


def test_gradients_of_gradients(strategy, rank, torch, norm):
    """As of a gradient penalty: they go through the sums over the ranks again."""
    found = []
    for module in (norm(3, strategy=strategy), torch.nn.BatchNorm1d(3)):
        is_sync = type(module) is norm
        x = input_of(torch, (8, 3)) - 100
        x = (x[rank::2] if is_sync else x).requires_grad_()
        y = module.double()(x).pow(3).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        slope.square().sum().backward()
        found.append(x.grad if is_sync else x.grad[rank::2])
    torch.testing.assert_close(*found)


def test_a_converted_module(strategy, rank, torch, norm):
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.BatchNorm1d(3, eps=0.01))
    )
    old = model[1][0]
    names = list(model.state_dict())
    converted = norm.convert_sync_batchnorm(model, strategy=strategy)
    assert converted is model
    assert type(model[1][0]) is norm
    assert model[1][0].weight is old.weight
    assert model[1][0].running_var is old.running_var
    assert model[1][0].eps == 0.01
    assert list(model.state_dict()) == names
    assert norm.convert_sync_batchnorm(model) is model
    with strategy.scope():
        model(input_of(torch, (8, 3), torch.float32)[rank::2])
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in copies:  # which use the strategy of the scope
            twin(input_of(torch, (8, 3), torch.float32)[rank::2])
    for twin in copies:
        with pytest.raises(RuntimeError, match="no strategy is active"):
            twin(torch.zeros(4, 3))
    alone = norm.convert_sync_batchnorm(torch.nn.BatchNorm2d(4))
    assert type(alone) is norm
    again = torch.nn.BatchNorm1d(3)
    model = torch.nn.Sequential(again, again, torch.nn.Sequential(again))
    norm.convert_sync_batchnorm(model)
    assert type(model[0]) is norm
    assert model[0] is model[1]
    assert model[0] is model[2][0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo looks at
def test_torch_compiles_what_is_around_it(strategy, rank, torch, norm):
    """And does not trace mpidist."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(x):
        y = module(x + 1) * 2
        y.sum().backward()
        return y

    module = norm(3, strategy=strategy)
    x = input_of(torch, (8, 3), torch.float32)[rank::2].requires_grad_()
    torch.testing.assert_close(torch.compile(step, backend=backend)(x), step(x))
    assert len(graphs) == 2


def test_float16_and_autocast(strategy, rank, torch, norm):
    module = norm(3, affine=False, track_running_stats=False, strategy=strategy)
    x = input_of(torch, (8, 3), torch.bfloat16)
    y = module(x[rank::2])
    assert y.dtype == torch.bfloat16
    both = torch.cat(everywhere(y))
    torch.testing.assert_close(
        both.float().mean(0), torch.zeros(3), atol=0.02, rtol=0.02
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x[rank::2].float()).dtype == torch.float32


def test_what_is_refused(strategy, rank, torch, norm):
    module = norm(3, strategy=strategy)
    wrong = raises_everywhere(ValueError, lambda: module(torch.zeros(4, 3 + rank)))
    assert all("expected input of shape (rows, 3, ...)" in text for text in wrong)
    numbers = torch.zeros(4, 3).to(torch.int64 if rank else torch.float32)
    for given in (numbers, None if rank else numbers):
        text = raises_everywhere(TypeError, lambda given=given: module(given))[0]
        assert "SyncBatchNorm: expected a tensor of floating-point numbers" in text
    single = raises_everywhere(ValueError, lambda: module(torch.zeros(1 - rank, 3)))
    assert all("more than 1 value per channel" in text for text in single)
    other = norm(3 + rank, strategy=strategy)
    differs = raises_everywhere(
        mpidist.CollectiveMismatchError, lambda: other(torch.zeros(4, 3 + rank))
    )
    assert all(text.count("(at test_batch_norm.py:") == 2 for text in differs)
    for name in ("eps", "momentum"):
        other = norm(3, strategy=strategy, **{name: 0.5 + rank})
        call = lambda other=other: other(torch.zeros(4, 3))  # noqa: E731
        raises_everywhere(mpidist.CollectiveMismatchError, call, f"{name}=1.5")
    module(torch.arange(12.0).reshape(4, 3))  # the strategy goes on
