/* The arithmetic of every optimizer on one block of elements. blocks.h includes this file once per kind of processor.
 *
 * A rule is a row in `enum rule` of one_pass.c, a function here, and a class in rules.py that gives the numbers of a step
 * in the order in which the function reads them. Every loop is elementwise and without branches that depend on the
 * element, and every operation is rounded separately: fmaf only where torch has a fused multiplication and addition.
 */

/* Adam and AdamW, as torch's fused kernel computes them. States: first moment, second moment, and with amsgrad the
 * largest second moment so far. */
#define DEFINE_ADAM(NAME, DENOMINATOR_OF)                                                                                  \
    PROCESSOR static void NAME(float *restrict master, float *restrict first, float *restrict second,               \
                               float *restrict largest, const float *restrict gradient, int64_t count,              \
                               const float *restrict numbers) {                                                     \
        const float shrink = numbers[0];     /* decoupled weight decay: 1 - lr * weight_decay */                    \
        const float decay = numbers[1];      /* weight decay that is added to the gradient: decay * weight */       \
        const float beta1_rest = numbers[2]; /* 1 - beta1 */                                                        \
        const float beta2 = numbers[3], beta2_rest = numbers[4];                                                    \
        const float step_size = numbers[5];  /* lr / (1 - beta1^t) */                                               \
        const float correction = numbers[6]; /* sqrt(1 - beta2^t) */                                                \
        const float eps = numbers[7];                                                                               \
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

DEFINE_ADAM(FOR(adam), THE_MOMENT)
DEFINE_ADAM(FOR(amsgrad), THE_LARGEST_MOMENT)

/* Lion. State: the moment. A NaN stays NaN: its sign is not taken for 0. */
PROCESSOR static void FOR(lion)(float *restrict master, float *restrict first, const float *restrict gradient,
                                int64_t count, const float *restrict numbers) {
    const float shrink = numbers[0]; /* decoupled weight decay: 1 - lr * weight_decay */
    const float beta1 = numbers[1], beta1_rest = numbers[2], beta2 = numbers[3], beta2_rest = numbers[4];
    const float lr = numbers[5];
    for (int64_t i = 0; i < count; i++) {
        float g = gradient[i], m = first[i], mixed = beta1 * m + beta1_rest * g;
        float sign = (mixed > 0 ? 1.0f : 0.0f) - (mixed < 0 ? 1.0f : 0.0f);
        sign = mixed != mixed ? mixed : sign;
        master[i] = master[i] * shrink - lr * sign;
        first[i] = beta2 * m + beta2_rest * g;
    }
}

/* SGD, as torch computes it with foreach=False. State: the momentum buffer, if there is momentum. In the first step of a
 * parameter the buffer becomes the gradient, and what was in its memory does not matter. */
#define DEFINE_SGD(NAME, NEW_BUFFER, STEP_ALONG)                                                                          \
    PROCESSOR static void NAME(float *restrict master, float *restrict buffer, const float *restrict gradient,     \
                               int64_t count, const float *restrict numbers) {                                     \
        const float decay = numbers[0], minus_lr = numbers[1], momentum = numbers[2];                              \
        const float rest = numbers[3]; /* 1 - dampening */                                                         \
        (void)buffer, (void)momentum, (void)rest;                                                                  \
        for (int64_t i = 0; i < count; i++) {                                                                      \
            float g = decay != 0 ? fmaf(decay, master[i], gradient[i]) : gradient[i];                              \
            NEW_BUFFER;                                                                                            \
            master[i] = fmaf(minus_lr, STEP_ALONG, master[i]);                                                     \
        }                                                                                                          \
    }

#define NO_BUFFER (void)0
#define FIRST_BUFFER float b = buffer[i] = g
#define NEXT_BUFFER float b = buffer[i] = fmaf(rest, g, buffer[i] * momentum)

DEFINE_SGD(FOR(sgd), NO_BUFFER, g)
DEFINE_SGD(FOR(sgd_first), FIRST_BUFFER, b)
DEFINE_SGD(FOR(sgd_next), NEXT_BUFFER, b)
DEFINE_SGD(FOR(sgd_first_nesterov), FIRST_BUFFER, fmaf(momentum, b, g))
DEFINE_SGD(FOR(sgd_next_nesterov), NEXT_BUFFER, fmaf(momentum, b, g))

/* Updates the master and the states of one block with its gradient. */
PROCESSOR static void FOR(apply_rule)(const struct parameter *p, float *master, const float *gradient,
                                      float *const *states, int64_t count) {
    const float *numbers = p->numbers;
    float *first = states[0], *second = states[1], *third = states[2];
    switch (p->rule) {
        case ADAM: FOR(adam)(master, first, second, 0, gradient, count, numbers); break;
        case AMSGRAD: FOR(amsgrad)(master, first, second, third, gradient, count, numbers); break;
        case LION: FOR(lion)(master, first, gradient, count, numbers); break;
        case SGD: FOR(sgd)(master, 0, gradient, count, numbers); break;
        case SGD_FIRST: FOR(sgd_first)(master, first, gradient, count, numbers); break;
        case SGD_NEXT: FOR(sgd_next)(master, first, gradient, count, numbers); break;
        case SGD_FIRST_NESTEROV: FOR(sgd_first_nesterov)(master, first, gradient, count, numbers); break;
        case SGD_NEXT_NESTEROV: FOR(sgd_next_nesterov)(master, first, gradient, count, numbers); break;
        default: break;
    }
}

#undef DEFINE_ADAM
#undef THE_MOMENT
#undef THE_LARGEST_MOMENT
#undef DEFINE_SGD
#undef NO_BUFFER
#undef FIRST_BUFFER
#undef NEXT_BUFFER
