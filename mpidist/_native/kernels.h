/* Reductions: n source arrays, combined element by element, into m destinations.

   No Python, no MPI, no threads, no allocation, no state: every function here may be
   called at any time from any thread, without the GIL.

   Compile with -O3 -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math.
   -ffp-contract=off matters: with fused multiply-add, ranks on different processors
   would compute different bits. The last two let the compiler vectorise comparisons.
   -ffast-math is an error. GCC or Clang; x86-64 or aarch64. */

#ifndef MPIDIST_KERNELS_H
#define MPIDIST_KERNELS_H

#include <stddef.h>

/* The reduction of one dtype with one operation. Immutable and static. */
typedef struct md_kernel md_kernel;

/* Return the kernel for a dtype and an operation ("SUM", "PROD", "MIN", "MAX"), or NULL where
   there is none.

   `dtype` is NumPy's kind and itemsize: "b1", "i1" "i2" "i4" "i8", "u1" "u2" "u4" "u8",
   "f2" "f4" "f8", "f16" (long double), "c8" "c16", "c32" (complex long double); and
   "bf2" for bfloat16. There is none for MIN and MAX of complex numbers, for SUM and
   PROD of bool, and for "f16" and "c32" where long double does not have 16 bytes. */
const md_kernel *md_find_kernel(const char *dtype, const char *op);

/* Return the number of bytes of one element. */
size_t md_itemsize(const md_kernel *kernel);

/* For i < count and every j < m, from left to right:

     dst[j][i] = (src[0][i] op src[1][i] op ... op src[n-1][i]) / divisor

   n >= 1, m >= 1, count >= 0. A divisor of 0 means no division. Only SUM of floats and
   of complex numbers divides; for all others the caller passes 0 and divides itself.

   A destination may be the same memory as a source or as another destination, element
   for element, but may not overlap one at an offset. Pointers have the alignment of
   the C type (16 bytes for long double and complex long double).

   The result has the bits that NumPy gives, whatever the processor, but that the sign
   and payload of a NaN that SUM or PROD gives are left open:
   - integers wrap;
   - float16 and bfloat16 are computed in float, divided too, and rounded once, to
     nearest even;
   - a complex product is (ar*br - ai*bi) + (ar*bi + ai*br)i; a complex sum is divided
     by Smith's method, as NumPy does: an infinite part makes the other one NaN;
   - MIN and MAX of floats: -0.0 < 0.0, and NaN wins: all bits one (MIN), or all but
     the sign (MAX), converted like any other value where it is float16 or bfloat16;
     C's NAN of long double;
   - MIN and MAX of bool are logical and, or; any byte but 0 is true; stored as 0 or 1.
   With n = 1, SUM and PROD copy, and MIN and MAX give x op x.

   The bits do not depend on the floating-point state of the thread either: libraries that were
   built with -ffast-math make it flush subnormal numbers to zero, and fesetround changes the
   rounding.  Ranks in another state would get other sums. */
void md_reduce(const md_kernel *kernel, void *const *dst, int m, const void *const *src, int n,
               size_t count, unsigned divisor);

/* Replace each NaN by one: of a sum that MPI has made of `nbytes`, if it is of floats and small.
   Which NaN the sum of two is depends on their order, and MPI may add a small array on each rank,
   in an order of its own (MPICH: up to 2 KiB).  An element of a large one is added on one rank. */
void md_unify_nans(const md_kernel *kernel, void *sum, size_t nbytes);

/* Put the thread into the state that a program starts with: round to nearest, keep subnormal
   numbers.  Return what `md_leave_default_state` needs to put it back.  For sums that others
   than `md_reduce` make, such as those of MPI. */
typedef struct {
  unsigned long control;
  int rounding;
} md_float_state;
md_float_state md_enter_default_state(void);
void md_leave_default_state(md_float_state before);

#endif
