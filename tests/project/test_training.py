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
import mpidist
sys.path.insert(0, {str(ROOT / "examples")!r})
import train_digits

strategy = mpidist.MPIStrategy(device="cpu")
images_and_labels = train_digits.load_data(np)
results = dict()
for batch_size, num_images in {list(zip(BATCH_SIZES, [1438, 97], strict=True))}:
    (images, labels), test = images_and_labels
    data = (images[:num_images], labels[:num_images]), test
    variables, losses, accuracies = train_digits.train(
        strategy, data, epochs=3, batch_size=batch_size, seed=1
    )
    results |= {{f"{{batch_size}} {{v.name}}": v.numpy() for v in variables}}
    results |= {{f"{{batch_size}} losses": losses, f"{{batch_size}} acc": accuracies}}
rank = mpidist.ReplicaContext(strategy, None).replica_id_in_sync_group
np.savez(f"{{sys.argv[1]}}/{{rank}}", **results)
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train on ``n`` ranks, once; return what each rank has got."""
    done = {}

    def train_on(n):
        if n not in done:
            folder = tmp_path_factory.mktemp(f"ranks{n}")
            result = run_ranks(n, ["-c", PROGRAM, folder], timeout=100)
            assert result.returncode == 0, result.stdout + result.stderr
            done[n] = [dict(np.load(folder / f"{rank}.npz")) for rank in range(n)]
        return done[n]

    return train_on


def test_losses_and_weights_are_those_of_one_rank(train):
    (alone,) = train(1)
    together = train(RANKS)[0]
    assert alone.keys() == together.keys()
    assert len(alone["50 losses"]) == 3 * 29
    assert len(alone["2 losses"]) == 3 * 49
    for name, values in alone.items():
        # float64 rounds to 1e-16; the steps of training make it grow somewhat.
        np.testing.assert_allclose(
            together[name], values, rtol=1e-9, atol=1e-12, err_msg=name
        )


def test_the_copies_are_equal_to_the_last_bit(train):
    first, *others = train(RANKS)
    for other in others:
        for name, values in first.items():
            np.testing.assert_array_equal(other[name], values, err_msg=name)


def test_it_learns(train):
    (alone,) = train(1)
    losses = alone["50 losses"]
    assert losses[-29:].mean() < 0.2 * losses[:29].mean()
    assert alone["50 acc"][-1] > 0.9
