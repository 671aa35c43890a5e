/* One reduction of the kernels, for any processor: sources from stdin, the result to stdout.

     kernel_bits DTYPE OP SOURCES COUNT DIVISOR

   Long double differs between processors: those numbers are read and written as double. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { MOST_SOURCES = 8 };

static void *allocate(size_t bytes) {
  void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
  if (!memory) exit(3);
  return memory;
}

static int read_numbers(void *into, size_t bytes, int is_long) {
  if (!is_long) return fread(into, 1, bytes, stdin) == bytes;
  for (size_t i = 0; i < bytes / sizeof(long double); i++) {
    double number;
    if (fread(&number, sizeof number, 1, stdin) != 1) return 0;
    ((long double *)into)[i] = number;
  }
  return 1;
}

static int write_numbers(const void *from, size_t bytes, int is_long) {
  if (!is_long) return fwrite(from, 1, bytes, stdout) == bytes;
  for (size_t i = 0; i < bytes / sizeof(long double); i++) {
    double number = (double)((const long double *)from)[i];
    if (fwrite(&number, sizeof number, 1, stdout) != 1) return 0;
  }
  return 1;
}

int main(int argc, char **argv) {
  if (argc != 6) return 2;
  int n = atoi(argv[3]);
  const md_kernel *kernel = md_find_kernel(argv[1], argv[2]);
  if (!kernel || n < 1 || n > MOST_SOURCES) return 2;
  size_t count = strtoul(argv[4], NULL, 10), bytes = count * md_itemsize(kernel);
  int is_long = !strcmp(argv[1], "f16") || !strcmp(argv[1], "c32");
  void *sources[MOST_SOURCES], *result = allocate(bytes);
  for (int k = 0; k < n; k++) {
    sources[k] = allocate(bytes);
    if (!read_numbers(sources[k], bytes, is_long)) return 3;
  }
  md_reduce(kernel, &result, 1, (const void *const *)sources, n, count,
            (unsigned)strtoul(argv[5], NULL, 10));
  return write_numbers(result, bytes, is_long) ? 0 : 3;
}
