"""The script docs/port.sed, on programs like those of TensorFlow's guides."""

import re
import subprocess

import numpy as np
import pytest
from launching import ROOT, run_ranks

COPIES = """
import tensorflow as tf

v = tf.Variable(np.arange(3.0))
checkpoint = tf.train.Checkpoint(v=v)
path = checkpoint.write(CHECKPOINTS)
v.assign(np.zeros(3))
checkpoint.read(path).assert_consumed()
loss = tf.keras.losses.MeanSquaredError()(tf.zeros([3]), v)
print(float(tf.reduce_sum(v)), round(float(loss), 3))
"""


def ported(program, folder):
    path = folder / "program.py"
    checkpoints = repr(str(folder / "checkpoints"))
    path.write_text(program.replace("CHECKPOINTS", checkpoints))
    subprocess.run(["sed", "-E", "-i", "-f", ROOT / "docs/port.sed", path], check=True)
    text = path.read_text()
    assert not re.search(r"\btf\b", text), text
    return path


def test_a_program_without_a_strategy_that_saves_is_one_program(tmp_path):
    path = ported(COPIES, tmp_path)
    done = run_ranks(3, [str(path)], timeout=100)
    assert (done.returncode, done.stdout) == (0, "3.0 1.667\n" * 3), done.stderr
    lines = "print(__name__)\ntf.train.Checkpoint(v=v)\n"
    for program in (f"import tensorflow as tf\nstrategy = None\n{lines}", lines):
        assert "set_strategy" not in ported(program, tmp_path).read_text()
    last_goes = ported("x = 1\nfrom tensorflow import keras", tmp_path)
    assert last_goes.read_text() == "x = 1\n"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("tf.config.experimental.get_memory_info('GPU:0')", "delete the line"),
        ("tf.random.Generator.from_seed(1)", "numpy.random.default_rng"),
        ("tf.io.gfile.get_registered_schemes()", "os.makedirs"),
        ("tf.keras.metrics.PearsonCorrelation()", "mpidist.metrics.Metric"),
        (
            "from tensorflow import keras\nkeras.layers.Dense(2)",
            "array code for layers",
        ),
        ("tf.keras.losses.Dice()", "mpidist.losses.Loss"),
        ("tf.keras.datasets.mnist.load_data()", "torchvision"),
        ("tf.compat.v1.train.AdamOptimizer()", "mpidist.optimizers.Adam"),
    ],
)
def test_names_that_are_left_say_what_to_write(line, remedy, tmp_path):
    path = ported(f"import tensorflow as tf\n{line}\n", tmp_path)
    with pytest.raises(AttributeError, match=remedy):
        exec(path.read_text(), {})


def test_functions_of_numpy_give_what_tensorflow_does(tmp_path):
    program = """import tensorflow as tf
labels = [1, -1]  # which is no class
one_hot = tf.one_hot(labels, depth=2)
x = tf.constant([[3.0, 4.0], [0.0, 0.0]])
norm, turned = tf.norm(x), tf.transpose(x, perm=[1, 0])
ratio = tf.math.divide_no_nan(x[0], x[1] + [0.0, 2.0])
counts = tf.Variable(2.0), tf.Variable(0.0)
others = tf.math.divide_no_nan(*counts), tf.math.divide_no_nan(1.0, counts[0])
first = tf.argmax(x), tf.argmin(x, axis=-1, output_type=tf.int32), tf.argmax(x, 1)
summed = tf.cumsum(x + 1.0)
rows = tf.gather(x, [[1, 0]]), tf.gather(x, 1, axis=1)
product = tf.linalg.matvec(x, [1.0, 2.0]), tf.math.squared_difference(3.0, x[0])
clipped = tf.clip_by_norm(x, 1.0), tf.clip_by_norm(x, 9.0)
shares = tf.nn.softmax(x), tf.nn.softmax(x, axis=0), tf.nn.tanh(0.0)
larger = tf.cond(tf.math.mod(norm, 2) < 1.0,
                 lambda: tf.boolean_mask(x, labels),
                 false_fn=lambda: tf.boolean_mask(x, x > 3.0),
                 name="larger")
losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[0, 1],
                                                        logits=x)
"""
    found: dict[str, object] = {}
    exec(ported(program, tmp_path).read_text(), found)
    assert found["one_hot"].tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert (found["ratio"].tolist(), found["others"]) == ([0.0, 2.0], (0.0, 0.5))
    assert [x.tolist() for x in found["first"]] == [[0, 0], [0, 0], [1, 0]]
    assert found["first"][1].dtype == np.int32
    assert found["summed"].tolist() == [[4.0, 5.0], [5.0, 6.0]]
    assert [x.tolist() for x in found["rows"]] == [
        [[[0.0, 0.0], [3.0, 4.0]]],
        [4.0, 0.0],
    ]
    assert [x.tolist() for x in found["product"]] == [[11.0, 0.0], [0.0, 1.0]]
    for clipped, row in zip(found["clipped"], ([0.6, 0.8], [3.0, 4.0]), strict=True):
        np.testing.assert_allclose(clipped, [row, [0.0, 0.0]])
    e = np.exp(1.0)
    np.testing.assert_allclose(
        found["shares"][0], [[1 / (1 + e), e / (1 + e)], [0.5] * 2]
    )
    np.testing.assert_allclose(found["shares"][1].sum(0), 1.0)
    assert (found["norm"], found["turned"].tolist()) == (5.0, [[3.0, 0.0], [4.0, 0.0]])
    assert found["larger"].tolist() == [4.0]
    assert found["losses"] == pytest.approx(np.log([1 + np.e, 2]))
    # Of a matrix NumPy's is another norm: this is left to the reader.
    with pytest.raises(AssertionError, match=r"tf\.norm"):
        ported("y = tf.norm(x, ord=2)\n", tmp_path)


def test_what_libraries_on_tensorflow_write(tmp_path, caplog):
    program = """from types import SimpleNamespace
from typing import List
logging = SimpleNamespace(info="of absl")  # imported before, which has to stay
import tensorflow as tf, tf_keras
from tensorflow.keras.optimizers import RMSprop  # of Keras 3
from keras.optimizers import (
    Adam as First,  # another name
    SGD,
)

optimizers = tf.keras.optimizers
many = [tf.keras.optimizers.Adagrad(0.1)]
many += [RMSprop(0.1), getattr(optimizers, "Adam")(0.1), tf.keras.optimizers.AdamW(0.1)]
many += [First(0.1), SGD(0.1), {"sgd": tf.keras.optimizers.SGD}["sgd"](0.1)]
assert isinstance(SGD(0.1), tf.keras.optimizers.SGD)
many.append(tf.keras.optimizers.legacy.RMSprop(0.1, momentum=0.9))
old = tf.keras.optimizers.legacy.RMSprop(0.1)

class Constant(
    tf.keras.optimizers.schedules.LearningRateSchedule):
  def __call__(self, step):
    return 0.5

schedule = Constant()
rates = [
    r(3) if isinstance(r, tf.keras.optimizers.schedules.LearningRateSchedule) else r
    for r in (schedule, 0.25, tf.keras.experimental.CosineDecay(0.5, 6))
]
def double(x):
  return 2 * x
double = tf.function(double)
double = tf.function(autograph=False)(double)
triple = tf.function(
    lambda x: 3 * x, input_signature=[tf.TensorSpec(shape=[], dtype=tf.float32)])
class Net(tf.keras.Model):
	def __init__(self):
		super(Net, self).__init__()
		self.w = tf.Variable(1.0)

	@tf.function
	def __call__(self, x):
		return self.w * x

tf.io.gfile.mkdir(FOLDER)
before = tf.io.gfile.exists(os.path.join(FOLDER, "checkpoint"))
tf.train.Checkpoint(model=Net()).save(file_prefix=os.path.join(FOLDER, "ckpt"))
after = os.path.exists(os.path.join(FOLDER, "checkpoint"))
tpus = tf.config.experimental.list_logical_devices("TPU")

try:
  tpu = tf.distribute.cluster_resolver.TPUClusterResolver.connect()
except ValueError:
  tpu = None

class Log(tf.keras.callbacks.Callback):
  pass

def train(model: tf_keras.Model,
          rate: tf.keras.optimizers.schedules.LearningRateSchedule,
          logs: List[tf.keras.callbacks.Callback] = [Log()]) -> tf.keras.layers.Layer:
  tf.keras.backend.set_learning_phase(1)
  optimizer = tf_keras.optimizers.SGD(rate)
  optimizer._create_hypers()  # pylint: disable=protected-access
  optimizer._create_slots(model.trainable_variables)
  merges = tf.distribute.get_strategy().extended._use_merge_call()
  options = tf.train.CheckpointOptions(enable_async_checkpointing=True)
  path = os.path.join(FOLDER, "built")
  tf.train.Checkpoint(optimizer=optimizer).save(path, options=options)
  saved = dict(tf.train.list_variables(os.path.join(FOLDER, "built")))
  return merges, saved["optimizer/sgd/iterations"]

trained = train(Net(), schedule)
counted = tf.data.experimental.Counter().take(2).reduce(0, lambda a, b: a + b)

x = tf.zeros([2, 3])
shapes = [x.shape.as_list()[1:], x.get_shape().as_list(), x.shape.rank, x.shape.ndims]
if x.shape.is_fully_defined():
  tf.compat.v1.logging.warning("of TensorFlow")
"""
    found: dict[str, object] = {"FOLDER": str(tmp_path / "d")}
    exec(ported(program, tmp_path).read_text(), found)
    assert (found["before"], found["after"], found["tpus"]) == (False, True, [])
    assert found["Net"]()(3.0) == 3.0
    assert (found["tpu"], found["trained"], found["counted"]) == (None, (False, ()), 1)
    assert found["logging"].info == "of absl"
    assert caplog.messages == ["of TensorFlow"]
    keras = ["of_keras=True" in repr(x) for x in (*found["many"], found["old"])]
    # Not the one by getattr, and the old one has Keras 2's formula.
    assert keras == [True, True, False, *(True,) * 5, False]
    assert found["rates"] == [0.5, 0.25, pytest.approx(0.25)]
    assert (found["double"](4), found["triple"](4)) == (8, 12)
    assert len(found["Net"]().trainable_variables) == 1
    assert found["shapes"] == [[3], [2, 3], 2, 2]


def test_what_the_docstrings_of_tensorflow_write(tmp_path):
    program = """import tensorflow as tf
import keras
class Net(keras.Model):
  def __init__(self):
    super().__init__()
    with self.name_scope:
      self.w = tf.Variable([1.0, 2.0])
      self.seen = tf.Variable(0, trainable=False)

  def call(self, x, training=False):
    return self.w * x

  @tf.Module.with_name_scope
  def twice(self, x):
    return self(2 * x, training=True)

model = Net()
others = [v.dtype for v in model.non_trainable_variables]
full = tf.experimental.Optional.from_value(42)
empty = tf.experimental.Optional.empty(tf.TensorSpec(shape=[]))
clipped = tf.clip_by_value([1.0, 5.0], clip_value_min=0, clip_value_max=2)
texts = tf.data.Dataset.from_generator(lambda: iter(["a"]), tf.string)
pairs = list(tf.data.Dataset.from_tensor_slices([(7, 8), (9, 10)]))
tf.keras.utils.set_random_seed(3)
path = tf.train.Checkpoint(model).save(tf.io.gfile.join(FOLDER, "ckpt"))
both = tf.train.Checkpoint(root=model, step=tf.Variable(1))
both.restore(path, partial=True)
reader = tf.train.load_checkpoint(path)
w = reader.get_tensor("model/w/.ATTRIBUTES/VARIABLE_VALUE")
same = tf.train.load_variable(path, "model/w/.ATTRIBUTES/VARIABLE_VALUE")
new = os.path.join(FOLDER, "new")
tf.io.gfile.makedirs(new)  # with a comment
with tf.io.gfile.GFile(name=os.path.join(new, "x"), mode="w") as f:
  f.write("hello")
x = os.path.join(new, "x")
tf.io.gfile.copy(x, x + "2", overwrite=True)
tf.gfile.Copy(x, x + "3")
tf.io.gfile.rename(x + "3", x + "4", overwrite=True)
found = sorted(os.path.basename(one) for one in tf.compat.v1.gfile.Glob(new + "/*"))
walked = [names for _, _, names in tf.io.gfile.walk(new)]
size = tf.io.gfile.stat(x).length
"""
    found: dict[str, object] = {"FOLDER": str(tmp_path / "d")}
    exec(ported(program, tmp_path).read_text(), found)
    assert found["model"].twice(3.0).tolist() == [6.0, 12.0]
    assert [d.name for d in found["others"]] == ["int64"]
    full, empty = found["full"], found["empty"]
    assert (full.has_value(), full.get_value(), empty.has_value()) == (True, 42, False)
    assert (empty.element_spec.dtype, found["clipped"].tolist()) == ("f4", [1.0, 2.0])
    assert [str(x) for x in found["texts"]] == ["a"]
    assert [x.tolist() for x in found["pairs"]] == [[7, 8], [9, 10]]
    assert found["w"].tolist() == found["same"].tolist() == [1.0, 2.0]
    assert (found["found"], found["size"]) == (["x", "x2", "x4"], 5)
    assert [sorted(names) for names in found["walked"]] == [["x", "x2", "x4"]]


def test_names_of_arguments_and_words_that_stay(tmp_path):
    program = """import tensorflow as tf
import keras
def clip(x, clip_value_min=0.0, clip_value_max=1.0):
  if clip_value_min == 0.5:
    clip_value_max = 3.0
  x = tf.clip_by_value(x, clip_value_min=clip_value_min, clip_value_max=4.0)
  x = tf.clip_by_value(f(f(f(x))), clip_value_max=clip_value_max, clip_value_min=0.0)
  return tf.clip_by_value(
      x, clip_value_min,
      clip_value_max=clip_value_max)

def f(x):
  return x
clipped = clip([-1.0, 0.75, 9.0], clip_value_max=2.0), clip([9.0], clip_value_min=0.5)

class Trainer(tf.Module):
  def __init__(self):
    super().__init__()
    self.model = tf.Variable([1.0, 2.0])
    self.path = tf.train.Checkpoint(root=self).save(tf.io.gfile.join(FOLDER, "self"))

model = Trainer().model
path = tf.train.Checkpoint(root=None, model=model).save(tf.io.gfile.join(FOLDER, "a"))
tf.train.Checkpoint(None, model=model)
names = ["model"]
reader = tf.train.load_checkpoint(path)
read = [reader.get_tensor(tensor_str="model"), reader.get_tensor(names[f(0)])]
read.append(tf.train.load_variable(path, name="model"))
read.append(tf.train.load_variable(ckpt_dir_or_file=path, name="".join(names)))

logged = []
def log(*args):
  logged.append(args)

a, b = os.path.join(FOLDER, "x"), os.path.join(FOLDER, "y")
open(a, "w").close()
tf.io.gfile.copy(a, b, overwrite=True); log("copied", True)
tf.io.gfile.copy(a, b) if os.path.exists(a) else log("none", True)
tf.io.gfile.copy(os.path.join(FOLDER, str(f("x"))), b, overwrite=False); log(b, False)
words = 'https://keras.io/api, see keras.io and keras.__version__'
"""
    path = ported(program, tmp_path)
    found: dict[str, object] = {"FOLDER": str(tmp_path / "d")}
    exec(path.read_text(), found)
    assert [x.tolist() for x in found["clipped"]] == [[0.0, 0.75, 2.0], [3.0]]
    assert [x.tolist() for x in found["read"]] == [[1.0, 2.0]] * 4
    assert found["logged"] == [("copied", True), (found["b"], False)]
    assert found["words"] == "https://keras.io/api, see keras.io and keras.__version__"
    # One name for two: this is left to the reader.
    twice = ported("tf.train.Checkpoint(model, step=f(1), model=model)\n", tmp_path)
    assert "(model, step=f(1), model=model)" in twice.read_text()


def test_what_programs_beside_the_guides_write(tmp_path):
    program = """
import math as math_ops
import tensorflow as tf
from tensorflow.keras import mixed_precision
from tensorflow.python.ops import math_ops as unused

cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=9) for _ in range(2)])
devices = len(tf.config.list_logical_devices())
version = f"{tf.__version__}", int(tf.__version__.split(".")[0]) < 2

class Stop(tf.keras.callbacks.EarlyStopping):
  options: tf.saved_model.SaveOptions = None

class Wrapped(tf.keras.optimizers.SGD):
  def _create_hypers(self):
    self._optimizer._create_hypers()  # pylint: disable=protected-access

def normalize(x, mean):
  x = tf.reshape(x, [-1, 2])
  x -= tf.reduce_mean(mean, axis=[0, 1])
  per_row = tf.reduce_mean(tf.abs(x), axis=list(range(1, len(x.shape))))
  x += tf.cast(tf.math.count_nonzero(per_row), x.dtype) - 2.0
  x *= (2 + tf.size(mean))
  x /= 2
  x += tf.where(tf.greater(x, 0.0), x, 0 * x)
  return x

given = tf.constant([[1.0, 2.0], [3.0, 4.0]], name="given")
batch = {"k": tf.ones([2, 3, 4])}
attended = tf.matmul(batch["k"] + 1.0, 2.0 * batch["k"][:, :2], transpose_b=True)
both = tf.matmul(given - 1.0, tf.abs(given + 0.0), transpose_a=True, transpose_b=True)
labels = tf.one_hot(tf.cast(given[0], tf.int32), len(given) + 1, dtype=tf.float32)
larger = tf.where(
    given > 2.0, given, 0.0)
tf.summary.image("given", given, step=0)
tf.summary.trace_on(graph=True)
normal = normalize(given, tf.convert_to_tensor([[1.0, 2.0]], "float64", name='mean'))
names = ["a"]
same = names
names += ["b"]
count = 1
count += 1

def collect(found, *layers):
  for layer in layers:
    found += layer.variables
  other_list = found
  other_list += layers[:0]
  text = ""
  text += f'''two
lines'''
  last = 1 * given
  last += given[0,
    1]
  return text

class Layer(tf.Module):
  def __init__(self):
    self.v = tf.Variable(1.0)

path = tf.train.Checkpoint(v=tf.Variable(1.0)).save(CHECKPOINTS + "/saved")
reader = tf.compat.v1.train.NewCheckpointReader(path)
shapes = reader.get_variable_to_shape_map()
loss: tf.Tensor = tf.reduce_sum(given)
known = isinstance(loss, tf.Tensor), isinstance(2.0, (float, tf.Tensor)), isinstance(
    loss, (tf.Tensor, type(None)))
collected = []
text = collect(collected, Layer(), Layer())

try:
  tf.train.Checkpoint(v=tf.Variable(1.0)).restore("CHECKPOINTS/none")
except (tf.errors.AbortedError, tf.errors.UnavailableError, tf.errors.NotFoundError):
  found = False
try:
  tf.Variable(1.0).assign([1.0, 2.0])
except tf.errors.InvalidArgumentError:
  fits = False
"""
    found: dict[str, object] = {"x": 0}
    exec(ported(program, tmp_path).read_text(), found)
    assert (found["devices"], found["version"]) == (1, ("2.21", False))
    assert (found["Stop"].__base__, found["fits"], found["found"]) == (
        object,
        False,
        False,
    )
    assert found["given"].tolist() == [[1.0, 2.0], [3.0, 4.0]]  # unchanged
    assert (found["attended"].shape, found["attended"][1, 2, 1]) == ((2, 3, 2), 16.0)
    assert found["both"].tolist() == [[4.0, 8.0], [7.0, 15.0]]
    assert found["labels"].tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert found["larger"].tolist() == [[0.0, 0.0], [3.0, 4.0]]
    assert found["normal"].tolist() == [[-1.0, 2.0], [6.0, 10.0]]
    assert (found["same"], found["count"]) == (["a", "b"], 2)
    assert found["known"] == (True, True, True)
    assert found["shapes"] == {"v": []}
    assert (len(found["collected"]), found["text"]) == (2, "two\nlines")


def test_what_the_tutorials_and_models_of_tensorflow_write(tmp_path):
    program = """import tensorflow as tf
from tensorflow.python.eager import monitoring
from tensorflow.python.util import deprecation
from tensorflow.python.util import nest

@deprecation.deprecated(
    None, 'Please use orbit.')
def steps_to_run(step, steps_per_loop):
  return min(20 - step, steps_per_loop)

first_batch_gauge = monitoring.IntGauge('/tensorflow/training/first', 'time', 'type')
first_batch_gauge.get_cell('start').set(3)

class TimeHistory(tf.keras.callbacks.Callback):
  def on_epoch_end(self, epoch, logs=None):
    self.epoch = epoch

callback = TimeHistory()
callback.on_train_begin()
callback.on_epoch_end(3)
flat = nest.flatten({"b": 2, "a": 1})
tf.keras.backend.set_image_data_format("channels_last")
tf.keras.mixed_precision.set_global_policy('float32')
dtypes = {"fp32": tf.float32, "bf16": tf.bfloat16}
scale = tf.math.rsqrt(tf.cast(16, tf.float32)) * tf.math.rsqrt(4.0)

class Net(tf.keras.Model):
  def __init__(self):
    super().__init__()
    self.kernel = tf.Variable(tf.ones([1, 5]))
    self.bias = tf.Variable(tf.zeros((5,)))

net = Net()
file = os.path.join(FOLDER, "model.weights.h5")
net.save_weights(file)
net.bias.assign(net.bias + 1.0)
net.load_weights(filepath=file)
counts = len(net.trainable_weights), len(net.non_trainable_weights)
reader = tf.train.load_checkpoint(file)
dtype_from_key = reader.get_variable_to_dtype_map()
part = tf.train.Checkpoint(bias=tf.Variable(tf.zeros([5])))
status = tf.train.Checkpoint(model=part).restore(tf.train.latest_checkpoint(file))
status.assert_existing_objects_matched()

def reduce_explicitly(grads):
  return tf.distribute.get_strategy(  # pylint: disable=protected-access
  ).extended._replica_ctx_all_reduce(tf.distribute.ReduceOp.SUM, grads)

total = tf.distribute.get_strategy().run(reduce_explicitly, args=([2.0],))
"""
    found: dict[str, object] = {"FOLDER": str(tmp_path / "d")}
    exec(ported(program, tmp_path).read_text(), found)
    assert (found["callback"].epoch, found["flat"]) == (3, [1, 2])
    assert found["dtypes"] == {"fp32": np.float32, "bf16": "bfloat16"}
    assert (found["scale"], found["steps_to_run"](15, 10)) == (0.125, 5)
    assert found["net"].bias.numpy().tolist() == [0.0] * 5
    assert found["counts"] == (2, 0)
    assert found["dtype_from_key"] == {"model/bias": "f4", "model/kernel": "f4"}
    assert found["total"][0].values == (2.0,)
    with pytest.raises(AssertionError, match="kernel"):
        found["status"].assert_consumed()
