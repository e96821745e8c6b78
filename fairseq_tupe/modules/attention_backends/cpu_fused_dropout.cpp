// Dropout on hidden states, with the residual sum: one pass, nothing kept for the backward pass but the seed.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu_fused.h"

namespace tupe {
namespace {

constexpr int64_t kBlock = 1024;  // elements a hash row

// A sum is a float unless both of its terms are bfloat16.
template <class A, class B>
using Sum = std::conditional_t<std::is_same_v<A, bf16> && std::is_same_v<B, bf16>, bf16, float>;

// The last lanes of a tensor go through a buffer of one vector.
template <class X, class R, class O>
void dropout_block(const X* x, const R* residual, O* out, int64_t count, float scale, RowKey key, uint32_t threshold) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - j);
    X x_tail[kLanes];
    R r_tail[kLanes];
    O o_tail[kLanes];
    const bool whole = lanes == kLanes;
    if (!whole) {
      std::copy_n(x + j, lanes, x_tail);
      if (residual) std::copy_n(residual + j, lanes, r_tail);
    }
    Vec y = keep(load_floats(whole ? x + j : x_tail) * scale, keep_mask(key, j, threshold));
    if (residual) y += load_floats(whole ? residual + j : r_tail);
    store_floats(whole ? out + j : o_tail, y);
    if (!whole) std::copy_n(o_tail, lanes, out + j);
  }
}

template <class X, class R, class O>
at::Tensor dropout_as(const at::Tensor& x, const at::Tensor* residual, at::ScalarType type, double p, uint64_t seed) {
  at::Tensor out = at::empty(x.sizes(), x.options().dtype(type));
  const X* from = x.const_data_ptr<X>();
  const R* add = residual ? residual->const_data_ptr<R>() : nullptr;
  O* to = out.data_ptr<O>();
  const int64_t count = x.numel(), blocks = (count + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      const int64_t at = n * kBlock;
      dropout_block(from + at, add ? add + at : nullptr, to + at, std::min(kBlock, count - at), float(1 / (1 - p)), RowKey(seed, n),
                    drop_threshold(p));
    }
  });
  return out;
}

template <class F>
void by_type(at::ScalarType type, F f) {
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "fused dropout takes float32 or bfloat16, got ", type);
  if (type == at::kFloat) f(float{});
  else f(bf16{});
}

// dropout(x) + residual
at::Tensor dropout_add(const at::Tensor& x_, const at::Tensor& residual_, double p, const at::Tensor& seed) {
  const at::Tensor x = x_.contiguous(), residual = residual_.contiguous();
  TORCH_CHECK(x.sizes() == residual.sizes(), "dropout_add: x is ", x.sizes(), " and the residual ", residual.sizes());
  at::Tensor out;
  by_type(x.scalar_type(), [&](auto a) {
    by_type(residual.scalar_type(), [&](auto b) {
      using O = Sum<decltype(a), decltype(b)>;
      out = dropout_as<decltype(a), decltype(b), O>(x, &residual, c10::CppTypeToScalarType<O>::value, p, seed.item<int64_t>());
    });
  });
  return out;
}

// dropout(x) as `type`; applied to a gradient with the same seed it is its own backward pass.
at::Tensor dropout(const at::Tensor& x_, double p, const at::Tensor& seed, at::ScalarType type) {
  const at::Tensor x = x_.contiguous();
  at::Tensor out;
  by_type(x.scalar_type(), [&](auto a) {
    by_type(type, [&](auto o) {
      out = dropout_as<decltype(a), decltype(a), decltype(o)>(x, nullptr, type, p, seed.item<int64_t>());
    });
  });
  return out;
}

}  // namespace
}  // namespace tupe

TORCH_LIBRARY_FRAGMENT(fairseq_tupe, m) {
  m.def("dropout_add(Tensor x, Tensor residual, float p, Tensor seed) -> Tensor");
  m.def("dropout(Tensor x, float p, Tensor seed, ScalarType dtype) -> Tensor");
}
TORCH_LIBRARY_IMPL(fairseq_tupe, CPU, m) {
  m.impl("dropout_add", tupe::dropout_add);
  m.impl("dropout", tupe::dropout);
}
