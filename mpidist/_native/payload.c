#include "payload.h"

#include <string.h>

void md_small_put(const md_small *small, unsigned char *slot) {
  for (int i = 0; i < small->nest->count; i++) {
    const md_leaf *leaf = &small->nest->leaves[i];
    memcpy(slot + leaf->start, small->sources[i], leaf->nbytes);
  }
}

void md_small_sum(const md_small *small, const unsigned char *const *slots, int size,
                  unsigned char *sums) {
  for (int i = 0; i < small->nest->count; i++) {
    const md_leaf *leaf = &small->nest->leaves[i];
    void *out = sums ? sums + leaf->start : small->results[i];
    const void *sources[size];
    for (int r = 0; r < size; r++) sources[r] = slots[r] + leaf->start;
    if (size == 1 && out == sources[0] && !leaf->divisor) continue;
    md_reduce(leaf->kernel, &out, 1, sources, size, leaf->nbytes / md_itemsize(leaf->kernel),
              leaf->divisor);
  }
}

void md_small_get(const md_small *small, const unsigned char *sums) {
  for (int i = 0; i < small->nest->count; i++) {
    const md_leaf *leaf = &small->nest->leaves[i];
    memcpy(small->results[i], sums + leaf->start, leaf->nbytes);
  }
}
