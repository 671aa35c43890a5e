"""Which leaves are fused."""

import numpy as np
import pytest
from random_examples import given, st

import mpidist
from mpidist._collectives import bucket_route, dtype_table
from mpidist._collectives.bucket_route import plan_buckets
from mpidist._collectives.plan import Leaf


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.sampled_from("fdeilg"),
            st.sampled_from(["SUM", "MAX"]),
        ),
        max_size=30,
    ),
    st.integers(0, 600),
)
def test_every_leaf_is_in_one_place_of_one_bucket(rows, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_route, "_LEAST_UNPACKED", 200)
        check_buckets(rows, limit)


def check_buckets(rows, limit):
    leaves = [
        Leaf(
            (n,),
            dtype_table.reduction(np.dtype(c), mpidist.ReduceOp[op], "f"),
            False,
        )
        for n, c, op in rows
    ]
    made = plan_buckets(leaves, limit)
    assert sorted(i for b in made for i in b.leaves) == list(range(len(leaves)))
    for bucket in made:
        wire = leaves[bucket.leaves[0]].reduction.wire
        taken = np.zeros(bucket.size, bool)
        for index, offset in zip(bucket.leaves, bucket.offsets, strict=True):
            leaf = leaves[index]
            assert leaf.reduction.wire == wire
            assert leaf.reduction.combining == bucket.operation
            assert not taken[offset : offset + leaf.size].any()
            taken[offset : offset + leaf.size] = True
        assert taken.all()
        for leaf in (leaves[i] for i in bucket.leaves[1:]):
            is_plain = leaf.reduction.encoding == "none"
            assert leaf.size * wire.itemsize < 200 or not is_plain
        assert len(bucket.leaves) == 1 or bucket.size * wire.itemsize <= max(
            limit, wire.itemsize
        )
