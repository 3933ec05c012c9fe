/* One pass of an optimizer over the parameters of a layer: reads each gradient in its own precision, updates the float32
 * master and its states, such as moments, and writes the weight in the precision of the model. rules.h has the arithmetic
 * of each optimizer, blocks.h what is common to all.
 *
 * Plain C and POSIX threads, called through ctypes with the interpreter lock released. Every operation is elementwise
 * and is rounded separately (-ffp-contract=off), so that neither the instruction set nor the number of threads changes
 * a bit of the result.
 *
 * [Note: halved masters] A float32 master M need not be stored beside its bfloat16 weight W. W is M rounded to nearest,
 * ties to even, so W and the low 16 bits L of M determine M. L < 0x8000: the high half of M is W. L > 0x8000: the high
 * half is W - 1. L == 0x8000: M was half way between two bfloat16 numbers, and a bit of `ties` tells whether it was
 * rounded up. These bits are read only in blocks that contain such an L (one block of 64 if L is random), so the pages
 * of `ties` are hardly ever touched.
 *
 * [Note: masters of 24 bits] values.py says how a master with 8 bits more than its bfloat16 weight is stored, as a signed
 * byte beside the weight, and rounds in the same way: stochastically, as states in low bits.
 *
 * [Note: states in low bits] forms.py says how states are stored in bfloat16 and in 8 bits and computes the same in torch.
 * A block of elements is expanded to float32, updated by the rule, and rounded again. Rounding is stochastic: up with a
 * probability equal to the part that is cut off, because a second moment changes by 0.1 % in a step and would stand still
 * if it were rounded to nearest. The random bits are a hash of the element's number in the whole parameter and of the
 * seed, which stands for the step and the state. So they depend neither on threads nor on the ranges of machines.
 */
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 1024         /* elements that are processed together, in the first-level cache */
#define SCALED 256         /* elements with one scale in states of 8 bits; BLOCK is a multiple of it */
#define CHUNK (64 * BLOCK) /* elements a thread takes at a time; a multiple of 8, so that threads share no byte of `ties` */

enum precision { NOTHING = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

/* How a state is stored; the numbers are those of `_STORAGE` in kernel.py. */
enum storage { AS_FLOAT32 = 0, AS_BFLOAT16 = 1, AS_SIGNED_CODES = 2, AS_ROOT_CODES = 3 };

/* The order is that of `Kernel` in kernel.py. */
enum rule {
    ADAM = 0,
    AMSGRAD = 1,
    LION = 2,
    SGD = 3,
    SGD_FIRST = 4,
    SGD_NEXT = 5,
    SGD_FIRST_NESTEROV = 6,
    SGD_NEXT_NESTEROV = 7
};

struct parameter {
    float *master; /* 0: halved, see the note; then old_weight, low and ties hold the values */
    const uint16_t *old_weight;
    void *low;     /* 16 bits per value, or a signed byte if the master has 24 bits */
    uint8_t *ties; /* 0: the master has 24 bits */
    void *weight; /* where the new weight is written; may be old_weight */
    const void *gradient;
    const void *const *more_gradients; /* further gradients of the same precision; the sum of all, in order, counts */
    int64_t num_more_gradients;
    void *states[3];  /* as many as the rule has; for states of 8 bits the codes */
    float *scales[3]; /* of states of 8 bits, one for SCALED elements */
    int64_t first;    /* number of the first element in the whole parameter */
    int64_t count;
    int32_t weight_precision, gradient_precision;
    int32_t rule, num_factors;
    float factors[4]; /* the gradient is multiplied by each in turn: unscaling, clipping, the sign for maximize */
    float numbers[8]; /* of this step, in the order in which the function of the rule reads them */
    int32_t storage[3];
    uint32_t seeds[3]; /* of this step, for rounding each state */
    int32_t rounds_master; /* whether the values are rounded to 24 bits, however they are stored */
    uint32_t master_seed;
};

/* A gradient whose sum of squares is wanted: the sum of `num_gradients` tensors of the same precision. */
struct gradient_sum {
    const void *const *gradients;
    int64_t num_gradients;
    int64_t count;
    int32_t precision;
    double *of_chunks; /* receives the sum of squares of each chunk */
};

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Precisions. */

static inline float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = (uint32_t)(half & 0x7fffu) << 13;
    float scaled = as_float(rest) * 0x1p112f; /* exact for subnormal numbers, too */
    uint32_t bits = (half & 0x7c00u) == 0x7c00u ? rest | 0x7f800000u : as_bits(scaled);
    return as_float(bits | sign);
}

static inline uint16_t to_half(float value) {
    uint32_t bits = as_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t tiny = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(half | sign);
}

static inline uint16_t to_bfloat(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* 32 random bits for an element, in which every bit of number and seed counts. */
static inline uint32_t random_bits(uint32_t number, uint32_t seed) {
    uint32_t bits = number ^ seed;
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    return bits ^ bits >> 16;
}

/* A float32 value rounded up or down to one of 24 bits that is not half way between two bfloat16 numbers. Around such a
 * point the two nearest values are 512 apart, elsewhere 256. */
static inline uint32_t to_24_bits(uint32_t bits, uint32_t draw) {
    uint32_t up = (bits + (draw >> 24)) & ~0xffu;
    uint32_t above = (bits & 0xffffu) - 0x7f00u;
    uint32_t around = bits - above + ((above + (draw >> 23)) & 0x200u);
    uint32_t rounded = above < 0x200u ? around : up;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded;
}

/* A random number in [0, 1) with 16 bits: its sum with a code of 8 bits and a fraction is not rounded up to the next. */
static inline float random_fraction(uint32_t number, uint32_t seed) {
    return (float)(int32_t)(random_bits(number, seed) >> 16) * 0x1p-16f;
}

/* The arithmetic, compiled once for each kind of processor. Loading the library selects the kind that runs. */

#define FOR(name) name##_any
#define PROCESSOR
#include "blocks.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define SEVERAL_PROCESSORS

#define FOR(name) name##_avx2
#define PROCESSOR __attribute__((target("avx2,fma")))
#include "blocks.h"

#define FOR(name) name##_avx512
#define PROCESSOR __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#include "blocks.h"
#endif

static void (*update_block)(const struct parameter *p, int64_t start, int64_t count) = update_block_any;
static double (*squares)(const struct gradient_sum *g, int64_t start, int64_t count) = squares_any;
static void (*join)(float *, const uint16_t *, const uint16_t *, const uint8_t *, int64_t) = join_any;
static void (*halve)(uint16_t *, uint16_t *, uint8_t *, const float *, int64_t) = halve_any;

enum processor { ANY = 0, AVX2 = 1, AVX512 = 2 };

/* Selects the code for `most`, or for the best kind below it that this processor supports, and returns the kind. The
 * results are the same for all kinds. Must not be called while a team works. */
int roundpipe_use_processor(int most) {
    int chosen = ANY;
    update_block = update_block_any;
    squares = squares_any;
    join = join_any;
    halve = halve_any;
#ifdef SEVERAL_PROCESSORS
    __builtin_cpu_init();
    if (most >= AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        chosen = AVX2;
        update_block = update_block_avx2;
        squares = squares_avx2;
        join = join_avx2;
        halve = halve_avx2;
    }
    if (most >= AVX512 && chosen == AVX2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        chosen = AVX512;
        update_block = update_block_avx512;
        squares = squares_avx512;
        join = join_avx512;
        halve = halve_avx512;
    }
#else
    (void)most;
#endif
    return chosen;
}

__attribute__((constructor)) static void choose_processor(void) { roundpipe_use_processor(AVX512); }

static int64_t chunks_of(int64_t count) { return (count + CHUNK - 1) / CHUNK; }

static int64_t end_of_chunk(int64_t chunk, int64_t count) {
    return (chunk + 1) * CHUNK < count ? (chunk + 1) * CHUNK : count;
}

/* What a team does: `do_chunk(job, c)` for every chunk c below `num_chunks`, in any order. */

static void update_chunk(const void *job, int64_t chunk) {
    const struct parameter *p = job;
    for (; chunk >= chunks_of(p->count); p++) chunk -= chunks_of(p->count);
    int64_t end = end_of_chunk(chunk, p->count);
    for (int64_t start = chunk * CHUNK; start < end; start += BLOCK)
        update_block(p, start, end - start < BLOCK ? end - start : BLOCK);
}

static void square_chunk(const void *job, int64_t chunk) {
    const struct gradient_sum *g = job;
    for (; chunk >= chunks_of(g->count); g++) chunk -= chunks_of(g->count);
    int64_t end = end_of_chunk(chunk, g->count);
    double total = 0;
    for (int64_t start = chunk * CHUNK; start < end; start += BLOCK)
        total += squares(g, start, end - start < BLOCK ? end - start : BLOCK);
    g->of_chunks[chunk] = total;
}

/* Threads. A team does one job at a time. The calling thread works too, and returns when the job is done. */

struct team {
    pthread_mutex_t turn; /* held by the caller whose job is being done */
    pthread_mutex_t lock;
    pthread_cond_t begun, ended;
    int num_helpers;
    uint64_t jobs_begun;
    int helpers_at_work;
    void (*do_chunk)(const void *job, int64_t chunk);
    const void *job;
    int64_t num_chunks;
    fenv_t environment; /* of the calling thread; decides whether denormal numbers are flushed to zero */
    atomic_int_fast64_t next_chunk;
};

static void work(struct team *team) {
    for (;;) {
        int64_t chunk = atomic_fetch_add_explicit(&team->next_chunk, 1, memory_order_relaxed);
        if (chunk >= team->num_chunks) return;
        team->do_chunk(team->job, chunk);
    }
}

static void *help(void *argument) {
    struct team *team = argument;
    uint64_t jobs_seen = 0;
    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (team->jobs_begun == jobs_seen) pthread_cond_wait(&team->begun, &team->lock);
        jobs_seen = team->jobs_begun;
        pthread_mutex_unlock(&team->lock);
        fesetenv(&team->environment);
        work(team);
        pthread_mutex_lock(&team->lock);
        if (--team->helpers_at_work == 0) pthread_cond_signal(&team->ended);
    }
    return 0;
}

/* A team of `num_threads` threads including the caller, or fewer if the system refuses to start more. It lives as long
 * as the process. Returns 0 if there is no memory. */
struct team *roundpipe_team(int num_threads) {
    struct team *team = calloc(1, sizeof *team);
    if (!team) return 0;
    pthread_mutex_init(&team->turn, 0);
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->begun, 0);
    pthread_cond_init(&team->ended, 0);
    pthread_mutex_lock(&team->lock); /* helpers start to wait for jobs when all of them are counted */
    while (team->num_helpers < num_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help, team)) break;
        pthread_detach(thread);
        team->num_helpers++;
    }
    pthread_mutex_unlock(&team->lock);
    return team;
}

static void do_job(struct team *team, void (*do_chunk)(const void *, int64_t), const void *job, int64_t num_chunks) {
    pthread_mutex_lock(&team->turn);
    pthread_mutex_lock(&team->lock);
    team->do_chunk = do_chunk;
    team->job = job;
    team->num_chunks = num_chunks;
    fegetenv(&team->environment);
    atomic_store(&team->next_chunk, 0);
    int helps = num_chunks > 1 && team->num_helpers;
    if (helps) {
        team->helpers_at_work = team->num_helpers;
        team->jobs_begun++;
        pthread_cond_broadcast(&team->begun);
    }
    pthread_mutex_unlock(&team->lock);
    work(team);
    pthread_mutex_lock(&team->lock);
    while (team->helpers_at_work) pthread_cond_wait(&team->ended, &team->lock);
    pthread_mutex_unlock(&team->lock);
    pthread_mutex_unlock(&team->turn);
}

void roundpipe_update(struct team *team, const struct parameter *parameters, int64_t num_parameters) {
    int64_t num_chunks = 0;
    for (int64_t k = 0; k < num_parameters; k++) num_chunks += chunks_of(parameters[k].count);
    do_job(team, update_chunk, parameters, num_chunks);
}

/* Writes the sum of squares of each gradient to `sums`. The additions have one order, whatever the number of threads.
 * `of_chunks` of the first gradient has room for the chunks of all of them. */
void roundpipe_squares(struct team *team, struct gradient_sum *gradients, int64_t num, double *sums) {
    int64_t num_chunks = 0;
    for (int64_t k = 0; k < num; k++) {
        gradients[k].of_chunks = gradients[0].of_chunks + num_chunks;
        num_chunks += chunks_of(gradients[k].count);
    }
    do_job(team, square_chunk, gradients, num_chunks);
    for (int64_t k = 0; k < num; k++) {
        sums[k] = 0;
        for (int64_t c = 0; c < chunks_of(gradients[k].count); c++) sums[k] += gradients[k].of_chunks[c];
    }
}

/* Conversion between a float32 master and its two halves, on the calling thread. */

void roundpipe_join(float *to, const uint16_t *weight, const uint16_t *low, const uint8_t *ties, int64_t count) {
    join(to, weight, low, ties, count);
}

void roundpipe_halve(uint16_t *weight, uint16_t *low, uint8_t *ties, const float *from, int64_t count) {
    halve(weight, low, ties, from, count);
}
