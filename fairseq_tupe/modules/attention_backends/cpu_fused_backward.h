// Backward pass of one head of one sentence; see cpu_fused.cpp.
#pragma once
#include "cpu_fused_forward.h"

namespace tupe {

// One row: `x` from q k^T to the dropped probabilities, `g` from dO v^T to the gradient of the logits, added to the bias's.
inline void gradient_row(const Problem& s, float* x, float* g, const float* bias, float* bias_gradient, const float* additive,
                         int64_t padded, float scale, float lse, float delta, RowKey key) {
  for (int64_t j = 0; j < padded; j += kLanes) {
    Vec logit = load<Vec>(x + j) * scale + load<Vec>(additive + j) - lse;
    if (bias) logit += load_some(bias + j, s.length - j);
    Vec p = exp(logit), dropped = p;
    if (s.dropout) dropped = keep(p * s.keep_scale, keep_mask(key, j, s.threshold));
    Vec d = dropped * load<Vec>(g + j) - p * delta;
    store(x + j, dropped);
    store(g + j, d);
    if (bias_gradient) store_some(bias_gradient + j, load_some(bias_gradient + j, s.length - j) + d, s.length - j);
  }
}

// The scratch of one head's backward pass. Operands are named after what they hold; ..._t are transposed.
template <class S>
struct Gradients {
  Scratch memory;
  float *additive, *weights, *logits, *key_t, *value_t, *query_out;
  S *keys_by_dim, *values_by_dim, *keys, *query, *grad, *query_tr, *grad_tr, *weights_b, *logits_b, *logits_a;
  static size_t bytes(const Problem& s, int64_t most) {
    return most * (s.depth * (3 * sizeof(S) + 8) + 4) + kQueries * (most * (8 + 3 * sizeof(S)) + s.depth * (4 * sizeof(S) + 4)) + 4096;
  }
  Gradients(const Problem& s, int64_t most) : memory(bytes(s, most)) {
    additive = memory.take<float>(most);
    weights = memory.take<float>(kQueries * most);
    logits = memory.take<float>(kQueries * most);
    key_t = memory.take<float>(s.depth * most);
    value_t = memory.take<float>(s.depth * most);
    query_out = memory.take<float>(s.depth * kQueries);
    for (S** p : {&keys_by_dim, &values_by_dim, &keys}) *p = memory.take<S>(s.depth * most);
    for (S** p : {&query, &grad, &query_tr, &grad_tr}) *p = memory.take<S>(s.depth * kQueries);
    if constexpr (std::is_same_v<S, float>) {
      weights_b = weights, logits_b = logits_a = logits;
    } else {
      for (S** p : {&weights_b, &logits_b, &logits_a}) *p = memory.take<S>(kQueries * most);
    }
  }
};

// Rows i and i + 1 as bfloat16: interleaved for a product over queries (`pairs`), and one after the other (`rows`).
inline void pair_rows(const float* even, const float* odd, bf16* pairs, bf16* rows, int64_t padded) {
  for (int64_t j = 0; j < padded; j += kLanes) {
    UintVec low = round_bf16(load<Vec>(even + j)), high = round_bf16(load<Vec>(odd + j));
    store(pairs + 2 * j, (low >> 16) | (high & 0xffff0000u));
    if (!rows) continue;
    store(rows + j, __builtin_convertvector(low >> 16, HalfVec));
    store(rows + padded + j, __builtin_convertvector(high >> 16, HalfVec));
  }
}

// Rows (rows, dim) of a gradient at `to`, from its transpose (dim, ld); rows behind `rows` are zero.
template <class S>
void write_transposed(S* to, int64_t stride, const float* from, int64_t ld, int64_t rows, int64_t all_rows, int64_t dim, float scale) {
  constexpr int64_t block = 16;
  for (int64_t i = 0; i < rows; i += block) {
    const int64_t end = std::min(i + block, rows);
    for (int64_t r = i; r < end; r++)
      for (int64_t c = 0; c < dim; c++) to[r * stride + c] = from[c * ld + r] * scale;
  }
  for (int64_t r = rows; r < all_rows; r++) std::fill_n(to + r * stride, dim, S(0));
}

// The rows of one block of queries: probabilities and logit gradients from the products in w.weights and w.logits.
template <class S>
void gradient_rows(const Problem& s, const Keys& keys, const Gradients<S>& w, int64_t b, int64_t h, int64_t first, int64_t rows,
                   const S* out, const float* lse, float* bias_gradient) {
  for (int64_t i = 0; i < rows; i++) {
    float* x = w.weights + i * keys.padded;
    float* g = w.logits + i * keys.padded;
    const int64_t row = (h * s.length + first + i) * s.length;
    const S* mixed = out + ((s.start(b) + first + i) * s.heads + h) * s.dim;
    float delta = 0;
    for (int64_t c = 0; c < s.dim; c++) delta += float(w.grad[i * s.depth + c]) * float(mixed[c]);
    gradient_row(s, x, g, s.bias && !keys.none ? s.bias + row : nullptr, keys.none || !bias_gradient ? nullptr : bias_gradient + row,
                 w.additive, keys.padded, keys.none ? 0.f : s.scale, lse[h * s.total + s.start(b) + first + i], delta,
                 s.key(b, h, first + i));
    if (keys.none) std::fill_n(g, keys.padded, 0.f);
  }
  if constexpr (!std::is_same_v<S, float>) {
    if (rows % 2) {  // products over queries take pairs
      std::fill_n(w.weights + rows * keys.padded, keys.padded, 0.f);
      std::fill_n(w.logits + rows * keys.padded, keys.padded, 0.f);
    }
    for (int64_t i = 0; i < rows; i += 2) {
      const int64_t at = i * keys.padded;
      pair_rows(w.weights + at, w.weights + at + keys.padded, w.weights_b + at, (bf16*)nullptr, keys.padded);
      pair_rows(w.logits + at, w.logits + at + keys.padded, w.logits_b + at, w.logits_a + at, keys.padded);
    }
  }
}

template <class S>
void backward_head(const Problem& s, int64_t b, int64_t h, const S* grad, const S* qkv, const S* out, const float* lse,
                   S* qkv_gradient, float* bias_gradient) {
  const int64_t start = s.start(b), tokens = s.tokens(b);
  Gradients<S> w(s, round_up(tokens, kTile));
  const Keys keys(s, b, w.additive);
  const int64_t offset = start * s.stride + h * s.dim, width = s.heads * s.dim, padded = keys.padded;
  const S* query = qkv + offset;
  pack_transposed(w.keys_by_dim, padded, query + width, s.stride, keys.count, s.dim, s.depth);
  pack_transposed(w.values_by_dim, padded, query + 2 * width, s.stride, keys.count, s.dim, s.depth);
  pack_depth(w.keys, s.depth, query + width, s.stride, keys.count, s.dim, padded);
  for (int64_t first = 0; first < tokens; first += kQueries) {
    const int64_t rows = std::min(kQueries, tokens - first), even = rows + rows % 2;
    pack_rows(w.query, s.depth, query + first * s.stride, s.stride, rows, s.dim);
    pack_rows(w.grad, s.depth, grad + (start + first) * width + h * s.dim, width, rows, s.dim);
    for (S* block : {w.query, w.grad}) std::fill(block + rows * s.depth, block + even * s.depth, S(0));
    transpose(w.query_tr, kQueries, w.query, s.depth, even, s.dim);
    transpose(w.grad_tr, kQueries, w.grad, s.depth, even, s.dim);
    product(false, rows, padded, s.depth, w.query, s.depth, w.keys_by_dim, padded, w.weights, padded);
    product(false, rows, padded, s.depth, w.grad, s.depth, w.values_by_dim, padded, w.logits, padded);
    gradient_rows(s, keys, w, b, h, first, rows, out, lse, bias_gradient);
    const int64_t depth = std::is_same_v<S, float> ? rows : even;
    product(first > 0, s.dim, padded, depth, w.grad_tr, kQueries, w.weights_b, padded, w.value_t, padded);
    product(first > 0, s.dim, padded, depth, w.query_tr, kQueries, w.logits_b, padded, w.key_t, padded);
    product(false, rows, s.depth, padded, w.logits_a, padded, w.keys, s.depth, w.query_out, s.depth);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t c = 0; c < s.dim; c++)
        qkv_gradient[offset + (first + i) * s.stride + c] = w.query_out[i * s.depth + c] * s.scale;
  }
  write_transposed(qkv_gradient + offset + width, s.stride, w.key_t, padded, keys.count, tokens, s.dim, s.scale);
  write_transposed(qkv_gradient + offset + 2 * width, s.stride, w.value_t, padded, keys.count, tokens, s.dim, 1.f);
}

}  // namespace tupe
