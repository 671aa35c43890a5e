/* See guess.h. */
#include "guess.h"

#define MOST_TRUST 3
#define WRONG 3 /* what a wrong guess takes away */

/* The habit of what comes after two calls; it may be one of two others.  NULL: there are none. */
static md_habit *habit_after(const md_guesses *self, const int64_t *calls, int64_t *after) {
  if (!calls[0] || !calls[1]) return 0;
  uint64_t hash = (uint64_t)calls[1] * 0x9E3779B97F4A7C15u + (uint64_t)calls[0];
  *after = (int64_t)hash;
  return (md_habit *)&self->habits[(hash ^ hash >> 29) % MD_HABITS];
}

const md_habit *md_guess(const md_guesses *self) {
  int64_t after;
  const md_habit *habit = habit_after(self, self->calls, &after);
  return habit && habit->call && habit->after == after && habit->trust > 0 ? habit : 0;
}

int md_is_same(const md_data *a, const md_data *b) {
  return a->nbytes == b->nbytes && a->piece_bytes == b->piece_bytes &&
         a->itemsize == b->itemsize && a->gathers == b->gathers && a->in_flight == b->in_flight;
}

static void distrust(md_habit *habit) {
  habit->trust -= WRONG;
  if (habit->trust < -WRONG) habit->trust = -WRONG;
}

void md_note(md_guesses *self, int64_t call) {
  int64_t after;
  md_habit *habit = habit_after(self, self->calls, &after);
  if (habit && call && habit->after == after && habit->call != call) distrust(habit);
  self->calls[2] = self->calls[1];
  self->calls[1] = self->calls[0];
  self->calls[0] = call;
}

/* The habit of what came before the last call; `is_this`: whether that is the call it expects. */
static md_habit *last_habit(md_guesses *self, int64_t *after, int *is_this) {
  md_habit *habit = habit_after(self, self->calls + 1, after);
  *is_this = habit && habit->after == *after && habit->call == self->calls[0];
  return habit;
}

void md_learn(md_guesses *self, const md_data *data) {
  int64_t after;
  int is_this;
  md_habit *habit = last_habit(self, &after, &is_this);
  if (!habit) return;
  if (is_this && md_is_same(&habit->data, data)) {
    if (habit->trust < MOST_TRUST) habit->trust++;
    habit->data = *data; /* the handles may be new */
    return;
  }
  if (is_this) distrust(habit);
  else if (habit->after != after) habit->trust--; /* of two in one place, the usual one stays */
  if (habit->trust <= 0) *habit = (md_habit){after, self->calls[0], *data, 0};
}

void md_unlearn(md_guesses *self) {
  int64_t after;
  int is_this;
  md_habit *habit = last_habit(self, &after, &is_this);
  if (is_this) distrust(habit);
}
