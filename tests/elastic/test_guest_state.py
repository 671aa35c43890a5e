"""Tensors of torch and pytrees of JAX in a `mpidist.elastic.State`."""

from __future__ import annotations

import pytest

from mpidist import elastic, testing
from tests.elastic.test_state import _hold

pytestmark = pytest.mark.guests


def test_a_pytree_is_a_value_of_a_state(tmp_path):
    jax = pytest.importorskip("jax")

    def program():
        params = {"w": [jax.numpy.ones(3)], "b": 1.0}
        state = elastic.State(params=params, directory=tmp_path / "run", every=1)

        def train(strategy, state):
            state.params = jax.tree.map(lambda x: x + 1, state.params)
            state.commit()
            return [float(x.sum()) for x in state.params["w"]], state.params["b"]

        return elastic.run(train, state)

    assert testing.run(2, program) == [([6.0], 2.0)] * 2
    assert testing.run(1, program) == [([9.0], 3.0)]
    assert testing.run(3, program) == [([12.0], 4.0)] * 3


@pytest.mark.parametrize("spare", [False, True])
def test_a_torch_training_goes_back_to_a_commit(spare):
    torch = pytest.importorskip("torch")
    import mpidist.torch as mt

    states = {}

    def make(seed):
        rank = testing.current_group().rank
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        generator = torch.Generator().manual_seed(seed + rank)
        with torch.no_grad():
            model[0].weight.fill_(0.5)
            model[0].bias.fill_(float(seed))
        optimizer = torch.optim.Adam(model.parameters())
        optimizer = mt.DistributedOptimizer(optimizer, backward_passes_per_step=2)
        return elastic.State(model=model, optimizer=optimizer, own=generator, n=0)

    def step(state, strategy):
        # Each rank has rows of its own for the buffers; the gradients are the same.
        state.model(torch.randn(4, 2, generator=state.own))
        for p in state.model.parameters():
            p.grad = torch.ones_like(p)
        with strategy.scope():
            state.optimizer.step()
        state.n += 1

    def look(state):
        rest = [*state.model.state_dict().values(), *state.optimizer.state.values()]
        return repr(rest), state.n, torch.rand(2, generator=state.own).tolist()

    def train():
        rank = testing.current_group().rank
        state = states[rank] = make(0)
        strategy, _ = _hold(state)
        for _ in range(4):
            step(state, strategy)
        state.commit()
        expected = look(state)
        step(state, strategy)
        return expected

    expected = testing.run(3, train)
    # The first has died; a spare may take its place.
    places = [0, 1, 2] if spare else [1, 2]
    has = [place != 0 for place in places]

    def go_on():
        rank = testing.current_group().rank
        state = states[places[rank]] if has[rank] else make(7)
        strategy, storage = _hold(state)
        storage.put_back(1, has, places)
        found = look(state)
        # The first of two passes, which is lost, is forgotten.
        assert state.optimizer.passes == 0
        assert all(p.grad is None for p in state.model.parameters())
        # What is set has memory of its own: the commit stays as it was.
        for _ in range(2):
            step(state, strategy)
        storage.put_back(1, has if spare else [True, True], places)
        assert look(state)[:2] == found[:2]
        state.commit()
        return found

    found = testing.run(len(places), go_on)
    for place, (tensors, n, drawn) in zip(places, found, strict=True):
        assert (n, drawn) == expected[place][1:]
        if spare:
            assert tensors == expected[place][0]
        else:  # of the replica that is lost: its buffers were those of rank 0
            assert tensors == expected[0][0]
