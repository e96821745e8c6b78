// Exact attention with an additive (H, T, T) bias, its gradient and dropout, without a (T, T) matrix a sentence in memory.
//
// Dimensions: B sentences, T tokens, H heads, D head dimension. A head's probabilities exist for kQueries queries at a time, in
// cache; the backward pass recomputes them from the log-sum-exp of the forward pass. One thread owns a head of the bias and
// loops over the sentences, so that the bias gradient needs no atomics and is the same in every run.
#include <ATen/Parallel.h>
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu_fused.h"

namespace tupe {
namespace {

constexpr int64_t kQueries = 64;
constexpr float kHidden = -std::numeric_limits<float>::infinity();
using OptionalTensor = std::optional<at::Tensor>;

struct Problem {
  int64_t batch, length, heads, dim, depth, stride;  // depth: dim, padded; stride: between tokens of qkv
  float scale, keep_scale;
  bool dropout;
  uint32_t threshold;
  uint64_t seed;
  const float* bias;
  const bool* padding;

  Problem(const at::Tensor& qkv, const OptionalTensor& bias_, const OptionalTensor& padding_, double scale_, double p,
          const OptionalTensor& seed_)
      : batch(qkv.size(0)), length(qkv.size(1)), heads(qkv.size(3)), dim(qkv.size(4)), depth(round_up(dim, kTile)),
        stride(3 * heads * dim), scale(scale_), keep_scale(1 / (1 - p)), dropout(p > 0), threshold(drop_threshold(p)),
        seed(p > 0 ? seed_->item<int64_t>() : 0), bias(bias_ ? bias_->const_data_ptr<float>() : nullptr),
        padding(padding_ ? padding_->const_data_ptr<bool>() : nullptr) {}
  RowKey key(int64_t b, int64_t h, int64_t i) const { return RowKey(seed, (b * heads + h) * length + i); }
};

// The keys one sentence may see. Those behind the last visible one are not computed at all.
struct Keys {
  int64_t count, padded;  // padded: to whole register tiles
  bool none;              // a sentence of nothing but padding: uniform attention, as softmax makes of equal logits
  Keys(const Problem& s, int64_t b, float* additive) : count(s.length), none(false) {
    const bool* row = s.padding ? s.padding + b * s.length : nullptr;
    while (row && count > 0 && row[count - 1]) count--;
    none = count == 0;
    if (none) count = s.length;
    padded = round_up(count, kTile);
    for (int64_t j = 0; j < padded; j++) additive[j] = j >= count || (row && !none && row[j]) ? kHidden : 0.f;
  }
};

// One row of logits to exp(logit - maximum), dropped where dropout says so; returns the maximum and the undropped sum.
template <class S>
std::pair<float, float> softmax_row(const Problem& s, float* x, S* out, const float* bias, const float* additive, int64_t padded,
                                    float scale, RowKey key) {
  Vec largest = splat(kHidden), total{};
  for (int64_t j = 0; j < padded; j += kLanes) {
    Vec logit = load<Vec>(x + j) * scale + load<Vec>(additive + j);
    if (bias) logit += load_some(bias + j, s.length - j);
    store(x + j, logit);
    largest = logit > largest ? logit : largest;
  }
  const float maximum = max(largest);
  for (int64_t j = 0; j < padded; j += kLanes) {
    Vec e = exp(load<Vec>(x + j) - maximum);
    total += e;
    if (s.dropout) e = keep(e, keep_mask(key, j, s.threshold));
    store_floats(out + j, e);
  }
  return {maximum, sum(total)};
}

template <class S>
void forward_head(const Problem& s, int64_t b, int64_t h, const S* qkv, S* out, float* lse) {
  const int64_t most = round_up(s.length, kTile);
  Scratch memory(most * (2 * s.depth * sizeof(S) + 4) + kQueries * (most * 8 + s.depth * 8) + 1024);
  float* additive = memory.take<float>(most);
  const Keys keys(s, b, additive);
  const S* query = qkv + b * s.length * s.stride + h * s.dim;
  S* key = memory.take<S>(s.depth * most);
  S* value = memory.take<S>(s.depth * most);
  pack_transposed(key, keys.padded, query + s.heads * s.dim, s.stride, keys.count, s.dim, s.depth);
  pack_depth(value, s.depth, query + 2 * s.heads * s.dim, s.stride, keys.count, s.dim, keys.padded);
  float* logits = memory.take<float>(kQueries * most);
  S* weights = std::is_same_v<S, float> ? reinterpret_cast<S*>(logits) : memory.take<S>(kQueries * most);
  S* block = memory.take<S>(kQueries * s.depth);
  float* mixed = memory.take<float>(kQueries * s.depth);
  for (int64_t first = 0; first < s.length; first += kQueries) {
    const int64_t rows = std::min(kQueries, s.length - first);
    float inverse[kQueries];
    pack_rows(block, s.depth, query + first * s.stride, s.stride, rows, s.dim);
    product(false, rows, keys.padded, s.depth, block, s.depth, key, keys.padded, logits, keys.padded);
    for (int64_t i = 0; i < rows; i++) {
      const float* bias = s.bias && !keys.none ? s.bias + (h * s.length + first + i) * s.length : nullptr;
      auto [maximum, total] = softmax_row(s, logits + i * keys.padded, weights + i * keys.padded, bias, additive, keys.padded,
                                          keys.none ? 0.f : s.scale, s.key(b, h, first + i));
      lse[(b * s.heads + h) * s.length + first + i] = maximum + std::log(total);
      inverse[i] = (s.dropout ? s.keep_scale : 1.f) / total;
    }
    product(false, rows, s.depth, keys.padded, weights, keys.padded, value, s.depth, mixed, s.depth);
    for (int64_t i = 0; i < rows; i++) {
      S* to = out + ((b * s.length + first + i) * s.heads + h) * s.dim;
      for (int64_t c = 0; c < s.dim; c++) to[c] = mixed[i * s.depth + c] * inverse[i];
    }
  }
}

// ---- backward

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
    const S* mixed = out + ((b * s.length + first + i) * s.heads + h) * s.dim;
    float delta = 0;
    for (int64_t c = 0; c < s.dim; c++) delta += float(w.grad[i * s.depth + c]) * float(mixed[c]);
    gradient_row(s, x, g, s.bias && !keys.none ? s.bias + row : nullptr, keys.none || !bias_gradient ? nullptr : bias_gradient + row,
                 w.additive, keys.padded, keys.none ? 0.f : s.scale, lse[(b * s.heads + h) * s.length + first + i], delta,
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
  Gradients<S> w(s, round_up(s.length, kTile));
  const Keys keys(s, b, w.additive);
  const int64_t offset = b * s.length * s.stride + h * s.dim, width = s.heads * s.dim, padded = keys.padded;
  const S* query = qkv + offset;
  pack_transposed(w.keys_by_dim, padded, query + width, s.stride, keys.count, s.dim, s.depth);
  pack_transposed(w.values_by_dim, padded, query + 2 * width, s.stride, keys.count, s.dim, s.depth);
  pack_depth(w.keys, s.depth, query + width, s.stride, keys.count, s.dim, padded);
  for (int64_t first = 0; first < s.length; first += kQueries) {
    const int64_t rows = std::min(kQueries, s.length - first), even = rows + rows % 2;
    pack_rows(w.query, s.depth, query + first * s.stride, s.stride, rows, s.dim);
    pack_rows(w.grad, s.depth, grad + (b * s.length + first) * width + h * s.dim, width, rows, s.dim);
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
  write_transposed(qkv_gradient + offset + width, s.stride, w.key_t, padded, keys.count, s.length, s.dim, s.scale);
  write_transposed(qkv_gradient + offset + 2 * width, s.stride, w.value_t, padded, keys.count, s.length, s.dim, 1.f);
}

// ---- operators

template <class F>
void by_type(const at::Tensor& x, F f) {
  if (x.scalar_type() == at::kFloat) f(float{});
  else if (x.scalar_type() == at::kBFloat16 && TUPE_NATIVE_BF16) f(bf16{});
  else TORCH_CHECK(false, "fused attention takes float32", TUPE_NATIVE_BF16 ? " or bfloat16" : "", ", got ", x.scalar_type());
}

inline void release_tiles() {
#if TUPE_NATIVE_BF16
  at::native::cpublas::brgemm_release();
#endif
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& qkv_, const OptionalTensor& bias, const OptionalTensor& padding,
                                             double scale, double p, const OptionalTensor& seed) {
  const at::Tensor qkv = qkv_.contiguous();
  const Problem s(qkv, bias, padding, scale, p, seed);
  at::Tensor out = at::empty({s.batch, s.length, s.heads * s.dim}, qkv.options());
  at::Tensor lse = at::empty({s.batch, s.heads, s.length}, qkv.options().dtype(at::kFloat));
  by_type(qkv, [&](auto type) {
    using S = decltype(type);
    // heads outside: a thread's share of the sentences reads the same head of the bias
    at::parallel_for(0, s.heads * s.batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        forward_head<S>(s, t % s.batch, t / s.batch, qkv.const_data_ptr<S>(), out.data_ptr<S>(), lse.data_ptr<float>());
      if (!std::is_same_v<S, float>) release_tiles();
    });
  });
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor> attention_backward(const at::Tensor& grad_, const at::Tensor& qkv_, const OptionalTensor& bias,
                                                      const OptionalTensor& padding, const at::Tensor& out, const at::Tensor& lse,
                                                      double scale, double p, const OptionalTensor& seed, bool need_bias) {
  const at::Tensor qkv = qkv_.contiguous(), grad = grad_.contiguous();
  const Problem s(qkv, bias, padding, scale, p, seed);
  at::Tensor qkv_gradient = at::empty_like(qkv);
  // with more threads than heads the sentences are split too, each part with a bias gradient of its own
  const int64_t parts = std::min(s.batch, (at::get_num_threads() + s.heads - 1) / s.heads);
  const int64_t cells = s.length * s.length;
  at::Tensor bias_gradient = at::empty({need_bias ? parts : 0, s.heads, s.length, s.length}, lse.options());
  by_type(qkv, [&](auto type) {
    using S = decltype(type);
    at::parallel_for(0, s.heads * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const int64_t h = t / parts, part = t % parts;
        float* db = need_bias ? bias_gradient.data_ptr<float>() + part * s.heads * cells : nullptr;
        if (db) std::fill_n(db + h * cells, cells, 0.f);
        for (int64_t b = s.batch * part / parts; b < s.batch * (part + 1) / parts; b++)
          backward_head<S>(s, b, h, grad.const_data_ptr<S>(), qkv.const_data_ptr<S>(), out.const_data_ptr<S>(),
                           lse.const_data_ptr<float>(), qkv_gradient.data_ptr<S>(), db);
      }
      if (!std::is_same_v<S, float>) release_tiles();
    });
  });
  if (!need_bias) return {qkv_gradient, at::empty({0}, lse.options())};
  return {qkv_gradient, parts == 1 ? bias_gradient.select(0, 0) : bias_gradient.sum(0)};
}

// What attention's dropout keeps under a seed: (B, H, T, T) booleans. For tests.
at::Tensor attention_keep_mask(const at::Tensor& seed, int64_t batch, int64_t heads, int64_t length, double p) {
  at::Tensor mask = at::empty({batch * heads * length, length}, at::kBool);
  for (int64_t row = 0; row < mask.size(0); row++)
    for (int64_t j = 0; j < length; j += kLanes) {
      UintVec kept = keep_mask(RowKey(seed.item<int64_t>(), row), j, drop_threshold(p));
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, length - j); lane++)
        mask.data_ptr<bool>()[row * length + j + lane] = kept[lane] != 0;
    }
  return mask.view({batch, heads, length, length});
}

}  // namespace
}  // namespace tupe

TORCH_LIBRARY_FRAGMENT(fairseq_tupe, m) {
  m.def("attention(Tensor qkv, Tensor? bias, Tensor? padding, float scale, float p, Tensor? seed) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad, Tensor qkv, Tensor? bias, Tensor? padding, Tensor out, Tensor lse, float scale, float p, "
      "Tensor? seed, bool need_bias) -> (Tensor, Tensor)");
  m.def("attention_keep_mask(Tensor seed, int batch, int heads, int length, float p) -> Tensor");
  m.def("native_bfloat16() -> bool", []() { return bool(TUPE_NATIVE_BF16); });
}
TORCH_LIBRARY_IMPL(fairseq_tupe, CPU, m) {
  m.impl("attention", tupe::attention);
  m.impl("attention_backward", tupe::attention_backward);
  m.impl("attention_keep_mask", tupe::attention_keep_mask);
}
