"""DCGAN's tutorial, with linear networks: two optimizers, a cross entropy of logits."""

import os
import time

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
tf.random.set_seed(0)
BATCH_SIZE = 8 * strategy.num_replicas_in_sync
noise_dim = 2
real = np.random.RandomState(0).randn(64, 1).astype("float32") + 3.0
train_dataset = tf.data.Dataset.from_tensor_slices(real).batch(BATCH_SIZE)
train_dataset = strategy.experimental_distribute_dataset(train_dataset)

with strategy.scope():
    # This method returns a helper function to compute cross entropy loss
    cross_entropy = tf.keras.losses.BinaryCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )
    g_w = tf.Variable(tf.ones([noise_dim, 1]) * 0.1)
    g_b = tf.Variable(tf.zeros([1]))
    d_w = tf.Variable(tf.ones([1, 1]) * 0.1)
    d_b = tf.Variable(tf.zeros([1]))
    generator_optimizer = tf.keras.optimizers.Adam(4e-2, beta_1=0.5)
    discriminator_optimizer = tf.keras.optimizers.Adam(4e-2, beta_1=0.5)
    gen_metric = tf.keras.metrics.Mean("gen_loss")
    disc_metric = tf.keras.metrics.BinaryCrossentropy("disc", from_logits=True)

checkpoint_dir = os.path.join(FOLDER, "training_checkpoints")
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")
checkpoint = tf.train.Checkpoint(
    generator_optimizer=generator_optimizer,
    discriminator_optimizer=discriminator_optimizer,
    g_w=g_w,
    g_b=g_b,
    d_w=d_w,
    d_b=d_b,
)


def discriminator_loss(real_output, fake_output):
    real_loss = cross_entropy(tf.ones_like(real_output), real_output)
    fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
    total_loss = real_loss + fake_loss
    return tf.nn.compute_average_loss(total_loss, global_batch_size=BATCH_SIZE)


def generator_loss(fake_output):
    return tf.nn.compute_average_loss(
        cross_entropy(tf.ones_like(fake_output), fake_output),
        global_batch_size=BATCH_SIZE,
    )


@tf.function
def train_step(images):
    noise = np.random.normal(size=[images.shape[0], noise_dim]).astype("float32")
    generated = tf.matmul(noise, g_w) + g_b
    real_output = tf.matmul(images, d_w) + d_b
    fake_output = tf.matmul(generated, d_w) + d_b
    gen_loss = generator_loss(fake_output)
    disc_loss = discriminator_loss(real_output, fake_output)
    d_fake = cross_entropy.gradient(tf.ones_like(fake_output), fake_output) / BATCH_SIZE
    d_generated = tf.matmul(d_fake, d_w, transpose_b=True)
    gradients_of_generator = [
        tf.matmul(noise, d_generated, transpose_a=True),
        tf.reduce_sum(d_generated, axis=0),
    ]
    on_real = (
        cross_entropy.gradient(tf.ones_like(real_output), real_output) / BATCH_SIZE
    )
    on_fake = (
        cross_entropy.gradient(tf.zeros_like(fake_output), fake_output) / BATCH_SIZE
    )
    gradients_of_discriminator = [
        tf.matmul(tf.transpose(images), on_real)
        + tf.matmul(tf.transpose(generated), on_fake),
        tf.reduce_sum(on_real + on_fake, axis=0),
    ]
    generator_optimizer.apply_gradients(zip(gradients_of_generator, [g_w, g_b]))
    discriminator_optimizer.apply_gradients(zip(gradients_of_discriminator, [d_w, d_b]))
    gen_metric.update_state(gen_loss * strategy.num_replicas_in_sync)
    disc_metric.update_state(tf.ones_like(real_output), real_output)
    return gen_loss, disc_loss


def train(dataset, epochs):
    for epoch in range(epochs):
        start = time.time()
        for image_batch in dataset:
            gen, disc = strategy.run(train_step, args=(image_batch,))
            gen = strategy.reduce("SUM", gen, axis=None)
            disc = strategy.reduce("SUM", disc, axis=None)
        if (epoch + 1) % 15 == 0:
            checkpoint.save(file_prefix=checkpoint_prefix)
        gen_metric.reset_states()
    return gen, disc


gen, disc = train(train_dataset, 15)
assert tf.math.is_finite(gen) and tf.math.is_finite(disc)
assert g_b.numpy()[0] > 0.5, g_b.numpy()
assert 0.3 < disc_metric.result().numpy() < 1.0, disc_metric.result()
latest = tf.train.latest_checkpoint(checkpoint_dir)
saved = g_b.numpy()
g_b.assign([0.0])
checkpoint.restore(latest)
assert np.array_equal(g_b.numpy(), saved), (g_b.numpy(), saved)
