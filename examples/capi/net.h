/* A net on arrays of its own, in bf16: y = v . tanh(w x + b), trained on y = sin(3 x0) x1. Forward
 * and backward by hand, in C99. */
#ifndef NET_H
#define NET_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { INPUTS = 2, HIDDEN = 16, WEIGHTS = HIDDEN * INPUTS + HIDDEN + HIDDEN };

/* w [HIDDEN, INPUTS], b [HIDDEN], v [HIDDEN], one after another; bf16. */
typedef struct net {
  uint16_t weights[WEIGHTS], gradients[WEIGHTS];
} net;

static float float_of(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint16_t bf16_of(float value) { /* rounded to the nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float drawn(uint32_t number) { /* in [-1, 1), the same for the same number */
  number = (number ^ 61u ^ (number >> 16)) * 9u;
  number = (number ^ (number >> 4)) * 0x27d4eb2du;
  return (float)((number ^ (number >> 15)) >> 8) / 8388608.0f - 1.0f;
}

static void net_begin(net* n) {
  int i;
  for (i = 0; i < WEIGHTS; ++i) n->weights[i] = bf16_of(drawn((uint32_t)i + 77u));
}

/* Writes the gradients of `scale` times the mean loss of rows [begin, begin + rows) of this step's
 * batch; returns the loss. */
static float net_backward(net* n, int64_t step, int begin, int rows, float scale) {
  float sums[WEIGHTS] = {0}, loss = 0;
  int row, h, i;
  const uint16_t *w = n->weights, *b = w + HIDDEN * INPUTS, *v = b + HIDDEN;
  for (row = begin; row < begin + rows; ++row) {
    const uint32_t number = ((uint32_t)step * 64u + (uint32_t)row) * 2u;
    const float x0 = drawn(number), x1 = drawn(number + 1u);
    float active[HIDDEN], error = -sinf(3 * x0) * x1;
    for (h = 0; h < HIDDEN; ++h) {
      active[h] = tanhf(float_of(w[2 * h]) * x0 + float_of(w[2 * h + 1]) * x1 + float_of(b[h]));
      error += float_of(v[h]) * active[h];
    }
    loss += error * error / (float)rows;
    for (h = 0; h < HIDDEN; ++h) {
      const float outer = 2 * error / (float)rows * scale;
      const float inner = outer * float_of(v[h]) * (1 - active[h] * active[h]);
      sums[2 * h] += inner * x0;
      sums[2 * h + 1] += inner * x1;
      sums[HIDDEN * INPUTS + h] += inner;
      sums[HIDDEN * INPUTS + HIDDEN + h] += outer * active[h];
    }
  }
  for (i = 0; i < WEIGHTS; ++i) n->gradients[i] = bf16_of(sums[i]);
  return loss;
}

#endif
