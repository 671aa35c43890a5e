"""Every program in examples/ runs under mpirun and says what it should, once."""

import json
import re
import runpy

import numpy as np
import pytest
from launching import ROOT, ULFM, outlives_ranks, run_in_turn, run_ranks
from replicas import slow

import mpidist

EXAMPLES = ROOT / "examples"
RANKS = 2
TIMEOUT = 100.0  # seconds; each takes a few on an idle machine


def the_match(pattern, text):
    """Return the only match of ``pattern`` in ``text``."""
    matches = list(re.finditer(pattern, text))
    assert len(matches) == 1, f"{len(matches)} matches of {pattern!r} in:\n{text}"
    return matches[0]


def hello(result, folder):
    the_match(r"the sum of 1 to 2 is 3\b", result.stdout)
    for replica_id in range(RANKS):
        the_match(
            rf"hello from replica {replica_id} of 2, on /rank:{replica_id}",
            result.stdout,
        )


def custom_training_loop(result, folder):
    epochs = re.findall(
        r"^Epoch (\d), Loss: (\S+), Accuracy: (\S+)%, Test Loss: (\S+), "
        r"Test Accuracy: (\S+)%$",
        result.stdout,
        re.M,
    )
    losses = [float(row[1]) for row in epochs]
    assert [row[0] for row in epochs] == ["1", "2", "3"]
    assert losses == sorted(losses, reverse=True)
    assert float(epochs[-1][4]) > 80
    # The checkpoint is that of the third epoch.
    restored = the_match(r"without strategy: (\S+)%", result.stdout)
    assert restored[1] == epochs[-1][4]
    assert (folder / "training_checkpoint").is_dir()


def clip_by_global_norm(result, folder):
    match = the_match(
        r"slope (\S+) \(true: 3.0\), offset (\S+) \(true: -1.0\); "
        r"clipped (\d+) of 300 gradients, the largest of norm (\d+)",
        result.stdout,
    )
    slope, offset, clipped, largest = map(float, match.groups())
    assert slope == pytest.approx(3, abs=0.15)
    assert offset == pytest.approx(-1, abs=0.15)
    assert 0 < clipped < 150
    assert largest > 3


def monte_carlo_pi(result, folder):
    pi, error = map(
        float, the_match(r"pi is (\S+) \+- (\S+), from", result.stdout).groups()
    )
    assert error <= 5e-4
    assert pi == pytest.approx(3.14159, abs=3 * error)


def grain_input(result, folder):
    pattern = r"9000 images in 6 epochs on 3 replicas: test accuracy (\S+)%"
    assert float(the_match(pattern, result.stdout)[1]) >= 85


def kmeans(result, folder):
    the_match(
        r"10 starts on 2 replicas: clusters of \[38, 50, 62\] flowers, "
        r"inertia 78\.8514 \(expected: 78\.8514\)",
        result.stdout,
    )


def train_digits(result, folder):
    the_match(r"replicas +2, with \w+ arrays", result.stdout)
    accuracy = the_match(r"test accuracy +(\S+)%", result.stdout)[1]
    assert float(accuracy) >= 90  # test_readme has that of all epochs
    rate = the_match(r"samples per second +([\d,]+)", result.stdout)[1]
    assert int(rate.replace(",", "")) > 0
    share = the_match(r"communicating +(\d+)% of the time", result.stdout)[1]
    assert 0 < int(share) <= 100
    picture = folder / "new folder" / "training.png"
    assert the_match(r"picture +(.+?)\r?\n", result.stdout)[1] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    losses = json.loads((folder / "l.json").read_text())
    assert len(losses) == 6 * 15
    assert sum(losses[-15:]) < 0.2 * sum(losses[:15])
    # Lines, and no bar, since stderr is no terminal.
    assert "\r" not in result.stderr
    pattern = r"^epoch (\d+) of 6: test accuracy \d\d\.\d%$"
    lines = re.findall(pattern, result.stderr, re.M)
    assert lines == [str(n) for n in range(1, 7)]


def demo(result, folder):
    """Compare with what README.md says that launch/demo prints, but for speed.

    As in a terminal: it shows one bar, which comes to its end. On fewer ranks.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = the_match(r"\$ launch/demo\n((?:.*\n)+?)```", readme)[1]
    assert len(re.findall(r"training: +0%\|.* 0/20 ", result.stderr)) == 1
    assert "epoch" not in result.stderr.replace(" epochs", "")
    row = r"^(\w[\w ]*?) {2,}(.*)$"
    printed = dict(re.findall(row, result.stdout, re.M))
    shown = dict(re.findall(row, page, re.M))
    assert list(shown) == list(printed)
    bar, *facts = page.splitlines()
    assert len(shown) == len(facts), "a line that is neither a fact nor the bar"
    pattern = r"training: 100%\|.*(epochs/s|s/ ?epochs), test accuracy 9[6-9]\.\d%\]"
    assert re.match(pattern, bar)
    assert re.search(pattern, result.stderr)
    assert shown["replicas"] == "4, with numpy arrays"
    assert printed["replicas"] == "2, with numpy arrays"
    for found in (shown, printed):
        assert 96 <= float(found["test accuracy"].rstrip("%")) < 100
        assert found["picture"].endswith("/train_digits.png")


def train_torch(result, folder, library="torch"):
    the_match(r"replicas +2, with", result.stdout)
    accuracy = the_match(r"test accuracy +(\S+)%", result.stdout)[1]
    assert float(accuracy) >= 90
    picture = folder / f"train_{library}.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    losses = json.loads((folder / f"{library}.json").read_text())
    assert len(losses) == 3 * 14
    assert sum(losses[-14:]) < 0.5 * sum(losses[:14])


def train_jax(result, folder):
    train_torch(result, folder, "jax")


NUMPY = [
    (hello, ["hello.py"]),
    (clip_by_global_norm, ["clip_by_global_norm.py"]),
    (monte_carlo_pi, ["monte_carlo_pi.py"]),
    (kmeans, ["kmeans.py"]),
    (custom_training_loop, ["custom_training_loop.py", "--epochs", "3"]),
    (
        train_digits,
        [
            *("train_digits.py", "--epochs", "6", "--losses", "l.json"),
            *("--output", "new folder/training.png"),
        ],
    ),
    (demo, ["train_digits.py", "--progress"]),
]
GRAIN = [(grain_input, ["grain_input.py"])]
GUESTS = [
    (train_torch, ["train_torch.py", "--epochs", "3", "--losses", "torch.json"]),
    (train_jax, ["train_jax.py", "--epochs", "3", "--losses", "jax.json"]),
]


def test_every_example_is_tested():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    tested = {program[0] for _, program in [*NUMPY, *GRAIN, *GUESTS]}
    assert names == {*tested, "train_elastic.py", "train_torch_elastic.py"}


@pytest.mark.parametrize(
    ("ranks", "job", "libraries"),
    [
        (RANKS, NUMPY, []),
        pytest.param(3, GRAIN, ["grain"], marks=slow),
        pytest.param(RANKS, GUESTS, ["torch", "jax"], marks=slow),
    ],
    ids=["numpy", "grain", "guests"],
)
def test_examples(tmp_path, ranks, job, libraries):
    for library in ["sklearn", *libraries]:
        pytest.importorskip(library)
    programs = [[EXAMPLES / name, *options] for _, (name, *options) in job]
    results = run_in_turn(ranks, programs, timeout=2 * TIMEOUT, cwd=tmp_path)
    for (check, _), result in zip(job, results, strict=True):
        check(result, tmp_path)


@slow  # tests/elastic has all that `elastic.run` promises
@pytest.mark.parametrize(
    ("name", "steps", "best"),
    [("train_elastic.py", 46, 85), ("train_torch_elastic.py", 58, 90)],
)
def test_train_elastic(tmp_path, name, steps, best):
    pytest.importorskip("sklearn")
    if "torch" in name:
        pytest.importorskip("torch")
    pattern = rf"{steps} steps, (\d) replicas at the end: (?:test )?accuracy (\S+)%, "
    pattern += "sum of weights (.*)"
    weights = []
    # The result without a fault: of one of them, since torch takes long to start.
    for fault in (False, True) if name == "train_elastic.py" else (True,):
        fault = fault and outlives_ranks()
        arguments = ["--epochs", "2", *(["--kill", "1", "--at-step", "30"] * fault)]
        options = ULFM if fault else ()
        program = [EXAMPLES / name, *arguments]
        job = run_ranks(2, program, timeout=TIMEOUT, cwd=tmp_path, options=options)
        assert job.returncode == 0, job.stdout + job.stderr
        if fault:
            assert "lost replica 1; 1 replica goes on" in job.stderr
        replicas, accuracy, total = the_match(pattern, job.stdout).groups()
        assert replicas == ("1" if fault else "2")
        assert float(accuracy) > best
        weights.append(total)
    assert len(set(weights)) == 1


@pytest.mark.parametrize(("batch_size", "images"), [(50, 438), (2, 25)])
def test_train_digits_is_the_same_on_any_number_of_replicas(batch_size, images):
    """3 divide neither 50 nor the 38 of the last batch; of 2 images one gets none."""
    pytest.importorskip("sklearn")
    example = runpy.run_path(EXAMPLES / "train_digits.py")
    (x, labels), test = example["load_data"](np)
    data = (x[:images], labels[:images]), test

    def program():
        strategy = mpidist.MPIStrategy(device="cpu")
        settings = {"epochs": 3, "batch_size": batch_size, "seed": 1}
        variables, losses, accuracies = example["train"](strategy, data, **settings)
        return [losses, accuracies, *(v.numpy() for v in variables)]

    (alone,) = mpidist.testing.run(1, program)
    first, *others = mpidist.testing.run(3, program)
    assert len(alone[0]) == 3 * -(-images // batch_size)
    # float64 rounds to 1e-16; the steps of training make it grow somewhat.
    for found, expected in zip(first, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    for found, expected in zip(others, [first, first], strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
