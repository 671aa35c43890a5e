# From tf.distribute to mpidist: sed -E -i -f port.sed program.py
1{x
s/.*//
x
}
/^\s*@tf\.function\((.*[^)])?$/{
:more
$!{
N
/\n\s*(def|async|@)\b[^\n]*$/!bmore
}
s/.*\n//
}
/\btf\.where\($/{
$!N
}
s/^(import .*), *tensorflow as tf$/\1, contextlib, glob as tf_glob, logging as tf_logging, os, shutil, mpidist/
s/^import tensorflow(\.compat\.v[12])? as tf\b.*/import contextlib, glob as tf_glob, logging as tf_logging, os, shutil\nimport numpy as np\nimport mpidist/
/^(from tensorflow import keras|import (tf_)?keras)$/{
$!d
s/.*//
}
s/\btf_keras\./tf.keras./g
/^\s*from (tensorflow\.)?keras\.optimizers import\b/{
:join
s/ *#[^\n]*//
/\([^)]*$/{
$!{
N
s/[ \n]+/ /2g
bjoin
}
}
s/^(\s*)from [a-z.]+ import (\( *([^()]*[^(), ]),? *\)|(.*))/\1from mpidist.optimizers import \3\4/
s/\b(Adagrad|AdamW?|RMSprop|SGD)( *)(,|$)/\1 as \1\2\3/g
:as
s/ import (.*)\b(Adagrad|AdamW?|RMSprop|SGD) as (\w+)(.*)/ import \1\2\4; \3 = \2.of_keras/
tas
}
/[\\[{,]$|"""|'''/!s/^(\s*)(\w+) ([-*\/])= (([^()#;]|\(([^()#;]|\(([^()#;]|\([^()#;]*\))*\))*\))+)$/\1\2 = \2 \3 (\4)/
/[\\[{,]$|"""|'''|list \+=|\+= (list|sorted|tuple)\(|(losses|variables|weights)$/!s/^(\s*)(\w*([a-rt-zA-Z0-9_]|ss)) \+= ([^][0-9"'#;()]([^()#;]|\(([^()#;]|\(([^()#;]|\([^()#;]*\))*\))*\))*)$/\1\2 = \2 + (\4)/
s/\btf\.compat\.v[12]\./tf./g
s/\btf\.contrib\.distribute\./tf.distribute./g
s/\bfrom tensorflow\.python\.distribute import values as\b/import mpidist as/
s/\bfrom tensorflow\.python\.distribute import values( *(#.*)?)$/import mpidist as values\1/
s/\bfrom tensorflow\.python\.distribute\.values import\b/from mpidist import/
s/\bfrom tensorflow\.python\.util import nest\b/from mpidist import nest/
s/^(\s*from mpidist import .*)\bDistributedVariable\b/\1Variable as DistributedVariable/
s/\b((ds_)?values(_lib)?)\.DistributedVariable\b/\1.Variable/g
s/^from tensorflow\.python\.eager import monitoring$/from unittest import mock; monitoring = mock.MagicMock()/
s/^from tensorflow\.python\.util import deprecation$/import types; deprecation = types.SimpleNamespace(deprecated=lambda *_, **__: lambda func: func)/
s/^(\s*)(from tensorflow\.[^(\\;]*|import tensorflow\.[^(\\;,]*)$/\1pass  # mpidist has no: \2/
s/tf\.distribute\.cluster_resolver\./mpidist.cluster./g
s/tf\.distribute\./mpidist./g
s/\bmpidist\.(experimental\.)?CentralStorageStrategy\(\)/mpidist.MirroredStrategy()/g
s/\b(MirroredStrategy\()(devices *= *)?\[ *(["'][^]["',]*\bgpu:[0-9]+["'],? *)+\](, *)?/\1/gI
s/\btf\.__version__/str(2.21)/g
s/tf\.__internal__\.distribute\.(interim\.)?/mpidist./g
s/tf\.types\.experimental\.distributed\./mpidist./g
s/tf\.data\.experimental\.cardinality\(([^()]*)\)/\1.cardinality()/g
s/tf\.data\.(experimental\.Counter|Dataset\.counter)\(\)/tf.data.Dataset.range(2**62)/g
s/tf\.data\.(experimental\.)?/mpidist.data./g
s/\btf\.train\.CheckpointOptions\(/(lambda *_, **__: None)(/g
s/\btf\.(train\.CheckpointOptions|saved_model\.(Load|Save)Options)\b/object/g
s/tf\.train\.list_variables\(([^()]*(\([^()]*\))?)\)/[(name, x.shape) for name, x in mpidist.load_checkpoint(\1).items()]/g
s/tf\.train\.load_variable\((ckpt_dir_or_file *= *)?([^(),=]*(\([^()]*\))?), *(name *= *)?([^()=]*(\([^()]*\)[^()=]*)*)\)/mpidist.load_checkpoint(\2)[\5]/g
s/\b(checkpoint|ckpt|reader)\.get_tensor\((tensor_str *= *)?([^()=]*(\([^()]*\)[^()=]*)*)\)/\1[\3]/g
s/\/\.ATTRIBUTES\/VARIABLE_VALUE//g
s/(\b\w+(\.\w+)*)\.get_variable_to_shape_map\(\)/{name: [*x.shape] for name, x in \1.items()}/g
s/(\b\w+(\.\w+)*)\.get_variable_to_dtype_map\(\)/{name: x.dtype for name, x in \1.items()}/g
s/(\b\w+(\.\w+)*)\.save_weights\((filepath *= *)?/mpidist.Checkpoint(model=\1).save(/g
s/(\b\w+(\.\w+)*)\.load_weights\((filepath *= *)?/mpidist.Checkpoint(model=\1).restore(/g
s/\btf\.train\.Checkpoint\((root *= *)?None *(, *|\))/tf.train.Checkpoint(\2/g
s/\btf\.train\.Checkpoint\([, ]+/tf.train.Checkpoint(/g
/Checkpoint\((root *= *)?(self|(\w+\.)*(\w+),[^()]*(\([^()]*\)[^()]*)*\b\4 *=[^=].*)[,)]/!s/\btf\.train\.Checkpoint\((root *= *)?((\w+\.)*)([A-Za-z_]\w*)([,)])/mpidist.Checkpoint(\4=\2\4\5/g
s/\btf\.train\.NewCheckpointReader\(/mpidist.load_checkpoint(/g
s/tf\.train\.ClusterSpec/mpidist.cluster.ClusterSpec/g
s/tf\.train\.(GradientDescent|Momentum)Optimizer\(/mpidist.optimizers.SGD(/g
s/tf\.train\.get_or_create_global_step\(\)/mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA")/g
s/tf\.train\./mpidist./g
s/(checkpoint|ckpt|Checkpoint\([^()]*\))\.write\(/\1.save(/g
s/(checkpoint|ckpt|Checkpoint\([^()]*\))\.read\(/\1.restore(/g
s/tf\.experimental\.Optional\b/mpidist.data.Optional/g
s/tf\.errors\.OutOfRangeError/mpidist.data.OutOfRangeError/g
s/\btf\.errors\.(Aborted|Unavailable)Error\b/mpidist.CollectiveError/g
s/\btf\.errors\.InvalidArgumentError\b/ValueError/g
s/\btf\.errors\.NotFoundError\b/FileNotFoundError/g
s/\b(tf\.)?keras\.mixed_precision\.(experimental\.)?LossScaleOptimizer\b/mpidist.optimizers.LossScaleOptimizer/g
s/\bkeras\.experimental\.CosineDecay/keras.optimizers.schedules.CosineDecay/g
s/\b(tf\.)?keras\.(models\.)?(Model|layers\.Layer)\b([^(.]|$)/mpidist.Module\4/g
s/\bisinstance\(([^(),]*), *(tf\.keras|keras|tf)\.optimizers\.schedules\.LearningRateSchedule\)/callable(\1)/g
s/^(\s*class \w+\()(tf\.)?keras\.callbacks\.Callback\b/\1type("Callback", (), {f"on_{what}_{end}": lambda *_, **__: None for what in ("train", "epoch", "batch", "train_batch", "test", "test_batch", "predict", "predict_batch") for end in ("begin", "end")})/
s/^(\s*class \w+\()(tf\.)?keras\.callbacks\.\w+/\1object/
s/\b(tf\.)?(keras|tf)\.(optimizers\.schedules\.LearningRateSchedule|callbacks\.Callback)\b/object/g
s/\b(tf\.)?keras\.backend\.(clear_session|(set_)?learning_phase|set_image_data_format)\(/(lambda *_: None)(/g
s/\b(tf\.)?keras\.mixed_precision\.set_global_policy\((["'])float32\2\)/None/g
/\bmomentum *=/!s/\b(tf\.keras|keras|tf)\.optimizers\.legacy\.RMSprop\b/mpidist.optimizers.RMSprop/g
s/\b(tf\.keras|keras|tf)\.optimizers\.(legacy\.|experimental\.)?(Adagrad|AdamW?|RMSprop|SGD)\(/mpidist.optimizers.\3.of_keras(/g
/\bis(instance|subclass)\(|^\s*class /!s/\b(tf\.keras|keras|tf)\.optimizers\.(legacy\.|experimental\.)?(Adagrad|AdamW?|RMSprop|SGD)\b/mpidist.optimizers.\3.of_keras/g
s/\b(tf\.keras|keras|tf)\.optimizers\.(legacy\.|experimental\.)?/mpidist.optimizers./g
s/\b(tf\.)?keras\.optimizers\b/mpidist.optimizers/g
s/\boptimizers\.schedules\.(Cosine|Exponential|Polynomial)Decay\(/optimizers.\L\1\E_decay(/g
s/\boptimizers\.schedules\.CosineDecayRestarts\(/optimizers.cosine_decay_restarts(/g
s/\boptimizers\.schedules\.InverseTimeDecay\(/optimizers.inverse_time_decay(/g
s/\boptimizers\.schedules\.PiecewiseConstantDecay\(/optimizers.piecewise_constant(/g
s/(_decay\(.*), *name=[^,()]*\)/\1)/g
s/tf\.nn\.(compute_average_loss|scale_regularization_loss)/mpidist.\1/g
s/tf\.(Variable|VariableAggregation|VariableSynchronization|IndexedSlices|variable_creator_scope)\b/mpidist.\1/g
s/tf\.TensorSpec/mpidist.data.ArraySpec/g
s/\btf\.TensorShape\(/tuple(/g
s/\b(tf\.)?keras\.utils\.set_random_seed\(/tf.random.set_seed(/g
s/tf\.random\.set_seed\(([^()]*)\)/mpidist.seed_all(\1, per_rank=False)/g
s/\btf\.(dtypes\.)?((float|int|uint|complex)[0-9]+)/np.\2/g
s/(\btf\.(cast|constant|convert_to_tensor|identity)\(([^()]|\(([^()]|\([^()]*\))*\))*), *name=("[^"]*"|'[^']*')/\1/g
s/\btf\.(cast|constant|convert_to_tensor|identity|stop_gradient)\b/np.array/g
:tensor
s/(\bisinstance\([^()]*(\([^()]*\)[^()]*)*[(,] *|^[^()]*\((\w+, )*)tf\.Tensor\b([,)])/\1(np.ndarray, np.generic)\4/g
ttensor
s/\btf\.Tensor\b/np.ndarray/g
s/\btf\.clip_by_global_norm\b/mpidist.optimizers.clip_by_global_norm/g
s/\bkeras\.metrics\.((binary|(sparse_)?categorical)_crossentropy|huber)\b/keras.losses.\1/g
s/\bkeras\.(losses|metrics)\.(MSE|mse|mean_squared_error)\b/keras.losses.mean_squared_error/g
s/\bkeras\.(losses|metrics)\.(MAE|mae|mean_absolute_error)\b/keras.losses.mean_absolute_error/g
s/\b(tf\.|tensorflow\.)?keras\.(metrics|losses)\b/mpidist.\2/g
s/\btf\.nest\./mpidist.nest./g
s/\.restore\(([^()]*(\([^()]*\))?[^()]*)\)\.expect_partial\(\)/.restore(\1, partial=True)/g
s/\.restore\(([^()]*(\([^()]*\))?[^()]*)\)\.assert_(existing_objects_matched|nontrivial_match)\(\)/.restore(\1, partial=True).assert_\3()/g
/\bpartial=/!s/^(\s*\w*status = .*\.restore\([^()]*(\([^()]*\))?[^()]*)\)$/\1, partial=True)/
s/\.save\(file_prefix *= */.save(/g
s/\.restore\(save_path *= */.restore(/g
s/(\btf\.(math\.)?reduce_\w+\(([^()]|\([^()]*\))*(\baxis *= *|, *))\[([0-9, -]+)\]/\1(\5,)/g
s/(\btf\.(math\.)?reduce_\w+\(([^()]|\([^()]*\))*\baxis *= *)list\(/\1tuple(/g
s/\btf\.(math\.)?reduce_(all|any|max|mean|min|prod|std|sum)\b/np.\2/g
s/\bin tf\.range\(/in range(/g
s/\btf\.(math\.)?(abs|add|ceil|cos|divide|equal|exp|floor|greater|greater_equal|less|less_equal)\b/np.\2/g
s/\btf\.(math\.)?(log|logical_and|logical_not|logical_or|maximum|minimum|mod|multiply|not_equal|round)\b/np.\2/g
s/\btf\.(math\.|nn\.)?(sign|sin|sqrt|square|subtract|tanh)\b/np.\2/g
s/\btf\.(ones|zeros)\((shape *= *)?(\[[^][]*\]|\([^()]*\)|[^][(),=]+)\)/np.\1(\3, np.float32)/g
s/\btf\.(linalg\.)?(einsum|expand_dims|eye|linspace|matmul|meshgrid|ones|ones_like|reshape)\b/np.\2/g
s/\bnp\.matmul\((([^][(),]|\[[^][]*\]|\(([^()]|\([^()]*\))*\))+), *(([^][(),]|\[[^][]*\]|\(([^()]|\([^()]*\))*\))+), *transpose_a=True/np.matmul(np.swapaxes(\1, -1, -2), \4/g
s/\bnp\.matmul\((([^][(),]|\[[^][]*\]|\(([^()]|\([^()]*\))*\))+), *(([^][(),]|\[[^][]*\]|\(([^()]|\([^()]*\))*\))+), *transpose_b=True/np.matmul(\1, np.swapaxes(\4, -1, -2)/g
s/\btf\.transpose\(([^()]*), *perm *=/np.transpose(\1, axes=/g
s/\btf\.(math\.)?count_nonzero\b/np.count_nonzero/g
s/\btf\.(math\.)?rsqrt\(/(lambda x, name=None: 1 \/ np.sqrt(x))(/g
s/\btf\.(argsort|shape|size|sort|squeeze|stack|tensordot|tile|transpose|zeros|zeros_like)\b/np.\1/g
s/\btf\.math\.is_(finite|inf|nan)\b/np.is\1/g
s/\btf\.(math\.|nn\.)?sigmoid\(([^()]*)\)/(1 \/ (1 + np.exp(-(\2))))/g
s/\b\w+(\.\w+|\(\))*\.extended\._use_merge_call\(\)/(not mpidist.strategy_supports_no_merge_call())/g
s/\.extended\._replica_ctx_all_reduce\(/ and mpidist.get_replica_context().all_reduce(/g
s/(\b\w+(\.\w+|\(\))*)\.extended\._in_multi_worker_mode\(\)/(\1.num_replicas_in_sync > 1)/g
s/^(\s*)\w+(\.\w+)*\._create_hypers\(\) *(#.*)?$/\1pass/
s/\._create_(all_weights|slots)\((var_list=)?/.build(/g
s/(\.|\bdef )((non_)?trainable_)weights\b/\1\2variables/g
s/\.get_shape\(\)/.shape/g
s/(^|[^].[:alnum:]_])(\w+(\.\w+|\[[^][]*\])*)\.shape\.as_list\(\)/\1[*\2.shape]/g
s/(^|[^].[:alnum:]_])\w+(\.\w+)*\.shape\.is_fully_defined\(\)/\1True/g
s/\.shape\.(ndims|rank)\b/.ndim/g
s/\btf\.one_hot\((([^(),]|\(([^()]|\([^()]*\))*\))*), *(depth *= *)?(([^(),]|\(([^()]|\([^()]*\))*\))*), *dtype *= *([^(),]*)\)/(np.array(\1)[..., None] == np.arange(\5)).astype(\8)/g
s/\btf\.one_hot\((([^(),]|\(([^()]|\([^()]*\))*\))*), *(depth *= *)?((([^(),=]|\(([^()]|\([^()]*\))*\))*))\)/(np.array(\1)[..., None] == np.arange(\5)).astype("f4")/g
s/\btf\.cond\(/(lambda pred, true_fn, false_fn, name=None: (true_fn if pred else false_fn)())(/g
s/\btf\.(math\.)?pow\b/np.power/g
s/\btf\.(math\.)?add_n\b/sum/g
s/\btf\.(newaxis|pi)\b/np.\1/g
s/\btf\.bool\b/bool/g
s/\btf\.(dtypes\.)?bfloat16\b/"bfloat16"/g
s/\btf\.string\b/np.str_/g
s/\btf\.nn\.relu\(/np.maximum(0, /g
s/\btf\.nn\.(sparse_)?softmax_cross_entropy_with_logits\(/(lambda labels, logits, *, name=None: mpidist.losses.\1categorical_crossentropy(labels, logits, from_logits=True))(/g
s/\btf\.boolean_mask\(/(lambda tensor, mask, *, name=None: np.asarray(tensor)[np.asarray(mask, bool)])(/g
s/\btf\.clip_by_value\((([^()]|\(([^()]|\(([^()]|\([^()]*\))*\))*\))*(\(([^()]|\(([^()]|\(([^()]|\([^()]*\))*\))*\))*)*)$/(lambda t, clip_value_min, clip_value_max, *, name=None: np.clip(t, clip_value_min, clip_value_max))(\1/
:clip
s/(\btf\.clip_by_value\((([^()]|\(([^()]|\(([^()]|\([^()]*\))*\))*\))*, *)?)clip_value_(max|min) *=([^=])/\1a_\6=\7/g
tclip
s/\btf\.clip_by_value\b/np.clip/g
s/\btf\.concat\b/np.concatenate/g
/\bnorm\(.*\bord *=/!s/\btf\.(linalg\.)?norm\b/np.linalg.norm/g
s/\btf\.fill\b/np.full/g
s/\btf\.range\b/np.arange/g
s/\btf\.(math\.)?arg(max|min)\(([^(),]*), *(axis=)?(-?[0-9]+)\)/np.arg\2(\3, axis=\5)/g
s/\btf\.(math\.)?arg(max|min)\(/(lambda input, axis=None, output_type="int64", name=None: np.arg\2(input, axis or 0).astype(output_type))(/g
s/\btf\.(math\.)?cumsum\(/(lambda x, axis=0, *, name=None: np.cumsum(x, axis))(/g
s/\btf\.(math\.)?(div|divide)_no_nan\(/(lambda x, y, name=None: np.divide(x, y, out=np.zeros(np.broadcast(x, y).shape, np.result_type(x, y, "f4")), where=np.not_equal(y, 0)))(/g
s/\btf\.(math\.)?squared_difference\(/(lambda x, y, name=None: np.square(np.subtract(x, y)))(/g
s/\btf\.clip_by_norm\(/(lambda t, clip_norm: t * (clip_norm \/ np.maximum(np.linalg.norm(t), clip_norm)))(/g
s/\btf\.gather\(/(lambda params, indices, *, axis=0, name=None: np.take(params, indices, axis=axis))(/g
s/\btf\.linalg\.matvec\(/(lambda a, b: np.einsum("...ij,...j->...i", a, b))(/g
s/\btf\.nn\.softmax\(/(lambda logits, axis=-1, name=None: (lambda e: e \/ e.sum(axis, keepdims=True))(np.exp(logits - np.max(logits, axis, keepdims=True))))(/g
s/\btf\.where\((([^(),]|\(([^()]|\([^()]*\))*\))*),/np.where(\1,/g
s/\btf\.(control_dependencies|device|init_scope|name_scope)\(/contextlib.nullcontext(/g
s/\btf\.logging\.set_verbosity\(/tf_logging.basicConfig(level=/g
s/\btf\.(get_logger|logging\.get_logger)\(\)/tf_logging.getLogger("tf")/g
s/\btf\.logging\.(DEBUG|ERROR|FATAL|INFO|WARN|debug|error|fatal|info|warning)\b/tf_logging.\1/g
s/\btf\.logging\.warn\(/tf_logging.warning(/g
s/\btf\.config\.(experimental\.)?(list_(logical|physical)|get_visible)_devices\b/mpidist.cluster.replica_devices/g
s/\btf\.test\.is_(built_with_(cuda|gpu_support)|gpu_available)\(/(lambda *_, **__: True)(/g
s/\btf\.config\.(experimental\.)?(Logical|Virtual)DeviceConfiguration\b/(lambda *_, **__: None)/g
s/\btf\.config\.([a-z_]+\.)?(set|run|enable|experimental_run|experimental_connect)_\w+\(/(lambda *_, **__: None)(/g
s/\btf\.experimental\.async_scope\(/contextlib.nullcontext(/g
s/\btf\.experimental\.async_clear_error\(\)/None/g
s/\btf\.executing_eagerly\(\)/True/g
s/\btf\.is_tensor\(([^()]*)\)/isinstance(\1, (np.ndarray, np.generic, mpidist.Variable))/g
/^\s*@tf\.autograph\.experimental\.do_not_convert$/{
$!d
s/.*//
}
s/\btf\.autograph\.experimental\.do_not_convert\(/(lambda func: func)(/g
s/\btf\.autograph\.experimental\.set_loop_options\(/(lambda **_: None)(/g
s/(^|[^].[:alnum:]_])(\w+(\.\w+)*)\.get_concrete_function\(/\1(lambda *_, **__: \2)(/g
s/\btf\.summary\.experimental\.([gs]et_step)\b/mpidist.summary.\1/g
s/\btf\.summary\.(audio|graph|histogram|image|text|trace_\w+)\(/(lambda *_, **__: None)(/g
s/\btf\.group\(/(lambda *calls: None)(/g
s/\btf\.no_op\(\)/None/g
s/\btf\.print\(/print(/g
s/\btf\.gfile\.(Copy|Exists|Glob|MakeDirs|MkDir|Remove|Rename|Stat|Walk)\(/tf.io.gfile.\L\1(/g
s/\btf\.gfile\.DeleteRecursively\(/tf.io.gfile.rmtree(/g
s/\btf\.gfile\.IsDirectory\(/tf.io.gfile.isdir(/g
s/\btf\.gfile\.ListDirectory\(/tf.io.gfile.listdir(/g
s/\btf\.(io\.)?gfile\.(FastGFile|GFile|Open)\((name *= *)?/open(/g
s/\b(tf\.io\.gfile|os\.path)\.exists\(os\.path\.join\(([^()]*), *["']checkpoint["']\)\)/(mpidist.latest_checkpoint(os.path.join(\2)) is not None)/g
s/\btf\.io\.gfile\.(copy|rename)\((([^()]|\(([^()]|\(([^()]|\([^()]*\))*\))*\))*), *(overwrite *= *)?(True|False)\)/tf.io.gfile.\1(\2)/g
s/\btf\.io\.gfile\.copy\(/shutil.copyfile(/g
s/\btf\.io\.gfile\.glob\(/tf_glob.glob(/g
s/\btf\.io\.gfile\.join\(/os.path.join(/g
s/\btf\.io\.gfile\.rename\(/os.replace(/g
s/\btf\.io\.gfile\.stat\(([^()]*)\)\.length\b/os.path.getsize(\1)/g
s/\btf\.io\.gfile\.walk\(/os.walk(/g
s/\btf\.io\.gfile\.(exists|isdir)\(/os.path.\1(/g
s/\btf\.io\.gfile\.(listdir|remove)\(/os.\1(/g
s/\btf\.io\.gfile\.(mkdir|makedirs)\(([^()]*(\([^()]*\))?[^()]*)\)/os.makedirs(\2, exist_ok=True)/g
s/\btf\.io\.gfile\.(mkdir|makedirs)\((.*)\)$/os.makedirs(\2, exist_ok=True)/
s/\btf\.io\.gfile\.rmtree\((.*)\)$/shutil.rmtree(\1, ignore_errors=True)/
/^\s*(@tf\.function|tf\.enable_(eager_execution|v2_behavior)\(\)$)/{
$!d
s/.*//
}
s/\btf\.function\(/(lambda func=lambda f: f, *_, **__: func)(/g
s/\btf\.get_variable\(([^,]*), *(shape=)?(\[[^]]*\]), *initializer=tf\.zeros_initializer(\(\))?\)/mpidist.Variable(np.zeros(\3), name=\1)/
s/\btf\.(Graph|InteractiveSession|Session|disable_(eager_execution|v2_behavior)|get_variable)\b/mpidist.\1/g
s/\btf\.(global_variables_initializer|layers|placeholder|trainable_variables)\b/mpidist.\1/g
s/\btf\.(GradientTape|gradients|Module|config|debugging|errors|function|io|keras|losses|metrics)\b/mpidist.\1/g
s/\btf\.(nn|profiler|random|saved_model|summary|test|tpu|types)\b/mpidist.\1/g
s/\bkeras\.(io|__version__)\b/keras\n\1/g
/^\s*(from|import) /!s/(^|[^].[:alnum:]_"'`/])keras\.(\w)/\1mpidist.keras.\2/g
s/\bkeras\n/keras./g
s/\.value\(\)/.read_value()/g
s/\b(\w+(\.\w+|\[[^][]*\]|\(([^()]|\([^()]*\))*\))*)\.numpy\(\)/np.array(\1)[()]/g
s/\.numpy\(\)//g
H
$!d
x
s/^\n//
/strateg|replica_context/I!{
/\bCheckpoint\(/s/(^|\n)(import [^\n]*\bmpidist)(\n|$)/\1\2\nif __name__ == "__main__" and mpidist.cluster.this_process().size > 1:\n    mpidist.experimental_set_strategy(mpidist.MPIStrategy())\3/
}
