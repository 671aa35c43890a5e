"""Input: `Dataset`, and the types that distributed datasets use.

``Strategy.experimental_distribute_dataset`` and
``Strategy.distribute_datasets_from_function`` accept a `Dataset` of this module, or any
other iterable.
"""

from mpidist._base.remedies import publish as _publish
from mpidist.data._ahead import AUTOTUNE as AUTOTUNE
from mpidist.data._dataset import Dataset as Dataset
from mpidist.data._distributed import DistributedDataset as DistributedDataset
from mpidist.data._distributed_iterator import (
    DistributedIterator as DistributedIterator,
)
from mpidist.data._options import (
    INFINITE_CARDINALITY as INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY,
    ArraySpec as ArraySpec,
    AutoShardPolicy as AutoShardPolicy,
    AutotuneOptions as AutotuneOptions,
    DistributeOptions as DistributeOptions,
    InputContext as InputContext,
    InputOptions as InputOptions,
    InputReplicationMode as InputReplicationMode,
    OptimizationOptions as OptimizationOptions,
    Options as Options,
    ThreadingOptions as ThreadingOptions,
)
from mpidist.data._positions import (
    DatasetIterator as DatasetIterator,
    Optional as Optional,
    OutOfRangeError as OutOfRangeError,
)

_publish(__name__)
