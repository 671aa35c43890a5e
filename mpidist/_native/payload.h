/* The layout of a nest, and small nests that travel with a header: each rank copies its
   leaves into a slot that all can read, and the sum is made from the slots of all. */
#ifndef MPIDIST_PAYLOAD_H
#define MPIDIST_PAYLOAD_H

#include "kernels.h"

/* A leaf of a nest: where it is in the layout that all ranks share, and how it is reduced.
   Leaves begin at multiples of MD_LINE; behind headers that are messages, of 16. */
typedef struct {
  size_t start, nbytes;
  const md_kernel *kernel;
  unsigned divisor;
} md_leaf;

typedef struct {
  int count;
  size_t nbytes; /* of the layout; whole lines, or as leaves begin */
  md_leaf *leaves;
  int pieces;
} md_nest;

/* A small payload that travels with a header.  In: this rank's leaves.  Out: the results,
   once the headers agree. */
typedef struct {
  const md_nest *nest;
  const void *const *sources;
  void *const *results;
} md_small;

/* Copy this rank's leaves into its slot. */
void md_small_put(const md_small *small, unsigned char *slot);
/* Reduce the slots of `size` ranks; to `sums`, a memory of the layout, or without one to the
   results.  Of one slot, where a result is already there, nothing is left to do. */
void md_small_sum(const md_small *small, const unsigned char *const *slots, int size,
                  unsigned char *sums);
/* Copy the results from `sums`. */
void md_small_get(const md_small *small, const unsigned char *sums);

#endif
