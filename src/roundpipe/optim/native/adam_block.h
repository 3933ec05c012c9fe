/* The arithmetic on one block of elements, for one kind of processor. one_pass_adam.c includes this file once per kind:
 *   FOR(name)   the name of a function for this kind
 *   PROCESSOR   the attribute that lets the compiler use the instructions of this kind
 * A block fits into the first-level cache, and compilers vectorize every loop here.
 */

PROCESSOR static void FOR(widen_bfloat)(float *restrict to, const uint16_t *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = as_float((uint32_t)from[i] << 16);
}

PROCESSOR static void FOR(widen_half)(float *restrict to, const uint16_t *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = from_half(from[i]);
}

PROCESSOR static void FOR(narrow_bfloat)(uint16_t *restrict to, const float *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = to_bfloat(from[i]);
}

PROCESSOR static void FOR(narrow_half)(uint16_t *restrict to, const float *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = to_half(from[i]);
}

/* Halved masters, see the note in one_pass_adam.c. The second loop of each function handles ties, which are rare. */

PROCESSOR static void FOR(join)(float *restrict to, const uint16_t *restrict weight, const uint16_t *restrict low,
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

PROCESSOR static void FOR(halve)(uint16_t *restrict weight, uint16_t *restrict low, uint8_t *restrict ties,
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

PROCESSOR static void FOR(multiply)(float *restrict values, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) values[i] *= factor;
}

#define ADAM(NAME, DENOMINATOR_OF)                                                                                  \
    PROCESSOR static void NAME(float *restrict master, float *restrict first, float *restrict second,               \
                               float *restrict largest, const float *restrict gradient, int64_t count,              \
                               const struct adam_rule *restrict rule) {                                             \
        const float shrink = rule->shrink, decay = rule->decay, beta1_rest = rule->beta1_rest, beta2 = rule->beta2, \
                    beta2_rest = rule->beta2_rest, step_size = rule->step_size, correction = rule->correction,      \
                    eps = rule->eps;                                                                                \
        (void)largest;                                                                                              \
        for (int64_t i = 0; i < count; i++) {                                                                       \
            float value = master[i] * shrink;                                                                       \
            float g = decay != 0 ? fmaf(decay, value, gradient[i]) : gradient[i];                                   \
            float m = fmaf(beta1_rest, g - first[i], first[i]);                                                     \
            float v = fmaf(beta2_rest * g, g, second[i] * beta2);                                                   \
            first[i] = m;                                                                                           \
            second[i] = v;                                                                                          \
            DENOMINATOR_OF(v);                                                                                      \
            master[i] = value - step_size * m / (sqrtf(v) / correction + eps);                                      \
        }                                                                                                           \
    }

#define THE_MOMENT(v) (void)0
#define THE_LARGEST_MOMENT(v) v = largest[i] = largest[i] > v ? largest[i] : v

ADAM(FOR(adam), THE_MOMENT)
ADAM(FOR(amsgrad), THE_LARGEST_MOMENT)

PROCESSOR static void FOR(add)(float *restrict to, const float *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

/* Writes one gradient as float32 numbers to `to`. */
PROCESSOR static void FOR(widen)(float *to, const void *from, int32_t precision, int64_t start, int64_t count) {
    switch (precision) {
        case BFLOAT16: FOR(widen_bfloat)(to, (const uint16_t *)from + start, count); break;
        case FLOAT16: FOR(widen_half)(to, (const uint16_t *)from + start, count); break;
        default: memcpy(to, (const float *)from + start, (size_t)count * sizeof(float));
    }
}

PROCESSOR static const float *FOR(gradient_block)(float *scratch, const struct adam_parameter *p, int64_t start,
                                                  int64_t count) {
    float further[BLOCK];
    int is_used_as_is = p->gradient_precision == FLOAT32 && !p->rule.num_factors && !p->num_more_gradients;
    if (is_used_as_is) return (const float *)p->gradient + start;
    FOR(widen)(scratch, p->gradient, p->gradient_precision, start, count);
    for (int64_t k = 0; k < p->num_more_gradients; k++) {
        FOR(widen)(further, p->more_gradients[k], p->gradient_precision, start, count);
        FOR(add)(scratch, further, count);
    }
    for (int32_t f = 0; f < p->rule.num_factors; f++) FOR(multiply)(scratch, p->rule.factors[f], count);
    return scratch;
}

PROCESSOR static void FOR(write_weight)(const struct adam_parameter *p, const float *master, int64_t start,
                                        int64_t count) {
    switch (p->weight_precision) {
        case FLOAT32: memcpy((float *)p->weight + start, master, (size_t)count * sizeof(float)); break;
        case BFLOAT16: FOR(narrow_bfloat)((uint16_t *)p->weight + start, master, count); break;
        case FLOAT16: FOR(narrow_half)((uint16_t *)p->weight + start, master, count); break;
        default: break;
    }
}

PROCESSOR static void FOR(update_block)(const struct adam_parameter *p, int64_t start, int64_t count) {
    float gradient_scratch[BLOCK], master_scratch[BLOCK];
    const float *gradient = FOR(gradient_block)(gradient_scratch, p, start, count);
    float *master = p->master ? p->master + start : master_scratch;
    if (!p->master) FOR(join)(master, p->old_weight + start, p->low + start, p->ties + start / 8, count);
    if (p->largest)
        FOR(amsgrad)(master, p->first + start, p->second + start, p->largest + start, gradient, count, &p->rule);
    else
        FOR(adam)(master, p->first + start, p->second + start, 0, gradient, count, &p->rule);
    if (p->master)
        FOR(write_weight)(p, master, start, count);
    else
        FOR(halve)((uint16_t *)p->weight + start, p->low + start, p->ties + start / 8, master, count);
}

#undef ADAM
#undef THE_MOMENT
#undef THE_LARGEST_MOMENT
#undef FOR
#undef PROCESSOR
