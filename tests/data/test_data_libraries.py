"""Inputs of other libraries: grain and torch, each where installed.

The files of others are in tests/programs (`test_files`).
"""

from __future__ import annotations

import numpy as np
import pytest
from replicas import everywhere, own
from test_data_distribute import flat, gathered, mine

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


@pytest.fixture
def batches(grain):
    rows = grain.MapDataset.source(np.arange(ROWS)).shuffle(seed=3)
    return rows.map(np.float32).batch(BATCH)


@pytest.mark.one_size
@pytest.mark.parametrize("kind", ["map", "gaps", "iter", "loader"])
def test_grain(strategy, distribute, grain, batches, kind):
    loader = grain.DataLoader(
        data_source=np.arange(ROWS),
        sampler=grain.samplers.IndexSampler(ROWS, shuffle=True, seed=1, num_epochs=1),
        operations=[grain.transforms.Batch(BATCH)],
    )
    source = {
        "map": batches,
        "gaps": batches.filter(lambda batch: batch.sum() % 2 == 0),
        "iter": batches.to_iter_dataset(),
        "loader": loader,
    }[kind]
    expected = [batch.tolist() for batch in source]
    assert len(expected) > 2
    iterator = iter(distribute(source))
    assert gathered(strategy, iterator, 2) == expected[:2]
    again = iter(distribute(source))
    again.restore(iterator.state())
    assert gathered(strategy, again) == gathered(strategy, iterator) == expected[2:]


@pytest.mark.one_size
def test_grain_without_end(strategy, distribute, batches):
    endless = distribute(batches.repeat())
    assert endless.cardinality() == -1
    assert len(gathered(strategy, iter(endless), 8)) == 8


@pytest.mark.one_size
def test_grain_shards_for_each_rank(strategy, from_function, grain):
    def dataset_fn(context):
        rows = grain.MapDataset.source(np.arange(ROWS))
        shard = rows[context.input_pipeline_id :: context.num_input_pipelines]
        return shard.batch(BATCH).to_iter_dataset()

    seen = gathered(strategy, iter(from_function(dataset_fn)))
    assert sorted(flat(seen)) == list(range(ROWS))


@pytest.mark.one_size
def test_rows_of_grain_are_read_by_their_rank_only(strategy, distribute, grain):
    read = []
    rows = grain.MapDataset.source(np.arange(ROWS))
    rows = rows.map(lambda x: read.append(int(x)) or x)
    dataset = distribute(Dataset.from_tensor_slices(rows).batch(BATCH))
    assert read == flat(mine(strategy, dataset))
    assert sorted(flat(everywhere(read))) == list(range(ROWS))


@pytest.mark.guests
@pytest.mark.one_size
def test_torch_data_loader(strategy, distribute, torch):
    x, y = torch.arange(ROWS * 2.0).reshape(ROWS, 2), torch.arange(ROWS)
    rows = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    dataset = distribute(loader)
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
    steps = iter(dataset)
    next(steps)
    with pytest.warns(
        RuntimeWarning, match=r"rows come twice or never. Write `Dataset"
    ):
        steps.restore(steps.state())


@pytest.mark.guests
def test_torch_tensors_are_not_copied(strategy, distribute, torch):
    batch = torch.arange(8.0, requires_grad=True)
    (element,) = distribute(iter([{"x": batch}]))
    part = own(strategy, element)["x"]
    first = batch.detach().numpy().__array_interface__["data"][0]
    start = part.__array_interface__["data"][0]
    assert first <= start <= first + 8 * 4
    assert part.base is not None
    (element,) = distribute(iter([torch.ones(4, dtype=torch.bfloat16)]))
    assert own(strategy, element).dtype.name == "bfloat16"
    assert (own(strategy, element) == 1).all()


@pytest.mark.guests
def test_torch_tensors_as_rows(strategy, distribute, torch):
    x = torch.arange(9)
    dataset = distribute(Dataset.from_tensor_slices(x).batch(4))
    assert flat(gathered(strategy, iter(dataset))) == list(range(9))
    rows = torch.utils.data.TensorDataset(x, x * 2)
    dataset = Dataset.from_tensor_slices(rows).batch(9)
    ((first, second),) = list(dataset)
    assert (second == 2 * first).all()


@pytest.mark.guests
def test_writing_into_a_cached_tensor_does_not_change_the_cache(torch):
    dataset = Dataset.range(2).map(lambda i: torch.ones(2)).cache()
    for _ in range(2):
        for x in dataset:
            assert float(x.sum()) == 2
            x[:] = 5


@pytest.mark.guests
def test_from_generator_may_fill_one_tensor(torch):
    def generate():
        buffer = torch.zeros(2)
        for number in range(4):
            yield {"x": buffer.fill_(number)}

    dataset = Dataset.from_generator(generate)
    (batch,) = dataset.batch(4)
    assert batch["x"].tolist() == [[i, i] for i in range(4)]
    assert [x["x"].tolist() for x in dataset.prefetch(3)] == batch["x"].tolist()
    assert all(isinstance(x["x"], torch.Tensor) for x in dataset)
