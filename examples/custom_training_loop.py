"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", line by line.

Needs the extra `examples`:

    mpirun -n 2 python examples/custom_training_loop.py

The order of the sections, and the names in them, are those of the tutorial. What
differs: the images are the handwritten digits of scikit-learn, the network is two dense
layers, and its gradients are written out, since nothing differentiates here.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import mpidist

# --- Create a strategy to distribute the variables and the graph ------------------

strategy = mpidist.MPIStrategy()
xp = strategy.array_module


def say(text):
    """Print on one rank."""
    if strategy.replica_id == 0:
        print(text, flush=True)


# --- Set up the input pipeline ----------------------------------------------------

BATCH_SIZE_PER_REPLICA = 32
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def make_datasets():
    """Return the data to train and to test with."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = np.split(order, [len(order) // 5])
    train_dataset = (
        mpidist.data.Dataset.from_tensor_slices((images[train], digits.target[train]))
        .shuffle(seed=0)
        .batch(GLOBAL_BATCH_SIZE)
    )
    test_dataset = mpidist.data.Dataset.from_tensor_slices(
        (images[test], digits.target[test])
    ).batch(GLOBAL_BATCH_SIZE)
    return train_dataset, test_dataset


# --- Create the model -------------------------------------------------------------


class Model:
    """Two dense layers: 64 inputs, 128 hidden units, 10 scores."""

    def __init__(self, seed=0):
        """Make the variables; rank 0's initial values count."""
        rng = np.random.default_rng(seed)

        def dense(rows, columns, name):
            kernel = rng.normal(0, (2 / rows) ** 0.5, (rows, columns))
            return [
                mpidist.Variable(kernel, name=f"{name}/kernel", dtype=np.float32),
                mpidist.Variable(np.zeros(columns), name=f"{name}/bias", dtype="f4"),
            ]

        self.trainable_variables = [
            *dense(64, 128, "hidden"),
            *dense(128, 10, "output"),
        ]

    def __call__(self, images):
        """Return the hidden layer, and a score for each digit."""
        kernel_1, bias_1, kernel_2, bias_2 = (
            v.value() for v in self.trainable_variables
        )
        hidden = (images @ kernel_1 + bias_1).clip(0)
        return hidden, hidden @ kernel_2 + bias_2

    def gradients(self, images, hidden, d_scores):
        """Return the gradients of the loss, from those of the scores."""
        d_hidden = (d_scores @ self.trainable_variables[2].value().T) * (hidden > 0)
        return [
            images.T @ d_hidden,
            d_hidden.sum(0),
            hidden.T @ d_scores,
            d_scores.sum(0),
        ]


# --- Define the loss function -----------------------------------------------------


def loss_object(labels, predictions):
    """Return the cross-entropy of each example, and the probabilities."""
    shifted = predictions - predictions.max(1, keepdims=True)
    log_probabilities = shifted - xp.log(xp.exp(shifted).sum(1, keepdims=True))
    return -log_probabilities[xp.arange(len(labels)), labels], xp.exp(log_probabilities)


# --- Training loop ----------------------------------------------------------------


def main(options):
    """Train, checkpoint, restore, test."""
    say(f"Number of devices: {strategy.num_replicas_in_sync}")
    train_dataset, test_dataset = make_datasets()
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
    test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

    # Metrics, variables, optimizer and checkpoint are made under the scope.
    with strategy.scope():
        test_loss = mpidist.metrics.Mean(name="test_loss")
        train_accuracy = mpidist.metrics.SparseCategoricalAccuracy(
            name="train_accuracy"
        )
        test_accuracy = mpidist.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        model = Model()
        optimizer = mpidist.optimizers.Adam(learning_rate=0.001)
        checkpoint = mpidist.Checkpoint(
            optimizer=optimizer, model=model.trainable_variables
        )

    def train_step(inputs):
        images, labels = inputs
        hidden, predictions = model(images)
        per_example_loss, probabilities = loss_object(labels, predictions)
        # What the tape does there: the gradient of the loss of the whole batch. It is
        # the sum over the examples, divided by their number on all replicas.
        loss = mpidist.compute_average_loss(
            per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE
        )
        d_scores = (probabilities - xp.eye(10, dtype="f4")[labels]) / GLOBAL_BATCH_SIZE
        gradients = model.gradients(images, hidden, d_scores)

        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        images, labels = inputs
        _, predictions = model(images)
        test_loss.update_state(loss_object(labels, predictions)[0])
        test_accuracy.update_state(labels, predictions)

    # `run` replicates the provided computation and runs it with the distributed input.
    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(mpidist.ReduceOp.SUM, per_replica_losses, axis=None)

    def distributed_test_step(dataset_inputs):
        return strategy.run(test_step, args=(dataset_inputs,))

    for epoch in range(options.epochs):
        # TRAIN LOOP
        total_loss = 0.0
        num_batches = 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        train_loss = total_loss / num_batches

        # TEST LOOP
        for x in test_dist_dataset:
            distributed_test_step(x)

        if epoch % 2 == 0:
            checkpoint.save(options.checkpoint)

        # Reading a metric is a collective call, so it is not inside `say`.
        loss = test_loss.result()
        accuracies = train_accuracy.result(), test_accuracy.result()
        say(
            f"Epoch {epoch + 1}, Loss: {train_loss:.4f}, "
            f"Accuracy: {accuracies[0]:.2%}, Test Loss: {loss:.4f}, "
            f"Test Accuracy: {accuracies[1]:.2%}"
        )
        test_loss.reset_states()
        train_accuracy.reset_states()
        test_accuracy.reset_states()

    # --- Restore the latest checkpoint and test -----------------------------------
    # Outside the scope there is no strategy: each process has plain variables of its
    # own, restores them, and tests with all of the data.
    eval_accuracy = mpidist.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    new_model = Model(seed=1)
    new_checkpoint = mpidist.Checkpoint(model=new_model.trainable_variables)
    new_checkpoint.restore(options.checkpoint, partial=True)

    for images, labels in test_dataset:
        _, predictions = new_model(images)
        eval_accuracy.update_state(labels, predictions)
    say(
        "Accuracy after restoring the saved model without strategy: "
        f"{eval_accuracy.result():.2%}"
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("training_checkpoint"))
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_arguments())
