/* How the ranks of one node meet, in memory that they share.  No Python, no MPI.

   A rank is a process or a thread: all that it needs is the shared memory and its number.

   The memory begins with one `md_common`, then one `md_part` for each rank, each followed
   by its two piece areas; the two areas for sums come last (`md_layout` has the offsets).
   A part is written by its own rank only, and read by all.

   Steps.  Everything that makes ranks wait for each other is a *step*: a rank publishes
   that it has reached step k (`md_publish`), then waits until all have (`md_wait`).  All
   ranks make the same steps in the same order, and nobody publishes k + 1 before all have
   published k.  What a rank wrote before it published a step, all ranks see once they have
   waited for it (release and acquire of C11 atomics: x86 and ARM alike).

   Headers.  A *header* is a step with a line of data about the call, and perhaps a small
   payload.  There are two slots for each, used alternately.  Two are enough: a rank writes
   header h + 2 after it has waited for h + 1, so all have published h + 1, so all have
   finished reading h.

   Two ways to wait, chosen once for a channel:
   - *flat*, for up to MD_GROUP ranks with a core each: every rank looks at the step of
     every other one, and reads the headers itself;
   - *tree*, for more ranks, or where ranks share cores: a rank adds one to a counter of its
     group of MD_GROUP ranks; the last of a group compares the headers of the group and
     adds one to the counter of the node; the last of all finishes the step (adds up small
     payloads, once, for everybody) and releases the groups.  A rank then sleeps once for
     each step, and looks at two counters, not at n headers.
   The sums have the same bits in both: always from rank 0 upwards.

   A rank that waits spins for a short time, and then sleeps on a futex in the shared
   memory, for at most MD_SLICE_NS at a time: then `hooks.pause` is called, which may look
   at clocks and signals, and may end the wait.  A rank that will not make any further
   steps says so (`md_leave`): who waits for it is told at once.

   Messages.  Rank 0 of the node sends bytes to all others through a ring; it waits where
   the ring has no room for what some rank has not read. */
#ifndef MPIDIST_CHANNEL_H
#define MPIDIST_CHANNEL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "payload.h"

#define MD_LINE 64
#define MD_GROUP 16 /* ranks that look at each other directly */
#define MD_MAX_RANKS 1024
#define MD_MAX_GROUPS (MD_MAX_RANKS / MD_GROUP)
#define MD_EAGER_BYTES (132 * 1024) /* of a small payload: 128 KiB, and what goes with it */
#define MD_RING_BYTES (64 * 1024)
#define MD_MESSAGE_BYTES (16 * 1024)
#define MD_SLICE_NS 50000000
#define MD_NOWHERE (-1)

enum md_status {
  MD_OK = 0,
  MD_AGAIN,     /* some rank was late: all ranks have to exchange the header once more */
  MD_DIFFERENT, /* a flag is up, or the calls differ */
  MD_LEFT,      /* a rank has left (its number is in `who`) */
  MD_STOPPED    /* hooks.pause has ended the wait */
};

/* What a rank says of a call: one line of the cache.  And what several say together, if their
   headers were merged into one (`md_merge`): that of all ranks is the *verdict*. */
typedef struct {
  int32_t flags;       /* as below; of one rank only whether it has failed */
  int32_t lateness;    /* ms since the header before; the largest */
  int64_t fingerprint; /* of the call; must be the same on all ranks */
  int64_t value;       /* may differ */
  int64_t timeout_ms;  /* how long this rank would wait, INT64_MAX: forever; the smallest */
  int64_t largest;     /* all ranks learn the largest */
  /* Offsets in this rank's arena, or MD_NOWHERE: of its results, and of its first array. */
  int64_t result_offset, source_offset;
  int64_t source_layout; /* a hash of where its other arrays are, from the first */
} md_header;

enum {
  MD_FAILED = 1, /* some rank has */
  MD_OTHER_CALL = 2,
  MD_OTHER_VALUE = 4,
  MD_NO_ROOM = 8,       /* some rank has none for its results in its arena */
  MD_OTHER_SOURCES = 16, /* some rank has its arrays elsewhere, or in another order there */
  MD_SOURCES = 32        /* some rank has its arrays in its arena */
};

typedef struct {
  _Alignas(MD_LINE) _Atomic uint32_t step; /* also the futex word of the flat way */
  _Atomic uint32_t sleepers;
  _Atomic uint32_t left;
  _Alignas(MD_LINE) md_header header[2];
  _Alignas(MD_LINE) _Atomic uint64_t read; /* bytes of the ring that it has read */
  _Alignas(MD_LINE) unsigned char eager[2][MD_EAGER_BYTES];
} md_part;

typedef struct {
  _Alignas(MD_LINE) _Atomic uint32_t arrivals;
  _Alignas(MD_LINE) _Atomic uint32_t release; /* the step that all have reached */
  _Atomic uint32_t sleepers;
  _Alignas(MD_LINE) md_header verdict[2]; /* of the group */
} md_group;

typedef struct {
  md_group groups[MD_MAX_GROUPS];
  _Alignas(MD_LINE) _Atomic uint32_t arrivals; /* of groups */
  _Alignas(MD_LINE) md_header verdict[2];
  _Alignas(MD_LINE) unsigned char sums[2][MD_EAGER_BYTES];
  _Alignas(MD_LINE) _Atomic uint32_t posted; /* messages */
  _Atomic uint32_t posted_sleepers;
  _Alignas(MD_LINE) _Atomic uint32_t taken; /* changes when some rank has read */
  _Atomic uint32_t taken_sleepers;
  _Alignas(MD_LINE) unsigned char ring[MD_RING_BYTES];
} md_common;

typedef struct {
  /* The rank is about to wait for long: a binding lets other threads run. */
  void (*blocking)(void *arg);
  /* After each slice of a wait.  Not 0 ends it. */
  int (*pause)(void *arg, double seconds);
  void *arg;
} md_hooks;

typedef struct {
  unsigned char *memory;
  md_common *common;
  md_part *parts[MD_MAX_RANKS];
  unsigned char *areas[MD_MAX_RANKS]; /* two piece areas of each rank */
  unsigned char *sums;                /* two areas for the sums of pieces */
  unsigned char *arenas[MD_MAX_RANKS];
  size_t area_bytes, arena_bytes;
  int size, rank, groups;
  int tree;          /* which way to wait */
  int spins;         /* before a rank gives its core away */
  uint32_t step;     /* that this rank has published */
  uint32_t headers;  /* that were exchanged; its lowest bit is the slot of the next */
  int who;           /* the rank that has left */
  uint32_t messages; /* posted or taken */
  uint64_t moved;    /* bytes of them */
  uint64_t least_read;
  uint32_t areas_used; /* piece areas used so far; the lowest bit is the next */
  md_header verdict;   /* of the last header */
  md_hooks hooks;
} md_channel;

typedef struct {
  size_t part_bytes, head_bytes, sums_at, arenas_at, total_bytes;
} md_layout;

/* The layout for `size` ranks with piece areas and arenas of these sizes (multiples of a
   page).  What is before `arenas_at` must be there, and zero, when the ranks open it. */
md_layout md_lay_out(int size, size_t area_bytes, size_t arena_bytes);

void md_open(md_channel *ch, void *memory, int size, int rank, size_t area_bytes,
             size_t arena_bytes, int crowded, int spins);

/* Seconds of a clock that is that of all processes of a machine. */
double md_now(void);

/* Publish a header (with what `small` adds), wait for all ranks', and compare.  In two
   parts: `md_judge` once `md_wait` is done. */
void md_start(md_channel *ch, const md_header *header, const md_small *small);
int md_judge(md_channel *ch, const md_small *small);
int md_meet(md_channel *ch, const md_header *header, const md_small *small);
/* Merge a header into another one, or into a copy of itself; in any order.  And the status of the
   verdict. */
void md_merge(md_header *into, const md_header *other);
int md_status_of(const md_header *verdict);

void md_publish(md_channel *ch);
int md_wait(md_channel *ch);
int md_reached(const md_channel *ch, int rank); /* has it published this rank's step? */
int md_all_reached(const md_channel *ch);
void md_leave(md_channel *ch);

/* Wait for room in the ring, and send a message. */
int md_post(md_channel *ch, const void *data, uint32_t nbytes);
/* The size of the next message; wait for it (MD_OK), then copy it. */
int md_wait_message(md_channel *ch, uint32_t *nbytes);
void md_take(md_channel *ch, void *data, uint32_t nbytes);

static inline md_header *md_header_of(const md_channel *ch, int rank, uint32_t number) {
  return &ch->parts[rank]->header[number & 1];
}

#endif
