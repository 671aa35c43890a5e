/* Stress of the native core, without Python: ranks are threads of one process.

     stress SEED SECONDS     rounds SEED, SEED + 1, ..., for that long
     stress SEED 0           round SEED alone
     stress SEED SECONDS N   the same with at most N calls in a round: many more ends

   A round is one channel.  Its ranks make a sequence of calls, which all derive from the
   seed; each is late now and then, by a seed of its own.  Results are checked element by
   element, sources are overwritten as soon as a call returns, and results in an arena are
   looked at again some calls later: so who reads or writes too late is found, by a wrong
   element or by a sanitizer.  In some rounds a rank leaves in the middle, or a wait is
   ended by its `pause`: then the others must be told, within one call.

   Exits 0, or 1 with what went wrong, or 3 where ranks wait forever. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "algorithms.h"

enum {
  AREA = 8192,
  MOST_LEAVES = 4,
  LEAF_ROOM = 2 * AREA, /* bytes of a leaf, at most */
  REGION = MOST_LEAVES * (LEAF_ROOM + 2 * MD_LINE),
  KEPT = 3,                    /* results that are kept, one after the other */
  ARENA = (1 + KEPT) * REGION, /* the first region is for sources */
  LATE_MS = 120,               /* more than two slices of a wait */
  HANG_SECONDS = 60
};

/* --- random numbers ----------------------------------------------------------------- */

typedef struct {
  uint64_t state;
} Random;

static uint64_t next(Random *random) { /* splitmix64 */
  uint64_t z = (random->state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static Random seeded(uint64_t seed, uint64_t what) {
  Random random = {seed * 0x2545f4914f6cdd1du + what * 0x9e3779b97f4a7c15u};
  next(&random);
  return random;
}

static int below(Random *random, int n) { return (int)(next(random) % (uint64_t)n); }

/* --- rounds and ranks --------------------------------------------------------------- */

enum ending { ALL_FINISH, ONE_LEAVES, ONE_STOPS };

typedef struct {
  uint64_t seed;
  int size, crowded, spins, calls;
  enum ending ending;
  int who, late, at; /* the rank that leaves or stops, whom it waits for, at which call */
  unsigned char *memory;
} Round;

/* A nest, and the seed of its values. */
typedef struct {
  md_nest nest;
  md_leaf leaves[MOST_LEAVES];
  int type[MOST_LEAVES];
  size_t count[MOST_LEAVES];
  uint64_t seed;
} Nest;

typedef struct {
  const Round *round;
  md_channel channel;
  Random own;
  int rank, call;
  const char *kind;
  unsigned char *sources[MOST_LEAVES], *results[MOST_LEAVES];
  Nest kept[KEPT];
  int is_kept[KEPT], next_kept;
  unsigned char buffer[MD_EAGER_BYTES];
} Rank;

static void fail(const Rank *me, const char *what) {
  printf("round %llu (%d ranks%s), call %d, %s, rank %d: %s\n",
         (unsigned long long)me->round->seed, me->round->size,
         me->round->crowded ? ", crowded" : "", me->call, me->kind, me->rank, what);
  fflush(stdout);
  _exit(1);
}

#define EXPECT(ME, TRUTH)                   \
  do {                                      \
    if (!(TRUTH)) fail(ME, "not: " #TRUTH); \
  } while (0)

#define MUST(EXPRESSION)                 \
  do {                                   \
    int must_status = (EXPRESSION);      \
    if (must_status) return must_status; \
  } while (0)

static void sleep_ms(double ms) {
  struct timespec t = {(time_t)(ms / 1e3), (long)(ms * 1e6) % 1000000000};
  nanosleep(&t, NULL);
}

static void be_late(Rank *me) {
  int chance = below(&me->own, 40);
  if (chance == 0) sleep_ms(below(&me->own, 1000) * 1e-3);
  if (chance == 1 || chance == 2) sched_yield();
}

static md_header header_of(uint64_t fingerprint) {
  return (md_header){.fingerprint = (int64_t)(fingerprint >> 1),
                     .timeout_ms = INT64_MAX,
                     .result_offset = MD_NOWHERE,
                     .source_offset = MD_NOWHERE};
}

/* --- values ------------------------------------------------------------------------- */

static const struct {
  const char *dtype;
  const char *op;
  size_t itemsize;
} TYPES[] = {{"f4", "SUM", 4}, {"f8", "SUM", 8}, {"i4", "MIN", 4},
             {"u1", "MAX", 1}, {"i8", "SUM", 8}, {"f4", "SUM", 4}};
enum { KINDS = sizeof TYPES / sizeof *TYPES, MEAN = KINDS - 1 };

static int value(uint64_t seed, int leaf, size_t i) {
  return (int)((((uint32_t)i + (uint32_t)leaf * 977u + (uint32_t)seed) * 2654435761u) >> 16) %
         50;
}

static void fill(const Nest *n, int rank, unsigned char *const *leaves) {
  for (int k = 0; k < n->nest.count; k++)
    for (size_t i = 0; i < n->count[k]; i++) {
      int x = value(n->seed, k, i) + rank;
      switch (n->type[k]) {
        case 0:
        case MEAN: ((float *)leaves[k])[i] = (float)x; break;
        case 1: ((double *)leaves[k])[i] = x; break;
        case 2: ((int32_t *)leaves[k])[i] = x; break;
        case 3: leaves[k][i] = (unsigned char)x; break;
        default: ((int64_t *)leaves[k])[i] = x; break;
      }
    }
}

static void check(Rank *me, const Nest *n, const unsigned char *const *leaves) {
  int size = me->round->size;
  for (int k = 0; k < n->nest.count; k++)
    for (size_t i = 0; i < n->count[k]; i++) {
      int least = value(n->seed, k, i), sum = size * least + size * (size - 1) / 2, right;
      switch (n->type[k]) {
        case 0: right = ((const float *)leaves[k])[i] == (float)sum; break;
        case MEAN: right = ((const float *)leaves[k])[i] == (float)sum / (float)size; break;
        case 1: right = ((const double *)leaves[k])[i] == sum; break;
        case 2: right = ((const int32_t *)leaves[k])[i] == least; break;
        case 3: right = leaves[k][i] == (unsigned char)(least + size - 1); break;
        default: right = ((const int64_t *)leaves[k])[i] == sum; break;
      }
      if (!right) {
        char text[99];
        snprintf(text, sizeof text, "leaf %d of %d (%s), element %zu of %zu is wrong", k,
                 n->nest.count, TYPES[n->type[k]].dtype, i, n->count[k]);
        fail(me, text);
      }
    }
}

/* Leaves of up to `most` bytes each, laid out as the binding does it. */
static void make_nest(Rank *me, Random *shared, size_t most, Nest *n) {
  int leaves = 1 + below(shared, MOST_LEAVES);
  size_t at = 0;
  for (int k = 0; k < leaves; k++) {
    int type = n->type[k] = below(shared, KINDS);
    size_t room = most / TYPES[type].itemsize;
    n->count[k] = (size_t)below(shared, (int)(below(shared, 3) ? room : 20) + 1);
    md_leaf *leaf = &n->leaves[k];
    leaf->start = at;
    leaf->nbytes = n->count[k] * TYPES[type].itemsize;
    leaf->kernel = md_find_kernel(TYPES[type].dtype, TYPES[type].op);
    leaf->divisor = type == MEAN ? (unsigned)me->round->size : 0;
    at += (leaf->nbytes + MD_LINE - 1) / MD_LINE * MD_LINE;
  }
  size_t piece_bytes = below(shared, 2) ? AREA : AREA / 4;
  n->nest = (md_nest){leaves, at, n->leaves, md_pieces(at, piece_bytes)};
  n->seed = next(shared);
}

static void scribble(const Nest *n, unsigned char *const *leaves) {
  for (int k = 0; k < n->nest.count; k++) memset(leaves[k], 0xee, n->leaves[k].nbytes);
}

#define CONST(POINTERS) ((const unsigned char *const *)(POINTERS))

/* --- calls -------------------------------------------------------------------------- */

/* Headers that agree, and such that do not. */
static int meet(Rank *me, Random *shared) {
  md_channel *ch = &me->channel;
  int size = me->round->size, one = below(shared, size), what = below(shared, 8);
  md_header header = header_of(next(shared));
  header.largest = me->rank * 3;
  if (what == 1 && me->rank == one) header.flags = 1;
  if (what == 2 && me->rank == one) header.fingerprint++;
  if (what == 3 && me->rank == one) header.value = 1;
  if (what == 4) {
    header.timeout_ms = 100 + me->rank;
    header.lateness = me->rank == one ? 50 : 10;
  }
  int status;
  if (below(shared, 2)) {
    status = md_meet(ch, &header, NULL);
  } else { /* without waiting, at first */
    md_start(ch, &header, NULL);
    int reached = md_all_reached(ch);
    for (int i = 0; i < 20 && !reached; i++) {
      sched_yield();
      reached = md_all_reached(ch);
    }
    status = reached ? MD_OK : md_wait(ch);
    if (!status) status = md_judge(ch, NULL);
  }
  if (status == MD_LEFT || status == MD_STOPPED) return status;
  const md_header *v = &ch->verdict;
  EXPECT(me, v->largest == (size - 1) * 3);
  EXPECT(me, (v->flags & MD_FAILED) == (what == 1));
  EXPECT(me, !(v->flags & MD_OTHER_CALL) == (what != 2 || size == 1));
  EXPECT(me, !(v->flags & MD_OTHER_VALUE) == (what != 3 || size == 1));
  EXPECT(me, v->lateness == (what == 4 ? 50 : 0));
  int differs = v->flags & (MD_FAILED | MD_OTHER_CALL);
  EXPECT(me, status == (what == 4 ? MD_AGAIN : differs ? MD_DIFFERENT : MD_OK));
  return MD_OK;
}

static int eager(Rank *me, Random *shared) {
  Nest n;
  make_nest(me, shared, below(shared, 4) ? 500 : 12000, &n);
  fill(&n, me->rank, me->sources);
  scribble(&n, me->results);
  md_header header = header_of(n.seed);
  int differs = below(shared, 10) == 0, one = below(shared, me->round->size);
  if (differs && me->rank == one) header.flags = 1;
  md_small small = {&n.nest, (const void *const *)me->sources, (void *const *)me->results};
  int status = md_meet(&me->channel, &header, &small);
  if (differs && status == MD_DIFFERENT) return MD_OK;
  MUST(status);
  EXPECT(me, !differs);
  scribble(&n, me->sources);
  check(me, &n, CONST(me->results));
  return MD_OK;
}

/* The arrays of a nest in a region of this rank's arena. */
static void in_arena(Rank *me, const Nest *n, size_t at, size_t gap, unsigned char **leaves) {
  for (int k = 0; k < n->nest.count; k++)
    leaves[k] = me->channel.arenas[me->rank] + at + n->leaves[k].start + (size_t)k * gap;
}

static void check_kept(Rank *me, int k) {
  unsigned char *leaves[MOST_LEAVES];
  if (!me->is_kept[k]) return;
  in_arena(me, &me->kept[k], (size_t)(1 + k) * REGION, 0, leaves);
  check(me, &me->kept[k], CONST(leaves));
}

/* Each rank may have its sources in its arena or not, and room for the results there or not. */
static int shared_call(Rank *me, Random *shared) {
  enum { RESULTS, WINDOW, SOURCES, SOURCES_WINDOW, OTHER_SHAPES, MIXED, MODES };
  static const char *const names[] = {
      "shared, results in arena",         "shared, window",       "shared, sources in arena",
      "shared, sources in arena, window", "shared, other shapes", "shared, mixed"};
  int mode = below(shared, MODES), size = me->round->size, one = below(shared, size);
  me->kind = names[mode];
  Nest n;
  make_nest(me, shared, below(shared, 3) ? LEAF_ROOM : 300, &n);
  Random mine = seeded(n.seed, (uint64_t)me->rank);
  int window = mode == WINDOW || mode == SOURCES_WINDOW;
  int has_base = (mode == SOURCES || mode == SOURCES_WINDOW || mode == OTHER_SHAPES ||
                  (mode == MIXED && below(&mine, 2)));
  int has_room = !window || me->rank != one;
  if (mode == MIXED && below(shared, 4) == 0) has_room = below(&mine, 2);
  unsigned char *sources[MOST_LEAVES], *results[MOST_LEAVES];
  memcpy(sources, me->sources, sizeof sources);
  memcpy(results, me->results, sizeof results);
  if (has_base) {
    int is_other = mode == OTHER_SHAPES && me->rank == one;
    in_arena(me, &n, (size_t)below(&mine, 2) * MD_LINE, is_other ? MD_LINE : 0, sources);
  }
  md_header header = header_of(n.seed);
  int k = me->next_kept;
  if (has_room) {
    me->next_kept = (me->next_kept + 1) % KEPT;
    check_kept(me, k);
    me->is_kept[k] = 0;
    header.result_offset = (1 + k) * REGION;
  }
  fill(&n, me->rank, sources);
  md_shared call = {.nest = &n.nest, .sources = CONST(sources)};
  MUST(md_shared_meet(&me->channel, &call, &header));
  if (!call.results_in_arena) {
    scribble(&n, results);
    call.results = results;
  }
  MUST(md_shared_finish(&me->channel, &call));
  scribble(&n, sources);
  if (call.results_in_arena) {
    in_arena(me, &n, (size_t)header.result_offset, 0, results);
    me->kept[k] = n;
    me->kept[k].nest.leaves = me->kept[k].leaves;
    me->is_kept[k] = 1;
  }
  check(me, &n, CONST(results));
  return MD_OK;
}

/* Without a header of its own, into other arrays or in place. */
static int run(Rank *me, Random *shared) {
  Nest n;
  make_nest(me, shared, LEAF_ROOM, &n);
  unsigned char **results = below(shared, 2) ? me->results : me->sources;
  fill(&n, me->rank, me->sources);
  md_shared call = {.nest = &n.nest, .sources = CONST(me->sources), .results = results};
  if (below(shared, 2)) {
    md_header header = header_of(n.seed);
    MUST(md_meet(&me->channel, &header, NULL));
  }
  MUST(md_shared_run(&me->channel, &call));
  if (results != me->sources) scribble(&n, me->sources);
  check(me, &n, CONST(results));
  return MD_OK;
}

/* A piece of the nest, in an area: of what a rank puts there itself, or looks at there. */
static void move_piece(const Nest *n, int piece, unsigned char *area,
                       unsigned char *const *leaves, int is_read) {
  size_t first, last;
  md_piece(&n->nest, piece, &first, &last);
  for (int k = 0; k < n->nest.count; k++) {
    const md_leaf *leaf = &n->leaves[k];
    size_t a = first > leaf->start ? first : leaf->start, end = leaf->start + leaf->nbytes;
    if (end > last) end = last;
    if (a >= end) continue;
    if (is_read) memcpy(leaves[k] + (a - leaf->start), area + (a - first), end - a);
    else memcpy(area + (a - first), leaves[k] + (a - leaf->start), end - a);
  }
}

static int step(md_channel *ch) {
  md_publish(ch);
  return md_wait(ch);
}

/* Piece by piece, as the staged way does: from arrays or straight into the area, and to
   arrays or straight from the area for sums. */
static int steps(Rank *me, Random *shared) {
  md_channel *ch = &me->channel;
  Nest n;
  make_nest(me, shared, LEAF_ROOM, &n);
  int copies_in = below(shared, 2), copies_out = below(shared, 2);
  fill(&n, me->rank, me->sources);
  md_header header = header_of(n.seed);
  MUST(md_meet(ch, &header, NULL));
  md_shared call = {.nest = &n.nest, .number = ch->headers, .first_area = ch->areas_used};
  if (copies_in) call.sources = CONST(me->sources);
  if (copies_out) call.results = me->results;
  ch->areas_used += (uint32_t)n.nest.pieces;
  for (int p = 0; p < n.nest.pieces; p++) {
    size_t offset = ((call.first_area + (uint32_t)p) & 1) * ch->area_bytes;
    if (copies_in) md_shared_copy_in(ch, &call, p);
    else move_piece(&n, p, ch->areas[me->rank] + offset, me->sources, 0);
    MUST(step(ch));
    md_shared_combine(ch, &call, p);
    MUST(step(ch));
    if (copies_out) md_shared_copy_out(ch, &call, p);
    else move_piece(&n, p, ch->sums + offset, me->results, 1);
  }
  scribble(&n, me->sources);
  check(me, &n, CONST(me->results));
  return MD_OK;
}

/* Rank 0 goes on as soon as all are in the ring. */
static int messages(Rank *me, Random *shared) {
  md_channel *ch = &me->channel;
  int count = 1 + below(shared, 14);
  for (int k = 0; k < count; k++) {
    uint32_t nbytes = (uint32_t)below(shared, below(shared, 2) ? 200 : MD_MESSAGE_BYTES + 1);
    unsigned char seed = (unsigned char)next(shared);
    if (me->rank == 0) {
      for (uint32_t i = 0; i < nbytes; i++) me->buffer[i] = (unsigned char)(seed + i);
      MUST(md_post(ch, me->buffer, nbytes));
      continue;
    }
    uint32_t found;
    MUST(md_wait_message(ch, &found));
    EXPECT(me, found == nbytes);
    md_take(ch, me->buffer, nbytes);
    for (uint32_t i = 0; i < nbytes; i++)
      EXPECT(me, me->buffer[i] == (unsigned char)(seed + i));
  }
  return MD_OK;
}

static int broadcast(Rank *me, Random *shared) {
  int root = below(shared, me->round->size);
  size_t nbytes = (size_t)below(shared, 5 * AREA);
  uint64_t seed = next(shared);
  for (size_t i = 0; i < nbytes; i++)
    me->buffer[i] = (unsigned char)(me->rank == root ? value(seed, 0, i) : 255);
  MUST(md_broadcast(&me->channel, me->buffer, nbytes, root));
  for (size_t i = 0; i < nbytes; i++) EXPECT(me, me->buffer[i] == value(seed, 0, i));
  return MD_OK;
}

/* Rows of other lengths, which travel with the header; as the binding's Gather. */
static int gather(Rank *me, Random *shared) {
  md_channel *ch = &me->channel;
  uint32_t number = ch->headers + 1;
  uint64_t seed = next(shared);
  unsigned char *slot = ch->parts[me->rank]->eager[number & 1];
  size_t length = (size_t)(value(seed, me->rank, 0) * 20);
  for (size_t i = 0; i < length; i++) slot[i] = (unsigned char)value(seed, me->rank, i);
  md_header header = header_of(seed);
  MUST(md_meet(ch, &header, NULL));
  for (int r = 0; r < me->round->size; r++) {
    const unsigned char *theirs = ch->parts[r]->eager[number & 1];
    for (size_t i = 0; i < (size_t)(value(seed, r, 0) * 20); i++)
      EXPECT(me, theirs[i] == value(seed, r, i));
  }
  return MD_OK;
}

/* Rows of other lengths, which each rank writes to the results of all; these lie with a gap
   of a line in between. */
static int spread(Rank *me, Random *shared) {
  md_channel *ch = &me->channel;
  enum { LEAVES = 2 };
  size_t starts[LEAVES], counts[LEAVES], strides[LEAVES], at = 0;
  md_rows parts[LEAVES];
  uint64_t seed = next(shared);
  for (int k = 0; k < LEAVES; k++) {
    counts[k] = 1 + (size_t)below(shared, 3);
    strides[k] = 0;
    starts[k] = at;
    for (int r = 0; r < me->round->size; r++) {
      size_t bytes = (size_t)value(seed, r, (size_t)k) * 4;
      if (r == me->rank)
        parts[k] = (md_rows){me->sources[k], counts[k], bytes, 0, at + strides[k]};
      strides[k] += bytes;
    }
    parts[k].stride = strides[k];
    for (size_t i = 0; i < counts[k] * parts[k].bytes; i++)
      me->sources[k][i] = (unsigned char)value(seed + 1, me->rank + k, i);
    at += counts[k] * strides[k] + MD_LINE;
  }
  int place = me->next_kept;
  me->next_kept = (place + 1) % KEPT;
  check_kept(me, place);
  me->is_kept[place] = 0;
  md_header header = header_of(seed);
  header.result_offset = (1 + place) * REGION;
  EXPECT(me, at <= REGION);
  unsigned char *results = ch->arenas[me->rank] + header.result_offset;
  memset(results, 0xee, at);
  MUST(md_meet(ch, &header, NULL));
  MUST(md_spread(ch, parts, LEAVES));
  for (int k = 0; k < LEAVES; k++) memset(me->sources[k], 0xee, LEAF_ROOM);
  for (int k = 0; k < LEAVES; k++) {
    size_t first = 0;
    for (int r = 0; r < me->round->size; r++) {
      size_t bytes = (size_t)value(seed, r, (size_t)k) * 4;
      for (size_t i = 0; i < counts[k] * bytes; i++) {
        size_t where = starts[k] + i / bytes * strides[k] + first + i % bytes;
        EXPECT(me, results[where] == (unsigned char)value(seed + 1, r + k, i));
      }
      first += bytes;
    }
    for (int i = 0; i < MD_LINE; i++)
      EXPECT(me, results[starts[k] + counts[k] * strides[k] + (size_t)i] == 0xee);
  }
  return MD_OK;
}

static const struct {
  const char *name;
  int (*make)(Rank *, Random *);
} CALLS[] = {{"messages", messages},  {"meet", meet},           {"eager", eager},
             {"shared", shared_call}, {"shared", shared_call},  {"run", run},
             {"steps", steps},        {"broadcast", broadcast}, {"gather", gather},
             {"spread", spread}};
enum { CALL_KINDS = sizeof CALLS / sizeof *CALLS };

/* --- a round ------------------------------------------------------------------------ */

static int pause_of(void *arg, double seconds) {
  const Rank *me = arg;
  const Round *round = me->round;
  return seconds > 0 && round->ending == ONE_STOPS && me->rank == round->who &&
         me->call == round->at;
}

/* Whether the sequence ends here: what a status means in this round. */
static int ends(Rank *me, int status) {
  const Round *round = me->round;
  int has_begun = round->ending != ALL_FINISH && me->call >= round->at;
  if (status == MD_LEFT) {
    EXPECT(me, has_begun);
    EXPECT(me, me->channel.who != me->rank);
    EXPECT(me, atomic_load(&me->channel.parts[me->channel.who]->left));
    return 1;
  }
  if (status == MD_STOPPED) {
    EXPECT(me, round->ending == ONE_STOPS && me->rank == round->who && has_begun);
    return 1;
  }
  if (status) fail(me, "a status that no call should have");
  if (round->ending == ONE_STOPS && me->rank == round->who && me->call == round->at)
    return 1; /* it did not have to wait long: it leaves then */
  if (has_begun && me->call > round->at) fail(me, "went on without a rank that has left");
  return 0;
}

static void *body(void *arg) {
  Rank *me = arg;
  const Round *round = me->round;
  for (me->call = 0; me->call < round->calls; me->call++) {
    Random shared = seeded(round->seed, 1000 + (uint64_t)me->call);
    int kind = below(&shared, CALL_KINDS);
    /* A message makes no rank wait for all others, so that not all notice. */
    if (kind == 0 && (me->call > round->at || round->ending == ONE_STOPS)) kind = 1;
    me->kind = CALLS[kind].name;
    if (round->ending != ALL_FINISH && me->call == round->at) {
      if (round->ending == ONE_LEAVES && me->rank == round->who) break;
      if (round->ending == ONE_STOPS && me->rank == round->late) sleep_ms(LATE_MS);
    }
    be_late(me);
    if (ends(me, CALLS[kind].make(me, &shared))) break;
  }
  for (int i = 0; i < KEPT && me->call == round->calls; i++) check_kept(me, i);
  md_leave(&me->channel); /* at once: who is still in the last call must not mind */
  return NULL;
}

static Round make_round(uint64_t seed, int most_calls) {
  Random random = seeded(seed, 0);
  Round round = {.seed = seed, .calls = 30 + below(&random, 40)};
  if (most_calls) round.calls = 1 + below(&random, most_calls);
  static const int SPINS[] = {0, 20, 400};
  int is_large = below(&random, 5) == 0;
  round.size = is_large ? 20 : 2 + below(&random, 7);
  round.crowded = is_large || below(&random, 2);
  round.spins = SPINS[below(&random, 3)];
  int ending = below(&random, 12);
  round.ending = ending == 0 ? ONE_STOPS : ending < 4 ? ONE_LEAVES : ALL_FINISH;
  round.who = below(&random, round.size);
  round.late = (round.who + 1 + below(&random, round.size - 1)) % round.size;
  round.at = round.ending == ALL_FINISH ? round.calls : below(&random, round.calls);
  return round;
}

static void *allocate(size_t nbytes) {
  void *memory = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  if (!memory) {
    perror("stress");
    _exit(2);
  }
  return memory;
}

static void free_rank(Rank *me) {
  for (int k = 0; k < MOST_LEAVES; k++) {
    free(me->sources[k]);
    free(me->results[k]);
  }
  free(me);
}

static long play(Round *round) {
  md_layout layout = md_lay_out(round->size, AREA, ARENA);
  round->memory = allocate(layout.total_bytes);
  memset(round->memory, 0, layout.arenas_at);
  pthread_t threads[MD_MAX_RANKS];
  Rank *ranks[MD_MAX_RANKS];
  for (int r = 0; r < round->size; r++) {
    Rank *me = ranks[r] = allocate(sizeof *me);
    memset(me, 0, sizeof *me);
    me->round = round;
    me->rank = r;
    me->own = seeded(round->seed, 2000 + (uint64_t)r);
    for (int k = 0; k < MOST_LEAVES; k++) {
      me->sources[k] = allocate(LEAF_ROOM);
      me->results[k] = allocate(LEAF_ROOM);
    }
    md_open(&me->channel, round->memory, round->size, r, AREA, ARENA, round->crowded,
            round->spins);
    me->channel.hooks = (md_hooks){NULL, pause_of, me};
  }
  for (int r = 0; r < round->size; r++)
    if (pthread_create(&threads[r], NULL, body, ranks[r])) {
      perror("stress: pthread_create");
      _exit(2);
    }
  long calls = 0;
  for (int r = 0; r < round->size; r++) {
    pthread_join(threads[r], NULL);
    calls += ranks[r]->call;
    free_rank(ranks[r]);
  }
  free(round->memory);
  return calls;
}

static void hang(int signal) {
  static const char text[] = "stress: ranks wait forever\n";
  (void)signal;
  if (write(1, text, sizeof text - 1) < 0) _exit(2);
  _exit(3);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
  if (argc != 3 && argc != 4) {
    fprintf(stderr, "usage: stress SEED SECONDS [CALLS]\n");
    return 2;
  }
  int most_calls = argc == 4 ? atoi(argv[3]) : 0;
  signal(SIGALRM, hang);
  uint64_t seed = strtoull(argv[1], NULL, 10);
  double end = now() + atof(argv[2]);
  long rounds = 0, calls = 0;
  do {
    alarm(HANG_SECONDS);
    Round round = make_round(seed + (uint64_t)rounds++, most_calls);
    calls += play(&round);
  } while (now() < end);
  printf("%ld rounds, %ld calls: all right\n", rounds, calls);
  return 0;
}
