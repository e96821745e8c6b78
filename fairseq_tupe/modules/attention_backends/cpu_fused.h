// Building blocks of the fused CPU operators: vectors, exp, dropout's hash, matrix products, packing.
//
// GCC vector extensions rather than intrinsics, so that one source serves AVX-512, AVX2, SSE and NEON.
#pragma once
#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#if defined(__AVX512BF16__) && __has_include(<ATen/native/CPUBlas.h>)
#include <ATen/native/CPUBlas.h>
#define TUPE_NATIVE_BF16 1
#else
#define TUPE_NATIVE_BF16 0
#endif

namespace tupe {

// Width in bytes, and rows of a register tile of two vectors a row: what fits the register file.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 13;
#elif defined(__AVX__)
constexpr int kBytes = 32, kRows = 6;
#elif defined(__aarch64__)
constexpr int kBytes = 16, kRows = 12;
#else
constexpr int kBytes = 16, kRows = 6;
#endif
constexpr int kLanes = kBytes / 4;
constexpr int64_t kTile = 2 * kLanes;  // columns of a register tile; packed operands are padded to it

typedef float Vec __attribute__((vector_size(kBytes)));
typedef int32_t IntVec __attribute__((vector_size(kBytes)));
typedef uint32_t UintVec __attribute__((vector_size(kBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kBytes / 2)));
using bf16 = c10::BFloat16;
typedef uint32_t __attribute__((may_alias)) Pair;  // two bfloat16

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline Vec splat(float x) { return x - Vec{}; }

template <class V, class T>
inline V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class T>
inline void store(T* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

inline Vec widen(HalfVec half) { return (Vec)(__builtin_convertvector(half, UintVec) << 16); }
// Round to nearest even, the bfloat16 in the upper half of each lane.
inline UintVec round_bf16(Vec x) {
  UintVec bits = (UintVec)x;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}
inline HalfVec narrow(Vec x) { return __builtin_convertvector(round_bf16(x) >> 16, HalfVec); }

inline Vec load_floats(const float* p) { return load<Vec>(p); }
inline Vec load_floats(const bf16* p) { return widen(load<HalfVec>(p)); }
inline void store_floats(float* p, Vec x) { store(p, x); }
inline void store_floats(bf16* p, Vec x) { store(p, narrow(x)); }

// The first `count` lanes (all of them if there are that many), zeros behind.
inline Vec load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load<Vec>(p);
  Vec v{};
  if (count > 0) std::memcpy(&v, p, count * sizeof(float));
  return v;
}
inline void store_some(float* p, Vec v, int64_t count) {
  if (count >= kLanes) store(p, v);
  else if (count > 0) std::memcpy(p, &v, count * sizeof(float));
}

inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}
inline float max(Vec v) {
  float largest = v[0];
  for (int i = 1; i < kLanes; i++) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// exp for x <= about 88, within 2 units in the last place; 0 below the normal range; NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec lowest = splat(-87.33f);
  Vec clamped = x < lowest ? lowest : x;
  Vec shifted = clamped * 1.44269504f + 12582912.f;  // adding 1.5 * 2^23 rounds to an integer
  Vec whole = shifted - 12582912.f;
  Vec r = clamped - whole * 0.693145752f;  // ln 2 in two parts
  r = r - whole * 1.42860677e-6f;
  Vec y = r * 1.38888889e-3f + 8.33333333e-3f;
  y = y * r + 4.16666667e-2f;
  y = y * r + 1.66666667e-1f;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  IntVec exponent = ((IntVec)shifted - 0x4b400000 + 127) << 23;
  return x < lowest ? Vec{} : y * (Vec)exponent;
}

// Dropout decisions are a hash of (seed, row, column): nothing is stored, and the backward pass draws the same ones.
struct RowKey {
  uint32_t first, second;
  RowKey(uint64_t seed, uint64_t row) {
    uint64_t x = seed + (row + 1) * 0x9e3779b97f4a7c15ull;  // splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    first = (uint32_t)x;
    second = (uint32_t)(x >> 32);
  }
};
inline UintVec lane_numbers() {
  UintVec v;
  for (int i = 0; i < kLanes; i++) v[i] = i;
  return v;
}
// All ones where the element is kept, zero where it is dropped.
inline UintVec keep_mask(RowKey key, uint32_t column, uint32_t threshold) {
  UintVec x = (lane_numbers() + column) * 0x9e3779b9u + key.first;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) + key.second;
  x = x * 0x846ca68bu;
  x = x ^ (x >> 16);
  return (UintVec)(x >= threshold - UintVec{});
}
inline uint32_t drop_threshold(double p) { return (uint32_t)(p * 4294967296.0); }
inline Vec keep(Vec x, UintVec mask) { return (Vec)((UintVec)x & mask); }

// ---- matrix products: C (+)= A B, A (M, K) row-major, B (K, N) with N a multiple of kTile

template <int ROWS>
void tile_product(bool add, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  Vec left[ROWS], right[ROWS];
  for (int i = 0; i < ROWS; i++) {
    left[i] = add ? load<Vec>(c + i * ldc) : Vec{};
    right[i] = add ? load<Vec>(c + i * ldc + kLanes) : Vec{};
  }
  for (int64_t k = 0; k < depth; k++) {
    Vec b0 = load<Vec>(b + k * ldb), b1 = load<Vec>(b + k * ldb + kLanes);
    for (int i = 0; i < ROWS; i++) {
      Vec x = splat(a[i * lda + k]);
      left[i] += x * b0;
      right[i] += x * b1;
    }
  }
  for (int i = 0; i < ROWS; i++) {
    store(c + i * ldc, left[i]);
    store(c + i * ldc + kLanes, right[i]);
  }
}

using TileProduct = decltype(&tile_product<1>);
template <size_t... I>
constexpr auto tile_products(std::index_sequence<I...>) {
  struct Table { TileProduct of[sizeof...(I)]; };
  return Table{{&tile_product<(int)I + 1>...}};
}

inline void product(bool add, int64_t m, int64_t n, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                    float* c, int64_t ldc) {
  static constexpr auto table = tile_products(std::make_index_sequence<kRows>());
  int64_t groups = (m + kRows - 1) / kRows;
  for (int64_t j = 0; j < n; j += kTile) {
    for (int64_t g = 0, i = 0; g < groups; g++) {
      int64_t rows = (m - i) / (groups - g);  // as even as possible
      table.of[rows - 1](add, depth, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
      i += rows;
    }
  }
}
// B of bfloat16 holds pairs of rows interleaved ("VNNI"); ldb counts pairs. AMX where the processor has it, AVX512-BF16 else.
inline void product(bool add, int64_t m, int64_t n, int64_t depth, const bf16* a, int64_t lda, const bf16* b, int64_t ldb,
                    float* c, int64_t ldc) {
#if TUPE_NATIVE_BF16
  at::native::cpublas::brgemm(m, n, depth, lda, ldb, ldc, add, a, b, c, true);
#endif
}

// ---- packing; `stride` is the distance of source rows, `width` their real length, the rest of the target is zero

template <class T>
void pack_rows(T* to, int64_t ld, const T* from, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++, to += ld, from += stride) {
    std::memcpy(to, from, width * sizeof(T));
    std::memset((void*)(to + width), 0, (ld - width) * sizeof(T));
  }
}

// (rows, width) to (width, ld) of any trivially copied type; columns behind `rows` are left alone.
template <class T>
void transpose(T* to, int64_t ld, const T* from, int64_t stride, int64_t rows, int64_t width) {
  constexpr int64_t block = 16;
  for (int64_t i = 0; i < rows; i += block) {
    int64_t i_end = i + block < rows ? i + block : rows;
    for (int64_t c = 0; c < width; c++)
      for (int64_t r = i; r < i_end; r++) to[c * ld + r] = from[r * stride + c];
  }
}

// Keys or values (rows, width) as the B operand whose depth is the head dimension.
inline void pack_transposed(float* to, int64_t ld, const float* from, int64_t stride, int64_t rows, int64_t width, int64_t depth) {
  std::memset(to, 0, depth * ld * sizeof(float));
  transpose(to, ld, from, stride, rows, width);
}
inline void pack_transposed(bf16* to, int64_t ld, const bf16* from, int64_t stride, int64_t rows, int64_t width, int64_t depth) {
  std::memset((void*)to, 0, depth * ld * sizeof(bf16));
  if (width % 2 == 0 && stride % 2 == 0 && (uintptr_t)from % 4 == 0) {  // pairs move as one 32-bit word
    transpose((Pair*)to, ld, (const Pair*)from, stride / 2, rows, width / 2);
    return;
  }
  for (int64_t c = 0; c < width; c++)
    for (int64_t r = 0; r < rows; r++) to[(c / 2 * ld + r) * 2 + c % 2] = from[r * stride + c];
}

// Keys or values (rows, width) as the B operand whose depth is the number of rows, padded to `depth`.
inline void pack_depth(float* to, int64_t ld, const float* from, int64_t stride, int64_t rows, int64_t width, int64_t depth) {
  pack_rows(to, ld, from, stride, rows, width);
  std::memset(to + rows * ld, 0, (depth - rows) * ld * sizeof(float));
}
inline void pack_depth(bf16* to, int64_t ld, const bf16* from, int64_t stride, int64_t rows, int64_t width, int64_t depth) {
  std::memset((void*)to, 0, depth * ld * sizeof(bf16));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < width; c++) to[(r / 2 * ld + c) * 2 + r % 2] = from[r * stride + c];
}

// A thread's scratch memory: grows, is never given back, so that calls don't fault in fresh pages.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    static thread_local Block block;
    if (block.size < bytes) {
      block.memory.reset(new (std::align_val_t(64)) char[bytes]);
      block.size = bytes;
    }
    next_ = block.memory.get();
  }
  template <class T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(next_);
    next_ += round_up(count * sizeof(T), 64);
    return p;
  }

 private:
  struct Delete {
    void operator()(char* p) const { operator delete[](p, std::align_val_t(64)); }
  };
  struct Block {
    std::unique_ptr<char[], Delete> memory;
    size_t size = 0;
  };
  char* next_;
};

}  // namespace tupe
