"""Two networks and two optimizers, as in the tutorial "DCGAN"."""

import os

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
BATCH_SIZE = 2 * n
with strategy.scope():
    generator = tf.Variable(tf.zeros([2]), name="generator")
    discriminator = tf.Variable(tf.ones([2]), name="discriminator")
    generator_optimizer = tf.keras.optimizers.Adam(1e-1)
    discriminator_optimizer = tf.keras.optimizers.Adam(1e-2, beta_1=0.5)
checkpoint_prefix = os.path.join(FOLDER, "ckpt")  # noqa: F821
checkpoint = tf.train.Checkpoint(
    generator_optimizer=generator_optimizer,
    discriminator_optimizer=discriminator_optimizer,
    generator=generator,
    discriminator=discriminator,
)


@tf.function
def train_step(images):
    fake = tf.ones([2, 1]) * generator
    real_output = tf.reduce_sum(images * discriminator, axis=1)
    fake_output = tf.reduce_sum(fake * discriminator, axis=1)
    gen_loss = -tf.reduce_sum(fake_output) / BATCH_SIZE
    disc_loss = tf.reduce_sum(fake_output - real_output) / BATCH_SIZE
    gradients_of_generator = -discriminator * 2.0 / BATCH_SIZE
    gradients_of_discriminator = tf.reduce_sum(fake - images, axis=0) / BATCH_SIZE
    generator_optimizer.apply_gradients([(gradients_of_generator, generator)])
    discriminator_optimizer.apply_gradients(
        [(gradients_of_discriminator, discriminator)]
    )
    return gen_loss, disc_loss


def train(dataset, epochs):
    for epoch in range(epochs):
        for image_batch in dataset:
            gen, disc = strategy.run(train_step, args=(image_batch,))
        if (epoch + 1) % 2 == 0:
            checkpoint.save(file_prefix=checkpoint_prefix)
        tf.print("epoch", epoch + 1, strategy.reduce("SUM", gen, axis=None))
    return generator.numpy(), discriminator.numpy()


images = np.arange(8.0 * n).reshape(4 * n, 2)
dataset = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensor_slices(images).batch(BATCH_SIZE)
)
at_2 = train(dataset, 2)
at_3 = train(dataset, 1)
assert not np.array_equal(at_2[0], at_3[0])
checkpoint.restore(tf.train.latest_checkpoint(FOLDER))  # noqa: F821
assert np.array_equal(generator.numpy(), at_2[0])
again = train(dataset, 1)
assert all(np.array_equal(x, y) for x, y in zip(again, at_3))
