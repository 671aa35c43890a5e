"""Train on digits that grain shuffles, disturbs at random and puts into batches.

Each rank reads every n-th image of one shuffled order, and no other. Needs the extra
`examples`:

    mpidist run -n 4 examples/grain_input.py
"""

from __future__ import annotations

import absl.logging
import numpy as np
from sklearn.datasets import load_digits

import mpidist

absl.logging.set_verbosity("error")  # grain would mention that there is no JAX
import grain  # noqa: E402 - after the line above

EPOCHS = 6
GLOBAL_BATCH = 64
LEARNING_RATE = 0.5
TEST_IMAGES = 297


def disturb(row, rng):
    """Add noise to an image, another in each epoch."""
    noise = rng.normal(scale=0.1, size=(8, 8)).astype(np.float32)
    return {**row, "image": row["image"] + noise}


def make_input(context):
    """Return this rank's part of all epochs."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:-TEST_IMAGES]
    labels = digits.target[:-TEST_IMAGES]
    rows = [
        {"image": image, "label": label}
        for image, label in zip(images, labels, strict=True)
    ]
    dataset = grain.MapDataset.source(rows).seed(1).shuffle().repeat(EPOCHS)
    dataset = dataset[context.input_pipeline_id :: context.num_input_pipelines]
    batch = -(-GLOBAL_BATCH // context.num_input_pipelines)
    return dataset.random_map(disturb).batch(batch).to_iter_dataset()


def main():
    strategy = mpidist.MPIStrategy(device="cpu")
    dataset = strategy.distribute_datasets_from_function(make_input)
    with strategy.scope():
        total = mpidist.VariableAggregation.SUM
        weights = mpidist.Variable(np.zeros((64, 10)), aggregation=total)
        bias = mpidist.Variable(np.zeros(10), aggregation=total)

    def step(batch):
        x = batch["image"].reshape(-1, 64)
        count = mpidist.get_replica_context().all_reduce("SUM", len(x))
        scores = np.exp(x @ weights + bias)
        error = scores / scores.sum(axis=1, keepdims=True)
        error[np.arange(len(x)), batch["label"]] -= 1
        rate = LEARNING_RATE / count
        weights.assign_sub(rate * x.T @ error)
        bias.assign_sub(rate * error.sum(axis=0))
        return len(x)

    seen = 0
    for batch in dataset:
        rows = strategy.run(step, args=(batch,))
        seen += strategy.reduce("SUM", rows, axis=None)

    digits = load_digits()
    images, labels = digits.data[-TEST_IMAGES:] / 16, digits.target[-TEST_IMAGES:]
    right = (images @ weights + bias).argmax(axis=1) == labels
    if strategy.replica_id == 0:
        print(
            f"{seen} images in {EPOCHS} epochs on {strategy.num_replicas_in_sync} "
            f"replicas: test accuracy {right.mean():.1%}"
        )


if __name__ == "__main__":
    main()
