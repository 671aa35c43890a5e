/* Reductions of n sources into m destinations: one loop for each dtype and operation.
   What they compute is in kernels.h.

   How to read this file. C has no generic functions, so the loop is written once, as
   the macro LOOP, and each line LOOP(...) below it defines one function. In Python:

       def LOOP(name, out, left, right, acc, load_left, load_right, op, last, store):
           def loop(dst, a, b, divisor):
               for i in range(len(dst)):
                   dst[i] = store(last(op(load_left(a[i]), load_right(b[i]))))
           globals()[name] = loop

   `out`, `left` and `right` are the types of dst, a and b, and `acc` is the type of the
   computation. They differ for float16 and bfloat16 only, which are computed as float:
   `load` and `store` convert. `last` is KEEP, or the division of a mean. UNIFORM is a
   LOOP with one type. The table at the end has a row for each dtype and operation.

   md_reduce calls these loops:

       1 source    memcpy(dst, s0), or for MIN and MAX two(dst, s0, s0)
       2 sources   two(dst, s0, s1)
       n sources   first(block, s0, s1), next(block, block, s2) ..., last(dst, block, s)

   For a mean, mean_one, mean_two and mean_last take the place of memcpy, two and last.
   With UNIFORM types, `two`, `first`, `next` and `last` are one function.

   Three sources or more are reduced in pieces. `block` is on the stack and stays in the
   L1 cache, so that each source is read from memory once, and the result written once.
   Further destinations are copied from the first one, piece by piece too. (BLOCK was
   chosen by measurement: with 16 KiB, four sources of 1 MiB took 15 % longer.)

   The compiler vectorises the loops (`gcc -fopt-info-vec` tells). CLONES makes it
   compile them for several generations of x86-64; the dynamic loader picks one when the
   library is loaded. No intrinsics: aarch64 needs nothing of its own.

   Why aliasing is safe. A destination may be one of the sources. A piece of the result
   is written only by the loop that reads the last source of that piece, and that loop
   reads element i before it writes element i. Hence also INDEPENDENT, which allows
   vectors without a check for overlap: no iteration reads what another one writes. */

#include "kernels.h"

#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#ifdef __FAST_MATH__
#error "kernels.c: -ffast-math changes results; compile without it, see kernels.h"
#endif

enum { BLOCK = 8192 }; /* bytes */

/* --- what the compiler is asked for ----------------------------------------------- */

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#pragma clang diagnostic ignored "-Wpass-failed" /* long double is never vectorised */
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer) || \
    __has_feature(memory_sanitizer)
#define SANITIZED
#endif
#endif

/* Clones need ifunc, of the GNU loader. It calls the functions that choose a clone
   before a sanitizer is ready for them. GCC 12 and Clang 18 know the levels of x86-64:
   v3 has AVX2, v4 has AVX-512. */
#define CLONES
#if defined(__has_attribute) && defined(__x86_64__) && defined(__linux__) &&           \
    defined(__GLIBC__) && !defined(SANITIZED)
#if __has_attribute(target_clones)
#undef CLONES
#if defined(__clang__) ? __clang_major__ >= 18 : __GNUC__ >= 12
#define CLONES                                                                         \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES __attribute__((target_clones("avx2", "default")))
#endif
#endif
#endif

/* GCC 12 fuses a vectorised complex product (vfmaddsub) despite -ffp-contract=off. */
#if defined(__GNUC__) && !defined(__clang__)
#define NO_VECTORS __attribute__((optimize("no-tree-vectorize")))
#else
#define NO_VECTORS
#endif

/* --- the loop --------------------------------------------------------------------- */

typedef void loop_function(void *to, const void *left, const void *right, size_t count,
                           unsigned divisor);

#define LOOP(NAME, OUT, LEFT, RIGHT, ACC, LOAD_LEFT, LOAD_RIGHT, OP, LAST, STORE)      \
    static void NAME(void *to, const void *left, const void *right, size_t count,      \
                     unsigned divisor)                                                 \
    {                                                                                  \
        OUT *dst = to;                                                                 \
        const LEFT *a = left;                                                          \
        const RIGHT *b = right;                                                        \
        INDEPENDENT                                                                    \
        for (size_t i = 0; i < count; i++) {                                           \
            const ACC x = LOAD_LEFT(a[i]), y = LOAD_RIGHT(b[i]), z = OP(x, y);         \
            dst[i] = STORE(LAST(z));                                                   \
            (void)y; /* unused by FIRST */                                             \
        }                                                                              \
        (void)divisor; /* unused by KEEP */                                            \
    }

#define UNIFORM(NAME, TYPE, OP, LAST)                                                  \
    LOOP(NAME, TYPE, TYPE, TYPE, TYPE, SAME, SAME, OP, LAST, SAME)

/* --- operations: LOAD, OP, LAST and STORE ----------------------------------------- */

#define SAME(x) (x)
#define KEEP(x) (x)
#define FIRST(x, y) (x)
#define ADD(x, y) ((x) + (y))
#define MULTIPLY(x, y) ((x) * (y))
#define MULTIPLY_INTEGERS(x, y) (1u * (x) * (y)) /* two uint16_t would overflow int */
#define LESSER(x, y) ((x) < (y) ? (x) : (y))
#define GREATER(x, y) ((x) > (y) ? (x) : (y))
#define AND(x, y) ((x) != 0 && (y) != 0)
#define OR(x, y) ((x) != 0 || (y) != 0)
#define EXTREME_L(x, y, wins)                                                          \
    ((x) != (x) || (y) != (y) ? (long double)NAN : (wins) ? (x) : (y))
#define MINIMUM_L(x, y) EXTREME_L(x, y, (x) < (y) || ((x) == (y) && signbit(x)))
#define MAXIMUM_L(x, y) EXTREME_L(x, y, (x) > (y) || ((x) == (y) && !signbit(x)))
#define DIVIDE_F(x) ((x) / (float)divisor)
#define DIVIDE_D(x) ((x) / (double)divisor)
#define DIVIDE_L(x) ((x) / (long double)divisor)

/* The bits of a float as an integer and back, as `x.view(...)` of NumPy. */
#define BITS_F(x) ((union { float number; uint32_t bits; }){.number = (x)}.bits)
#define BITS_D(x) ((union { double number; uint64_t bits; }){.number = (x)}.bits)
#define FLOAT_OF(x) ((union { uint32_t bits; float number; }){.bits = (x)}.number)
#define DOUBLE_OF(x) ((union { uint64_t bits; double number; }){.bits = (x)}.number)

/* MIN and MAX of float and double: `<` or `>`, what is made of the bits of two equal
   numbers (they differ for 0.0 and -0.0 only), and the NaN of the result. */
#define EXTREME(NAME, FLOAT, BITS, TO_BITS, TO_FLOAT, WINS, EQUAL, NAN_BITS)           \
    static inline FLOAT NAME(FLOAT x, FLOAT y)                                         \
    {                                                                                  \
        const BITS p = TO_BITS(x), q = TO_BITS(y);                                     \
        const BITS winner = x WINS y ? p : y WINS x ? q : p EQUAL q;                   \
        return TO_FLOAT(x != x || y != y ? NAN_BITS : winner);                         \
    }

EXTREME(minimum_f, float, uint32_t, BITS_F, FLOAT_OF, <, |, UINT32_MAX)
EXTREME(maximum_f, float, uint32_t, BITS_F, FLOAT_OF, >, &, UINT32_MAX >> 1)
EXTREME(minimum_d, double, uint64_t, BITS_D, DOUBLE_OF, <, |, UINT64_MAX)
EXTREME(maximum_d, double, uint64_t, BITS_D, DOUBLE_OF, >, &, UINT64_MAX >> 1)

/* The same of 16-bit floats, without conversion, as integers of the same order. ORDERED
   is its own inverse. Above INFINITY_BITS, without the sign, is NaN. */
#define ORDERED(bits) ((int16_t)((bits) ^ ((bits) >> 15 & 0x7fff)))
#define EXTREME_OF_16_BITS(NAME, WINS, INFINITY_BITS, NAN_BITS)                        \
    static inline int16_t NAME(int16_t x, int16_t y)                                   \
    {                                                                                  \
        const int16_t p = ORDERED(x), q = ORDERED(y), winner = p WINS q ? p : q;       \
        const int nan = (x & 0x7fff) > INFINITY_BITS || (y & 0x7fff) > INFINITY_BITS;  \
        return nan ? NAN_BITS : ORDERED(winner);                                       \
    }

EXTREME_OF_16_BITS(minimum_float16, <, 0x7c00, (int16_t)0xffff)
EXTREME_OF_16_BITS(maximum_float16, >, 0x7c00, 0x7fff)
EXTREME_OF_16_BITS(minimum_bfloat16, <, 0x7f80, (int16_t)0xffc0)
EXTREME_OF_16_BITS(maximum_bfloat16, >, 0x7f80, 0x7fc0)

/* bfloat16 is the upper half of a float. */
static inline float load_bfloat16(uint16_t item)
{
    return FLOAT_OF((uint32_t)item << 16);
}

static inline uint16_t store_bfloat16(float x)
{
    const uint32_t bits = BITS_F(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t nan = (bits >> 16 & 0x8000) | 0x7fc0;
    return (uint16_t)(x != x ? nan : rounded);
}

/* float16: 1 bit of sign, 5 of exponent (bias 15), 10 of fraction; float: 1, 8 (bias
   127), 23. The exponent grows by 112, and once more by 112 for infinity and NaN.
   Below 2**-14 an item counts multiples of 2**-24, without an exponent. */
static inline float load_float16(uint16_t item)
{
    const uint32_t magnitude = item & 0x7fffu, sign = (uint32_t)(item & 0x8000u) << 16;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = (magnitude << 13) + (224u << 23);
    const uint32_t tiny = BITS_F((float)(int32_t)magnitude * 0x1p-24f);
    const uint32_t finite = magnitude < 0x400 ? tiny : normal;
    return FLOAT_OF(sign | (magnitude < 0x7c00 ? finite : special));
}

/* From 65520 on it is infinity. Adding 0.5 rounds to multiples of 2**-24. */
static inline uint16_t store_float16(float x)
{
    const uint32_t bits = BITS_F(x), magnitude = bits & 0x7fffffffu;
    const uint32_t even = (magnitude >> 13 & 1) + 0xfff;
    const uint32_t rounded = (magnitude - (112u << 23) + even) >> 13;
    const uint32_t normal = rounded < 0x7c00 ? rounded : 0x7c00;
    const uint32_t tiny = BITS_F(FLOAT_OF(magnitude) + 0.5f) - BITS_F(0.5f);
    const uint32_t finite = magnitude < 0x38800000u ? tiny : normal; /* 2**-14 */
    const uint32_t payload = magnitude >> 13 & 0x3ff;
    const uint32_t nan = 0x7c00 | payload | (payload == 0);
    return (uint16_t)((bits >> 16 & 0x8000) |
                      (magnitude > 0x7f800000u ? nan : finite));
}

/* Complex numbers. Smith's method with a divisor that has no imaginary part. */
#define COMPLEX(REAL, NAME)                                                            \
    typedef struct {                                                                   \
        REAL re, im;                                                                   \
    } NAME;                                                                            \
    static inline NAME NAME##_add(NAME x, NAME y)                                      \
    {                                                                                  \
        return (NAME){x.re + y.re, x.im + y.im};                                       \
    }                                                                                  \
    static inline NAME NAME##_multiply(NAME x, NAME y)                                 \
    {                                                                                  \
        return (NAME){x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};           \
    }                                                                                  \
    static inline NAME NAME##_divide(NAME x, unsigned divisor)                         \
    {                                                                                  \
        const REAL re = (REAL)divisor, im = 0, ratio = im / re;                        \
        const REAL scale = 1 / (re + im * ratio);                                      \
        return (NAME){(x.re + x.im * ratio) * scale, (x.im - x.re * ratio) * scale};   \
    }

COMPLEX(float, complex_f)
COMPLEX(double, complex_d)
#define DIVIDE_CF(x) complex_f_divide(x, divisor)
#define DIVIDE_CD(x) complex_d_divide(x, divisor)
#define DIVIDE_CL(x) complex_l_divide(x, divisor)

/* --- the functions ---------------------------------------------------------------- */

#define INTEGERS(SIGNED, UNSIGNED, I, U)                                               \
    CLONES UNIFORM(U##_sum, UNSIGNED, ADD, KEEP)                                       \
    CLONES UNIFORM(U##_prod, UNSIGNED, MULTIPLY_INTEGERS, KEEP)                        \
    CLONES UNIFORM(U##_min, UNSIGNED, LESSER, KEEP)                                    \
    CLONES UNIFORM(U##_max, UNSIGNED, GREATER, KEEP)                                   \
    CLONES UNIFORM(I##_min, SIGNED, LESSER, KEEP)                                      \
    CLONES UNIFORM(I##_max, SIGNED, GREATER, KEEP)

#define FLOATS(ATTRIBUTE, F, TYPE, DIVIDE, MIN, MAX)                                   \
    ATTRIBUTE UNIFORM(F##_sum, TYPE, ADD, KEEP)                                        \
    ATTRIBUTE UNIFORM(F##_mean_one, TYPE, FIRST, DIVIDE)                               \
    ATTRIBUTE UNIFORM(F##_mean, TYPE, ADD, DIVIDE)                                     \
    ATTRIBUTE UNIFORM(F##_prod, TYPE, MULTIPLY, KEEP)                                  \
    ATTRIBUTE UNIFORM(F##_min, TYPE, MIN, KEEP)                                        \
    ATTRIBUTE UNIFORM(F##_max, TYPE, MAX, KEEP)

#define COMPLEXES(ATTRIBUTE, C, TYPE, DIVIDE)                                          \
    ATTRIBUTE UNIFORM(C##_sum, TYPE, TYPE##_add, KEEP)                                 \
    ATTRIBUTE UNIFORM(C##_mean_one, TYPE, FIRST, DIVIDE)                               \
    ATTRIBUTE UNIFORM(C##_mean, TYPE, TYPE##_add, DIVIDE)                              \
    NO_VECTORS UNIFORM(C##_prod, TYPE, TYPE##_multiply, KEEP)

/* float16 and bfloat16: two items, or one of the block and an item. */
#define ITEMS(NAME, OUT, LOAD, OP, LAST, STORE)                                        \
    CLONES LOOP(NAME, OUT, uint16_t, uint16_t, float, LOAD, LOAD, OP, LAST, STORE)
#define BLOCK_ITEM(NAME, OUT, LOAD, OP, LAST, STORE)                                   \
    CLONES LOOP(NAME, OUT, float, uint16_t, float, SAME, LOAD, OP, LAST, STORE)

#define HALVES(F, LOAD, STORE, MIN, MAX)                                               \
    ITEMS(F##_sum_two, uint16_t, LOAD, ADD, KEEP, STORE)                               \
    ITEMS(F##_sum_first, float, LOAD, ADD, KEEP, SAME)                                 \
    BLOCK_ITEM(F##_sum_next, float, LOAD, ADD, KEEP, SAME)                             \
    BLOCK_ITEM(F##_sum_last, uint16_t, LOAD, ADD, KEEP, STORE)                         \
    ITEMS(F##_mean_one, uint16_t, LOAD, FIRST, DIVIDE_F, STORE)                        \
    ITEMS(F##_mean_two, uint16_t, LOAD, ADD, DIVIDE_F, STORE)                          \
    BLOCK_ITEM(F##_mean_last, uint16_t, LOAD, ADD, DIVIDE_F, STORE)                    \
    ITEMS(F##_prod_two, uint16_t, LOAD, MULTIPLY, KEEP, STORE)                         \
    ITEMS(F##_prod_first, float, LOAD, MULTIPLY, KEEP, SAME)                           \
    BLOCK_ITEM(F##_prod_next, float, LOAD, MULTIPLY, KEEP, SAME)                       \
    BLOCK_ITEM(F##_prod_last, uint16_t, LOAD, MULTIPLY, KEEP, STORE)                   \
    CLONES UNIFORM(F##_min, int16_t, MIN, KEEP)                                        \
    CLONES UNIFORM(F##_max, int16_t, MAX, KEEP)

FLOATS(CLONES, f4, float, DIVIDE_F, minimum_f, maximum_f)
FLOATS(CLONES, f8, double, DIVIDE_D, minimum_d, maximum_d)
HALVES(f2, load_float16, store_float16, minimum_float16, maximum_float16)
HALVES(bf2, load_bfloat16, store_bfloat16, minimum_bfloat16, maximum_bfloat16)
INTEGERS(int8_t, uint8_t, i1, u1)
INTEGERS(int16_t, uint16_t, i2, u2)
INTEGERS(int32_t, uint32_t, i4, u4)
INTEGERS(int64_t, uint64_t, i8, u8)
CLONES UNIFORM(b1_min, uint8_t, AND, KEEP)
CLONES UNIFORM(b1_max, uint8_t, OR, KEEP)
COMPLEXES(CLONES, c8, complex_f, DIVIDE_CF)
COMPLEXES(CLONES, c16, complex_d, DIVIDE_CD)

#if LDBL_MANT_DIG != DBL_MANT_DIG /* where it is not another name of double */
#define LONG_DOUBLE
_Static_assert(sizeof(long double) == 16, "only x86-64 and aarch64 are supported");
COMPLEX(long double, complex_l)
FLOATS(, f16, long double, DIVIDE_L, MINIMUM_L, MAXIMUM_L) /* no vectors, no CLONES */
COMPLEXES(, c32, complex_l, DIVIDE_CL)
#endif

/* --- the table -------------------------------------------------------------------- */

struct md_kernel {
    const char *dtype;
    enum { MD_SUM, MD_PROD, MD_MIN, MD_MAX } op;
    size_t itemsize;
    size_t piece; /* elements that fit the block */
    loop_function *two, *first, *next, *last;
    loop_function *mean_one, *mean_two, *mean_last; /* NULL: it does not divide */
};

#define SIZES(ITEM, ACC) sizeof(ITEM), BLOCK / sizeof(ACC)
#define ROW(X, OP, T, F) {#X, MD_##OP, SIZES(T, T), F, F, F, F, NULL, NULL, NULL}
#define ROWS_OF_SUM(F, TYPE)                                                           \
    {#F, MD_SUM, SIZES(TYPE, TYPE), F##_sum, F##_sum, F##_sum, F##_sum,                \
     F##_mean_one, F##_mean, F##_mean},                                                \
    ROW(F, PROD, TYPE, F##_prod)
#define ROWS_OF_EXTREMES(X, TYPE)                                                      \
    ROW(X, MIN, TYPE, X##_min), ROW(X, MAX, TYPE, X##_max)
#define ROWS_OF_FLOATS(F, TYPE) ROWS_OF_SUM(F, TYPE), ROWS_OF_EXTREMES(F, TYPE)
#define ROWS_OF_HALVES(F)                                                              \
    {#F, MD_SUM, SIZES(uint16_t, float), F##_sum_two, F##_sum_first, F##_sum_next,     \
     F##_sum_last, F##_mean_one, F##_mean_two, F##_mean_last},                         \
    {#F, MD_PROD, SIZES(uint16_t, float), F##_prod_two, F##_prod_first, F##_prod_next, \
     F##_prod_last, NULL, NULL, NULL},                                                 \
    ROWS_OF_EXTREMES(F, int16_t)
#define ROWS_OF_INTEGERS(I, U, TYPE)                                                   \
    ROW(I, SUM, TYPE, U##_sum), ROW(I, PROD, TYPE, U##_prod),                          \
    ROW(U, SUM, TYPE, U##_sum), ROW(U, PROD, TYPE, U##_prod),                          \
    ROWS_OF_EXTREMES(I, TYPE), ROWS_OF_EXTREMES(U, TYPE)

static const md_kernel kernels[] = {
    ROWS_OF_FLOATS(f4, float),
    ROWS_OF_FLOATS(f8, double),
    ROWS_OF_HALVES(f2),
    ROWS_OF_HALVES(bf2),
    ROWS_OF_INTEGERS(i1, u1, uint8_t),
    ROWS_OF_INTEGERS(i2, u2, uint16_t),
    ROWS_OF_INTEGERS(i4, u4, uint32_t),
    ROWS_OF_INTEGERS(i8, u8, uint64_t),
    ROWS_OF_EXTREMES(b1, uint8_t),
    ROWS_OF_SUM(c8, complex_f),
    ROWS_OF_SUM(c16, complex_d),
#ifdef LONG_DOUBLE
    ROWS_OF_FLOATS(f16, long double),
    ROWS_OF_SUM(c32, complex_l),
#endif
};

const md_kernel *md_find_kernel(const char *dtype, const char *op)
{
    static const char *const names[] = {
        [MD_SUM] = "SUM", [MD_PROD] = "PROD", [MD_MIN] = "MIN", [MD_MAX] = "MAX"};
    for (size_t k = 0; k < sizeof kernels / sizeof *kernels; k++)
        if (!strcmp(kernels[k].dtype, dtype) && !strcmp(names[kernels[k].op], op))
            return &kernels[k];
    return NULL;
}

size_t md_itemsize(const md_kernel *kernel)
{
    return kernel->itemsize;
}

/* --- NaN -------------------------------------------------------------------------- */

enum { MOST_UNIFIED = 1 << 16 }; /* bytes */

#define UNIFY(TYPE)                                                                    \
    for (size_t i = 0; i < nbytes / sizeof(TYPE); i++) {                               \
        const TYPE x = ((TYPE *)sum)[i];                                               \
        ((TYPE *)sum)[i] = x == x ? x : (TYPE)NAN;                                     \
    }

void md_unify_nans(const md_kernel *kernel, void *sum, size_t nbytes)
{
    const char kind = kernel->dtype[0];
    const size_t size = kernel->itemsize / (kind == 'c' ? 2 : 1);
    if (kernel->op != MD_SUM || (kind != 'f' && kind != 'c') || nbytes > MOST_UNIFIED)
        return; /* other operations are ours, and keep the order of ranks */
    if (size == sizeof(float)) UNIFY(float)
    if (size == sizeof(double)) UNIFY(double)
}

/* --- pieces ----------------------------------------------------------------------- */

/* Elements [start, start + count) into one destination; see the head of the file. */
static void reduce_piece(const md_kernel *kernel, char *dst, const void *const *src,
                         int n, size_t start, size_t count, unsigned divisor)
{
#define SOURCE(K) ((const char *)src[K] + start * kernel->itemsize)
    loop_function *two = divisor ? kernel->mean_two : kernel->two;
    loop_function *last = divisor ? kernel->mean_last : kernel->last;
    if (n > 2) {
        _Alignas(64) char block[BLOCK];
        kernel->first(block, SOURCE(0), SOURCE(1), count, 0);
        for (int k = 2; k < n - 1; k++)
            kernel->next(block, block, SOURCE(k), count, 0);
        last(dst, block, SOURCE(n - 1), count, divisor);
    } else if (n == 2) {
        two(dst, SOURCE(0), SOURCE(1), count, divisor);
    } else if (divisor) {
        kernel->mean_one(dst, SOURCE(0), SOURCE(0), count, divisor);
    } else if (kernel->op == MD_MIN || kernel->op == MD_MAX) {
        two(dst, SOURCE(0), SOURCE(0), count, 0);
    } else if (dst != SOURCE(0)) {
        memcpy(dst, SOURCE(0), count * kernel->itemsize);
    }
#undef SOURCE
}

/* --- the floating-point state ------------------------------------------------------- */

/* The bits of the control register that change results.  x86-64 (MXCSR): flush to zero, rounding,
   subnormal numbers are zero.  aarch64 (FPCR): default NaN, flush to zero, rounding, the same of
   float16. */
#if defined(__x86_64__)
enum { CHANGES_RESULTS = 0xe040 };
static unsigned long read_control(void) { return _mm_getcsr(); }
static void write_control(unsigned long control) { _mm_setcsr((unsigned)control); }
#elif defined(__aarch64__)
enum { CHANGES_RESULTS = 0x3c80000 };
static unsigned long read_control(void)
{
    unsigned long control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
}
static void write_control(unsigned long control)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory");
}
#else
enum { CHANGES_RESULTS = 0 };
static unsigned long read_control(void) { return 0; }
static void write_control(unsigned long control) { (void)control; }
#endif

md_float_state md_enter_default_state(void)
{
    md_float_state before = {read_control(), fegetround()};
    if (before.rounding != FE_TONEAREST) /* of long double too, which has a register of its own */
        fesetround(FE_TONEAREST);
    if (before.control & CHANGES_RESULTS)
        write_control(before.control & ~(unsigned long)CHANGES_RESULTS);
    return before;
}

void md_leave_default_state(md_float_state before)
{
    if (before.rounding != FE_TONEAREST)
        fesetround(before.rounding);
    if (before.control & CHANGES_RESULTS)
        write_control(before.control);
}

void md_reduce(const md_kernel *kernel, void *const *dst, int m,
               const void *const *src, int n, size_t count, unsigned divisor)
{
    const size_t piece = n <= 2 && m == 1 ? count : kernel->piece;
    const md_float_state before = md_enter_default_state();
    if (!kernel->mean_one)
        divisor = 0;
    for (size_t start = 0; start < count; start += piece) {
        const size_t length = count - start < piece ? count - start : piece;
        const size_t offset = start * kernel->itemsize;
        char *result = (char *)dst[0] + offset;
        reduce_piece(kernel, result, src, n, start, length, divisor);
        for (int j = 1; j < m; j++)
            if (dst[j] != dst[0])
                memcpy((char *)dst[j] + offset, result, length * kernel->itemsize);
    }
    md_leave_default_state(before);
}
