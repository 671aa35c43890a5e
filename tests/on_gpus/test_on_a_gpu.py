"""What only a GPU shows: real kernels, streams and errors, NCCL, torch and JAX.

`launch/gpu-check` runs it. Ranks may share a GPU (`one_gpu`).
"""

import numpy as np
import pytest
from replicas import all_reduce, context, everywhere, local, outcomes

import mpidist

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

LATE = 200  # products of matrices, some 10 ms


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(params=["STAGED", "DIRECT", "NCCL"])
def strategy(request, on_gpus):
    """A strategy with arrays on the GPU, for each way to move them."""
    return on_gpus.get(request.param)


@pytest.fixture
def torch(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    torch.cuda.set_device(cupy.cuda.runtime.getDevice())
    return torch


@pytest.fixture
def jax(cupy, monkeypatch):
    # Otherwise each rank takes three quarters of the GPU's memory.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    return jax


def late(xp, x):
    """Return x, by kernels that the GPU has not done when this returns."""
    a = xp.eye(1024, dtype=xp.float32)
    for _ in range(LATE):
        a = a @ a
    return x * a[0, 0]


def test_transport_is_what_was_asked_for(strategy, request):
    wanted = request.node.callspec.params["strategy"].lower()
    if strategy.num_replicas_in_sync > 1:
        assert group_transport(strategy) == wanted


def group_transport(strategy):
    from mpidist._strategy.strategy import group_of

    return group_of(strategy).collectives.resources.transports.device.name


def check_order(strategy, xp, on_gpu, nbytes, host):
    """Let a call begin before its input is there, and let go of all that it used.

    Args:
        xp: CuPy, torch or JAX's NumPy.
        on_gpu: keyword arguments that make an array on the GPU.
        nbytes: of the array.
        host: makes a NumPy array of one.
    """
    rank, size = strategy.replica_id, strategy.num_replicas_in_sync
    a = xp.eye(1024, dtype=xp.float32, **on_gpu)
    other = xp.full((nbytes // 4,), -5, dtype=xp.float32, **on_gpu)
    host(other)  # it is there, and a call with it waits for nothing
    for number in range(3):
        x = xp.full((nbytes // 4,), rank + number, dtype=xp.float32, **on_gpu)
        for _ in range(LATE):
            a = a @ a
        x = x * a[0, 0]
        y = all_reduce(strategy, "SUM", {"a": x, "b": [x[:1] * 1]})
        del x
        # Memory that is free, of the inputs and of the results, is used again.
        again = xp.full((nbytes // 4,), -7, dtype=xp.float32, **on_gpu)
        for _ in range(LATE):
            a = a @ a
        z = (y["a"] * 2 + y["b"][0]) * a[0, 0]
        del y
        others = all_reduce(strategy, "SUM", other)
        total = sum(r + number for r in range(size))
        np.testing.assert_array_equal(host(z), 3 * total)
        np.testing.assert_array_equal(host(others), -5 * size)
        np.testing.assert_array_equal(host(again), -7)


@pytest.mark.parametrize("blocking", [None, True, False])
@pytest.mark.parametrize("nbytes", [4, 2**20, 2**25])
def test_kernels_before_and_after(strategy, cupy, blocking, nbytes):
    """A call waits for the kernels of its stream, and later kernels for its results."""
    stream = cupy.cuda.Stream.null
    if blocking is not None:
        stream = cupy.cuda.Stream(non_blocking=not blocking)
    with stream:
        check_order(strategy, cupy, {}, nbytes, lambda x: x.get())


def test_gather_broadcast_and_merge_call(strategy, cupy, rank, size):
    x = late(cupy, cupy.arange(3 + rank, dtype=cupy.float64) + rank)
    expected = np.concatenate([np.arange(3.0 + r) + r for r in range(size)])
    y = local(strategy, lambda: context().all_gather(x, 0))
    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(y.get(), expected)

    def merge_fn(strategy, x):
        parts = strategy.experimental_local_results(x)
        return cupy.concatenate(parts), mpidist.PerReplica([p * 2 for p in parts])

    whole, own = local(strategy, lambda: context().merge_call(merge_fn, (x,)))
    np.testing.assert_array_equal(whole.get(), expected)
    np.testing.assert_array_equal(own.get(), 2 * x.get())


def test_variables_are_updated_on_the_gpu(strategy, cupy, rank, size):
    with strategy.scope():
        v = mpidist.Variable(np.zeros(1000, np.float32))
        optimizer = mpidist.optimizers.Adam(0.1)

    def step():
        gradient = late(cupy, cupy.full(1000, rank, cupy.float32))
        optimizer.apply_gradients([(gradient, v)])

    for _ in range(3):
        strategy.run(step)
    assert isinstance(v.value(), cupy.ndarray)
    everyone = everywhere(v.numpy()[:3].tobytes())
    assert len(set(everyone)) == 1
    if size > 1:
        np.testing.assert_allclose(v.numpy(), -0.3, rtol=1e-5)


def test_an_error_before_a_call_is_told_to_all(cupy, new_strategy, rank):
    """CuPy refuses the product of such shapes; no kernel runs."""
    strategy = new_strategy(device="gpu", implementation="STAGED")

    def step():
        x = cupy.ones(10)
        if rank == 0:
            x = cupy.ones((2, 3)) @ cupy.ones((2, 3))
        return context().all_reduce("SUM", x)

    raises_everywhere_but(strategy, step)


def raises_everywhere_but(strategy, step):
    rows = outcomes(lambda: strategy.run(step))
    assert rows[0].name == "ValueError"
    assert all("rank 0" in row.text for row in rows[1:]), rows


def test_memory_is_given_back(strategy, cupy):
    """Many calls do not take more and more memory of the GPU."""
    pool = cupy.get_default_memory_pool()
    x = cupy.ones(2**20, cupy.float32)

    def used():
        for _ in range(5):
            all_reduce(strategy, "SUM", [x, x[:7]])
        return pool.used_bytes()

    before = used()
    assert max(used() for _ in range(5)) <= before


# --- torch --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "int64"])
def test_torch_tensors(strategy, torch, rank, size, name):
    dtype = getattr(torch, name)
    x = late(torch_on(torch), torch.ones(3, 4, device="cuda")).to(dtype) * (rank + 1)
    y, whole = local(
        strategy,
        lambda: (context().all_reduce("SUM", x), context().all_gather(x[:1], 0)),
    )
    assert (y.device, y.dtype) == (x.device, dtype)
    assert (y == size * (size + 1) / 2).all()
    assert whole.device == x.device
    assert whole[:, 0].tolist() == [r + 1 for r in range(size)]


def torch_on(torch):
    """Torch with the two functions of `late`, on the GPU."""

    class OnGpu:
        float32 = torch.float32

        @staticmethod
        def eye(n, dtype):
            return torch.eye(n, dtype=dtype, device="cuda")

    return OnGpu


@pytest.mark.parametrize("nbytes", [4, 2**20, 2**25])
def test_streams_of_torch(strategy, torch, nbytes):
    """A call waits for torch's current stream, and torch's kernels for its results."""
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            check_order(
                strategy, torch, {"device": "cuda"}, nbytes, lambda x: x.cpu().numpy()
            )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "sharded"])
def test_training_with_torch(strategy, torch, rank, size, kind, overlap):
    """All ranks have the same weights, those of one process with all rows."""
    import mpidist.torch

    def make():
        torch.manual_seed(0)
        layers = (torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
        return torch.nn.Sequential(*layers).cuda()

    def plain(parameters):
        if kind == "SGD":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=0.01)

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24 * size, 16, generator=generator).cuda()
    y = torch.randn(24 * size, 3, generator=generator).cuda()

    def loss_of(module, rows):
        return torch.nn.functional.mse_loss(module(x[rows]), y[rows])

    one = make()
    optimizer = plain(one.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(one, slice(None)).backward()
        optimizer.step()

    model = make()
    with strategy.scope():
        mpidist.torch.broadcast_parameters(model)
        if kind == "sharded":
            inner = mpidist.torch.ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, lr=0.01
            )
        else:
            inner = plain(model.parameters())
        wrapped = mpidist.torch.DistributedOptimizer(inner, overlap=overlap)
        for _ in range(5):
            wrapped.zero_grad()
            loss_of(model, slice(rank, None, size)).backward()
            wrapped.step()
        mpidist.torch.check_in_sync(model)
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert p.device.type == "cuda"
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4)


def test_checkpoints_of_torch(strategy, torch, tmp_path, rank):
    import mpidist.torch

    model = torch.nn.Linear(5, 4).cuda()
    path = everywhere(str(tmp_path))[0] + "/saved"
    with strategy.scope():
        mpidist.torch.broadcast_parameters(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 5, device="cuda")).sum().backward()
        optimizer.step()
        kept = [p.detach().clone() for p in model.parameters()]
        saved = mpidist.Checkpoint(model=model, optimizer=optimizer).save(path)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        mpidist.Checkpoint(model=model, optimizer=optimizer).restore(saved)
    for p, q in zip(model.parameters(), kept, strict=True):
        assert p.device.type == "cuda"
        assert torch.equal(p, q)


def test_batch_norm_of_torch(strategy, torch, rank, size):
    import mpidist.torch

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8 * size, 6, generator=generator).cuda()
    one = torch.nn.BatchNorm1d(6).cuda()
    one(x).square().sum().backward()
    with strategy.scope():
        norm = mpidist.torch.SyncBatchNorm(6).cuda()
        norm(x[rank::size]).square().sum().backward()
    torch.testing.assert_close(norm.running_mean, one.running_mean)
    torch.testing.assert_close(norm.running_var, one.running_var)


# --- JAX ----------------------------------------------------------------------------


def test_training_with_jax(strategy, jax, rank, size):
    import mpidist.jax

    # Without this products are made of 10 bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    rng = np.random.default_rng(2)
    x = jax.numpy.asarray(rng.normal(size=(24 * size, 8)), jax.numpy.float32)
    y = x[:, :3] * 2
    parameters = {"w": jax.numpy.ones((8, 3)), "b": jax.numpy.zeros(3)}

    def loss(p, x, y):
        return ((x @ p["w"] + p["b"] - y) ** 2).mean()

    alone = jax.jit(jax.value_and_grad(loss))
    shared = mpidist.jax.value_and_grad(loss, strategy=strategy)
    mine = parameters
    for _ in range(5):
        _, gradients = alone(parameters, x, y)
        parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)
        _, gradients = local(
            strategy, lambda p=mine: shared(p, x[rank::size], y[rank::size])
        )
        mine = jax.tree.map(lambda p, g: p - 0.1 * g, mine, gradients)
    for key, p in mine.items():
        assert next(iter(p.devices())).platform == "gpu"
        np.testing.assert_allclose(p, parameters[key], rtol=1e-3, atol=1e-5)
    assert len(set(everywhere(np.asarray(mine["w"]).tobytes()))) == 1


@pytest.mark.parametrize("nbytes", [4, 2**20, 2**25])
def test_arrays_of_jax(strategy, jax, nbytes):
    check_order(strategy, jax.numpy, {}, nbytes, np.asarray)


def test_gathers_of_jax(strategy, jax, size):
    x = jax.numpy.ones((5, 3)) * (strategy.replica_id + 1)
    y, whole = local(
        strategy,
        lambda: (context().all_reduce("SUM", x), context().all_gather(x[:1], 0)),
    )
    assert isinstance(y, jax.Array)
    assert (y == size * (size + 1) / 2).all()
    assert whole[:, 0].tolist() == [r + 1 for r in range(size)]
