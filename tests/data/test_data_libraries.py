"""Inputs of other libraries: grain, torch, HDF5-like files. Each where installed."""

from __future__ import annotations

import numpy as np
import pytest
from replicas import own
from test_data_distribute import mine
from test_data_state import flat, gathered

from mpidist.data import Dataset

pytestmark = [
    pytest.mark.mpi,
    # grain asks for a JAX that need not be there, through absl's log.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROWS, BATCH = 22, 4


@pytest.fixture
def grain():
    return pytest.importorskip("grain")


def grain_batches(grain):
    rows = grain.MapDataset.source(np.arange(ROWS)).shuffle(seed=3)
    return rows.map(lambda x: {"x": np.float32(x)}).batch(BATCH)


def x_of(strategy, iterator, steps=None):
    found = []
    while steps is None or len(found) < steps:
        step = iterator.get_next_as_optional()
        if not step.has_value():
            break
        found.append(strategy.gather(step.get_value()["x"], axis=0).tolist())
    return found


@pytest.mark.one_size
@pytest.mark.parametrize("kind", ["map", "iter"])
def test_grain(strategy, grain, kind):
    batches = grain_batches(grain)
    expected = [batches[i]["x"].tolist() for i in range(len(batches))]
    source = batches if kind == "map" else batches.to_iter_dataset()
    dataset = strategy.experimental_distribute_dataset(source)
    assert x_of(strategy, iter(dataset)) == expected
    iterator = iter(dataset)
    x_of(strategy, iterator, 2)
    state = iterator.state()
    again = iter(strategy.experimental_distribute_dataset(source))
    again.restore(state)
    assert x_of(strategy, again) == expected[2:]


@pytest.mark.one_size
def test_grain_without_end_and_with_gaps(strategy, grain):
    endless = strategy.experimental_distribute_dataset(grain_batches(grain).repeat())
    assert endless.cardinality() == -1
    assert len(x_of(strategy, iter(endless), 8)) == 8
    batches = grain_batches(grain).filter(lambda b: b["x"].sum() % 2 == 0)
    kept = [b["x"].tolist() for i in range(len(batches)) if (b := batches[i])]
    dataset = strategy.experimental_distribute_dataset(batches)
    iterator = iter(dataset)
    first = x_of(strategy, iterator, 1)
    second = iter(strategy.experimental_distribute_dataset(batches))
    second.restore(iterator.state())
    assert first + x_of(strategy, second) == kept


@pytest.mark.one_size
def test_grain_data_loader(strategy, grain):
    loader = grain.DataLoader(
        data_source=np.arange(ROWS),
        sampler=grain.samplers.IndexSampler(ROWS, shuffle=True, seed=1, num_epochs=1),
        operations=[grain.transforms.Batch(BATCH)],
    )
    iterator = iter(strategy.experimental_distribute_dataset(loader))
    seen = gathered(strategy, iterator, 2)
    second = iter(strategy.experimental_distribute_dataset(loader))
    second.restore(iterator.state())
    rest = gathered(strategy, second)
    assert sorted(flat(seen + rest)) == list(range(ROWS))


@pytest.mark.one_size
def test_grain_shards_for_each_rank(strategy, grain, rank, size):
    def dataset_fn(context):
        rows = grain.MapDataset.source(np.arange(ROWS))
        mine = rows[context.input_pipeline_id :: context.num_input_pipelines]
        return mine.batch(BATCH).to_iter_dataset()

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    seen = gathered(strategy, iter(dataset))
    assert sorted(flat(seen)) == list(range(ROWS))


@pytest.mark.one_size
def test_rows_of_grain_are_read_by_their_rank_only(strategy, grain, rank):
    read = []
    rows = grain.MapDataset.source(np.arange(ROWS)).map(
        lambda x: read.append(int(x)) or {"x": np.float32(x)}
    )
    dataset = Dataset.from_tensor_slices(rows).batch(BATCH)
    kept = []
    for element in strategy.experimental_distribute_dataset(dataset):
        kept += own(strategy, element)["x"].astype(int).tolist()
    assert read == kept


@pytest.mark.guests
@pytest.mark.one_size
def test_torch_data_loader(strategy, torch, rank, size):
    x, y = torch.arange(ROWS * 2.0).reshape(ROWS, 2), torch.arange(ROWS)
    rows = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    dataset = strategy.experimental_distribute_dataset(loader)
    assert len(dataset) == 6
    assert "DataLoader" in dataset.shard_plan
    for _ in range(2):
        seen = []
        for element in dataset:
            part = own(strategy, element)
            assert [type(leaf) for leaf in part] == [np.ndarray, np.ndarray]
            assert part[0].dtype == np.float32
            assert (part[0][:, 0] == 2 * part[1]).all()
            seen += strategy.gather(element[1], axis=0).tolist()
        assert seen != sorted(seen)
        assert sorted(seen) == list(range(ROWS))


@pytest.mark.guests
def test_torch_tensors_are_not_copied(strategy, torch, rank):
    batch = torch.arange(8.0, requires_grad=True)
    dataset = strategy.experimental_distribute_dataset(iter([{"x": batch}]))
    (element,) = dataset
    part = own(strategy, element)["x"]
    first = batch.detach().numpy().__array_interface__["data"][0]
    start = part.__array_interface__["data"][0]
    assert first <= start <= first + 8 * 4
    assert part.base is not None
    dataset = strategy.experimental_distribute_dataset(
        iter([torch.ones(4, dtype=torch.bfloat16)])
    )
    (element,) = dataset
    assert own(strategy, element).dtype.name == "bfloat16"
    assert (own(strategy, element) == 1).all()


@pytest.mark.guests
def test_torch_tensors_as_rows(strategy, torch):
    x = torch.arange(9)
    dataset = Dataset.from_tensor_slices({"x": x}).batch(4)
    seen = []
    for element in strategy.experimental_distribute_dataset(dataset):
        seen += strategy.gather(element["x"], axis=0).tolist()
    assert seen == list(range(9))
    rows = torch.utils.data.TensorDataset(x, x * 2)
    dataset = Dataset.from_tensor_slices(rows).batch(9)
    ((first, second),) = list(dataset)
    assert (second == 2 * first).all()


def test_an_hdf5_like_file(strategy, rank, size):
    class Hdf5:
        """Wants increasing indices, as HDF5 does, and gives slices."""

        shape = (ROWS, 3)
        dtype = np.dtype(np.float32)

        def __getitem__(self, index):
            return np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)[index]

    dataset = Dataset.from_tensor_slices(Hdf5()).shuffle(seed=2).batch(5)
    seen = []
    for element in strategy.experimental_distribute_dataset(dataset):
        seen += strategy.gather(element, axis=0)[:, 0].tolist()
    assert sorted(seen) == [3.0 * row for row in range(ROWS)]
    assert mine(strategy, strategy.experimental_distribute_dataset(dataset))


@pytest.mark.guests
def test_writing_into_a_cached_tensor_does_not_change_the_cache(torch):
    dataset = Dataset.range(2).map(lambda i: torch.ones(2)).cache()
    for _ in range(2):
        for x in dataset:
            assert float(x.sum()) == 2
            x[:] = 5
