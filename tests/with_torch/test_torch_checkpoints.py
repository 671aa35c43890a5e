"""Checkpoints of modules, optimizers, schedulers and generators of torch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from replicas import ON_TWO, everywhere, raises_everywhere, split

import mpidist

pytestmark = [pytest.mark.guests, *ON_TWO]


class Training:
    """A module with all that a training needs to go on."""

    def __init__(self, torch, seed, rank, optimizer="Adam"):
        import mpidist.torch as mt

        self.torch, self.rank = torch, rank
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
        )
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        kind = getattr(torch.optim, optimizer)
        inner = kind(self.model.parameters(), lr=0.1)
        self.optimizer = mt.DistributedOptimizer(inner)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(inner, [2, 4], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.shuffle = torch.Generator().manual_seed(seed)
        self.own = torch.Generator().manual_seed(100 * seed + rank)

    def checkpoint(self):
        return mpidist.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            generators=[self.shuffle, self.own],
        )

    def step(self):
        torch = self.torch
        rows = torch.randn(8, 4, generator=self.shuffle)
        rows = rows[self.rank :: 2] + torch.randn(4, 4, generator=self.own)
        self.optimizer.zero_grad()
        loss = self.model(rows).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer._optimizer)
        self.optimizer.step()
        self.scaler.update()
        self.scheduler.step()
        return float(loss.detach())

    def everything(self):
        state = [self.model.state_dict(), self.optimizer.state_dict()]
        return repr([*state, self.scheduler.state_dict(), self.scaler.state_dict()])


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_a_training_goes_on_as_if_nothing_had_happened(
    strategy, folder, torch, rank, optimizer, format
):
    with strategy.scope():
        first = Training(torch, 1, rank, optimizer)
        for _ in range(3):
            first.step()
        first.checkpoint().save(folder / "a", format=format)
        expected = [first.step() for _ in range(3)]

        second = Training(torch, 2, rank, optimizer)
        names = second.checkpoint().restore(folder / "a")
        assert {"model", "generators/1"} <= set(names)
        assert [second.step() for _ in range(3)] == expected
    assert second.everything() == first.everything()


def test_buffers_that_differ_and_another_number_of_ranks(
    strategy, new_strategy, folder, torch, rank
):
    with strategy.scope():
        first = Training(torch, 1, rank)
        for _ in range(2):
            first.step()
        first.checkpoint().save(folder / "a")
    means = everywhere(first.model[1].running_mean.tolist())
    assert means[0] != means[1]
    drawn = everywhere(first.own.get_state().tolist())
    alone = new_strategy(comm=split(rank))
    with alone.scope():
        second = Training(torch, 2, 0)
        second.checkpoint().restore(folder / "a")
        assert second.model[1].running_mean.tolist() == means[0]
        assert second.own.get_state().tolist() == drawn[0]
        # And back, from one rank to two: the additional one gets a new stream.
        if rank == 0:
            second.checkpoint().save(folder / "b")
    with strategy.scope():
        first.checkpoint().restore(folder / "b")
    assert first.model[1].running_mean.tolist() == means[0]
    states = everywhere(first.own.get_state().tolist())
    assert states[0] == drawn[0]
    assert states[1] != states[0]
    shuffles = everywhere(first.shuffle.get_state().tolist())
    assert shuffles[0] == shuffles[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64", "complex64", "bool"])
def test_dtypes_and_a_reader_without_torch(strategy, folder, torch, rank, dtype):
    kind = getattr(torch, dtype)
    x = torch.arange(6).reshape(2, 3).to(kind)
    model = torch.nn.Module()
    model.register_buffer("x", x)
    model.register_buffer("scalar", torch.tensor(True))
    free = torch.nn.Parameter(torch.ones(3))
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(model=model, free=[free], turned=x.T)
        checkpoint.save(folder / "a")
        with torch.no_grad():
            for tensor in (model.x, free, x):
                tensor.zero_()
        checkpoint.restore(folder / "a")
    expected = torch.arange(6).reshape(2, 3).to(kind)
    assert model.x.dtype is kind
    assert model.x.equal(expected)
    assert free.tolist() == [1, 1, 1]
    if rank == 0:
        reader = mpidist.load_checkpoint(folder / "a")
        assert reader["model/x"].dtype.name == dtype
        numbers = torch.tensor(np.asarray(reader["model/x"], complex))
        assert numbers.equal(expected.to(numbers.dtype))
        (state,) = reader.states["model"]
        assert state["x"].dtype is kind
        assert state["x"].equal(expected)


class Nested:
    """What has tensors in nested dicts, lists and tuples, and keeps their dtypes."""

    def __init__(self, torch):
        self.value = {
            "replay": [(torch.arange(3), {"w": torch.ones(2, dtype=torch.bfloat16)})],
            0: torch.tensor(2.5),
            "large": np.arange(5000.0),
            "name": "x",
        }

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def test_tensors_in_nested_states(strategy, folder, torch):
    nested = Nested(torch)
    expected = repr(nested.value)
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(nested=nested)
        checkpoint.save(folder / "a")
        nested.value = {"other": None}
        checkpoint.restore(folder / "a")
    assert repr(nested.value) == expected


def test_parameters_that_have_drifted_are_found(strategy, folder, torch, rank):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(float(rank))
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(model=model)
        messages = raises_everywhere(
            mpidist.CollectiveMismatchError, lambda: checkpoint.save(folder / "a")
        )
        assert all("'model/bias' are not equal" in text for text in messages)
        assert all("broadcast_parameters" in text for text in messages)
        with torch.no_grad():
            model.bias.fill_(3.0)
        checkpoint.save(folder / "a")
        # And one that a rank lacks, whichever it is.
        for lacks in range(2):
            other = torch.nn.Linear(2, 2, bias=rank != lacks)
            with torch.no_grad():
                other.weight.zero_()
            for message in raises_everywhere(
                mpidist.CollectiveMismatchError,
                functools.partial(mpidist.Checkpoint(model=other).save, folder / "b"),
            ):
                assert f"no 'model/bias' on rank {lacks}." in message


def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(
    strategy, folder, torch, rank
):
    with strategy.scope():
        mpidist.Checkpoint(a=torch.ones(2), model=torch_linear(torch, 2, 1.0)).save(
            folder / "a"
        )
        mine, a = torch_linear(torch, 2 + rank, 5.0), torch.zeros(2)
        checkpoint = mpidist.Checkpoint(a=a, model=mine)
        messages = raises_everywhere(
            mpidist.CheckpointError, lambda: checkpoint.restore(folder / "a")
        )
        assert (
            "'model/weight': expected float32 (3, 3), got float32 (2, 2)" in messages[0]
        )
        assert a.tolist() == [0, 0]
        assert float(mine.weight.detach().sum()) == 5.0 * mine.weight.numel()


def torch_linear(torch, size, value):
    model = torch.nn.Linear(size, size)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def test_modules_are_put_back_if_a_later_state_is_refused(
    strategy, folder, torch, rank
):
    class Refusing:
        def state(self):
            return 1

        def restore(self, state):
            if rank == 1 and refuse:
                raise ValueError("not on rank 1")

    refuse = False
    with strategy.scope():
        model, optimizer_of = torch_linear(torch, 2, 1.0), torch.optim.SGD
        optimizer = optimizer_of(model.parameters(), lr=0.5)
        checkpoint = mpidist.Checkpoint(model=model, optimizer=optimizer, z=Refusing())
        checkpoint.save(folder / "a")
        with torch.no_grad():
            model.weight.fill_(7.0)
        optimizer.param_groups[0]["lr"] = 0.25
        refuse = True
        with pytest.raises(ValueError, match="not on rank 1"):
            checkpoint.restore(folder / "a")
        assert model.weight.tolist() == [[7, 7], [7, 7]]
        assert optimizer.param_groups[0]["lr"] == 0.25
        refuse = False
        checkpoint.restore(folder / "a")
        assert model.weight.tolist() == [[1, 1], [1, 1]]
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_cannot_be_saved_is_refused_when_the_checkpoint_is_made(torch):
    class Extra(torch.nn.Module):
        def get_extra_state(self):
            return object()

        def set_extra_state(self, state):
            pass

    class Unsaveable:
        def state_dict(self):
            return {"numbers": {1, 2}}

        def load_state_dict(self, state):
            pass

    sparse = torch.nn.Module()
    sparse.register_buffer("rows", torch.eye(2).to_sparse())
    for kind, model, text in (
        (TypeError, torch.nn.Linear(2, 2, device="meta"), "'model/weight'.*'meta'"),
        (TypeError, sparse, "'model/rows'.*sparse"),
        (TypeError, Extra(), "'model': its state has <object"),
        (TypeError, Unsaveable(), "'model': its state has {1, 2} of type set at"),
    ):
        with pytest.raises(kind, match=text):
            mpidist.Checkpoint(model=model)
        with pytest.raises(kind, match=text):
            mpidist.elastic.State(model=model)
