/* Counts calls of MPI's functions: a profiling layer for LD_PRELOAD, for tests.
 *
 * Each function here has the name of one of MPI's, counts, and calls MPI's PMPI_ form.
 * mpi4py's own calls find it, since it was loaded first. The core's do not: it gets the
 * addresses by `dlsym` of mpi4py's module; so that is replaced here too. All arguments
 * are passed on as words; more than a function takes do no harm on x86-64 and aarch64.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef long Word;
typedef int Function(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);

#define NAMES(X)                                                               \
    X(Start) X(Startall) X(Isend) X(Irecv) X(Send) X(Recv) X(Sendrecv)         \
    X(Ibarrier) X(Barrier) X(Iallreduce) X(Allreduce) X(Iallgather)            \
    X(Allgather) X(Iallgatherv) X(Allgatherv) X(Ibcast) X(Bcast) X(Ireduce)    \
    X(Reduce) X(Igather) X(Gather) X(Igatherv) X(Gatherv) X(Iscatter)          \
    X(Scatter) X(Iscatterv) X(Scatterv) X(Ialltoall) X(Alltoall)               \
    X(Ialltoallv) X(Alltoallv) X(Ireduce_scatter_block)

static void *find(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) {
        real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
    }
    return real(handle, name);
}

static void *mpi(const char *name) {
    static const char *const libraries[] = {"libmpi.so.40", "libmpi.so.12"};
    for (int k = 0; k < 2; k++) {
        void *handle = dlopen(libraries[k], RTLD_LAZY | RTLD_NOLOAD);
        if (handle) return find(handle, name);
    }
    return NULL;
}

#define DEFINE_FORM(name, form)                                                \
    int MPI_##form(Word a, Word b, Word c, Word d, Word e, Word f, Word g,     \
                   Word h, Word i, Word j) {                                   \
        static Function *function;                                             \
        if (!function) function = (Function *)mpi("PMPI_" #form);              \
        count_of_##name++;                                                     \
        return function(a, b, c, d, e, f, g, h, i, j);                         \
    }
/* The form _c is that of MPI 4 with counts of 64 bits. It is left out if the library
 * has none: mpi4py calls it if it is there. */
#ifdef LARGE_COUNTS
#define DEFINE_LARGE(name) DEFINE_FORM(name, name##_c)
#else
#define DEFINE_LARGE(name)
#endif
#define DEFINE(name)                                                           \
    static long count_of_##name;                                               \
    DEFINE_FORM(name, name)                                                    \
    DEFINE_LARGE(name)
NAMES(DEFINE)

static const struct {
    const char *name;
    long *count;
    void *function;
} rows[] = {
#define ROW(name) {"MPI_" #name, &count_of_##name, (void *)MPI_##name},
    NAMES(ROW)};
enum { ROWS = sizeof rows / sizeof *rows };

void *dlsym(void *restrict handle, const char *restrict name) {
    if (strncmp(name, "MPI_", 4) == 0)
        for (int k = 0; k < ROWS; k++)
            if (strcmp(name, rows[k].name) == 0) return rows[k].function;
    return find(handle, name);
}

/* Return the name of row k, and what was counted; NULL after the last. */
const char *profile_row(int k, long *count) {
    if (k >= ROWS) return NULL;
    *count = *rows[k].count;
    return rows[k].name;
}
