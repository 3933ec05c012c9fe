/* One pass of Adam over the parameters of a layer: reads a gradient in its own precision, updates the float32 master
 * and its moments, and writes the weight in the precision devices use.
 *
 * Plain C and POSIX threads. Built with the package or by library.py, called through ctypes with the interpreter lock
 * released. Every operation is elementwise and contraction is off (-ffp-contract=off), so that neither the instruction
 * set nor the number of threads changes a bit.
 *
 * [Note: split masters] A float32 master M need not be stored beside its bfloat16 weight W: W is M rounded to nearest,
 * ties to even, so the lower 16 bits L of M tell the rest. L < 0x8000: the upper half of M is W. L > 0x8000: it is
 * W - 1. L == 0x8000: M was half way, and a bit of `ties` says whether it was rounded up. These bits are looked at in
 * blocks that hold such an L, one of 64 when L is random, and lie in pages that are hardly ever touched.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 1024         /* elements that pass through the first-level cache together */
#define CHUNK (64 * BLOCK) /* elements a thread takes at a time; a multiple of 8, so that threads share no byte of `ties` */

/* One binary for all processors of a kind; the loader of the system picks the version. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_PROCESSOR __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define EVERY_PROCESSOR
#endif

enum precision { NOTHING = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

struct adam_rule {
    float factors[4]; /* of the gradient, one after the other: unscaling, clipping, the sign of ascent */
    int32_t num_factors;
    float shrink; /* decoupled weight decay: 1 - lr * weight_decay */
    float decay;  /* weight decay that is added to the gradient */
    float beta1_rest, beta2, beta2_rest;
    float step_size;  /* lr / (1 - beta1^t) */
    float correction; /* sqrt(1 - beta2^t) */
    float eps;
};

struct adam_segment {
    float *master; /* 0: split, see the note */
    const uint16_t *old_weight;
    uint16_t *low;
    uint8_t *ties;
    void *weight; /* where the new one goes; may be old_weight */
    const void *gradient;
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
    float scaled = as_float(rest) * 0x1p112f; /* right for subnormal numbers, too */
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

EVERY_PROCESSOR static void widen_bfloat(float *restrict to, const uint16_t *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = as_float((uint32_t)from[i] << 16);
}

EVERY_PROCESSOR static void widen_half(float *restrict to, const uint16_t *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = from_half(from[i]);
}

EVERY_PROCESSOR static void narrow_bfloat(uint16_t *restrict to, const float *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = to_bfloat(from[i]);
}

EVERY_PROCESSOR static void narrow_half(uint16_t *restrict to, const float *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = to_half(from[i]);
}

/* Split masters. */

EVERY_PROCESSOR static void join(float *restrict to, const uint16_t *restrict weight, const uint16_t *restrict low,
                                 const uint8_t *restrict ties, int64_t count) {
    uint32_t num_ties = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t upper = (uint32_t)weight[i] - (low[i] > 0x8000u);
        num_ties += low[i] == 0x8000u;
        to[i] = as_float(upper << 16 | low[i]);
    }
    for (int64_t i = 0; num_ties && i < count; i++)
        if (low[i] == 0x8000u) {
            uint32_t upper = (uint32_t)weight[i] - (ties[i / 8] >> (i % 8) & 1u);
            to[i] = as_float(upper << 16 | low[i]);
            num_ties--;
        }
}

EVERY_PROCESSOR static void split(uint16_t *restrict weight, uint16_t *restrict low, uint8_t *restrict ties,
                                  const float *restrict from, int64_t count) {
    uint32_t num_ties = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t lower = (uint16_t)as_bits(from[i]);
        weight[i] = to_bfloat(from[i]);
        low[i] = lower;
        num_ties += lower == 0x8000u;
    }
    for (int64_t i = 0; num_ties && i < count; i++)
        if (low[i] == 0x8000u) {
            uint8_t bit = (uint8_t)(1u << (i % 8)), went_up = weight[i] != (uint16_t)(as_bits(from[i]) >> 16);
            ties[i / 8] = (uint8_t)(went_up ? ties[i / 8] | bit : ties[i / 8] & ~bit);
            num_ties--;
        }
}

/* The update. */

EVERY_PROCESSOR static void multiply(float *restrict values, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) values[i] *= factor;
}

#define ADAM(NAME, DENOMINATOR_OF)                                                                                    \
    EVERY_PROCESSOR static void NAME(float *restrict master, float *restrict first, float *restrict second,           \
                                     float *restrict largest, const float *restrict gradient, int64_t count,          \
                                     const struct adam_rule *restrict rule) {                                         \
        const float shrink = rule->shrink, decay = rule->decay, beta1_rest = rule->beta1_rest, beta2 = rule->beta2,   \
                    beta2_rest = rule->beta2_rest, step_size = rule->step_size, correction = rule->correction,        \
                    eps = rule->eps;                                                                                  \
        (void)largest;                                                                                                \
        for (int64_t i = 0; i < count; i++) {                                                                         \
            float value = master[i] * shrink;                                                                         \
            float g = decay != 0 ? fmaf(decay, value, gradient[i]) : gradient[i];                                     \
            float m = fmaf(beta1_rest, g - first[i], first[i]);                                                       \
            float v = fmaf(beta2_rest * g, g, second[i] * beta2);                                                     \
            first[i] = m;                                                                                             \
            second[i] = v;                                                                                            \
            DENOMINATOR_OF(v);                                                                                        \
            master[i] = value - step_size * m / (sqrtf(v) / correction + eps);                                        \
        }                                                                                                             \
    }

#define THE_MOMENT(v) (void)0
#define THE_LARGEST_MOMENT(v) v = largest[i] = largest[i] > v ? largest[i] : v

ADAM(adam, THE_MOMENT)
ADAM(amsgrad, THE_LARGEST_MOMENT)

static const float *gradient_block(float *scratch, const struct adam_segment *s, int64_t start, int64_t count) {
    const void *from = s->gradient;
    switch (s->gradient_precision) {
        case BFLOAT16: widen_bfloat(scratch, (const uint16_t *)from + start, count); break;
        case FLOAT16: widen_half(scratch, (const uint16_t *)from + start, count); break;
        default:
            if (!s->rule.num_factors) return (const float *)from + start;
            memcpy(scratch, (const float *)from + start, (size_t)count * sizeof(float));
    }
    for (int32_t f = 0; f < s->rule.num_factors; f++) multiply(scratch, s->rule.factors[f], count);
    return scratch;
}

static void write_weight(const struct adam_segment *s, const float *master, int64_t start, int64_t count) {
    switch (s->weight_precision) {
        case FLOAT32: memcpy((float *)s->weight + start, master, (size_t)count * sizeof(float)); break;
        case BFLOAT16: narrow_bfloat((uint16_t *)s->weight + start, master, count); break;
        case FLOAT16: narrow_half((uint16_t *)s->weight + start, master, count); break;
        default: break;
    }
}

static void update_block(const struct adam_segment *s, int64_t start, int64_t count) {
    float gradient_scratch[BLOCK], master_scratch[BLOCK];
    const float *gradient = gradient_block(gradient_scratch, s, start, count);
    float *master = s->master ? s->master + start : master_scratch;
    if (!s->master) join(master, s->old_weight + start, s->low + start, s->ties + start / 8, count);
    if (s->largest)
        amsgrad(master, s->first + start, s->second + start, s->largest + start, gradient, count, &s->rule);
    else
        adam(master, s->first + start, s->second + start, 0, gradient, count, &s->rule);
    if (s->master)
        write_weight(s, master, start, count);
    else
        split((uint16_t *)s->weight + start, s->low + start, s->ties + start / 8, master, count);
}

static void update_chunk(const struct adam_segment *segments, int64_t num_segments, int64_t chunk) {
    for (int64_t k = 0; k < num_segments; k++) {
        const struct adam_segment *s = &segments[k];
        int64_t chunks = (s->count + CHUNK - 1) / CHUNK;
        if (chunk >= chunks) {
            chunk -= chunks;
            continue;
        }
        int64_t end = (chunk + 1) * CHUNK < s->count ? (chunk + 1) * CHUNK : s->count;
        for (int64_t start = chunk * CHUNK; start < end; start += BLOCK)
            update_block(s, start, end - start < BLOCK ? end - start : BLOCK);
        return;
    }
}

/* Threads. A team does one job at a time; whoever brings it works along and leaves when it is done. */

struct team {
    pthread_mutex_t turn; /* held by whoever has a job done */
    pthread_mutex_t lock;
    pthread_cond_t begun, ended;
    int num_helpers;
    uint64_t jobs_begun;
    int helpers_at_work;
    const struct adam_segment *segments;
    int64_t num_segments, num_chunks;
    atomic_int_fast64_t next_chunk;
};

static void work(struct team *team) {
    for (;;) {
        int64_t chunk = atomic_fetch_add_explicit(&team->next_chunk, 1, memory_order_relaxed);
        if (chunk >= team->num_chunks) return;
        update_chunk(team->segments, team->num_segments, chunk);
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
        work(team);
        pthread_mutex_lock(&team->lock);
        if (--team->helpers_at_work == 0) pthread_cond_signal(&team->ended);
    }
    return 0;
}

/* Threads that never end: a team lives as long as its process. Fewer are started where the system refuses more. */
struct team *roundpipe_team(int num_threads) {
    struct team *team = calloc(1, sizeof *team);
    if (!team) return 0;
    pthread_mutex_init(&team->turn, 0);
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->begun, 0);
    pthread_cond_init(&team->ended, 0);
    pthread_mutex_lock(&team->lock); /* no helper looks before all are counted */
    while (team->num_helpers < num_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help, team)) break;
        pthread_detach(thread);
        team->num_helpers++;
    }
    pthread_mutex_unlock(&team->lock);
    return team;
}

void roundpipe_adam(struct team *team, const struct adam_segment *segments, int64_t num_segments) {
    int64_t num_chunks = 0;
    for (int64_t k = 0; k < num_segments; k++) num_chunks += (segments[k].count + CHUNK - 1) / CHUNK;
    pthread_mutex_lock(&team->turn);
    pthread_mutex_lock(&team->lock);
    team->segments = segments;
    team->num_segments = num_segments;
    team->num_chunks = num_chunks;
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

/* Between the two forms of a master, for whoever wants to see it or has written it. */

void roundpipe_join(float *to, const uint16_t *weight, const uint16_t *low, const uint8_t *ties, int64_t count) {
    join(to, weight, low, ties, count);
}

void roundpipe_split(uint16_t *weight, uint16_t *low, uint8_t *ties, const float *from, int64_t count) {
    split(weight, low, ties, from, count);
}
