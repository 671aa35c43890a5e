#include "algorithms.h"

#include <string.h>

static size_t least(size_t a, size_t b) { return a < b ? a : b; }
static size_t most(size_t a, size_t b) { return a > b ? a : b; }

/* --- shared ------------------------------------------------------------------------- */

int md_pieces(size_t nbytes, size_t area_bytes) {
  return (int)((nbytes + area_bytes - 1) / area_bytes);
}

static void get_slice(size_t first, size_t last, int rank, int size, size_t *start, size_t *stop) {
  size_t lines = (last - first) / MD_LINE;
  *start = first + lines * (size_t)rank / (size_t)size * MD_LINE;
  *stop = first + lines * (size_t)(rank + 1) / (size_t)size * MD_LINE;
}

void md_piece(const md_nest *nest, int piece, size_t *first, size_t *last) {
  get_slice(0, nest->nbytes, piece, nest->pieces, first, last);
}

/* The first leaf that does not end before `at`. */
static int leaf_at(const md_nest *nest, size_t at) {
  int low = 0, high = nest->count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (nest->leaves[middle].start + nest->leaves[middle].nbytes <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* For each leaf, the part of it in [start, stop). */
#define FOR_PARTS(NEST, FIRST, LAST, i, leaf, a, b)                                          \
  for (int i = leaf_at(NEST, FIRST); i < (NEST)->count && (NEST)->leaves[i].start < (LAST);  \
       i++)                                                                                  \
    for (const md_leaf *leaf = &(NEST)->leaves[i]; leaf; leaf = NULL)                        \
      for (size_t a = most(FIRST, leaf->start), b = least(LAST, leaf->start + leaf->nbytes); \
           a < b; a = b)

static unsigned char *result_of(const md_channel *ch, const md_shared *call, int rank) {
  return ch->arenas[rank] + md_header_of(ch, rank, call->number)->result_offset;
}

/* Where byte 0 of the layout would be, of a piece that begins at `first`. */
static unsigned char *area_of(const md_channel *ch, const md_shared *call, int rank, int piece,
                              size_t first) {
  uint32_t slot = (call->first_area + (uint32_t)piece) & 1;
  return ch->areas[rank] + slot * ch->area_bytes - first;
}

static unsigned char *sums_of(const md_channel *ch, const md_shared *call, int piece,
                              size_t first) {
  uint32_t slot = (call->first_area + (uint32_t)piece) & 1;
  return ch->sums + slot * ch->area_bytes - first;
}

static void copy_parts(const md_nest *nest, const unsigned char *const *arrays,
                       unsigned char *out, size_t start, size_t stop) {
  FOR_PARTS(nest, start, stop, i, leaf, a, b)
  if (arrays[i]) memcpy(out + a, arrays[i] + (a - leaf->start), b - a);
}

void md_shared_copy_in(md_channel *ch, md_shared *call, int piece) {
  if (call->sources_in_arena || !call->sources) return;
  size_t first, last, start, stop;
  md_piece(call->nest, piece, &first, &last);
  get_slice(first, last, ch->rank, ch->size, &start, &stop);
  unsigned char *out = call->results_in_arena ? result_of(ch, call, ch->rank)
                                              : area_of(ch, call, ch->rank, piece, first);
  copy_parts(call->nest, call->sources, out, first, start);
  copy_parts(call->nest, call->sources, out, stop, last);
}

void md_shared_combine(md_channel *ch, md_shared *call, int piece) {
  size_t first, last, start, stop;
  md_piece(call->nest, piece, &first, &last);
  get_slice(first, last, ch->rank, ch->size, &start, &stop);
  if (start == stop) return;
  const md_nest *nest = call->nest;
  const unsigned char *in[MD_MAX_RANKS];
  unsigned char *out[MD_MAX_RANKS];
  int outs = call->results_in_arena ? ch->size : 1;
  if (!call->results_in_arena) out[0] = sums_of(ch, call, piece, first);
  for (int k = 0; k < ch->size; k++) {
    /* The next rank first, so that not all write to one. */
    int r = (ch->rank + k) % ch->size;
    if (call->results_in_arena) out[k] = result_of(ch, call, r);
    if (call->sources_in_arena)
      in[r] = ch->arenas[r] + md_header_of(ch, r, call->number)->source_offset;
    else
      in[r] =
          call->results_in_arena ? result_of(ch, call, r) : area_of(ch, call, r, piece, first);
  }
  FOR_PARTS(nest, start, stop, i, leaf, a, b) {
    const void *sources[MD_MAX_RANKS];
    void *results[MD_MAX_RANKS];
    /* In an arena the leaves lie as they do in this rank's: `md_header.source_layout`. */
    ptrdiff_t shift = 0;
    if (call->sources_in_arena) shift = call->sources[i] - call->sources[0];
    for (int r = 0; r < ch->size; r++)
      sources[r] = call->sources_in_arena ? in[r] + shift + (a - leaf->start) : in[r] + a;
    if (call->sources && call->sources[i])
      sources[ch->rank] = call->sources[i] + (a - leaf->start);
    for (int j = 0; j < outs; j++) results[j] = out[j] + a;
    md_reduce(leaf->kernel, results, outs, sources, ch->size,
              (b - a) / md_itemsize(leaf->kernel), call->undivided ? 0 : leaf->divisor);
  }
}

void md_shared_copy_out(md_channel *ch, md_shared *call, int piece) {
  if (call->results_in_arena || !call->results) return;
  size_t first, last;
  md_piece(call->nest, piece, &first, &last);
  const unsigned char *from = sums_of(ch, call, piece, first);
  FOR_PARTS(call->nest, first, last, i, leaf, a, b)
  if (call->results[i]) memcpy(call->results[i] + (a - leaf->start), from + a, b - a);
}

/* Say in the header where this rank's arrays are in its arena, if all of them are. */
static void find_base(const md_channel *ch, const md_shared *call, md_header *header) {
  const unsigned char *arena = ch->arenas[ch->rank], *end = arena + ch->arena_bytes;
  const unsigned char *const *sources = call->sources;
  uint64_t hash = 14695981039346656037u; /* FNV-1a, of the distances */
  header->source_offset = MD_NOWHERE;
  if (!call->nest->count) return;
  for (int i = 0; i < call->nest->count; i++) {
    if (sources[i] < arena || sources[i] + call->nest->leaves[i].nbytes > end) return;
    hash = (hash ^ (uint64_t)(sources[i] - sources[0])) * 1099511628211u;
  }
  header->source_offset = sources[0] - arena;
  header->source_layout = (int64_t)hash;
}

int md_shared_meet(md_channel *ch, md_shared *call, md_header *header) {
  find_base(ch, call, header);
  call->number = ch->headers + 1;
  call->results_in_arena = header->result_offset != MD_NOWHERE;
  call->sources_in_arena = 0;
  /* Arrays in an arena are mostly read where they are: nothing is copied in then. */
  call->copied = header->source_offset == MD_NOWHERE;
  if (call->copied && call->results_in_arena && call->nest->pieces) {
    md_header_of(ch, ch->rank, call->number)->result_offset = header->result_offset;
    md_shared_copy_in(ch, call, 0);
  }
  int status = md_meet(ch, header, NULL);
  call->results_in_arena = !(ch->verdict.flags & MD_NO_ROOM);
  call->sources_in_arena = !(ch->verdict.flags & MD_OTHER_SOURCES);
  return status;
}

int md_shared_finish(md_channel *ch, md_shared *call) {
  if (call->results_in_arena && !call->sources_in_arena && ch->verdict.flags & MD_SOURCES &&
      call->nest->pieces) {
    /* Some rank has not copied in before the header: then all make one step more. */
    if (!call->copied) md_shared_copy_in(ch, call, 0);
    md_publish(ch);
    int status = md_wait(ch);
    if (status) return status;
  }
  return md_shared_run(ch, call);
}

/* The header was the first step of piece 0 where results are in the arenas, or nothing is
   copied in; where they are not, that piece begins after it. */
int md_shared_run(md_channel *ch, md_shared *call) {
  int pieces = call->nest->pieces, status;
  int begun = call->results_in_arena || call->sources_in_arena;
  call->first_area = ch->areas_used;
  if (!call->results_in_arena) ch->areas_used += (uint32_t)pieces;
  if (!begun && pieces) {
    md_shared_copy_in(ch, call, 0);
    md_publish(ch);
  }
  for (int p = 0; p < pieces; p++) {
    /* Arenas have room for all pieces, so the next may go there before the wait.  An
       input area is free again when all have reduced the piece before this one. */
    if (call->results_in_arena && p + 1 < pieces) md_shared_copy_in(ch, call, p + 1);
    if ((p || !begun) && (status = md_wait(ch))) return status;
    if (p) md_shared_copy_out(ch, call, p - 1);
    if (!call->results_in_arena && p + 1 < pieces) md_shared_copy_in(ch, call, p + 1);
    md_shared_combine(ch, call, p);
    md_publish(ch);
  }
  if (pieces && (status = md_wait(ch))) return status;
  if (pieces) md_shared_copy_out(ch, call, pieces - 1);
  return MD_OK;
}

void md_reduce_range(const md_nest *nest, size_t first, size_t last, unsigned char *out,
                     const unsigned char *copies, int n) {
  FOR_PARTS(nest, first, last, i, leaf, a, b) {
    const void *sources[MD_MAX_RANKS];
    void *result = out + (a - first);
    for (int k = 0; k < n; k++) sources[k] = copies + (size_t)k * (last - first) + (a - first);
    md_reduce(leaf->kernel, &result, 1, sources, n, (b - a) / md_itemsize(leaf->kernel),
              leaf->divisor);
  }
}

/* --- gather ------------------------------------------------------------------------- */

/* So much is written to all ranks, one after the other, while it is in the cache. */
#define SPREAD_BYTES (16 * 1024)

int md_spread(md_channel *ch, const md_rows *parts, int count) {
  for (const md_rows *p = parts; p < parts + count; p++)
    for (size_t row = 0; row < p->rows; row++)
      for (size_t i = 0; i < p->bytes; i += SPREAD_BYTES)
        for (int k = 1; k <= ch->size; k++) {
          int r = (ch->rank + k) % ch->size;
          unsigned char *result = ch->arenas[r] + md_header_of(ch, r, ch->headers)->result_offset;
          memcpy(result + p->at + row * p->stride + i, p->from + row * p->bytes + i,
                 least(SPREAD_BYTES, p->bytes - i));
        }
  md_publish(ch);
  return md_wait(ch);
}

/* --- broadcast ---------------------------------------------------------------------- */

int md_broadcast(md_channel *ch, unsigned char *data, size_t nbytes, int root) {
  for (size_t at = 0; at < nbytes; at += ch->area_bytes) {
    size_t count = least(nbytes - at, ch->area_bytes);
    unsigned char *area = ch->areas[root] + (ch->areas_used++ & 1) * ch->area_bytes;
    if (ch->rank == root) memcpy(area, data + at, count);
    md_publish(ch);
    int status = md_wait(ch);
    if (status) return status;
    if (ch->rank != root) memcpy(data + at, area, count);
  }
  return MD_OK;
}
