/* One pass of Adam over the parameters of a layer: reads each gradient in its own precision, updates the float32 master
 * and its moments, and writes the weight in the precision of the model.
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
 */
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 1024         /* elements that are processed together, in the first-level cache */
#define CHUNK (64 * BLOCK) /* elements a thread takes at a time; a multiple of 8, so that threads share no byte of `ties` */

enum precision { NOTHING = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

struct adam_rule {
    float factors[4]; /* the gradient is multiplied by each in turn: unscaling, clipping, the sign for maximize */
    int32_t num_factors;
    float shrink; /* decoupled weight decay: 1 - lr * weight_decay */
    float decay;  /* weight decay that is added to the gradient: decay * weight */
    float beta1_rest, beta2, beta2_rest;
    float step_size;  /* lr / (1 - beta1^t) */
    float correction; /* sqrt(1 - beta2^t) */
    float eps;
};

struct adam_parameter {
    float *master; /* 0: halved, see the note; then old_weight, low and ties hold the values */
    const uint16_t *old_weight;
    uint16_t *low;
    uint8_t *ties;
    void *weight; /* where the new weight is written; may be old_weight */
    const void *gradient;
    const void *const *more_gradients; /* further gradients of the same precision; the sum of all, in order, counts */
    int64_t num_more_gradients;
    float *first, *second;
    float *largest; /* 0: not amsgrad */
    int64_t count;
    int32_t weight_precision, gradient_precision;
    struct adam_rule rule;
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

/* The arithmetic, compiled once for each kind of processor. Loading the library selects the kind that runs. */

#define FOR(name) name##_any
#define PROCESSOR
#include "adam_block.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define SEVERAL_PROCESSORS

#define FOR(name) name##_avx2
#define PROCESSOR __attribute__((target("avx2,fma")))
#include "adam_block.h"

#define FOR(name) name##_avx512
#define PROCESSOR __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#include "adam_block.h"
#endif

static void (*update_block)(const struct adam_parameter *p, int64_t start, int64_t count) = update_block_any;
static void (*join)(float *, const uint16_t *, const uint16_t *, const uint8_t *, int64_t) = join_any;
static void (*halve)(uint16_t *, uint16_t *, uint8_t *, const float *, int64_t) = halve_any;

enum processor { ANY = 0, AVX2 = 1, AVX512 = 2 };

/* Selects the code for `most`, or for the best kind below it that this processor supports, and returns the kind. The
 * results are the same for all kinds. Must not be called while a team works. */
int roundpipe_use_processor(int most) {
    int chosen = ANY;
    update_block = update_block_any;
    join = join_any;
    halve = halve_any;
#ifdef SEVERAL_PROCESSORS
    __builtin_cpu_init();
    if (most >= AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        chosen = AVX2;
        update_block = update_block_avx2;
        join = join_avx2;
        halve = halve_avx2;
    }
    if (most >= AVX512 && chosen == AVX2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        chosen = AVX512;
        update_block = update_block_avx512;
        join = join_avx512;
        halve = halve_avx512;
    }
#else
    (void)most;
#endif
    return chosen;
}

__attribute__((constructor)) static void choose_processor(void) { roundpipe_use_processor(AVX512); }

static void update_chunk(const struct adam_parameter *parameters, int64_t num_parameters, int64_t chunk) {
    for (int64_t k = 0; k < num_parameters; k++) {
        const struct adam_parameter *p = &parameters[k];
        int64_t chunks = (p->count + CHUNK - 1) / CHUNK;
        if (chunk >= chunks) {
            chunk -= chunks;
            continue;
        }
        int64_t end = (chunk + 1) * CHUNK < p->count ? (chunk + 1) * CHUNK : p->count;
        for (int64_t start = chunk * CHUNK; start < end; start += BLOCK)
            update_block(p, start, end - start < BLOCK ? end - start : BLOCK);
        return;
    }
}

/* Threads. A team does one job at a time. The calling thread works too, and returns when the job is done. */

struct team {
    pthread_mutex_t turn; /* held by the caller whose job is being done */
    pthread_mutex_t lock;
    pthread_cond_t begun, ended;
    int num_helpers;
    uint64_t jobs_begun;
    int helpers_at_work;
    const struct adam_parameter *parameters;
    int64_t num_parameters, num_chunks;
    fenv_t environment; /* of the calling thread; decides whether denormal numbers are flushed to zero */
    atomic_int_fast64_t next_chunk;
};

static void work(struct team *team) {
    for (;;) {
        int64_t chunk = atomic_fetch_add_explicit(&team->next_chunk, 1, memory_order_relaxed);
        if (chunk >= team->num_chunks) return;
        update_chunk(team->parameters, team->num_parameters, chunk);
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

void roundpipe_adam(struct team *team, const struct adam_parameter *parameters, int64_t num_parameters) {
    int64_t num_chunks = 0;
    for (int64_t k = 0; k < num_parameters; k++) num_chunks += (parameters[k].count + CHUNK - 1) / CHUNK;
    pthread_mutex_lock(&team->turn);
    pthread_mutex_lock(&team->lock);
    team->parameters = parameters;
    team->num_parameters = num_parameters;
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

/* Conversion between a float32 master and its two halves, on the calling thread. */

void roundpipe_join(float *to, const uint16_t *weight, const uint16_t *low, const uint8_t *ties, int64_t count) {
    join(to, weight, low, ties, count);
}

void roundpipe_halve(uint16_t *weight, uint16_t *low, uint8_t *ties, const float *from, int64_t count) {
    halve(weight, low, ties, from, count);
}
