/* Compiled code that computes all statistics of a group of tensors on a CPU in one pass. `c_kernel.py` loads it.

   It uses no header of Python or torch, and keeps no state. A result depends on the elements and their
   number only, and neither on the number of threads nor on the processor: sums have a fixed number of partial sums, and
   the chunks of a tensor are added up in their order.

   A block of elements has sums in float32 lanes, which are added up in float64. Minimum, maximum and zeros are computed
   from the bits, because compilers use vectors for comparisons of integers, and not for those of floats. Minimum and
   maximum also show whether a block has a NaN or an Inf, or numbers whose squares are beyond the precision of float32.
   Such a block is measured again, and so is one that has zeros and other numbers.

   While a block is measured, the next one is loaded into the cache, from PAGES places in turn: a core reads several
   pages at once a third faster than one after the other. */

#include <stdint.h>
#include <stdlib.h>

#define BLOCK 4096
#define CHUNK (8 * BLOCK) /* torch, too, divides operations on more elements than this among its threads */
#define PAGES 4
#define LINE 64 /* bytes of a cache line */
#define LANES 16          /* partial sums; with those of all statistics, they fit into 16 registers of 256 bits */

#define INLINE static inline __attribute__((always_inline))
#ifndef FOR_EACH_PROCESSOR
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#endif

typedef int32_t __attribute__((may_alias)) bits32;
typedef int64_t __attribute__((may_alias)) bits64;

#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define LARGER(a, b) ((a) > (b) ? (a) : (b))

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };

#define INFINITE16 0x7c00
#define INFINITE32 0x7f800000
#define INFINITE64 0x7ff0000000000000

/* The rows of the table of statistics. Sums that only some ops need follow. */
enum { SQUARES, LEAST, MOST, TOTAL, NANS, INFS, ZEROS, NUMEL, ROWS };

typedef union {
    double value;
    int64_t count;
} Number;

/* A sum that only some ops need, over `size` finite elements. */
typedef double Sum(const double *elements, int64_t size);

/* A tensor that is measured; its size is negative if there is none. `shape` is a hash of shape and dtype. A tensor that
   is compared has another one with as many elements in the same order. */
typedef struct {
    const char *address;
    int64_t size, column, dtype, shape;
    const char *other;
} Job;

/* The description of a tensor by DLPack, whose struct DLTensor it is. */
typedef struct {
    const char *address;
    int32_t device, device_index, dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;
} Tensor;

/* Functions and objects of Python and torch, by which tensors are read while the interpreter lock is held. */
typedef struct {
    int (*describe)(void *object, Tensor *tensor); /* 0 if this torch has no such function */
    void *(*item)(void *sequence, intptr_t position);
    void *(*type)(void *object);
    void (*release)(void *object);
    void (*clear_error)(void);
    const void *none, *tensor_type, *parameter_type;
} Python;

/* The arguments. */
typedef struct {
    Number *table;
    int64_t columns;
    Sum *const *extras;
    int64_t extra_count;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
    int64_t threads;
    const Python *python;
    const int64_t *zero_bits; /* by dtype: bits of the smallest magnitude that is no zero, then the same in float64 */
    int64_t most_elements;    /* that `rankscope_read` measures */
    int64_t count;
    Job *jobs;
    Number *parts; /* the statistics of all chunks: ROWS and one number per extra sum */
    int64_t next;  /* the next chunk that no thread has begun */
} Request;

INLINE int64_t itemsize_of(int64_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

/* Load a line of the block `ahead` into the cache, while element `i` of the present block is read. */
INLINE void prefetch(const char *ahead, int64_t i, int64_t itemsize)
{
    int64_t line = i * itemsize / LINE;
    __builtin_prefetch(ahead + line % PAGES * (BLOCK / PAGES * itemsize) + line / PAGES * LINE);
}

/* The number with these bits. */
#define AS_FLOAT(pattern) (((union { int32_t bits; float value; }){pattern}).value)
#define AS_DOUBLE(pattern) (((Number){.count = (pattern)}).value)

INLINE float from_bfloat16(int16_t bits) { return AS_FLOAT((int32_t)((uint32_t)(uint16_t)bits << 16)); }

/* The float of finite bits. No operation has a subnormal float, for which a processor may need 100 cycles. */
INLINE float from_float16(int16_t bits)
{
    int32_t magnitude = (int32_t)((uint32_t)(int32_t)bits << 13 & 0x0fffe000);
    int32_t if_small = (magnitude - 0x800000) >> 31;
    float value = AS_FLOAT(magnitude + 0x38000000 + (if_small & 0x800000)) - AS_FLOAT(if_small & 0x38800000);
    return value * AS_FLOAT(((int32_t)bits & (int32_t)0x80000000) | 0x3f800000);
}

/* Define a function that measures a block of elements in one loop, and returns the bits of the largest magnitude.
   `from_bits` returns the number with given bits, which are of type `integer`. `sum` is the type of the partial sums, and
   `ahead` is the next block. */
#define MEASURE(name, from_bits, sum, integer, largest)                                                                \
    INLINE integer name(const void *block, const char *ahead, int64_t size, integer zero, Number *found)               \
    {                                                                                                                  \
        const integer __attribute__((may_alias)) *patterns = block;                                                    \
        sum squares[LANES] = {0}, total[LANES] = {0};                                                                  \
        integer high[LANES], few[LANES] = {0};                                                                         \
        u##integer top[LANES] = {0}, tiny[LANES];                                                                      \
        double all_squares = 0, all_total = 0;                                                                         \
        int64_t i = 0, all_few = 0;                                                                                    \
        for (int lane = 0; lane < LANES; lane++)                                                                       \
            tiny[lane] = largest, high[lane] = -largest - 1;                                                           \
        for (; i + LANES <= size; i += LANES) {                                                                        \
            prefetch(ahead, i, sizeof(integer));                                                                       \
            for (int lane = 0; lane < LANES; lane++) {                                                                 \
                integer bits = patterns[i + lane];                                                                     \
                sum x = from_bits(bits);                                                                               \
                squares[lane] += x * x;                                                                                \
                total[lane] += x;                                                                                      \
                high[lane] = LARGER(bits, high[lane]);                                                                 \
                top[lane] = LARGER((u##integer)bits, top[lane]);                                                       \
                tiny[lane] = SMALLER((u##integer)(bits & largest), tiny[lane]);                                        \
            }                                                                                                          \
        }                                                                                                              \
        for (; i < size; i++) {                                                                                        \
            integer bits = patterns[i];                                                                                \
            double x = from_bits(bits);                                                                                \
            all_squares += x * x;                                                                                      \
            all_total += x;                                                                                            \
            high[0] = LARGER(bits, high[0]);                                                                           \
            top[0] = LARGER((u##integer)bits, top[0]);                                                                 \
            tiny[0] = SMALLER((u##integer)(bits & largest), tiny[0]);                                                  \
        }                                                                                                              \
        for (int lane = 0; lane < LANES; lane++) {                                                                     \
            all_squares += squares[lane];                                                                              \
            all_total += total[lane];                                                                                  \
            high[0] = LARGER(high[lane], high[0]);                                                                     \
            top[0] = LARGER(top[lane], top[0]);                                                                        \
            tiny[0] = SMALLER(tiny[lane], tiny[0]);                                                                    \
        }                                                                                                              \
        /* Negative numbers have the smallest integers, and those with the smallest magnitude come first. */           \
        integer smallest = (integer)tiny[0], sign = -largest - 1;                                                      \
        integer least = (integer)top[0] < 0 ? (integer)top[0] : smallest;                                              \
        integer most = high[0] < 0 ? smallest | sign : high[0], magnitude = LARGER(least & largest, most & largest);   \
        if (magnitude < zero)                                                                                          \
            all_few = size;                                                                                            \
        else if (smallest < zero) {                                                                                    \
            for (i = 0; i + LANES <= size; i += LANES)                                                                 \
                for (int lane = 0; lane < LANES; lane++)                                                               \
                    few[lane] += (patterns[i + lane] & largest) < zero;                                                \
            for (; i < size; i++)                                                                                      \
                all_few += (patterns[i] & largest) < zero;                                                             \
            for (int lane = 0; lane < LANES; lane++)                                                                   \
                all_few += few[lane];                                                                                  \
        }                                                                                                              \
        found[SQUARES].value = all_squares;                                                                            \
        found[TOTAL].value = all_total;                                                                                \
        found[ZEROS].count = all_few;                                                                                  \
        found[LEAST].value = from_bits(least);                                                                         \
        found[MOST].value = from_bits(most);                                                                           \
        return magnitude;                                                                                              \
    }
MEASURE(measure_float32, AS_FLOAT, float, int32_t, INT32_MAX)
MEASURE(measure_bfloat16, from_bfloat16, float, int16_t, INT16_MAX)
MEASURE(measure_float16, from_float16, float, int16_t, INT16_MAX)
MEASURE(measure_float64, AS_DOUBLE, double, int64_t, INT64_MAX)
MEASURE(measure_float32_widely, AS_FLOAT, double, int32_t, INT32_MAX)
MEASURE(measure_bfloat16_widely, from_bfloat16, double, int16_t, INT16_MAX)

/* Whether 4096 squares of numbers of at most this magnitude neither overflow float32 nor lose more than 4e-7 of their
   sum. This is so for 0, and from 1e-14 to 1e17. */
INLINE int is_precise(int32_t magnitude) { return !magnitude || (magnitude >= 0x283424dc && magnitude <= 0x5bb1a2bc); }

/* Measure a block in which all elements are finite. Return 0 for another block. */
INLINE int measure_finite(const void *block, const char *ahead, int64_t size, int64_t dtype, int64_t zero,
                          Number *found)
{
    int32_t magnitude;
    switch (dtype) {
    case FLOAT64:
        return measure_float64(block, ahead, size, zero, found) < INFINITE64;
    case FLOAT16:
        return measure_float16(block, ahead, size, (int16_t)zero, found) < INFINITE16;
    case FLOAT32:
        magnitude = measure_float32(block, ahead, size, (int32_t)zero, found);
        if (magnitude < INFINITE32 && !is_precise(magnitude))
            measure_float32_widely(block, ahead, size, (int32_t)zero, found);
        return magnitude < INFINITE32;
    default:
        magnitude = measure_bfloat16(block, ahead, size, (int16_t)zero, found) << 16;
        if (magnitude < INFINITE32 && !is_precise(magnitude))
            measure_bfloat16_widely(block, ahead, size, (int16_t)zero, found);
        return magnitude < INFINITE32;
    }
}

/* Write the finite elements of a block to `wide`, and count the others. Return the number of finite elements. */
INLINE int64_t widen(const void *block, int64_t size, int64_t dtype, double *wide, Number *found)
{
    const int64_t infinites[] = {INFINITE32, INFINITE32 >> 16, INFINITE16, INFINITE64}, infinite = infinites[dtype];
    int64_t kept = 0, nans = 0, infs = 0;
    for (int64_t i = 0; i < size; i++) {
        int64_t magnitude;
        if (dtype == FLOAT64) {
            magnitude = ((const bits64 *)block)[i] & INT64_MAX;
            wide[kept] = ((const double *)block)[i];
        } else if (dtype == FLOAT32) {
            magnitude = ((const bits32 *)block)[i] & INT32_MAX;
            wide[kept] = ((const float *)block)[i];
        } else {
            int16_t bits = ((const int16_t *)block)[i];
            magnitude = bits & INT16_MAX;
            wide[kept] = dtype == BFLOAT16 ? from_bfloat16(bits) : from_float16(bits);
        }
        nans += magnitude > infinite;
        infs += magnitude == infinite;
        kept += magnitude < infinite; /* otherwise, the next element replaces this one */
    }
    found[NANS].count = nans;
    found[INFS].count = infs;
    return kept;
}

/* Set the statistics of no element. */
INLINE void clear(Number *found, int64_t rows)
{
    for (int64_t row = 0; row < rows; row++)
        found[row].count = 0; /* also the bits of 0.0 */
    found[LEAST].value = __builtin_inf();
    found[MOST].value = -__builtin_inf();
}

FOR_EACH_PROCESSOR
static void measure_block(const Request *request, const void *block, const char *ahead, int64_t size, int64_t dtype,
                          Number *found)
{
    double wide[BLOCK];
    const int64_t *zero = request->zero_bits + dtype;
    found[NANS].count = found[INFS].count = 0;
    int is_finite = measure_finite(block, ahead, size, dtype, *zero, found);
    if (is_finite && !request->extra_count)
        return;
    int64_t kept = widen(block, size, dtype, wide, found);
    if (!is_finite && kept)
        measure_finite(wide, (const char *)wide, kept, FLOAT64, zero[FLOAT64 + 1], found);
    else if (!is_finite)
        clear(found, NANS);
    for (int64_t extra = 0; extra < request->extra_count; extra++)
        found[ROWS + extra].value = request->extras[extra](wide, kept);
}

/* Add the statistics `part` to `found`. */
INLINE void add(const Number *part, int64_t extra_count, Number *found)
{
    found[SQUARES].value += part[SQUARES].value;
    found[TOTAL].value += part[TOTAL].value;
    found[LEAST].value = SMALLER(part[LEAST].value, found[LEAST].value);
    found[MOST].value = LARGER(part[MOST].value, found[MOST].value);
    for (int row = NANS; row < NUMEL; row++)
        found[row].count += part[row].count;
    for (int64_t row = ROWS; row < ROWS + extra_count; row++)
        found[row].value += part[row].value;
}

INLINE int64_t chunks_of(const Job *job) { return (job->size + CHUNK - 1) / CHUNK; }

static void measure_chunk(const Request *request, const Job *job, int64_t chunk, const char *next, Number *found)
{
    Number part[ROWS + request->extra_count];
    int64_t itemsize = itemsize_of(job->dtype), end = SMALLER((chunk + 1) * CHUNK, job->size);
    clear(found, ROWS + request->extra_count);
    for (int64_t first = chunk * CHUNK; first < end; first += BLOCK) {
        int64_t size = SMALLER(BLOCK, end - first);
        const char *block = job->address + first * itemsize;
        const char *ahead = first + size < end ? block + size * itemsize : next ? next : block;
        measure_block(request, block, ahead, size, job->dtype, part);
        add(part, request->extra_count, found);
    }
}

/* Define the sum of sign(a) * sign(b) over `size` elements, of which the bits are of type `integer`. The next block is `ahead` bytes
   further. The sign of 0 and NaN is 0. */
#define COMPARE(name, integer, largest, infinite)                                                                      \
    INLINE integer name##_one(integer a, integer b)                                                                    \
    {                                                                                                                  \
        integer u = a & largest, v = b & largest;                                                                      \
        return ((u > 0) & (u <= infinite) & (v > 0) & (v <= infinite)) * (integer)((a ^ b) < 0 ? -1 : 1);              \
    }                                                                                                                  \
    FOR_EACH_PROCESSOR static int64_t name(const char *first, const char *second, int64_t size, int64_t ahead)         \
    {                                                                                                                  \
        const integer __attribute__((may_alias)) *a = (const void *)first, *b = (const void *)second;                  \
        integer sums[LANES] = {0};                                                                                     \
        int64_t i = 0, sum = 0;                                                                                        \
        for (; i + LANES <= size; i += LANES) {                                                                        \
            prefetch(first + ahead, i, sizeof(integer));                                                               \
            prefetch(second + ahead, i, sizeof(integer));                                                              \
            for (int lane = 0; lane < LANES; lane++)                                                                   \
                sums[lane] += name##_one(a[i + lane], b[i + lane]);                                                    \
        }                                                                                                              \
        for (int lane = 0; lane < LANES; lane++)                                                                       \
            sum += sums[lane];                                                                                         \
        for (; i < size; i++)                                                                                          \
            sum += name##_one(a[i], b[i]);                                                                             \
        return sum;                                                                                                    \
    }
COMPARE(compare16, int16_t, INT16_MAX, INFINITE16)
COMPARE(compare_bfloat16, int16_t, INT16_MAX, (INFINITE32 >> 16))
COMPARE(compare32, int32_t, INT32_MAX, INFINITE32)
COMPARE(compare64, int64_t, INT64_MAX, INFINITE64)

static int64_t compare_chunk(const Job *job, int64_t chunk)
{
    int64_t sum = 0, itemsize = itemsize_of(job->dtype), end = SMALLER((chunk + 1) * CHUNK, job->size);
    for (int64_t place = chunk * CHUNK; place < end; place += BLOCK) {
        int64_t size = SMALLER(BLOCK, end - place), ahead = place + size < end ? size * itemsize : 0;
        const char *first = job->address + place * itemsize, *second = job->other + place * itemsize;
        sum += job->dtype == FLOAT32    ? compare32(first, second, size, ahead)
               : job->dtype == FLOAT64  ? compare64(first, second, size, ahead)
               : job->dtype == BFLOAT16 ? compare_bfloat16(first, second, size, ahead)
                                        : compare16(first, second, size, ahead);
    }
    return sum;
}

/* The memory that a thread without others measures after a chunk; 0 if there is none. */
INLINE const char *next_of(const Job *job, int64_t chunk, const Job *end)
{
    if (chunk + 1 < chunks_of(job))
        return job->address + (chunk + 1) * CHUNK * itemsize_of(job->dtype);
    return job + 1 < end && job[1].size > 0 ? job[1].address : 0;
}

/* Measure or compare chunks that no thread has begun, until there are none. */
static void work(void *argument)
{
    Request *request = argument;
    int64_t before = 0; /* chunks of all tensors before `job` */
    const Job *job = request->jobs, *end = job + request->count;
    for (;;) {
        int64_t chunk = __atomic_fetch_add(&request->next, 1, __ATOMIC_RELAXED);
        while (job < end && chunk >= before + chunks_of(job))
            before += chunks_of(job++);
        if (job == end)
            return;
        const char *next = request->threads > 1 ? 0 : next_of(job, chunk - before, end);
        if (job->other)
            __atomic_fetch_add(&request->table[job->column].count, compare_chunk(job, chunk - before), __ATOMIC_RELAXED);
        else
            measure_chunk(request, job, chunk - before, next, request->parts + chunk * (ROWS + request->extra_count));
    }
}

/* Measure all tensors, and write the statistics of each to its column of the table; or compare all pairs, and add up the
   products of their signs there. */
void rankscope_measure(Request *request)
{
    int64_t width = ROWS + request->extra_count, chunks = 0;
    const Job *end = request->jobs + request->count;
    for (const Job *job = request->jobs; job < end; job++)
        chunks += chunks_of(job);
    Number found[width], *part = request->parts = malloc(chunks * width * sizeof(Number));
    if (chunks && !part)
        return; /* without memory, all are absent */
    request->next = 0;
    if (request->parallel && request->threads > 1)
        request->parallel(work, request, (unsigned)request->threads, 0);
    else
        work(request);
    for (const Job *job = request->jobs; job < end; job++) {
        if (job->size < 0 || job->other)
            continue;
        clear(found, width);
        for (int64_t chunk = 0; chunk < chunks_of(job); chunk++, part += width)
            add(part, request->extra_count, found);
        found[NUMEL].count = job->size;
        for (int64_t row = 0; row < width; row++)
            request->table[row * request->columns + job->column] = found[row];
    }
    free(request->parts);
}

/* Results of `rankscope_read`: some tensors have another address, size or dtype than before; another shape or dtype;
   some are None; some must be read by the caller; nothing was measured. */
enum { MOVED = 1, RESHAPED = 2, ABSENT = 4, UNREAD = 8, LARGE = 16 };

#define FNV_PRIME 0x100000001b3
#define DLPACK_CPU 1
#define DLPACK_FLOAT 2
#define DLPACK_BFLOAT 4
#define SUSPICIOUS_BELOW (1L << 36) /* as in tensor_access.py: the tensor may have no memory */

INLINE int64_t dtype_of(const Tensor *tensor)
{
    if (tensor->kind == DLPACK_BFLOAT)
        return BFLOAT16;
    if (tensor->kind != DLPACK_FLOAT)
        return -1;
    return tensor->bits == 32 ? FLOAT32 : tensor->bits == 64 ? FLOAT64 : tensor->bits == 16 ? FLOAT16 : -1;
}

/* Whether the elements fill their memory without gap or overlap, in any order. */
INLINE int is_dense(const Tensor *tensor, int64_t size)
{
    int64_t filled = 1;
    while (filled < size) {
        int dimension = tensor->dimensions - 1;
        while (dimension >= 0 && (tensor->shape[dimension] == 1 || tensor->strides[dimension] != filled))
            dimension--;
        if (dimension < 0)
            return 0;
        filled *= tensor->shape[dimension];
    }
    return 1;
}

INLINE int read_tensor(const Python *python, void *object, Job *job)
{
    Tensor tensor;
    void *type = python->type(object);
    python->release(type);
    if (!python->describe || (type != python->tensor_type && type != python->parameter_type))
        return UNREAD;
    if (python->describe(object, &tensor)) {
        python->clear_error();
        return UNREAD;
    }
    int64_t dtype = dtype_of(&tensor), size = 1;
    uint64_t shape = (0xcbf29ce484222325 ^ (uint64_t)dtype) * FNV_PRIME; /* the basis of FNV */
    for (int dimension = 0; dimension < tensor.dimensions; dimension++) {
        size *= tensor.shape[dimension];
        shape = (shape ^ (uint64_t)tensor.shape[dimension]) * FNV_PRIME;
    }
    const char *address = tensor.address + tensor.offset;
    if (dtype < 0 || tensor.device != DLPACK_CPU || !is_dense(&tensor, size))
        return UNREAD;
    if (size && (intptr_t)address < SUSPICIOUS_BELOW)
        return UNREAD;
    int is_same = address == job->address && size == job->size && dtype == job->dtype;
    int found = (is_same ? 0 : MOVED) | ((int64_t)shape == job->shape ? 0 : RESHAPED);
    *job = (Job){address, size, job->column, dtype, (int64_t)shape, 0};
    return found;
}

/* Set the jobs from a sequence of tensors; those that are UNREAD get no size. Measure them, unless some are UNREAD, or
   they are LARGE enough for several threads or for a release of the interpreter lock. */
int64_t rankscope_read(Request *request, void *tensors)
{
    const Python *python = request->python;
    int64_t elements = 0;
    int all = 0;
    request->threads = 1;
    for (int64_t i = 0; i < request->count; i++) {
        Job *job = request->jobs + i;
        void *object = python->item(tensors, i);
        int found = object == python->none ? ABSENT : read_tensor(python, object, job);
        python->release(object);
        if (found & (ABSENT | UNREAD))
            job->size = job->dtype = -1;
        else
            elements += job->size;
        all |= found | (job->size > CHUNK ? LARGE : 0);
    }
    if (elements > request->most_elements)
        all |= LARGE;
    if (!(all & (UNREAD | LARGE)))
        rankscope_measure(request);
    return all & MOVED ? all : all & ~ABSENT;
}

/* Define a sum that only some ops need. `term` is the summand for an element x. */
#define EXTRA_SUM(name, term)                                                                                          \
    FOR_EACH_PROCESSOR double name(const double *elements, int64_t size)                                               \
    {                                                                                                                  \
        double sums[LANES] = {0}, all = 0;                                                                             \
        int64_t i = 0;                                                                                                 \
        for (; i + LANES <= size; i += LANES)                                                                          \
            for (int lane = 0; lane < LANES; lane++) {                                                                 \
                double x = elements[i + lane];                                                                         \
                sums[lane] += term;                                                                                    \
            }                                                                                                          \
        for (int lane = 0; lane < LANES; lane++)                                                                       \
            all += sums[lane];                                                                                         \
        for (; i < size; i++) {                                                                                        \
            double x = elements[i];                                                                                    \
            all += term;                                                                                               \
        }                                                                                                              \
        return all;                                                                                                    \
    }
EXTRA_SUM(sum_of_fourth_powers, (x * x) * (x * x))

/* A hash of the source, by which `c_kernel.py` finds a library that was compiled from another one. */
const char rankscope_source[] = SOURCE;
