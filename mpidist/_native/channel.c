#define _GNU_SOURCE
#include "channel.h"

#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
/* So often a rank gives its core away before it sleeps, since ranks may share cores, also
   without knowing it. With 4 ranks on 2 cores 4 B took 11 us with 50, and 40 to 60 with 0
   to 10. */
#define YIELDS 50
/* Some 10 us, after which other threads of Python may run. */
#define SPINS_BEFORE_BLOCKING 500

static size_t whole(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* --- futexes ------------------------------------------------------------------------ */

static void sleep_on(_Atomic uint32_t *word, uint32_t seen) {
  struct timespec slice = {0, MD_SLICE_NS};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
}

static void wake(_Atomic uint32_t *word, _Atomic uint32_t *sleepers) {
  /* Sequentially consistent, as the store before it: either the sleeper sees the new
     value, or it is seen here. */
  if (atomic_load(sleepers)) syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

double md_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- layout ------------------------------------------------------------------------- */

md_layout md_lay_out(int size, size_t area_bytes, size_t arena_bytes) {
  md_layout l;
  l.head_bytes = whole(sizeof(md_common), PAGE);
  l.part_bytes = whole(sizeof(md_part), PAGE) + 2 * area_bytes;
  l.sums_at = l.head_bytes + (size_t)size * l.part_bytes;
  l.arenas_at = l.sums_at + 2 * area_bytes;
  l.arena_bytes = arena_bytes;
  l.total_bytes = l.arenas_at + (size_t)size * arena_bytes;
  return l;
}

void md_open(md_channel *ch, void *memory, int size, int rank, size_t area_bytes,
             size_t arena_bytes, int crowded, int spins) {
  md_layout l = md_lay_out(size, area_bytes, arena_bytes);
  memset(ch, 0, sizeof *ch);
  ch->memory = memory;
  ch->common = memory;
  for (int r = 0; r < size; r++) {
    unsigned char *part = ch->memory + l.head_bytes + (size_t)r * l.part_bytes;
    ch->parts[r] = (md_part *)part;
    ch->areas[r] = part + whole(sizeof(md_part), PAGE);
    ch->arenas[r] = ch->memory + l.arenas_at + (size_t)r * arena_bytes;
  }
  ch->sums = ch->memory + l.sums_at;
  ch->area_bytes = area_bytes;
  ch->arena_bytes = arena_bytes;
  ch->size = size;
  ch->rank = rank;
  ch->groups = (size + MD_GROUP - 1) / MD_GROUP;
  ch->tree = crowded || size > MD_GROUP;
  ch->spins = spins;
}

/* --- waiting ------------------------------------------------------------------------ */

typedef int (*arrived_fn)(const md_channel *ch, const void *arg);

/* What a rank waits for.  `word` changes, and its sleepers are woken, when `arrived` may
   have come true.  A rank from `first` up to `last` that has left ends the wait; where
   it is for a step, only one that has not made this step: what counts is whether all
   have, so that all ranks learn the same of a step, whoever leaves after it. */
typedef struct {
  _Atomic uint32_t *word, *sleepers;
  arrived_fn arrived;
  const void *arg;
  int first, last, is_step;
} md_condition;

/* A rank that this wait needs, and that has left; -1: none. */
static int deserter(const md_channel *ch, const md_condition *c) {
  for (int r = c->first; r < c->last; r++)
    if (r != ch->rank && atomic_load(&ch->parts[r]->left) && !(c->is_step && md_reached(ch, r)))
      return r;
  return -1;
}

static int wait_on(md_channel *ch, const md_condition *c) {
  for (int i = 0; i < ch->spins; i++) {
    if (c->arrived(ch, c->arg)) return MD_OK;
    relax();
    if (i == SPINS_BEFORE_BLOCKING && ch->hooks.blocking) ch->hooks.blocking(ch->hooks.arg);
  }
  if (ch->hooks.blocking) ch->hooks.blocking(ch->hooks.arg);
  /* The rank that is waited for may only need this one's core. */
  for (int i = 0; i < YIELDS; i++) {
    sched_yield();
    if (c->arrived(ch, c->arg)) return MD_OK;
  }
  double start = md_now();
  for (;;) {
    if (c->arrived(ch, c->arg)) return MD_OK;
    int left = deserter(ch, c);
    if (left >= 0) {
      if (c->arrived(ch, c->arg)) return MD_OK; /* it did its part before */
      ch->who = left;
      return MD_LEFT;
    }
    uint32_t seen = atomic_load(c->word);
    atomic_fetch_add(c->sleepers, 1);
    if (!c->arrived(ch, c->arg) && atomic_load(c->word) == seen) sleep_on(c->word, seen);
    atomic_fetch_sub(c->sleepers, 1);
    if (c->arrived(ch, c->arg)) return MD_OK;
    if (ch->hooks.pause && ch->hooks.pause(ch->hooks.arg, md_now() - start)) return MD_STOPPED;
  }
}

typedef struct {
  _Atomic uint32_t *word;
  uint32_t wanted;
} count_wait;

static int count_arrived(const md_channel *ch, const void *arg) {
  const count_wait *w = arg;
  (void)ch;
  return (int32_t)(atomic_load_explicit(w->word, memory_order_acquire) - w->wanted) >= 0;
}

static int wait_count(md_channel *ch, const md_condition *c, uint32_t wanted) {
  count_wait w = {c->word, wanted};
  md_condition condition = *c;
  condition.arrived = count_arrived;
  condition.arg = &w;
  if (count_arrived(ch, &w)) return MD_OK;
  return wait_on(ch, &condition);
}

/* --- steps -------------------------------------------------------------------------- */

static md_group *group_of(const md_channel *ch, int rank) {
  return &ch->common->groups[rank / MD_GROUP];
}

static int members_of(const md_channel *ch, int group) {
  int rest = ch->size - group * MD_GROUP;
  return rest < MD_GROUP ? rest : MD_GROUP;
}

static void add_header(md_verdict *v, const md_header *h, const md_header *mine) {
  v->flag |= h->flag;
  v->same_call &= h->fingerprint == mine->fingerprint;
  v->same_value &= h->value == mine->value;
  v->results_in_arena &= h->result_offset != MD_NOWHERE;
  v->sources_in_arena &=
      h->source_offset != MD_NOWHERE && h->source_layout == mine->source_layout;
  v->copied &= h->source_offset == MD_NOWHERE;
  if (h->lateness > v->lateness) v->lateness = h->lateness;
  if (h->timeout_ms < v->timeout_ms) v->timeout_ms = h->timeout_ms;
  if (h->largest > v->largest) v->largest = h->largest;
}

static void add_verdict(md_verdict *v, const md_verdict *other) {
  v->flag |= other->flag;
  v->same_call &= other->same_call;
  v->same_value &= other->same_value;
  v->results_in_arena &= other->results_in_arena;
  v->sources_in_arena &= other->sources_in_arena;
  v->copied &= other->copied;
  if (other->lateness > v->lateness) v->lateness = other->lateness;
  if (other->timeout_ms < v->timeout_ms) v->timeout_ms = other->timeout_ms;
  if (other->largest > v->largest) v->largest = other->largest;
}

static const md_verdict AGREED = {.same_call = 1,
                                  .same_value = 1,
                                  .results_in_arena = 1,
                                  .sources_in_arena = 1,
                                  .copied = 1,
                                  .timeout_ms = INT64_MAX,
                                  .largest = INT64_MIN};

static int late(const md_verdict *v) {
  return v->timeout_ms != INT64_MAX && 2 * (int64_t)v->lateness >= v->timeout_ms;
}

static int agreed(const md_verdict *v) { return !v->flag && v->same_call && !late(v); }

/* The last of all ranks has published: finish the step, and let the groups go. */
static void release(md_channel *ch) {
  for (int g = 0; g < ch->groups; g++) {
    md_group *group = &ch->common->groups[g];
    atomic_store(&group->release, ch->step);
    wake(&group->release, &group->sleepers);
  }
}

/* Compare the headers of a group with that of its first rank. */
static void judge_group(const md_channel *ch, int g, uint32_t number) {
  md_verdict v = AGREED;
  const md_header *first = md_header_of(ch, g * MD_GROUP, number);
  for (int i = 0; i < members_of(ch, g); i++)
    add_header(&v, md_header_of(ch, g * MD_GROUP + i, number), first);
  ch->common->groups[g].verdict[number & 1] = v;
}

static void sum_payloads(const md_channel *ch, uint32_t number, const md_small *small,
                         unsigned char *sums) {
  const unsigned char *slots[MD_MAX_RANKS];
  for (int r = 0; r < ch->size; r++) slots[r] = ch->parts[r]->eager[number & 1];
  md_small_sum(small, slots, ch->rank, ch->size, sums);
}

/* Compare the first ranks of the groups, now that all are there. */
static void judge_all(md_channel *ch, uint32_t number, const md_small *small) {
  md_verdict v = AGREED;
  for (int g = 0; g < ch->groups; g++) {
    add_verdict(&v, &ch->common->groups[g].verdict[number & 1]);
    add_header(&v, md_header_of(ch, g * MD_GROUP, number), md_header_of(ch, 0, number));
  }
  ch->common->verdict[number & 1] = v;
  if (small && agreed(&v)) sum_payloads(ch, number, small, ch->common->sums[number & 1]);
}

static void publish(md_channel *ch, int is_header, const md_small *small) {
  md_part *mine = ch->parts[ch->rank];
  uint32_t step = ++ch->step;
  if (!ch->tree) {
    atomic_store(&mine->step, step);
    wake(&mine->step, &mine->sleepers);
    return;
  }
  /* For ranks that look which one is missing; the counters say the rest. */
  atomic_store_explicit(&mine->step, step, memory_order_release);
  int g = ch->rank / MD_GROUP;
  md_group *group = group_of(ch, ch->rank);
  uint32_t members = (uint32_t)members_of(ch, g);
  if (atomic_fetch_add(&group->arrivals, 1) + 1 != members * step) return;
  if (is_header) judge_group(ch, g, ch->headers);
  if (atomic_fetch_add(&ch->common->arrivals, 1) + 1 != (uint32_t)ch->groups * step) return;
  if (is_header) judge_all(ch, ch->headers, small);
  release(ch);
}

void md_publish(md_channel *ch) { publish(ch, 0, NULL); }

int md_wait(md_channel *ch) {
  if (ch->tree) {
    md_group *group = group_of(ch, ch->rank);
    md_condition c = {&group->release, &group->sleepers, NULL, NULL, 0, ch->size, 1};
    return wait_count(ch, &c, ch->step);
  }
  for (int r = 0; r < ch->size; r++) {
    if (r == ch->rank) continue;
    md_part *part = ch->parts[r];
    md_condition c = {&part->step, &part->sleepers, NULL, NULL, r, r + 1, 1};
    int status = wait_count(ch, &c, ch->step);
    if (status) return status;
  }
  return MD_OK;
}

int md_reached(const md_channel *ch, int rank) {
  uint32_t step = atomic_load_explicit(&ch->parts[rank]->step, memory_order_acquire);
  return (int32_t)(step - ch->step) >= 0;
}

int md_all_reached(const md_channel *ch) {
  if (ch->tree) {
    count_wait w = {&group_of(ch, ch->rank)->release, ch->step};
    return count_arrived(ch, &w);
  }
  for (int r = 0; r < ch->size; r++)
    if (!md_reached(ch, r)) return 0;
  return 1;
}

void md_leave(md_channel *ch) {
  md_part *mine = ch->parts[ch->rank];
  md_common *common = ch->common;
  atomic_store(&mine->left, 1);
  wake(&mine->step, &mine->sleepers);
  for (int g = 0; g < ch->groups; g++)
    wake(&common->groups[g].release, &common->groups[g].sleepers);
  wake(&common->posted, &common->posted_sleepers);
  wake(&common->taken, &common->taken_sleepers);
}

/* --- headers ------------------------------------------------------------------------ */

void md_start(md_channel *ch, const md_header *header, const md_small *small) {
  uint32_t number = ++ch->headers;
  *md_header_of(ch, ch->rank, number) = *header;
  if (small) md_small_put(small, ch->parts[ch->rank]->eager[number & 1]);
  publish(ch, 1, small);
}

static int status_of(const md_verdict *v) {
  if (late(v)) return MD_AGAIN;
  return agreed(v) ? MD_OK : MD_DIFFERENT;
}

int md_compare(md_verdict *verdict, const md_header *const *headers, int size, int mine) {
  *verdict = AGREED;
  for (int r = 0; r < size; r++) add_header(verdict, headers[r], headers[mine]);
  return status_of(verdict);
}

void md_begin_merge(md_header *header) { header->result_offset = header->source_layout = 1; }

void md_merge(md_header *into, const md_header *other) {
  into->result_offset &= other->result_offset & (into->fingerprint == other->fingerprint);
  into->source_layout &= other->source_layout & (into->value == other->value);
  into->flag |= other->flag;
  if (other->lateness > into->lateness) into->lateness = other->lateness;
  if (other->timeout_ms < into->timeout_ms) into->timeout_ms = other->timeout_ms;
  if (other->largest > into->largest) into->largest = other->largest;
}

int md_judge_merged(md_verdict *verdict, const md_header *merged) {
  *verdict = (md_verdict){.flag = merged->flag,
                          .same_call = merged->result_offset == 1,
                          .same_value = merged->source_layout == 1,
                          .lateness = merged->lateness,
                          .timeout_ms = merged->timeout_ms,
                          .largest = merged->largest};
  return status_of(verdict);
}

int md_judge(md_channel *ch, const md_header *header, const md_small *small) {
  uint32_t number = ch->headers;
  if (ch->tree) {
    ch->verdict = ch->common->verdict[number & 1];
  } else {
    ch->verdict = AGREED;
    for (int r = 0; r < ch->size; r++)
      add_header(&ch->verdict, md_header_of(ch, r, number), header);
  }
  int status = status_of(&ch->verdict);
  if (status || !small) return status;
  if (ch->tree) md_small_get(small, ch->common->sums[number & 1]);
  else sum_payloads(ch, number, small, NULL);
  return MD_OK;
}

int md_meet(md_channel *ch, const md_header *header, const md_small *small) {
  md_start(ch, header, small);
  int status = md_wait(ch);
  return status ? status : md_judge(ch, header, small);
}

/* --- messages ----------------------------------------------------------------------- */

static uint64_t room_of(uint32_t nbytes) { return 8 + whole(nbytes, 8); }

static int has_room(const md_channel *ch, const void *arg) {
  md_channel *mine = (md_channel *)ch; /* `least_read` is a memo */
  uint64_t end = ch->moved + room_of(*(const uint32_t *)arg);
  if (end - ch->least_read <= MD_RING_BYTES) return 1;
  uint64_t least = UINT64_MAX;
  for (int r = 1; r < ch->size; r++) {
    uint64_t read = atomic_load_explicit(&ch->parts[r]->read, memory_order_acquire);
    if (read < least) least = read;
  }
  mine->least_read = least;
  return end - least <= MD_RING_BYTES;
}

static void to_ring(md_common *common, uint64_t at, const void *data, uint32_t nbytes) {
  size_t start = at % MD_RING_BYTES, first = MD_RING_BYTES - start;
  if (first > nbytes) first = nbytes;
  memcpy(common->ring + start, data, first);
  memcpy(common->ring, (const char *)data + first, nbytes - first);
}

int md_try_post(md_channel *ch, const void *data, uint32_t nbytes) {
  md_common *common = ch->common;
  if (!has_room(ch, &nbytes)) return 0;
  to_ring(common, ch->moved, &nbytes, sizeof nbytes);
  to_ring(common, ch->moved + 8, data, nbytes);
  ch->moved += room_of(nbytes);
  atomic_store(&common->posted, ++ch->messages);
  wake(&common->posted, &common->posted_sleepers);
  return 1;
}

int md_wait_room(md_channel *ch, uint32_t nbytes) {
  md_common *common = ch->common;
  md_condition c = {&common->taken, &common->taken_sleepers, has_room, &nbytes, 1, ch->size, 0};
  return wait_on(ch, &c);
}

int md_wait_message(md_channel *ch, uint32_t *nbytes) {
  md_common *common = ch->common;
  md_condition c = {&common->posted, &common->posted_sleepers, NULL, NULL, 0, 1, 0};
  int status = wait_count(ch, &c, ch->messages + 1);
  if (status) return status;
  memcpy(nbytes, common->ring + ch->moved % MD_RING_BYTES, sizeof *nbytes);
  return MD_OK;
}

void md_take(md_channel *ch, void *data, uint32_t nbytes) {
  md_common *common = ch->common;
  size_t start = (ch->moved + 8) % MD_RING_BYTES, first = MD_RING_BYTES - start;
  if (first > nbytes) first = nbytes;
  memcpy(data, common->ring + start, first);
  memcpy((char *)data + first, common->ring, nbytes - first);
  ch->moved += room_of(nbytes);
  ch->messages++;
  atomic_store(&ch->parts[ch->rank]->read, ch->moved);
  atomic_fetch_add(&common->taken, 1);
  wake(&common->taken, &common->taken_sleepers);
}
