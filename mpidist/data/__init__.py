"""Input: `Dataset`, and the types that distributed datasets use.

``Strategy.experimental_distribute_dataset`` and
``Strategy.distribute_datasets_from_function`` accept a `Dataset` of this module, or any
other iterable.
"""

from mpidist.data._ahead import AUTOTUNE as AUTOTUNE
from mpidist.data._dataset import Dataset as Dataset
from mpidist.data._distribute import DistributedDataset as DistributedDataset
from mpidist.data._iterator import DistributedIterator as DistributedIterator
from mpidist.data._options import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from mpidist.data._options import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from mpidist.data._options import ArraySpec as ArraySpec
from mpidist.data._options import AutoShardPolicy as AutoShardPolicy
from mpidist.data._options import AutotuneOptions as AutotuneOptions
from mpidist.data._options import DistributeOptions as DistributeOptions
from mpidist.data._options import InputContext as InputContext
from mpidist.data._options import InputOptions as InputOptions
from mpidist.data._options import InputReplicationMode as InputReplicationMode
from mpidist.data._options import OptimizationOptions as OptimizationOptions
from mpidist.data._options import Options as Options
from mpidist.data._options import ThreadingOptions as ThreadingOptions
from mpidist.data._positions import DatasetIterator as DatasetIterator
from mpidist.data._positions import Optional as Optional
from mpidist.data._positions import OutOfRangeError as OutOfRangeError
