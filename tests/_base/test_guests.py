"""torch tensors and JAX arrays in every call: the bits of NumPy, in their own kind."""

import importlib.machinery
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from launching import run_python
from replicas import ON_TWO, SUM, context, make, merge, own, raises_everywhere

import mpidist
from mpidist._base import guests
from mpidist._checkpoints import contents

pytestmark = [pytest.mark.guests, *ON_TWO]

DTYPES = [np.float32, np.float16, np.int32, np.uint8, np.complex64, ml_dtypes.bfloat16]


class Library:
    """One of the libraries, and how its arrays are made and read, not by mpidist."""

    def __init__(self, kind, module):
        self.kind, self.module = kind, module
        self.array_class = module.Tensor if kind == "torch" else module.Array

    def make(self, x):
        x = np.array(x)  # a copy
        if self.kind == "jax":
            return self.module.numpy.array(x)
        if x.dtype == ml_dtypes.bfloat16:
            return self.module.tensor(x.astype(np.float32)).bfloat16()
        return self.module.from_numpy(x)

    def read(self, x):
        """Return the values of one array, after a check of its kind."""
        assert isinstance(x, self.array_class), type(x)
        if self.kind == "jax":
            return np.asarray(x)
        assert not x.requires_grad
        if x.dtype is self.module.bfloat16:
            return x.float().numpy().astype(ml_dtypes.bfloat16)
        return x.numpy()

    def address(self, x):
        return x.data_ptr() if self.kind == "torch" else x.unsafe_buffer_pointer()


@pytest.fixture(params=["torch", "jax"])
def library(request):
    # Not at the top: where tests are collected, but not run, the import would cost.
    return Library(request.param, pytest.importorskip(request.param))


def assert_same(x, y):
    assert x.dtype == y.dtype
    assert x.shape == y.shape
    assert x.tobytes() == y.tobytes()


def in_replica(strategy, function, *args):
    """Return the results of a replica function on this rank."""
    return own_tree(strategy, strategy.run(function, args=args))


def own_tree(strategy, tree):
    return mpidist._base.nest.map_structure(lambda x: own(strategy, x), tree)


def values(dtype, rank, shape=(5, 3)):
    return (np.arange(np.prod(shape)).reshape(shape) % 4 + rank + 1).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(strategy, rank, library, dtype):
    x = values(dtype, rank)
    given = library.make(x)
    ops = ["SUM", "MEAN", "PROD", *(["MIN", "MAX"] * (dtype is not np.complex64))]
    for op in (*ops, *ops):  # the first call makes the plan
        expected, result = in_replica(
            strategy,
            lambda op=op: (
                context().all_reduce(op, x),
                context().all_reduce(op, given),
            ),
        )
        found = library.read(result)
        if library.kind == "jax" and expected.dtype == np.float64:
            expected = expected.astype(np.float32)  # JAX has none, unless enabled
        assert_same(found, expected)
        assert library.address(result) != library.address(given)
    assert_same(library.read(given), x)


def test_nests_with_leaves_of_all_kinds(strategy, rank, library):
    x = values(np.float32, rank)
    tree = {"guest": library.make(x), "host": [x, 2], "scalar": np.float32(rank)}
    result = in_replica(strategy, lambda: context().all_reduce("SUM", tree))
    total = values(np.float32, 0) + values(np.float32, 1)
    assert_same(library.read(result["guest"]), total)
    assert type(result["host"][0]) is np.ndarray
    assert result["host"][1] == 4
    assert type(result["host"][1]) is int
    assert type(result["scalar"]) is np.float32


def test_each_rank_gets_its_own_kind(strategy, rank, library):
    x = values(np.float32, rank)
    given = library.make(x) if rank == 0 else x
    result = in_replica(strategy, lambda: context().all_reduce("SUM", given))
    assert isinstance(result, library.array_class if rank == 0 else np.ndarray)
    assert_same(np.asarray(result), values(np.float32, 0) + values(np.float32, 1))


@pytest.mark.parametrize("shape", [(), (0, 3), (1 << 18,)], ids=str)
def test_shapes(strategy, rank, library, shape):
    x = np.full(shape, rank + 1, np.float32)
    given = library.make(x)
    result = in_replica(strategy, lambda: context().all_reduce("SUM", given))
    assert_same(library.read(result), np.full(shape, 3, np.float32))


def test_memory_is_shared_in_both_directions(library):
    given = library.make(np.zeros(1 << 12, np.float32))
    view = guests.as_view(given, library.kind, "test")
    assert view.ctypes.data == library.address(given)
    raw = np.zeros((4 << 12) + 64, np.uint8)
    start = -raw.ctypes.data % 64  # where XLA takes memory without a copy
    host = raw[start : start + (4 << 12)].view(np.float32)
    assert library.address(guests.restore(host, library.kind)) == host.ctypes.data


def test_empty_tensors_are_not_on_the_default_device_of_torch(torch):
    with torch.device("meta"):
        assert guests.restore(np.zeros((0, 3)), "torch").device.type == "cpu"


@pytest.mark.parametrize("name", ["transposed", "expanded", "conj", "neg", "parameter"])
def test_tensors_that_are_views(strategy, rank, torch, name):
    base = torch.arange(6.0).reshape(2, 3) + rank
    lazy = (base + 2j * base).conj()
    tensor = {
        "transposed": base.T,
        "expanded": base[:1].expand(4, 3),
        "conj": lazy,
        "neg": lazy.imag,
        "parameter": torch.nn.Parameter(base),
    }[name]
    plain = tensor.detach().resolve_conj().resolve_neg().numpy()
    expected, result, rows = in_replica(
        strategy,
        lambda: (
            context().all_reduce("SUM", plain),
            context().all_reduce("SUM", tensor),
            context().all_gather(tensor, 0),
        ),
    )
    assert not result.requires_grad
    assert_same(result.numpy(), expected)
    assert_same(rows.numpy()[rank * len(plain) :][: len(plain)], plain.copy())


def test_all_gather_and_gather(strategy, rank, library):
    x = values(np.float32, rank, (rank + 1, 2))
    given = library.make(x)
    both = np.concatenate([values(np.float32, r, (r + 1, 2)) for r in (0, 1)])
    result = in_replica(strategy, lambda: context().all_gather({"x": given}, 0))
    assert_same(library.read(result["x"]), both)
    per_replica = strategy.run(lambda: given)
    assert type(per_replica) is mpidist.PerReplica
    assert_same(library.read(strategy.gather(per_replica, 0)), both)


def test_cross_replica_reductions(strategy, rank, library):
    x = values(np.float32, rank)
    total = values(np.float32, 0) + values(np.float32, 1)
    per_replica = strategy.run(lambda: library.make(x))
    assert own(strategy, per_replica) is not None
    reduced = strategy.reduce("SUM", per_replica, axis=None)
    assert_same(library.read(reduced), total)
    over_rows = strategy.reduce("MEAN", per_replica, axis=0)
    assert_same(library.read(over_rows), total.sum(0) / np.float32(10))
    extended = strategy.extended
    mirrored = extended.reduce_to("SUM", per_replica, per_replica)
    assert_same(library.read(mirrored.value()), total)
    pairs = [(per_replica, per_replica), (per_replica, extended.worker_devices[0])]
    first, second = extended.batch_reduce_to("SUM", pairs)
    assert_same(library.read(first.value()), total)
    assert (second is None) == (rank != 0)
    if rank == 0:
        assert_same(library.read(second), total)
    sent = extended.broadcast_to(library.make(x), per_replica)
    assert_same(library.read(sent.value()), values(np.float32, 0))
    assert np.dtype(sent.dtype) == np.float32
    assert sent.shape == (5, 3)
    assert_same(np.asarray(sent), values(np.float32, 0))
    assert_same(sent.numpy(), values(np.float32, 0))
    assert_same(library.read(library.make(x) + sent), x + values(np.float32, 0))


def test_merge_call(strategy, rank, library):
    x = values(np.float32, rank)

    def merge_fn(strategy, given):
        extended = strategy.extended
        theirs = strategy.experimental_local_results(given)[1]
        mean = extended.reduce_to("MEAN", given, given)
        mine = mpidist.PerReplica([theirs, theirs * 2])
        return mean, theirs * 2, mine

    results = merge(strategy, merge_fn, library.make(x))
    mean, theirs, mine = own_tree(strategy, results)
    one = values(np.float32, 1)
    assert_same(library.read(mean), (values(np.float32, 0) + one) / np.float32(2))
    assert_same(library.read(theirs), one * 2)
    assert_same(library.read(mine), one * (rank + 1))


def test_updates(strategy, library):
    variable = make(strategy, np.ones(3, np.float32))
    step = library.make(np.full(3, 0.25, np.float32))

    def update(var, gradient):
        assert isinstance(gradient, library.array_class)
        var.assign_sub(gradient)
        return gradient

    def merge_fn(strategy, gradient):
        extended = strategy.extended
        mean = extended.reduce_to("MEAN", gradient, variable)
        extended.update(variable, update, args=(mean,))

    strategy.extended.update(variable, update, args=(step,))
    merge(strategy, merge_fn, step)
    assert variable.numpy().tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_variables(strategy, rank, library, dtype):
    x = values(dtype, 1)
    variable = make(strategy, library.make(values(dtype, rank)), aggregation=SUM)
    assert variable.dtype == dtype
    assert_same(variable.numpy(), values(dtype, 0))
    variable.assign(library.make(x))
    variable.assign_add(library.make(x))
    assert_same(variable.numpy(), x + x)
    strategy.run(lambda: variable.assign(library.make(x)))
    assert_same(variable.numpy(), x + x)


def test_arithmetic_with_variables(strategy, library):
    x = values(np.float32, 0, (3, 3))
    variable = make(strategy, x)
    given = library.make(x + 1)
    assert_same(library.read(variable * given), x * (x + 1))
    assert_same(library.read(given @ variable), (x + 1) @ x)
    assert_same(library.read(variable @ given), x @ (x + 1))
    assert_same(library.read(variable >= given), x >= x + 1)
    mirrored = strategy.extended.broadcast_to(given, variable)
    assert_same(library.read(-mirrored + variable), np.full((3, 3), -1, np.float32))


def test_functions_of_torch_take_variables(strategy, torch):
    x = values(np.float32, 0, (3, 3))
    variable = make(strategy, x)
    rows = torch.ones(2, 3, requires_grad=True)
    result = torch.nn.functional.linear(rows, variable)
    variable.assign(variable * 0)  # saved for the gradient: the value of then
    result.sum().backward()
    assert_same(rows.grad.numpy(), np.stack([x.sum(0)] * 2))
    assert torch.stack([variable, variable]).shape == (2, 3, 3)
    with pytest.raises(TypeError, match=r"`add\(\.\.\., out=variable\)` would change"):
        torch.add(rows, 1, out=variable)
    with pytest.raises(TypeError, match=r"`normal_\(variable, \.\.\.\)` would change"):
        torch.nn.init.normal_(variable)


def test_transforms_of_jax_take_arithmetic_with_variables(strategy, jax):
    variable = make(strategy, np.arange(3, dtype=np.float32))
    gradient = jax.grad(lambda x: (variable * x).sum())(jax.numpy.ones(3))
    assert_same(np.asarray(gradient), variable.numpy())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_variables_give_copies_of_themselves(strategy, library, dtype):
    x = values(dtype, 0)
    variable = make(strategy, x)
    module = library.module
    if library.kind == "torch":
        taken = [module.from_dlpack(variable), module.as_tensor(variable)]
    else:
        taken = [module.numpy.asarray(variable), module.numpy.array(variable)]
        if dtype is np.float32:  # NumPy cannot export the other
            taken.append(module.dlpack.from_dlpack(variable))
    variable.assign(variable + variable)
    for one in taken:
        assert_same(library.read(one), x)
    assert_same(variable.numpy(), x + x)
    with pytest.raises(BufferError, match=r"write|use `x.value\(\)`"):
        variable.__dlpack__(copy=False)


def test_optimizers(strategy, library):
    results = []
    for convert in (np.array, library.make):
        one = make(strategy, np.ones(3, np.float32))
        two = make(strategy, np.ones(2, np.float32))
        with strategy.scope():
            optimizer = mpidist.optimizers.Adam(0.1, global_clipnorm=0.5)

        def step(optimizer=optimizer, one=one, two=two, convert=convert):
            gradients = [
                convert(np.arange(3, dtype=np.float32)),
                convert(np.ones(2, np.float32)),
            ]
            optimizer.apply_gradients(zip(gradients, (one, two), strict=True))

        for _ in range(2):
            strategy.run(step)
        results.append((one.numpy().tobytes(), two.numpy().tobytes()))
    assert results[0] == results[1]


def test_clip_by_global_norm(library):
    gradients = [np.full(4, 3, np.float32), None]
    expected, norm = mpidist.optimizers.clip_by_global_norm(gradients, 1.0)
    given = [library.make(gradients[0]), None]
    clipped, its_norm = mpidist.optimizers.clip_by_global_norm(given, 1.0)
    assert_same(library.read(clipped[0]), expected[0])
    assert its_norm == norm
    assert clipped[1] is None


def test_user_defined_reductions(rank, library):
    given = library.make(values(np.float32, rank))
    strategy = mpidist.MPIStrategy(cross_device_ops=mpidist.HierarchicalCopyAllReduce())
    result = in_replica(strategy, lambda: context().all_reduce("SUM", given))
    strategy.close()
    total = values(np.float32, 0) + values(np.float32, 1)
    assert_same(library.read(result), total)


def test_rows_of_a_sparse_gradient(strategy, rank, library):
    rows = library.make(np.full((1, 2), rank + 1, np.float32))
    given = mpidist.IndexedSlices(rows, np.array([rank]))
    result = in_replica(strategy, lambda: context().all_reduce("SUM", given))
    assert np.asarray(result.values).tolist() == [[1, 1], [2, 2]]
    assert isinstance(result.values, library.array_class)


def test_losses_keep_their_gradient_in_torch(strategy, rank, torch):
    def loss():
        logits = torch.ones(rank + 1, requires_grad=True)
        weights = np.full(rank + 1, 2.0, np.float32)
        share = mpidist.compute_average_loss(logits * 3, sample_weight=weights)
        share.backward()
        return share, logits.grad

    per_replica, gradients = strategy.run(loss)
    assert strategy.reduce("SUM", per_replica, axis=None).item() == 6
    assert own(strategy, gradients).tolist() == [2.0] * (rank + 1)


def test_losses_in_functions_that_jax_transforms(strategy, jax):
    def loss(w, rows, weights):
        losses = w * rows
        return mpidist.compute_average_loss(losses, weights, global_batch_size=8)

    def replica():
        ones = jax.numpy.ones(4)
        return jax.jit(jax.value_and_grad(loss))(2.0, ones, ones)

    shares, gradients = strategy.run(replica)
    assert float(strategy.reduce("SUM", shares, axis=None)) == 2
    assert float(strategy.reduce("SUM", gradients, axis=None)) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("meta", "device 'meta', which has no values; write `torch.zeros_like"),
        ("sparse", r"a sparse_coo torch tensor; write `x\.to_dense\(\)`"),
        ("float8", "torch.float8_e4m3fn on cpu .* a dtype that NumPy has"),
        ("quantized", "torch.quint8 on cpu .* a dtype that NumPy has"),
        ("vmap", "inside `torch.func` transforms"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensors_that_have_no_array(strategy, rank, torch, name, message):
    def call(x):
        return context().all_reduce("SUM", x)

    def replica():
        good = torch.zeros(3)
        if rank == 0:  # on this rank alone
            call(good)
            return
        make = {
            "meta": lambda: torch.zeros(3, device="meta"),
            "sparse": lambda: torch.eye(3).to_sparse(),
            "float8": lambda: good.to(torch.float8_e4m3fn),
            "quantized": lambda: torch.quantize_per_tensor(good, 1.0, 0, torch.quint8),
        }
        if name == "vmap":
            torch.func.vmap(call)(good)
        else:
            call(make[name]())

    raises_and_says(strategy, replica, rank == 1, message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jit", "got a JAX tracer.* call it outside, with what the transformed"),
        ("grad", "got a JAX tracer.* call it outside, with what the transformed"),
        ("key", r"holds no numbers; for a random key write `jax\.random\.key_data"),
        ("donated", "has been deleted or donated"),
        ("int4", "arrays of dtype int4 cannot be communicated"),
    ],
)
def test_jax_arrays_that_have_no_values(strategy, rank, jax, name, message):
    def call(x):
        return context().all_reduce("SUM", x)

    def replica():
        good = jax.numpy.zeros(3)
        if rank == 0:
            call(good)
        elif name == "jit":
            jax.jit(call)(good)
        elif name == "grad":
            jax.grad(lambda x: call(x).sum())(good)
        elif name == "donated":
            good.delete()
            call(good)
        elif name == "key":
            call(jax.random.key(0))
        else:
            call(good.astype(jax.numpy.int4))

    raises_and_says(strategy, replica, rank == 1, message)


def raises_and_says(strategy, replica, here, message):
    """Check that all ranks raise a TypeError, and that it says why."""
    import re

    texts = raises_everywhere(TypeError, lambda: strategy.run(replica))
    for text in texts:
        assert re.search(message, text, re.DOTALL), text


def test_importing_mpidist_imports_neither():
    program = "import sys, mpidist; print({'torch', 'jax'} & set(sys.modules))"
    assert run_python("-c", program).strip() == "set()"


def test_a_library_that_is_being_imported_is_not_asked(monkeypatch):
    """The garbage collector may run the end of a checkpoint meanwhile."""
    partial = types.ModuleType("torch")
    partial.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    partial.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, "torch", partial)
    assert guests.library("torch") is None
    optimizer = mpidist.optimizers.SGD(0.1)
    assert contents.collect({"optimizer": optimizer}, "later")
