/* The update of one block of elements, for one kind of processor. one_pass.c includes this file once per kind:
 *   FOR(name)   the name of a function for this kind
 *   PROCESSOR   the attribute that lets the compiler use the instructions of this kind
 * A block fits into the first-level cache, and compilers vectorize every loop here. rules.h has the arithmetic of the
 * optimizers; everything else in this file is the same for all of them.
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

/* Halved masters, see the note in one_pass.c. The second loop of each function handles ties, which are rare. */

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

/* Masters of 24 bits, see the note in one_pass.c. */

PROCESSOR static void FOR(join_short)(float *restrict to, const uint16_t *restrict weight, const int8_t *restrict low,
                                      int64_t count) {
    for (int64_t i = 0; i < count; i++)
        to[i] = as_float(((uint32_t)weight[i] << 16) + ((uint32_t)(int32_t)low[i] << 8));
}

PROCESSOR static void FOR(round_master)(float *values, int64_t count, uint32_t number, uint32_t seed) {
    for (int64_t i = 0; i < count; i++)
        values[i] = as_float(to_24_bits(as_bits(values[i]), random_bits(number + (uint32_t)i, seed)));
}

/* Stores values of 24 bits: none is half way between two bfloat16 numbers. */
PROCESSOR static void FOR(halve_short)(uint16_t *restrict weight, int8_t *restrict low, const float *restrict from,
                                       int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = as_bits(from[i]);
        weight[i] = (uint16_t)((bits + 0x8000u) >> 16);
        low[i] = (int8_t)(uint8_t)(bits >> 8);
    }
}

/* Masters that lie beside their weight, in one of the two forms. */

PROCESSOR static void FOR(read_master)(float *to, const struct parameter *p, int64_t start, int64_t count) {
    if (p->ties)
        FOR(join)(to, p->old_weight + start, (const uint16_t *)p->low + start, p->ties + start / 8, count);
    else
        FOR(join_short)(to, p->old_weight + start, (const int8_t *)p->low + start, count);
}

PROCESSOR static void FOR(store_master)(const struct parameter *p, const float *from, int64_t start, int64_t count) {
    uint16_t *weight = (uint16_t *)p->weight + start;
    if (p->ties)
        FOR(halve)(weight, (uint16_t *)p->low + start, p->ties + start / 8, from, count);
    else
        FOR(halve_short)(weight, (int8_t *)p->low + start, from, count);
}

/* The gradient of a block. */

PROCESSOR static void FOR(multiply)(float *restrict values, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) values[i] *= factor;
}

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

PROCESSOR static const float *FOR(gradient_block)(float *scratch, const struct parameter *p, int64_t start,
                                                  int64_t count) {
    float further[BLOCK];
    int is_used_as_is = p->gradient_precision == FLOAT32 && !p->num_factors && !p->num_more_gradients;
    if (is_used_as_is) return (const float *)p->gradient + start;
    FOR(widen)(scratch, p->gradient, p->gradient_precision, start, count);
    for (int64_t k = 0; k < p->num_more_gradients; k++) {
        FOR(widen)(further, p->more_gradients[k], p->gradient_precision, start, count);
        FOR(add)(scratch, further, count);
    }
    for (int32_t f = 0; f < p->num_factors; f++) FOR(multiply)(scratch, p->factors[f], count);
    return scratch;
}

/* The new weight of a block. */

PROCESSOR static void FOR(write_weight)(const struct parameter *p, const float *master, int64_t start,
                                        int64_t count) {
    switch (p->weight_precision) {
        case FLOAT32: memcpy((float *)p->weight + start, master, (size_t)count * sizeof(float)); break;
        case BFLOAT16: FOR(narrow_bfloat)((uint16_t *)p->weight + start, master, count); break;
        case FLOAT16: FOR(narrow_half)((uint16_t *)p->weight + start, master, count); break;
        default: break;
    }
}

/* States in low bits, see the note in one_pass.c. */

PROCESSOR static void FOR(expand_signed)(float *restrict to, const int8_t *restrict codes, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float code = (float)codes[i];
        to[i] = code / (254.0f - fabsf(code)) * scale;
    }
}

PROCESSOR static void FOR(expand_root)(float *restrict to, const uint8_t *restrict codes, float scale, int64_t count) {
    float unit = scale / 255.0f;
    for (int64_t i = 0; i < count; i++) {
        float root = (float)codes[i] * unit;
        to[i] = root * root;
    }
}

/* The largest magnitude; a NaN counts as the largest, so that it stays in the state. */
PROCESSOR static float FOR(scale_of)(const float *restrict values, int64_t count) {
    uint32_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = as_bits(values[i]) & 0x7fffffffu;
        top = magnitude > top ? magnitude : top;
    }
    return as_float(top > 0x7f800000u ? 0x7fc00000u : top);
}

PROCESSOR static float FOR(pack_signed)(int8_t *restrict codes, const float *restrict values, int64_t count,
                                        uint32_t number, uint32_t seed) {
    float scale = FOR(scale_of)(values, count);
    for (int64_t i = 0; i < count; i++) {
        float magnitude = fabsf(values[i]);
        float exact = 254.0f * (magnitude / (scale + magnitude));
        exact = exact > 0 ? exact : 0; /* 0 for NaN, too */
        int32_t code = (int32_t)(exact + random_fraction(number + (uint32_t)i, seed));
        codes[i] = (int8_t)(values[i] < 0 ? -code : code);
    }
    return scale;
}

/* Overwrites `values` by their roots. A value above 0 never gets code 0, by whose root the step would be divided. */
PROCESSOR static float FOR(pack_root)(uint8_t *restrict codes, float *restrict values, int64_t count, uint32_t number,
                                      uint32_t seed) {
    for (int64_t i = 0; i < count; i++) values[i] = sqrtf(values[i]);
    float scale = FOR(scale_of)(values, count), per_unit = scale > 0 ? 255.0f / scale : 0;
    for (int64_t i = 0; i < count; i++) {
        float exact = values[i] * per_unit;
        exact = exact > 0 ? exact : 0;
        exact = exact < 255.0f ? exact : 255.0f;
        int32_t code = (int32_t)(exact + random_fraction(number + (uint32_t)i, seed));
        int32_t least = values[i] > 0;
        codes[i] = (uint8_t)(code > least ? code : least);
    }
    return scale;
}

PROCESSOR static void FOR(pack_bfloat)(uint16_t *restrict to, const float *restrict values, int64_t count,
                                       uint32_t number, uint32_t seed) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = as_bits(values[i]);
        uint32_t rounded = (bits + (random_bits(number + (uint32_t)i, seed) >> 16)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

/* The float32 values of a block of a state: where they are stored, or expanded in `scratch`. */
PROCESSOR static float *FOR(read_state)(float *scratch, const struct parameter *p, int which, int64_t start,
                                        int64_t count) {
    if (!p->states[which]) return 0;
    if (p->storage[which] == AS_FLOAT32) return (float *)p->states[which] + start;
    if (p->storage[which] == AS_BFLOAT16) {
        FOR(widen_bfloat)(scratch, (const uint16_t *)p->states[which] + start, count);
        return scratch;
    }
    for (int64_t at = 0; at < count; at += SCALED) {
        int64_t length = count - at < SCALED ? count - at : SCALED;
        float scale = p->scales[which][(start + at) / SCALED];
        const uint8_t *codes = (const uint8_t *)p->states[which] + start + at;
        if (p->storage[which] == AS_SIGNED_CODES)
            FOR(expand_signed)(scratch + at, (const int8_t *)codes, scale, length);
        else
            FOR(expand_root)(scratch + at, codes, scale, length);
    }
    return scratch;
}

/* Stores the values of a block of a state, if `read_state` has expanded them. */
PROCESSOR static void FOR(write_state)(float *values, const struct parameter *p, int which, int64_t start,
                                       int64_t count) {
    if (!p->states[which] || p->storage[which] == AS_FLOAT32) return;
    uint32_t number = (uint32_t)(p->first + start), seed = p->seeds[which];
    if (p->storage[which] == AS_BFLOAT16) {
        FOR(pack_bfloat)((uint16_t *)p->states[which] + start, values, count, number, seed);
        return;
    }
    for (int64_t at = 0; at < count; at += SCALED) {
        int64_t length = count - at < SCALED ? count - at : SCALED;
        uint8_t *codes = (uint8_t *)p->states[which] + start + at;
        float *scale = p->scales[which] + (start + at) / SCALED;
        if (p->storage[which] == AS_SIGNED_CODES)
            *scale = FOR(pack_signed)((int8_t *)codes, values + at, length, number + (uint32_t)at, seed);
        else
            *scale = FOR(pack_root)(codes, values + at, length, number + (uint32_t)at, seed);
    }
}

#include "rules.h"

PROCESSOR static void FOR(update_block)(const struct parameter *p, int64_t start, int64_t count) {
    float gradient_scratch[BLOCK], master_scratch[BLOCK], state_scratch[3][BLOCK], *states[3];
    const float *gradient = FOR(gradient_block)(gradient_scratch, p, start, count);
    float *master = p->master ? p->master + start : master_scratch;
    if (!p->master) FOR(read_master)(master, p, start, count);
    for (int which = 0; which < 3; which++)
        states[which] = FOR(read_state)(state_scratch[which], p, which, start, count);
    FOR(apply_rule)(p, master, gradient, states, count);
    for (int which = 0; which < 3; which++) FOR(write_state)(states[which], p, which, start, count);
    if (p->rounds_master) FOR(round_master)(master, count, (uint32_t)(p->first + start), p->master_seed);
    if (p->master)
        FOR(write_weight)(p, master, start, count);
    else
        FOR(store_master)(p, master, start, count);
}

/* Sums of squares. */

/* The sum of the squares of a block. Element i belongs to lane i % 16, so that the order of additions is the same for
 * all kinds of processors. The products are exact in double precision. */
PROCESSOR static double FOR(squares_of_block)(const float *restrict values, int64_t count) {
    double lanes[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (int lane = 0; i + lane < count; lane++) lanes[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* Adds the gradients of one block in float32, as the update does, and returns the sum of the squares. */
PROCESSOR static double FOR(squares)(const struct gradient_sum *g, int64_t start, int64_t count) {
    float total[BLOCK], further[BLOCK];
    FOR(widen)(total, g->gradients[0], g->precision, start, count);
    for (int64_t k = 1; k < g->num_gradients; k++) {
        FOR(widen)(further, g->gradients[k], g->precision, start, count);
        FOR(add)(total, further, count);
    }
    return FOR(squares_of_block)(total, count);
}

#undef FOR
#undef PROCESSOR
