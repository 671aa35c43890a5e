"""Training gives the same loss curve and weights on one rank and on three."""

import importlib.util

import numpy as np
import pytest
from launching import ROOT, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="scikit-learn is not installed (extra `examples`)",
)

# 3 ranks divide neither 50 nor 38, the images in the last batch of an epoch. With 2
# images, one rank has none at all.
RANKS = 3
BATCH_SIZES = [50, 2]
PROGRAM = f"""
import sys
import numpy as np
import mpi4py.MPI
import mpidist
sys.path.insert(0, {str(ROOT / "examples")!r})
import train_digits

images_and_labels = train_digits.load_data(np)
comm = mpi4py.MPI.COMM_WORLD
for name, group in ("alone", mpi4py.MPI.COMM_SELF), (comm.rank, comm):
    if name == "alone" and comm.rank:
        continue
    strategy = mpidist.MPIStrategy(group, device="cpu")
    results = dict()
    for batch_size, num_images in {list(zip(BATCH_SIZES, [1438, 97], strict=True))}:
        (images, labels), test = images_and_labels
        data = (images[:num_images], labels[:num_images]), test
        variables, losses, accuracies = train_digits.train(
            strategy, data, epochs=3, batch_size=batch_size, seed=1
        )
        results |= {{f"{{batch_size}} {{v.name}}": v.numpy() for v in variables}}
        more = {{"losses": losses, "acc": accuracies}}
        results |= {{f"{{batch_size}} {{k}}": x for k, x in more.items()}}
    np.savez(f"{{sys.argv[1]}}/{{name}}", **results)
"""


def test_losses_and_weights_are_those_of_one_rank(tmp_path):
    """The copies of all ranks are equal to the last bit; and it learns."""
    result = run_ranks(RANKS, ["-c", PROGRAM, tmp_path], timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    names = ("alone", *range(RANKS))
    alone, first, *others = (dict(np.load(tmp_path / f"{n}.npz")) for n in names)
    assert alone.keys() == first.keys()
    assert len(alone["50 losses"]) == 3 * 29
    assert len(alone["2 losses"]) == 3 * 49
    for name, values in alone.items():
        # float64 rounds to 1e-16; the steps of training make it grow somewhat.
        np.testing.assert_allclose(
            first[name], values, rtol=1e-9, atol=1e-12, err_msg=name
        )
        for other in others:
            np.testing.assert_array_equal(other[name], first[name], err_msg=name)
    losses = alone["50 losses"]
    assert losses[-29:].mean() < 0.2 * losses[:29].mean()
    assert alone["50 acc"][-1] > 0.9
