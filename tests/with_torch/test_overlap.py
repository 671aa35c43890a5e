"""DistributedOptimizer(overlap=True): the bits of overlap=False, whatever steps do."""

import gc

import pytest
from replicas import (
    assert_usable,
    everywhere,
    outcomes,
    raises_everywhere,
    wait_for_reports,
)

import mpidist
from mpidist._strategy.strategy import group_of

pytestmark = [pytest.mark.mpi, pytest.mark.guests, pytest.mark.replicas(2, 3)]


@pytest.fixture
def mt(torch, monkeypatch):
    import mpidist.torch
    from mpidist.torch import _overlap

    monkeypatch.setattr(_overlap, "BUCKET_BYTES", 500)
    return mpidist.torch


class Training:
    """A module and its optimizer, in one of the two ways."""

    def __init__(self, torch, mt, strategy, overlap, module=None, sgd=None, **options):
        generator = torch.Generator().manual_seed(0)
        self.torch, self.strategy = torch, strategy
        self.module = module or torch.nn.Sequential(
            *(m for _ in range(5) for m in (torch.nn.Linear(8, 8), torch.nn.Tanh()))
        )
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 3)
        sgd = sgd or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
        self.optimizer = mt.DistributedOptimizer(
            sgd([p for p in self.module.parameters() if p.requires_grad]),
            strategy=strategy,
            overlap=overlap,
            **options,
        )
        self.rows = torch.Generator().manual_seed(1 + strategy.replica_id)
        self.begun = []

    def loss(self):
        x = self.torch.randn(4, 8, generator=self.rows)
        return self.module(x).square().mean()

    def note(self):
        """Note how many buckets were begun by now; None: nothing is planned."""
        plan = self.optimizer._overlap._plan
        self.begun.append(plan and (plan.next, len(plan.buckets)))

    def step(self, number):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.note()
        self.optimizer.step()


@pytest.fixture
def trains_alike(torch, mt, strategy):
    """Train in both ways; return the training that overlaps."""

    def train(step=Training.step, steps=5, make_module=lambda: None, **options):
        one, two = (
            Training(torch, mt, strategy, overlap, make_module(), **options)
            for overlap in (False, True)
        )
        for training in (one, two):
            for number in range(steps):
                strategy.run(step, args=(training, number))
        mine = [
            [p.detach().numpy().tobytes() for p in x.module.parameters()]
            for x in (one, two)
        ]
        assert mine[0] == mine[1]
        assert everywhere(mine[1]) == [mine[1]] * strategy.num_replicas_in_sync
        assert_usable(strategy)
        return two

    return train


@pytest.fixture
def several(size):
    if size == 1:
        pytest.skip("one rank reduces nothing")


@pytest.mark.parametrize("op", ["MEAN", "SUM"])
@pytest.mark.usefixtures("several")
def test_all_but_the_last_bucket_are_begun_by_the_backward_pass(trains_alike, op):
    two = trains_alike(op=op, max_norm=0.5)
    assert two.begun == [None] + [(2, 3)] * 4
    (last,) = [i for i, _ in enumerate(two.module) if i == 8]
    names = [name for name, _ in two.optimizer._overlap._plan.buckets[0].named]
    assert names[0].startswith("parameter")
    first = two.optimizer._overlap._plan.buckets[0].named[0][1]
    assert any(first is p for p in two.module[last].parameters())


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(
    ("width", "count"), [(8, 1), (512, 4)], ids=["small", "of 1 MiB"]
)
def test_how_many_buckets(strategy, torch, width, count):
    import mpidist.torch

    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    module = torch.nn.Sequential(*layers)
    optimizer = mpidist.torch.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), strategy=strategy, overlap=True
    )
    mpidist.torch.broadcast_parameters(module, strategy=strategy)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(1, width)).sum().backward()
        optimizer.step()
    assert len(optimizer._overlap._plan.buckets) == count


def test_accumulation(trains_alike):
    two = trains_alike(backward_passes_per_step=3, steps=9)
    # Begun by the last of three passes, from the second step on.
    assert [n and n[0] for n in two.begun] == [None] * 3 + [0, 0, 2] * 2


def test_a_closure(trains_alike, torch):
    def step(training, number):
        def closure():
            training.optimizer.zero_grad()
            loss = training.module(torch.ones(4, 8)).square().mean()
            loss.backward()
            return loss

        training.optimizer.step(closure)

    trains_alike(step, sgd=lambda p: torch.optim.LBFGS(p, max_iter=4))


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.usefixtures("several")
def test_several_backward_passes(trains_alike, varies):
    def step(training, number):
        training.optimizer.zero_grad()
        for _ in range(1 + number % 2 if varies else 2):
            training.loss().backward()
        training.note()
        training.optimizer.step()

    two = trains_alike(step, steps=6)
    if not varies:
        assert two.begun == [None] + [(2, 3)] * 5


@pytest.mark.usefixtures("several")
def test_gradients_that_the_program_changes(trains_alike, torch, rank, caplog):
    def step(training, number):
        training.optimizer.zero_grad()
        training.loss().backward()
        if rank == 0:
            parameters = training.module.parameters()
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        training.optimizer.step()

    two = trains_alike(step)
    assert two.optimizer._overlap._holds
    wait_for_reports()
    if rank == 0:
        assert "were reduced twice" in caplog.text


@pytest.mark.usefixtures("several")
def test_gradients_that_are_views_of_one_buffer(trains_alike, torch, rank, caplog):
    def step(training, number):
        parameters = list(training.module.parameters())
        places = torch.zeros(sum(p.numel() for p in parameters)).split(
            [p.numel() for p in parameters]
        )
        for p, place in zip(parameters, places, strict=True):
            p.grad = place.view_as(p)
        training.loss().backward()
        training.optimizer.step()

    trains_alike(step)
    wait_for_reports()
    assert "the program has changed gradients" not in caplog.text
    if rank == 0:
        assert "views of one buffer" in caplog.text


def test_steps_that_are_skipped(trains_alike):
    def step(training, number):
        training.optimizer.zero_grad()
        training.loss().backward()
        if number not in (2, 3, 6):
            training.optimizer.step()

    two = trains_alike(step, steps=9)
    assert not two.optimizer._overlap._holds


def test_parameters_without_a_gradient(trains_alike, torch, rank, size):
    """Here or there, nowhere, and on another rank in each step."""

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))

        def forward(self, x, taken):
            for i in taken:
                x = torch.tanh(self.parts[i](x))
            return x

    def step(training, number):
        taken = [0, 1 + (rank + number // 3) % 2, 3]
        training.optimizer.zero_grad()
        training.module(torch.ones(2, 8) * rank, taken).square().mean().backward()
        training.optimizer.step()

    two = trains_alike(step, steps=9, make_module=Branches)
    assert two.module.parts[4].weight.grad is None


def test_parameters_that_are_shared_frozen_and_added(trains_alike, torch):
    def make():
        shared = torch.nn.Linear(8, 8)
        layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        layers[1].requires_grad_(False)
        return torch.nn.Sequential(shared, *layers[:2], shared, *layers[2:])

    def step(training, number):
        if number == 3:
            training.module[4].requires_grad_(False)
        if number == 6:
            training.module[2].requires_grad_(True)
            parameters = list(training.module[2].parameters())
            training.optimizer.add_param_group({"params": parameters, "lr": 0.1})
        training.optimizer.zero_grad()
        training.loss().backward()
        if number == 8:  # its gradient is there
            training.module[5].requires_grad_(False)
        training.optimizer.step()

    trains_alike(step, steps=10, make_module=make)


def test_other_calls_between_backward_and_step(trains_alike, size):
    def step(training, number):
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        assert mpidist.get_replica_context().all_reduce("SUM", 1) == size
        training.optimizer.step()

    trains_alike(step)


@pytest.mark.usefixtures("several")
def test_a_step_that_is_compiled(torch, mt, strategy):
    """Hooks are called as usual. mpidist is not traced, which would take a minute."""
    steps = []
    torch._dynamo.utils.counters.clear()
    for overlap in (False, True):
        training = Training(torch, mt, strategy, overlap)
        # With the compiler of C++ a test would take a minute; the hooks are the same.
        training.step = torch.compile(training.step, backend="aot_eager")
        for number in range(4):
            strategy.run(training.step, args=(number,))
        steps.append(
            [p.detach().numpy().tobytes() for p in training.module.parameters()]
        )
    assert steps[0] == steps[1]
    assert training.begun == [None] + [(2, 3)] * 3
    # 9 or 10; replicas that are threads compile some of them twice.
    assert torch._dynamo.utils.counters["frames"]["total"] < 25


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_exception_in_a_backward_pass_of_one_rank(
    strategy, torch, mt, rank, size, at
):
    """All raise, and the next step is right on all."""

    def fail(gradient):
        if failing:
            raise ZeroDivisionError
        return gradient

    failing = False
    two = Training(torch, mt, strategy, True)
    two.module[2 * at].weight.register_hook(fail)
    for number in range(3):
        strategy.run(two.step, args=(number,))
    failing = rank == size - 1
    rows = outcomes(lambda: strategy.run(two.step, args=(3,)))
    assert rows.pop().name == "ZeroDivisionError"
    assert {row.name for row in rows} == {"ReplicaError"}
    failing = False
    for number in range(3):
        strategy.run(two.step, args=(number,))
    mine = [p.detach().numpy().tobytes() for p in two.module.parameters()]
    assert everywhere(mine) == [mine] * size
    assert_usable(strategy)


def test_what_an_optimizer_has_set_goes_with_it(strategy, torch, mt):
    """A program may make one for each part of its training."""
    model = torch.nn.Linear(3, 3)
    mt.broadcast_parameters(model, strategy=strategy)
    for overlap in (True, False):
        optimizer = mt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), overlap=overlap, strategy=strategy
        )
        model(torch.ones(2, 3)).sum().backward()
        optimizer.synchronize()
        del optimizer
        gc.collect()
        model(torch.ones(2, 3)).sum().backward()
        assert not model.weight._post_accumulate_grad_hooks


@pytest.mark.usefixtures("several")
def test_an_optimizer_that_only_some_ranks_have_dropped_yet(strategy, torch, mt, rank):
    """No bucket depends on the garbage collector of a rank."""
    two = Training(torch, mt, strategy, True)
    for _ in range(2):
        kept = two.optimizer if rank == 0 else None
        sgd = torch.optim.SGD(two.module.parameters(), lr=0.1)
        two.optimizer = mt.DistributedOptimizer(sgd, overlap=True, strategy=strategy)
        for number in range(3):
            strategy.run(two.step, args=(number,))
        del kept
    assert two.begun == [None, (2, 3), (2, 3)] * 2


@pytest.mark.usefixtures("several")
def test_an_optimizer_outlives_a_strategy(new_strategy, torch, mt, size):
    """As in an elastic training, where each loss makes another one."""
    first, second = new_strategy(), new_strategy()
    two = Training(torch, mt, first, True)
    sgd = torch.optim.SGD(two.module.parameters(), lr=0.1)
    two.optimizer = mt.DistributedOptimizer(sgd, overlap=True)
    for strategy in (first, second):
        with strategy.scope():
            for number in range(3):
                two.step(number)
        first.close()
    assert two.begun == [None, (2, 3), (2, 3)] * 2
    mine = [p.detach().numpy().tobytes() for p in two.module.parameters()]
    assert everywhere(mine) == [mine] * size


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("skips", [False, True])
def test_two_optimizers_whose_backward_passes_differ(strategy, torch, mt, rank, skips):
    """Equal modules have equal buckets, whose gradients must not be mixed."""
    two = [Training(torch, mt, strategy, True) for _ in range(2)]

    def step(order):
        for one in two:
            one.optimizer.zero_grad()
        for k in order:
            two[k].loss().backward()
        for one in two:
            one.optimizer.step()

    for order in ([0, 1], [0, 1]):
        step(order)
    order = [1] if skips else [1, 0]
    for row in outcomes(lambda: step([0, 1] if rank else order)):
        assert row.name == "CollectiveMismatchError"
        assert row.message.count(" [optimizer #") == 2
        assert "or write `overlap=False`" in row.message
    assert_usable(strategy)


@pytest.mark.usefixtures("several")
def test_a_gradient_that_cannot_be_reduced(strategy, torch, mt, rank):
    module = torch.nn.Linear(8, 30)
    mt.broadcast_parameters(module, strategy=strategy)
    for overlap in (False, True):
        optimizer = mt.DistributedOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1),
            strategy=strategy,
            overlap=overlap,
            named_parameters=[("x", p) for p in module.parameters()],
        )
        for _ in range(2):
            module(torch.ones(rank + 1, 8)).sum().backward()
            for message in raises_everywhere(ValueError, optimizer.step):
                assert "two parameters have the same name" in message
            optimizer.zero_grad()
    assert_usable(strategy)


def test_the_default_of_overlap(strategy, torch, mt):
    module = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = mt.DistributedOptimizer(sgd, strategy=strategy)
    group = group_of(strategy)
    assert optimizer._overlaps(group) is (len(set(group.node_numbers)) > 1)
