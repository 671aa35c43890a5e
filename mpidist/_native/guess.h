/* Which data follow the next header, as a guess.

   A call whose data have no room behind its header takes two collectives of MPI, one after the
   other.  Programs repeat their calls.  So ranks remember which call came after which two, and
   start the data that they expect together with the header: then both are on the way at once.

   All ranks guess the same, whatever their next call is: they learn only from headers on which
   all agreed.  So all start the same collective of MPI.  A rank that makes another call takes
   part with memory of no meaning; the header shows it, and nobody uses the result. */
#ifndef MPIDIST_GUESS_H
#define MPIDIST_GUESS_H

#include <stddef.h>
#include <stdint.h>

/* What MPI does with `nbytes` of each rank: it gathers them, or it reduces them in pieces. */
typedef struct {
  size_t nbytes, piece_bytes, itemsize;
  int gathers, in_flight;
  intptr_t datatype, op; /* handles, which may have other values on other ranks */
} md_data;

/* Only so many bytes in all: above, the wait for a header costs little, and a wrong guess much. */
#define MD_MOST_GUESSED ((size_t)1 << 20)
#define MD_HABITS 32

/* What comes after two calls.  A wrong guess costs about what one or two right ones save, so it
   takes more of these to make up for it. */
typedef struct {
  int64_t after, call; /* a hash of the two; the call: 0 in a habit that is none */
  md_data data;
  int trust; /* a guess if above 0 */
} md_habit;

typedef struct {
  int64_t calls[3]; /* the last ones on which all agreed, the last first; 0: none */
  md_habit habits[MD_HABITS];
} md_guesses;

/* What is expected to come now; NULL: nothing. */
const md_habit *md_guess(const md_guesses *self);
/* Whether all ranks take them for the same data. */
int md_is_same(const md_data *a, const md_data *b);
/* A header was exchanged: of this call if all agree, otherwise of 0. */
void md_note(md_guesses *self, int64_t call);
/* The last call has moved such data, on all ranks; or none, on all. */
void md_learn(md_guesses *self, const md_data *data);
void md_unlearn(md_guesses *self);

#endif
