// Exact attention with an additive (H, T, T) bias, its gradient and dropout, without a (T, T) matrix a sentence in memory.
//
// Dimensions: B sentences, T tokens, H heads, D head dimension. A head's probabilities exist for kQueries queries at a time, in
// cache; the backward pass recomputes them from the log-sum-exp of the forward pass. One thread owns a head of the bias and
// loops over the sentences, so that the bias gradient needs no atomics and is the same in every run.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "cpu_fused_backward.h"

namespace tupe {
namespace {

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
                                             double scale, double p, const OptionalTensor& seed, const OptionalTensor& offsets) {
  const at::Tensor qkv = qkv_.contiguous();
  const Problem s(qkv, bias, padding, scale, p, seed, offsets);
  at::Tensor out = at::empty({qkv.size(0), qkv.size(1), s.heads * s.dim}, qkv.options());
  at::Tensor lse = at::empty({s.heads, s.total}, qkv.options().dtype(at::kFloat));
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
                                                      double scale, double p, const OptionalTensor& seed, const OptionalTensor& offsets,
                                                      bool need_bias) {
  const at::Tensor qkv = qkv_.contiguous(), grad = grad_.contiguous();
  const Problem s(qkv, bias, padding, scale, p, seed, offsets);
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
  m.def(
      "attention(Tensor qkv, Tensor? bias, Tensor? padding, float scale, float p, Tensor? seed, "
      "Tensor? offsets) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad, Tensor qkv, Tensor? bias, Tensor? padding, Tensor out, Tensor lse, float scale, float p, "
      "Tensor? seed, Tensor? offsets, bool need_bias) -> (Tensor, Tensor)");
  m.def("attention_keep_mask(Tensor seed, int batch, int heads, int length, float p) -> Tensor");
  m.def("native_bfloat16() -> bool", []() { return bool(TUPE_NATIVE_BF16); });
}
TORCH_LIBRARY_IMPL(fairseq_tupe, CPU, m) {
  m.impl("attention", tupe::attention);
  m.impl("attention_backward", tupe::attention_backward);
  m.impl("attention_keep_mask", tupe::attention_keep_mask);
}
