"""What is attached after a restore gets its value then, as in TensorFlow."""

import contextlib
import copy
import gc
import os
import pickle
import shutil
import sys
import warnings

import numpy as np
import pytest
from replicas import outcomes, raises_everywhere

import mpidist
from mpidist import Checkpoint, Module

pytestmark = [pytest.mark.mpi, pytest.mark.replicas(2, 3)]
several = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def scope(strategy):
    with strategy.scope():
        yield


def var(value):
    return mpidist.Variable(np.float32(value))


def module(**attributes):
    made = Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def restore(path, **objects):
    return Checkpoint(**objects).restore(path, partial=True)


def warned_of(name, rank):
    """Return a context in which rank 0 has to warn that something was not restored."""
    warned = pytest.warns(RuntimeWarning, match=f"not restored, .*{name!r}; attached")
    return warned if rank == 0 else contextlib.nullcontext()


def training():
    """Return a variable, an optimizer that is not built, and a generator."""
    w = var(1)
    return w, mpidist.optimizers.SGD(0.5, momentum=0.5), np.random.default_rng(3)


@pytest.fixture
def saved(folder):
    """The path of a checkpoint of a `net` with parts of all kinds."""
    parts = {"m": module(w=var(1)), "l": [var(2), module(w=var(3))], "d": {"k": var(4)}}
    net = module(w=var(5), **parts)
    return Checkpoint(net=net, inner=Checkpoint(w=var(6))).save(folder / "saved")


def test_it_gets_its_value_when_it_is_attached(saved, rank):
    net, inner = Module(), Checkpoint()
    status = restore(saved, net=net, inner=inner)  # that Checkpoint is gone
    gc.collect()
    if rank == 0:
        shutil.rmtree(saved)  # its files are still open
    status.assert_existing_objects_matched().assert_nontrivial_match()
    with pytest.raises(AssertionError, match=r"only in the checkpoint: 'inner/w', 'n"):
        status.assert_consumed()
    net.w = w = var(0)
    assert w == 5
    w.assign(7)
    net.again = w  # by another name: it keeps its value
    net.m = Module()
    net.m.w = var(0)
    net.l = [var(0), module(w=var(0))]
    net.d = {"k": var(0)}
    found = [w, net.m.w, net.l[0], net.l[1].w, net.d["k"]]
    assert [float(x) for x in found] == [7, 1, 2, 3, 4]
    inner.w = var(0)
    assert inner.w == 6
    mpidist.check_in_sync([*found, inner.w])
    del net.again
    status.assert_consumed()
    net.new = var(0)
    with pytest.raises(AssertionError, match="missing in the checkpoint: 'net/new'"):
        status.assert_consumed()
    net.w = var(0)  # the value of the first one is gone
    assert net.w == 0


def test_an_object_with_a_slash_in_its_name(folder):
    path = Checkpoint(**{"a/b": module(w=var(1), v=var(2))}).save(folder / "c")
    net = Module()
    status = restore(path, **{"a/b": net}).assert_nontrivial_match()
    net.w, net.v = var(0), var(0)
    assert (net.w, net.v) == (1, 2)
    status.assert_consumed()


def test_the_work_for_many_objects_grows_with_their_number(folder):
    def calls(count):
        path = Checkpoint(**{f"v{i}": var(i) for i in range(2 * count)}).save(folder)
        half = Checkpoint(**{f"v{i}": var(0) for i in range(count)})
        files = []
        sys.setprofile(lambda frame, *_: files.append(frame.f_code.co_filename))
        try:
            half.restore(path, partial=True).expect_partial()
        finally:
            sys.setprofile(None)
        return sum(file.endswith("restore.py") for file in files)

    assert calls(80) < 5 * calls(20)


def test_variables_that_a_replica_function_makes(saved, strategy):
    net = Module()
    restore(saved, net=net)

    def replica():
        net.w = var(0)
        return net.w + 1

    assert strategy.experimental_local_results(strategy.run(replica)) == (6,)


def test_a_later_restore_wins(saved, folder):
    path = Checkpoint(net=module(w=var(10))).save(folder / "second")
    net = Module()
    for each in (saved, path):
        restore(each, net=net)
    net.w, net.d = var(0), {"k": var(0)}
    assert (net.w, net.d["k"]) == (10, 4)  # only the first one has it

    net, late = Module(), module(w=var(0))
    restore(saved, net=net)
    restore(path, net=late)
    net.w = late.w
    assert net.w == 10


@pytest.mark.parametrize("new", [False, True])
def test_restores_in_a_loop_keep_the_files_of_the_last_one_open(saved, rank, new):
    """An evaluation that restores each new checkpoint had too many open files."""
    net, folder = module(w=var(0)), "/proc/self/fd"
    checkpoint = Checkpoint(net=net)
    for _ in range(20):
        checkpoint = Checkpoint(net=net) if new else checkpoint
        checkpoint.restore(saved, partial=True)
    if rank == 0:
        links = []
        for number in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # of another thread
                links.append(os.readlink(f"{folder}/{number}"))
        assert sum(saved in link for link in links) == 1
    net.d = {"k": var(0)}
    assert net.d["k"] == 4
    checkpoint.inner = Checkpoint(w=var(0))
    assert checkpoint.inner.w == 6


@pytest.mark.parametrize("how", ["assigned", "in a list", "by another Checkpoint"])
def test_a_later_restore_wins_for_what_has_no_variables(folder, strategy, how):
    """An optimizer that is not built, and a generator: the first restore won."""
    w, optimizer, rng = training()
    paths = []
    for rate in (0.25, 0.125):
        optimizer.apply_gradients([(np.float32(1), w)])
        optimizer.learning_rate = rate
        rng.normal()
        objects = {"list": [optimizer], "rng": rng}
        paths.append(Checkpoint(w=w, **objects).save(folder / str(rate)))
    state, slots = rng.bit_generator.state, [float(x) for x in optimizer.variables]
    checkpoint, other = Checkpoint(w=var(0), list=[]), training()
    checkpoint.restore(paths[0], partial=True)
    if how == "in a list":
        checkpoint.list.append(other[1])
    late = checkpoint
    if how == "by another Checkpoint":
        late = Checkpoint(w=var(0), list=[other[1]], rng=other[2])
    status = late.restore(paths[1], partial=True)
    if how != "in a list":
        checkpoint.list += [other[1]]
    var(0)
    strategy.run(lambda: None)
    checkpoint.rng = other[2]
    other[1].build([late.w])
    assert [float(x) for x in other[1].variables] == slots
    assert other[1].learning_rate == 0.125
    assert other[2].bit_generator.state == state
    status.assert_consumed()


def test_what_is_in_the_place_of_another_one_gets_nothing(saved):
    """A new head for a model, for example, of another shape."""
    net = module(m=Module(), d={})
    status = restore(saved, net=net)
    net.m = module(w=mpidist.Variable(np.ones(3)))
    net.d = {"k": var(0)}
    assert net.d["k"] == 0
    np.testing.assert_array_equal(net.m.w, np.ones(3))
    with pytest.raises(AssertionError, match="missing in the checkpoint: 'net/d/k', "):
        status.assert_existing_objects_matched()
    net.m = mpidist.optimizers.SGD(0.1)
    with pytest.raises(AssertionError, match=r"missing .*: 'net/d/k', 'net/m'"):
        status.assert_existing_objects_matched()


def test_one_object_in_two_places(folder):
    path = Checkpoint(a=module(w=var(1)), b=module(w=var(2))).save(folder / "c")
    checkpoint, shared = Checkpoint(), Module()
    status = checkpoint.restore(path, partial=True)
    checkpoint.b = shared
    checkpoint.a = shared
    shared.w = var(0)
    status.assert_consumed()
    one, checkpoint = module(w=var(0)), Checkpoint()
    checkpoint.restore(path, partial=True)
    checkpoint.b = one
    checkpoint.a = one  # it has a value of this checkpoint
    assert one.w == 2


def test_optimizers_and_generators(folder):
    def step(w, optimizer):
        optimizer.apply_gradients([(np.float32(1), w)])
        return float(w)

    w, optimizer, rng = training()
    step(w, optimizer)
    rng.normal()
    path = Checkpoint(w=w, optimizer=optimizer, rng=rng).save(folder / "c")
    expected = step(w, optimizer), rng.normal()

    w, optimizer, rng = training()
    checkpoint = Checkpoint()
    status = checkpoint.restore(path, partial=True)
    checkpoint.w = w
    checkpoint.optimizer = optimizer
    checkpoint.rng = rng
    with pytest.raises(AssertionError, match="'optimizer' restores its"):
        status.assert_consumed()
    assert (step(w, optimizer), rng.normal()) == expected
    status.assert_consumed()


def test_a_copy_of_a_module_has_nothing_left(saved):
    net = Module()
    restore(saved, net=net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other.w = var(0)
        assert other.w == 0
    net.w = var(0)
    assert net.w == 5


def test_what_does_not_fit_changes_nothing(saved):
    net = Module()
    status = restore(saved, net=net)
    late = module(w=var(7), d={"k": mpidist.Variable(np.ones(3))})

    def attach():
        net.w, net.d = late.w, late.d

    net.w = var(0)
    late.d["l"] = var(8)
    for message in raises_everywhere(mpidist.CheckpointError, attach):
        assert message.endswith(
            "does not fit:\n  'net/d/k': expected float64 (3,), got float32 ()\n"
            "Nothing was changed."
        )
    assert net.w == 7  # replaced: its value was that of the first one
    net.l = [var(0)]  # no second error
    assert net.l[0] == 2
    del net.d, net.w
    with pytest.raises(AssertionError, match="only in the checkpoint: 'inner/w', 'net"):
        status.assert_consumed()


@several
def test_one_rank_attaches_alone(saved, strategy, rank):
    net = Module()
    restore(saved, net=net)
    late = var(0)

    def alone():
        if rank == 1:
            net.w = late
        strategy.run(lambda: None)

    for message in raises_everywhere(mpidist.CollectiveMismatchError, alone):
        assert "Checkpoint.restore of {'net/w': float32 ()}, attached after" in message
    assert late == 0
    mpidist.check_in_sync([late])


def test_merge_fn_attaches_on_rank_0_only(saved, strategy):
    net = Module()
    restore(saved, net=net)
    late = var(0)

    def replica():
        def merge_fn(_):
            net.w = late

        mpidist.get_replica_context().merge_call(merge_fn)

    for row in outcomes(lambda: strategy.run(replica)):
        assert row.name in ("RuntimeError", "ReplicaError"), row
        assert "expected to be called at program level" in row.message
    assert late == 0
    net.w = late
    assert late == 5


def test_a_list_tells_nothing(saved, folder, rank):
    net = module(l=[])
    checkpoint = Checkpoint(net=net)
    status = checkpoint.restore(saved, partial=True)
    net.l.append(var(0))
    assert net.l[0] == 0
    text = r"not restored, .*'net/l/0'; attached .*\(path, partial=True\)` once"
    with pytest.raises(AssertionError, match=text):
        status.assert_existing_objects_matched()
    with warned_of("net/l/0", rank):
        checkpoint.save(folder / "other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(folder / "other")
    net.d = {"k": var(0)}
    assert (net.l[0], net.d["k"]) == (0, 4)  # trained since, perhaps
    checkpoint.restore(saved, partial=True)
    assert net.l[0] == 2
    net.l.append(module(w=var(0)))
    net.w = var(0)  # this tells
    assert (net.w, net.l[1].w) == (5, 3)


def test_run_restores_what_was_appended_before(saved, strategy):
    net = module(l=[], d={})
    status = restore(saved, net=net)
    net.l += [var(0), module(w=var(0))]
    net.d["k"] = var(0)
    seen = strategy.run(lambda: (net.l[0] + 0, net.l[1].w + 0, net.d["k"] + 0))
    assert strategy.experimental_local_results(seen) == ((2, 3, 4),)
    status.assert_existing_objects_matched()
    net.l[0].assign(9)
    net.w = var(0)
    strategy.run(lambda: None)
    assert (net.w, net.l[0]) == (5, 9)


@several
def test_the_next_run_looks_if_one_rank_makes_another_call(saved, strategy, rank):
    net = module(l=[])
    restore(saved, net=net)
    net.l.append(var(0))

    def differs():
        if rank:
            strategy.run(lambda: None)
        else:
            strategy.distribute_datasets_from_function(lambda context: [])

    raises_everywhere(mpidist.CollectiveMismatchError, differs)
    strategy.run(lambda: None)
    assert net.l[0] == 2
    strategy.run(lambda: None)


@pytest.mark.parametrize("how", ["assign", "optimizer", "in run"])
def test_a_training_is_not_set_back(saved, strategy, rank, how):
    net = module(l=[])
    status = restore(saved, net=net)
    late, optimizer = var(0), mpidist.optimizers.SGD(1.0)

    def append():
        net.l.append(late)
        if how == "assign":
            late.assign(-8)
        else:
            size = strategy.num_replicas_in_sync if how == "in run" else 1
            optimizer.apply_gradients([(np.float32(8 / size), late)])

    if how == "in run":
        strategy.run(append)
        with warned_of("net/l/0", rank):
            strategy.run(append)
        del net.l[1]
        assert late == -16
    else:
        append()
        with warned_of("net/l/0", rank):
            net.w = var(0)
        assert net.w == 5
        assert late == -8
    with pytest.raises(AssertionError, match="'net/l/0'"):
        status.assert_existing_objects_matched()
    net.d = {"k": late}  # here it says so
    assert late == 4


def test_a_variable_from_before_the_restore_is_not_set_back(saved, rank):
    net, late = module(l=[]), var(0)
    restore(saved, net=net)
    net.l.append(late)
    late.assign(7)
    with warned_of("net/l/0", rank):
        net.m = Module()
    assert late == 7


def test_what_was_not_restored_is_told_when_the_objects_go(saved, rank):
    net = module(l=[])
    restore(saved, net=net)
    net.l.append(var(0))
    with warned_of("net/l/0", rank):
        del net
        gc.collect()


@several
def test_what_only_some_ranks_have_dropped_yet(saved, strategy, rank):
    """Whether `run` looks does not depend on the garbage collector of a rank."""
    net = module(l=[])
    restore(saved, net=net)
    kept = None if rank == 0 else net
    del net
    gc.collect()
    made = var(0)
    strategy.run(lambda: made.assign(2))
    strategy.run(lambda: made.assign_add(1))
    assert made == 3
    del kept


def test_copies_that_one_rank_has_changed(saved, strategy, rank):
    """All ranks do the same, although only one of them sees that."""
    net = module(l=[])
    restore(saved, net=net)
    made = mpidist.Variable(np.float32(0), synchronization="ON_READ", aggregation="SUM")
    net.l.append(made)
    strategy.run(
        lambda: rank == strategy.num_replicas_in_sync - 1 and made.assign_add(1)
    )
    net.l.append(module(w=var(0)))
    strategy.run(lambda: made.assign_add(1))
    assert net.l[1].w == 3


def test_an_optimizer_and_a_generator_in_a_list(folder, rank):
    w, optimizer, rng = training()
    optimizer.apply_gradients([(np.float32(1), w)])
    optimizer.learning_rate = 0.25
    path = Checkpoint(w=w, list=[optimizer], other=[rng]).save(folder / "c")
    checkpoint = Checkpoint(w=var(0), list=[], other=[])
    checkpoint.restore(path, partial=True)
    other, optimizer, rng = training()
    checkpoint.list.append(optimizer)
    checkpoint.w = other
    assert optimizer.learning_rate == 0.25
    optimizer.apply_gradients([(np.float32(0), other)])
    assert optimizer.iterations == 2
    checkpoint.other.append(rng)
    expected = rng.bit_generator.state
    with warned_of("other/0", rank):
        checkpoint.w = var(0)
    assert rng.bit_generator.state == expected  # who knows what it has drawn


@several
def test_run_does_not_restore_what_one_rank_has_alone(saved, strategy, rank):
    """Such as an object that the garbage collector has not met there."""
    net, late = module(l=[]), []
    restore(saved, net=net)
    (late if rank else net.l).append(var(0))
    strategy.run(lambda: None)
    assert [float(x) for x in net.l + late] == [0]
    net.l.clear()
