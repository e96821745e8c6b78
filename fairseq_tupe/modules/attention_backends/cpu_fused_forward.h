// Forward pass of one head of one sentence; see cpu_fused.cpp.
#pragma once
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu_fused.h"

namespace tupe {

constexpr int64_t kQueries = 64;
constexpr float kHidden = -std::numeric_limits<float>::infinity();
using OptionalTensor = std::optional<at::Tensor>;

struct Problem {
  int64_t batch, length, total, heads, dim, depth, stride;  // depth: dim, padded; stride: between tokens of qkv
  float scale, keep_scale;
  bool dropout;
  uint32_t threshold;
  uint64_t seed;
  const float* bias;
  const bool* padding;
  const int64_t* offsets;  // of packed sentences: where each one's tokens begin, and where the last one's end

  Problem(const at::Tensor& qkv, const OptionalTensor& bias_, const OptionalTensor& padding_, double scale_, double p,
          const OptionalTensor& seed_, const OptionalTensor& offsets_)
      : batch(offsets_ ? offsets_->numel() - 1 : qkv.size(0)), length(offsets_ && bias_ ? bias_->size(2) : qkv.size(1)),
        total(qkv.size(0) * qkv.size(1)), heads(qkv.size(3)), dim(qkv.size(4)), depth(round_up(dim, kTile)),
        stride(3 * heads * dim), scale(scale_), keep_scale(1 / (1 - p)), dropout(p > 0), threshold(drop_threshold(p)),
        seed(p > 0 ? seed_->item<int64_t>() : 0), bias(bias_ ? bias_->const_data_ptr<float>() : nullptr),
        padding(padding_ ? padding_->const_data_ptr<bool>() : nullptr),
        offsets(offsets_ ? offsets_->const_data_ptr<int64_t>() : nullptr) {
    if (!offsets) return;
    TORCH_CHECK(qkv.size(0) == 1 && offsets[0] == 0 && offsets[batch] == total, "packed sentences: bad offsets");
    for (int64_t b = 0; b < batch; b++)
      TORCH_CHECK(offsets[b] <= offsets[b + 1] && tokens(b) <= length, "packed sentence ", b, " has ", tokens(b), " tokens");
  }
  int64_t start(int64_t b) const { return offsets ? offsets[b] : b * length; }
  int64_t tokens(int64_t b) const { return offsets ? offsets[b + 1] - offsets[b] : length; }
  RowKey key(int64_t b, int64_t h, int64_t i) const { return RowKey(seed, (b * heads + h) * length + i); }
};

// The keys one sentence may see. Those behind the last visible one are not computed at all.
struct Keys {
  int64_t count, padded;  // padded: to whole register tiles
  bool none;              // a sentence of nothing but padding: uniform attention, as softmax makes of equal logits
  Keys(const Problem& s, int64_t b, float* additive) : count(s.tokens(b)), none(false) {
    const bool* row = s.padding ? s.padding + b * s.length : nullptr;
    while (row && count > 0 && row[count - 1]) count--;
    none = count == 0;
    if (none) count = s.tokens(b);
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
  const int64_t start = s.start(b), tokens = s.tokens(b), most = round_up(tokens, kTile);
  Scratch memory(most * (2 * s.depth * sizeof(S) + 4) + kQueries * (most * 8 + s.depth * 8) + 1024);
  float* additive = memory.take<float>(most);
  const Keys keys(s, b, additive);
  const S* query = qkv + start * s.stride + h * s.dim;
  S* key = memory.take<S>(s.depth * most);
  S* value = memory.take<S>(s.depth * most);
  pack_transposed(key, keys.padded, query + s.heads * s.dim, s.stride, keys.count, s.dim, s.depth);
  pack_depth(value, s.depth, query + 2 * s.heads * s.dim, s.stride, keys.count, s.dim, keys.padded);
  float* logits = memory.take<float>(kQueries * most);
  S* weights = std::is_same_v<S, float> ? reinterpret_cast<S*>(logits) : memory.take<S>(kQueries * most);
  S* block = memory.take<S>(kQueries * s.depth);
  float* mixed = memory.take<float>(kQueries * s.depth);
  for (int64_t first = 0; first < tokens; first += kQueries) {
    const int64_t rows = std::min(kQueries, tokens - first);
    float inverse[kQueries];
    pack_rows(block, s.depth, query + first * s.stride, s.stride, rows, s.dim);
    product(false, rows, keys.padded, s.depth, block, s.depth, key, keys.padded, logits, keys.padded);
    for (int64_t i = 0; i < rows; i++) {
      const float* bias = s.bias && !keys.none ? s.bias + (h * s.length + first + i) * s.length : nullptr;
      auto [maximum, total] = softmax_row(s, logits + i * keys.padded, weights + i * keys.padded, bias, additive, keys.padded,
                                          keys.none ? 0.f : s.scale, s.key(b, h, first + i));
      lse[h * s.total + start + first + i] = maximum + std::log(total);
      inverse[i] = (s.dropout ? s.keep_scale : 1.f) / total;
    }
    product(false, rows, s.depth, keys.padded, weights, keys.padded, value, s.depth, mixed, s.depth);
    for (int64_t i = 0; i < rows; i++) {
      S* to = out + ((start + first + i) * s.heads + h) * s.dim;
      for (int64_t c = 0; c < s.dim; c++) to[c] = mixed[i * s.depth + c] * inverse[i];
    }
  }
}

}  // namespace tupe
