/* All-reduce, all-gather and broadcast among the ranks of one channel. */
#ifndef MPIDIST_ALGORITHMS_H
#define MPIDIST_ALGORITHMS_H

#include "channel.h"

/* --- shared: pieces ------------------------------------------------------------------

   A nest is taken as one sequence of bytes, cut into pieces, and each piece into one slice
   for each rank, at lines of the cache.  For each piece

     1. copy_in: every rank makes its part readable, all but the slice that it will reduce
        itself; then all make a step;
     2. combine: every rank reduces its slice, from rank 0 upwards, to where it is wanted;
        then all make a step;
     3. copy_out: every rank copies the result, if it is not there already.

   Sources: the caller's arrays, copied in; or arrays in the arenas, which are readable
   where they are (`sources_in_arena`): then there is no first step.  Destinations: the
   arenas of all ranks (`results_in_arena`), written by the rank that made the sum, without
   a copy out; or the node's two areas for sums.

   Why no rank reads what is not written, or writes what is still read:
   - A slice of an arena's results is read by one rank only, which writes the sum there.
   - The input areas are used alternately.  A rank writes piece p + 2 after the step that all
     make when they have reduced piece p.
   - So are the areas for sums.  Piece p + 2 is written after a step that every rank makes
     after it has copied piece p out.
   - In an arena, pieces do not share memory.  A call returns after a step that every rank
     makes after its last sum: nobody touches results in an arena, or reads sources there,
     after that. */
typedef struct {
  const md_nest *nest;
  /* Leaves of this rank.  In steps all, or any of them, may be NULL: the caller copies it to
     the area, or from the sums. */
  const unsigned char *const *sources;
  unsigned char *const *results; /* if not in the arena */
  int results_in_arena, sources_in_arena;
  int copied;      /* piece 0 of this rank, before the header */
  int undivided;   /* sums of a node; `md_reduce_range` divides those of all nodes */
  uint32_t number; /* of the header with the offsets */
  uint32_t first_area;
} md_shared;

/* Exchange the header of a call (its `result_offset`; those of sources are found here),
   which says whether results and sources are in the arenas.  Then do it: if results are
   not, `results` must be there by now. */
int md_shared_meet(md_channel *ch, md_shared *call, md_header *header);
int md_shared_finish(md_channel *ch, md_shared *call);
/* What is left to do after a header; without results in arenas, after any. */
int md_shared_run(md_channel *ch, md_shared *call);
/* The parts of it, for callers that go step by step. */
void md_shared_copy_in(md_channel *ch, md_shared *call, int piece);
void md_shared_combine(md_channel *ch, md_shared *call, int piece);
void md_shared_copy_out(md_channel *ch, md_shared *call, int piece);
int md_pieces(size_t nbytes, size_t area_bytes);
/* The bytes of a piece, of which each rank reduces a slice. */
void md_piece(const md_nest *nest, int piece, size_t *first, size_t *last);

/* The sum of bytes [first, last) of the layout, of which `n` copies follow each other, from
   the first to the last copy; for callers that have them from other nodes.
   `first` is a multiple of MD_LINE; `out` may be one of the copies. */
void md_reduce_range(const md_nest *nest, size_t first, size_t last, unsigned char *out,
                     const unsigned char *copies, int n);

/* --- gather and broadcast ------------------------------------------------------------ */

/* This rank's part of an array that is gathered: at `from` rows of `bytes`, one after the
   other; in each result they are `stride` apart, from `at` on. */
typedef struct {
  const unsigned char *from;
  size_t rows, bytes, stride, at;
} md_rows;

/* Write this rank's parts to the results of all ranks, which are in their arenas, where the
   last header says.  Then all make a step, after which nobody writes there. */
int md_spread(md_channel *ch, const md_rows *parts, int count);

/* Copy the bytes of rank `root` to all ranks' memory. */
int md_broadcast(md_channel *ch, unsigned char *data, size_t nbytes, int root);

#endif
