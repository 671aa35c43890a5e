"""Data-parallel training with JAX: gradients and pytrees of arrays.

All of these calls are collective. They are for the program, in
``with strategy.scope():`` or with ``strategy=``, and for functions that `Strategy.run`
calls; not for functions that JAX transforms, in which there are no values yet. Arrays
are on the host, or on a GPU that CuPy knows too. `import mpidist` does not import this
module; importing it imports JAX, and registers `Variable` and `Mirrored` as pytrees of
one array: `jax.grad`, `jax.jit` and `jax.tree` take them as copies of their arrays.
"""

from mpidist._base.remedies import publish as _publish
from mpidist.jax._collectives import (
    all_reduce as all_reduce,
    broadcast as broadcast,
    value_and_grad as value_and_grad,
)

_publish(__name__)
