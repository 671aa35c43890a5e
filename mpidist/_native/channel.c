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

/* What a rank waits for.  `word` changes, and its sleepers are woken, when `arrived` may
   have come true.  A rank from `first` up to `last` that has left ends the wait; where
   it is for a step, only one that has not made this step: what counts is whether all
   have, so that all ranks learn the same of a step, whoever leaves after it. */
typedef struct md_condition {
  _Atomic uint32_t *word, *sleepers;
  int (*arrived)(md_channel *ch, const struct md_condition *c);
  uint32_t wanted; /* of the word; or bytes of the ring */
  int first, last, is_step;
} md_condition;

static int has_reached(const _Atomic uint32_t *word, uint32_t wanted) {
  return (int32_t)(atomic_load_explicit(word, memory_order_acquire) - wanted) >= 0;
}

static int count_arrived(md_channel *ch, const md_condition *c) {
  (void)ch;
  return has_reached(c->word, c->wanted);
}

/* A rank that this wait needs, and that has left; -1: none. */
static int deserter(const md_channel *ch, const md_condition *c) {
  for (int r = c->first; r < c->last; r++)
    if (r != ch->rank && atomic_load(&ch->parts[r]->left) && !(c->is_step && md_reached(ch, r)))
      return r;
  return -1;
}

static int wait_on(md_channel *ch, const md_condition *c) {
  for (int i = 0; i < ch->spins; i++) {
    if (c->arrived(ch, c)) return MD_OK;
    relax();
    if (i == SPINS_BEFORE_BLOCKING && ch->hooks.blocking) ch->hooks.blocking(ch->hooks.arg);
  }
  if (ch->hooks.blocking) ch->hooks.blocking(ch->hooks.arg);
  /* The rank that is waited for may only need this one's core. */
  for (int i = 0; i < YIELDS; i++) {
    sched_yield();
    if (c->arrived(ch, c)) return MD_OK;
  }
  double start = md_now();
  for (;;) {
    if (c->arrived(ch, c)) return MD_OK;
    int left = deserter(ch, c);
    if (left >= 0) {
      if (c->arrived(ch, c)) return MD_OK; /* it did its part before */
      ch->who = left;
      return MD_LEFT;
    }
    uint32_t seen = atomic_load(c->word);
    atomic_fetch_add(c->sleepers, 1);
    if (!c->arrived(ch, c) && atomic_load(c->word) == seen) sleep_on(c->word, seen);
    atomic_fetch_sub(c->sleepers, 1);
    if (c->arrived(ch, c)) return MD_OK;
    if (ch->hooks.pause && ch->hooks.pause(ch->hooks.arg, md_now() - start)) return MD_STOPPED;
  }
}

/* --- steps -------------------------------------------------------------------------- */

static md_group *group_of(const md_channel *ch, int rank) {
  return &ch->common->groups[rank / MD_GROUP];
}

static int members_of(const md_channel *ch, int group) {
  int rest = ch->size - group * MD_GROUP;
  return rest < MD_GROUP ? rest : MD_GROUP;
}

void md_merge(md_header *into, const md_header *other) {
  into->flags |= other->flags;
  if (other->fingerprint != into->fingerprint) into->flags |= MD_OTHER_CALL;
  if (other->value != into->value) into->flags |= MD_OTHER_VALUE;
  if (other->result_offset == MD_NOWHERE) into->flags |= MD_NO_ROOM;
  into->flags |= other->source_offset == MD_NOWHERE ? MD_OTHER_SOURCES : MD_SOURCES;
  if (other->source_layout != into->source_layout) into->flags |= MD_OTHER_SOURCES;
  if (other->lateness > into->lateness) into->lateness = other->lateness;
  if (other->timeout_ms < into->timeout_ms) into->timeout_ms = other->timeout_ms;
  if (other->largest > into->largest) into->largest = other->largest;
}

int md_status_of(const md_header *v) {
  if (v->timeout_ms != INT64_MAX && 2 * (int64_t)v->lateness >= v->timeout_ms) return MD_AGAIN;
  return v->flags & (MD_FAILED | MD_OTHER_CALL) ? MD_DIFFERENT : MD_OK;
}

/* The last of all ranks has published: finish the step, and let the groups go. */
static void release(md_channel *ch) {
  for (int g = 0; g < ch->groups; g++) {
    md_group *group = &ch->common->groups[g];
    atomic_store(&group->release, ch->step);
    wake(&group->release, &group->sleepers);
  }
}

/* The verdict of ranks from `first` up to `last`. */
static md_header verdict_of(const md_channel *ch, int first, int last, uint32_t number) {
  md_header v = *md_header_of(ch, first, number);
  for (int r = first; r < last; r++) md_merge(&v, md_header_of(ch, r, number));
  return v;
}

static void sum_payloads(const md_channel *ch, uint32_t number, const md_small *small,
                         unsigned char *sums) {
  const unsigned char *slots[MD_MAX_RANKS];
  for (int r = 0; r < ch->size; r++) slots[r] = ch->parts[r]->eager[number & 1];
  md_small_sum(small, slots, ch->size, sums);
}

/* Merge the verdicts of the groups, now that all are there. */
static void judge_all(md_channel *ch, uint32_t number, const md_small *small) {
  md_common *common = ch->common;
  md_header *v = &common->verdict[number & 1];
  *v = common->groups[0].verdict[number & 1];
  for (int g = 1; g < ch->groups; g++) md_merge(v, &common->groups[g].verdict[number & 1]);
  if (small && md_status_of(v) == MD_OK) sum_payloads(ch, number, small, common->sums[number & 1]);
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
  if (is_header)
    group->verdict[ch->headers & 1] =
        verdict_of(ch, g * MD_GROUP, g * MD_GROUP + (int)members, ch->headers);
  if (atomic_fetch_add(&ch->common->arrivals, 1) + 1 != (uint32_t)ch->groups * step) return;
  if (is_header) judge_all(ch, ch->headers, small);
  release(ch);
}

void md_publish(md_channel *ch) { publish(ch, 0, NULL); }

int md_wait(md_channel *ch) {
  if (ch->tree) {
    md_group *group = group_of(ch, ch->rank);
    md_condition c = {&group->release, &group->sleepers, count_arrived, ch->step, 0, ch->size, 1};
    return wait_on(ch, &c);
  }
  for (int r = 0; r < ch->size; r++) {
    if (r == ch->rank) continue;
    md_part *part = ch->parts[r];
    md_condition c = {&part->step, &part->sleepers, count_arrived, ch->step, r, r + 1, 1};
    int status = wait_on(ch, &c);
    if (status) return status;
  }
  return MD_OK;
}

int md_reached(const md_channel *ch, int rank) {
  return has_reached(&ch->parts[rank]->step, ch->step);
}

int md_all_reached(const md_channel *ch) {
  if (ch->tree) return has_reached(&group_of(ch, ch->rank)->release, ch->step);
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

int md_judge(md_channel *ch, const md_small *small) {
  uint32_t number = ch->headers;
  ch->verdict =
      ch->tree ? ch->common->verdict[number & 1] : verdict_of(ch, 0, ch->size, number);
  int status = md_status_of(&ch->verdict);
  if (status || !small) return status;
  if (ch->tree) md_small_get(small, ch->common->sums[number & 1]);
  else sum_payloads(ch, number, small, NULL);
  return MD_OK;
}

int md_meet(md_channel *ch, const md_header *header, const md_small *small) {
  md_start(ch, header, small);
  int status = md_wait(ch);
  return status ? status : md_judge(ch, small);
}

/* --- messages ----------------------------------------------------------------------- */

static uint64_t room_of(uint32_t nbytes) { return 8 + whole(nbytes, 8); }

static int has_room(md_channel *ch, const md_condition *c) {
  uint64_t end = ch->moved + room_of(c->wanted);
  if (end - ch->least_read <= MD_RING_BYTES) return 1;
  uint64_t least = UINT64_MAX;
  for (int r = 1; r < ch->size; r++) {
    uint64_t read = atomic_load_explicit(&ch->parts[r]->read, memory_order_acquire);
    if (read < least) least = read;
  }
  ch->least_read = least;
  return end - least <= MD_RING_BYTES;
}

static void to_ring(md_common *common, uint64_t at, const void *data, uint32_t nbytes) {
  size_t start = at % MD_RING_BYTES, first = MD_RING_BYTES - start;
  if (first > nbytes) first = nbytes;
  memcpy(common->ring + start, data, first);
  memcpy(common->ring, (const char *)data + first, nbytes - first);
}

int md_post(md_channel *ch, const void *data, uint32_t nbytes) {
  md_common *common = ch->common;
  md_condition c = {&common->taken, &common->taken_sleepers, has_room, nbytes, 1, ch->size, 0};
  int status = wait_on(ch, &c);
  if (status) return status;
  to_ring(common, ch->moved, &nbytes, sizeof nbytes);
  to_ring(common, ch->moved + 8, data, nbytes);
  ch->moved += room_of(nbytes);
  atomic_store(&common->posted, ++ch->messages);
  wake(&common->posted, &common->posted_sleepers);
  return MD_OK;
}

int md_wait_message(md_channel *ch, uint32_t *nbytes) {
  md_common *common = ch->common;
  md_condition c = {&common->posted, &common->posted_sleepers, count_arrived, ch->messages + 1,
                    0, 1, 0};
  int status = wait_on(ch, &c);
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
