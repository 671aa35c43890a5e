"""Names of tf.data that are not here, and what to write instead."""

from __future__ import annotations

from typing import Final, NoReturn

_BY_HAND: Final = {
    "unique": "numpy.unique(x), before `from_tensor_slices`",
    "get_single_element": "next(iter(dataset))",
    "rebatch": "dataset.unbatch().batch(n)",
    "shuffle_and_repeat": "dataset.shuffle(seed=1).repeat(n)",
    "ragged_batch": "dataset.padded_batch(n)",
    "sparse_batch": "dataset.padded_batch(n)",
    "dense_to_ragged_batch": "dataset.padded_batch(n)",
    "dense_to_sparse_batch": "dataset.padded_batch(n)",
    "from_sparse_tensor_slices": "Dataset.from_tensor_slices(matrix.toarray())",
    "ignore_errors": "dataset.map(fn), where `fn` handles its exceptions",
    "prefetch_to_device": "dataset.prefetch(n): a distributed dataset comes on the GPU",
    "random": (
        "Dataset.range(n).map(lambda i: numpy.random.default_rng([seed, i])"
        ".integers(2**32))"
    ),
    "window": (
        "Dataset.from_tensor_slices(numpy.lib.stride_tricks.sliding_window_view("
        "x, size, axis=0))"
    ),
    "scan": "Dataset.from_generator(fn), where `fn` keeps the state",
    "save": "numpy.save(path, array)",
    "load": 'Dataset.from_tensor_slices(numpy.load(path, mmap_mode="r"))',
    "snapshot": (
        "dataset.cache(), in memory; on disk numpy.save(path, array) and then "
        'numpy.load(path, mmap_mode="r")'
    ),
    "experimental": (
        "mpidist.data.AUTOTUNE, mpidist.data.AutoShardPolicy: what is here of "
        "tf.data.experimental is in mpidist.data"
    ),
    "Iterator": "mpidist.data.DatasetIterator",
    "NumpyIterator": "dataset.as_numpy_iterator()",
    "DatasetSpec": "dataset.element_spec",
    "TensorSpec": "mpidist.data.ArraySpec(shape, dtype)",
    "TextLineDataset": (
        "Dataset.from_generator(open, args=(path,)), or with several files "
        "Dataset.list_files(pattern, shuffle=False).interleave(lambda path: "
        "Dataset.from_generator(open, args=(path,)))"
    ),
    "FixedLengthRecordDataset": (
        "Dataset.from_tensor_slices(numpy.memmap(path, dtype).reshape(-1, length))"
    ),
    "CsvDataset": 'Dataset.from_tensor_slices(numpy.loadtxt(path, delimiter=","))',
}  # fmt: skip

_GRAIN_MIX: Final = "grain.MapDataset.mix([one, two], weights=[0.5, 0.5])"
_TORCH_BUCKETS: Final = (
    "torch.utils.data.DataLoader(rows, batch_sampler=batches, collate_fn=pad), where "
    "`batches` yields lists of row numbers"
)
_BY_GUEST: Final = {
    "sample_from_datasets": ("grain", _GRAIN_MIX),
    "choose_from_datasets": ("grain", _GRAIN_MIX),
    "rejection_resample": ("grain", _GRAIN_MIX),
    "bucket_by_sequence_length": ("torch's DataLoader", _TORCH_BUCKETS),
    "group_by_window": ("torch's DataLoader", _TORCH_BUCKETS),
    "TFRecordDataset": (
        "webdataset, or grain",
        "webdataset.WebDataset(urls).decode() for tar files, or "
        "grain.sources.ArrayRecordDataSource(paths) for ArrayRecord files",
    ),
    "service": (
        "grain",
        "grain.MapDataset.source(rows).to_iter_dataset().mp_prefetch(grain."
        "MultiprocessingOptions(num_workers=4))",
    ),
}  # fmt: skip


def advise(where: str, name: str) -> str:
    """Return the message of an AttributeError.

    Args:
        where: what has no such attribute: ``mpidist.data`` or ``Dataset``.
        name: the attribute.
    """
    text = f"{where} has no attribute {name!r}"
    if name in _BY_HAND:
        return f"{text}; write {_BY_HAND[name]}"
    if name in _BY_GUEST:
        guest, line = _BY_GUEST[name]
        return (
            f"{text}: that is done by {guest}: {line}; "
            "`strategy.experimental_distribute_dataset` and "
            "`strategy.distribute_datasets_from_function` take any iterable of batches"
        )
    return text


def explain_missing_names(owner: object, where: str) -> None:
    """Give missing attributes of a module, or of objects of a class, a message.

    A function sets it, since type checkers accept every name where they see a
    ``def __getattr__``.

    Args:
        owner: the module, or the class.
        where: what has no such attribute, for the message.
    """

    def look(*args: object) -> NoReturn:  # of a module: its name alone
        raise AttributeError(advise(where, str(args[-1])))

    setattr(owner, "__getattr__", look)  # noqa: B010 - see above
