#include <algorithm>
#include <cstring>

#include "base/rng.h"
#include "cpu/cpu_backend.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace usp::cpu {

namespace {

/// Where row `row` of x begins, in elements; a row is what the last axis spans.
int64_t row_offset(const Tensor& x, int64_t row) {
  int64_t offset = 0;
  for (int axis = x.rank() - 2; axis >= 0; --axis) {
    offset += row % x.size(axis) * x.stride(axis);
    row /= x.size(axis);
  }
  return offset;
}

template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(static_cast<accumulate_t<From>>(value));
  }
}

template <class To, class From>
void copy_elements(const Tensor& y, const Tensor& x) {
  To* to = y.data<To>();
  const From* from = x.data<From>();
  if (x.contiguous() && y.contiguous()) {
    parallel_for_elements(x.numel(), [=](int64_t i) { to[i] = convert<To>(from[i]); });
    return;
  }
  const int64_t length = x.size(-1), to_step = y.stride(-1), from_step = x.stride(-1);
  parallel_for(length == 0 ? 0 : x.numel() / length, length, [=, &x, &y](int64_t row) {
    To* to_row = to + row_offset(y, row);
    const From* from_row = from + row_offset(x, row);
    if (to_step == 1 && from_step == 1) {
#pragma omp simd
      for (int64_t i = 0; i < length; ++i) to_row[i] = convert<To>(from_row[i]);
    } else {
      for (int64_t i = 0; i < length; ++i)
        to_row[i * to_step] = convert<To>(from_row[i * from_step]);
    }
  });
}

}  // namespace

void CpuBackend::fill(Tensor y, double value) {
  dispatch(y.dtype(), [&]<class T>(T) {
    T* out = y.data<T>();
    const auto element = static_cast<accumulate_t<T>>(value);
    parallel_for_elements(y.numel(), [=](int64_t i) { store(out[i], element); });
  });
}

void CpuBackend::copy(Tensor y, const Tensor& x) {
  if (x.dtype() == DType::i32 && y.dtype() == DType::i32) {
    copy_elements<int32_t, int32_t>(y, x);
    return;
  }
  dispatch(y.dtype(), [&]<class To>(To) {
    dispatch(x.dtype(), [&]<class From>(From) { copy_elements<To, From>(y, x); });
  });
}

void CpuBackend::add(Tensor y, const Tensor& a, const Tensor& b) {
  dispatch(y.dtype(), [&]<class T>(T) {
    T* out = y.data<T>();
    const T *left = a.data<T>(), *right = b.data<T>();
    parallel_for_elements(y.numel(),
                          [=](int64_t i) { store(out[i], load(left[i]) + load(right[i])); });
  });
}

void CpuBackend::accumulate(Tensor sum, const Tensor& x) {
  dispatch(x.dtype(), [&]<class T>(T) {
    auto* out = sum.data<accumulate_t<T>>();
    const T* in = x.data<T>();
    parallel_for_elements(x.numel(), [=](int64_t i) { out[i] += load(in[i]); });
  });
}

// `inverse` differentiates rope's `x0 * c - x1 * s` and `x1 * c + x0 * s`: it rotates dy back.
// [rope]
void CpuBackend::rope(Tensor x, const Tensor& cos, const Tensor& sin, const Positions& positions,
                      bool inverse) {
  dispatch(x.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t S = x.size(1), N = x.size(2), pairs = x.size(3) / 2;
    const int64_t sample_stride = x.stride(0), row_stride = x.stride(1), head_stride = x.stride(2);
    T* data = x.data<T>();
    const A *cosines = cos.data<A>(), *sines = sin.data<A>();
    const A sign = inverse ? -1 : 1;
    parallel_for(x.size(0) * S, N * 2 * pairs, [=](int64_t row) {
      const int64_t table_row = positions[row % S] * pairs;
      T* first = data + row / S * sample_stride + row % S * row_stride;
      for (int64_t n = 0; n < N; ++n) {
        T *low = first + n * head_stride, *high = low + pairs;
#pragma omp simd
        for (int64_t i = 0; i < pairs; ++i) {
          const A c = cosines[table_row + i], s = sign * sines[table_row + i];
          const A x0 = load(low[i]), x1 = load(high[i]);
          store(low[i], x0 * c - x1 * s);
          store(high[i], x1 * c + x0 * s);
        }
      }
    });
  });
}
// [rope]

void CpuBackend::swiglu_forward(Tensor y, const Tensor& gate_up) {
  dispatch(y.dtype(), [&]<class T>(T) {
    const int64_t F = y.size(1);
    T* out = y.data<T>();
    const T* in = gate_up.data<T>();
    parallel_for(y.size(0), 3 * F, [=](int64_t row) {
      const T *gate = in + row * 2 * F, *up = gate + F;
      T* y_row = out + row * F;
      const auto element = [=](auto i) { return silu<T>(load(gate, i)) * load(up, i); };
      simd_map(y_row, F, element, gate + 2 * F, up + 2 * F, y_row + F);
    });
  });
}

// Differentiates swiglu_forward's `silu<T>(load(gate, i)) * load(up, i)`.
void CpuBackend::swiglu_backward(Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) {
  dispatch(dy.dtype(), [&]<class T>(T) {
    const int64_t F = dy.size(1);
    T* dx = dgate_up.data<T>();
    const T *in = gate_up.data<T>(), *grad = dy.data<T>();
    parallel_for(dy.size(0), 5 * F, [=](int64_t row) {
      const T *gate = in + row * 2 * F, *up = gate + F;
      const T* dy_row = grad + row * F;
      T *dgate = dx + row * 2 * F, *dup = dgate + F;
      const auto element = [=](auto i) {
        const auto g = load(gate, i), u = load(up, i), d = load(dy_row, i), s = sigmoid<T>(g);
        return std::array{d * u * s * (1 + g * (1 - s)), d * g * s};
      };
      simd_map(std::array{dgate, dup}, F, element, gate + 2 * F, up + 2 * F, dy_row + F,
               dgate + 2 * F, dup + 2 * F);
    });
  });
}

void CpuBackend::embedding_forward(Tensor y, const Tensor& table, const Tensor& tokens,
                                   int64_t vocab_offset) {
  const int64_t V = table.size(0), row_bytes = y.size(1) * bytes_of(y.dtype());
  char* out = static_cast<char*>(y.address());
  const char* rows = static_cast<const char*>(table.address());
  const int32_t* token = tokens.data<int32_t>();
  parallel_for(y.size(0), y.size(1), [=](int64_t t) {
    const int64_t row = token[t] - vocab_offset;
    if (row >= 0 && row < V) {
      std::memcpy(out + t * row_bytes, rows + row * row_bytes, row_bytes);
    } else {
      std::memset(out + t * row_bytes, 0, row_bytes);
    }
  });
}

// Differentiates embedding_forward's `std::memcpy(out + t * row_bytes, rows + row * row_bytes,
// row_bytes)`: what was copied once for each token receives a gradient from each.
void CpuBackend::embedding_backward(Tensor dtable, const Tensor& dy, const Tensor& tokens,
                                    int64_t vocab_offset, bool accumulate) {
  const DType acc = accumulate_dtype(dy.dtype());
  if (dtable.dtype() != acc) {
    round_sums(dtable, acc, accumulate, [&](const Tensor& sums) {
      embedding_backward(sums, dy, tokens, vocab_offset, accumulate);
    });
    return;
  }
  if (!accumulate) fill(dtable, 0);
  dispatch(dy.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    // A thread owns columns: it adds all tokens to them in order, and no two threads meet.
    constexpr int64_t kColumns = 64;
    const int64_t V = dtable.size(0), num_tokens = dy.size(0), H = dy.size(1);
    A* sums = dtable.data<A>();
    const T* grad = dy.data<T>();
    const int32_t* token = tokens.data<int32_t>();
    parallel_for((H + kColumns - 1) / kColumns, num_tokens * kColumns, [=](int64_t block) {
      const int64_t begin = block * kColumns, end = std::min(H, begin + kColumns);
      for (int64_t t = 0; t < num_tokens; ++t) {
        const int64_t row = token[t] - vocab_offset;
        if (row < 0 || row >= V) continue;
#pragma omp simd
        for (int64_t h = begin; h < end; ++h) {
          sums[row * H + h] += load(grad[t * H + h]);
        }
      }
    });
  });
}

void CpuBackend::dropout(Tensor y, const Tensor& x, double rate, const RandomStream& random,
                         int64_t first_row) {
  dispatch(x.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t H = x.size(1);
    const A scale = A(1 / (1 - rate));
    T* out = y.data<T>();
    const T* in = x.data<T>();
    parallel_for(x.size(0), 32 * H, [=, &random](int64_t row) {
      for (int64_t h = 0; h < H; ++h) {
        const bool kept = random.uniform(uint64_t(first_row + row), uint64_t(h)) >= rate;
        store(out[row * H + h], kept ? scale * load(in[row * H + h]) : A{0});
      }
    });
  });
}

}  // namespace usp::cpu

namespace usp {

std::unique_ptr<Backend> make_cpu_backend() { return std::make_unique<cpu::CpuBackend>(); }

}  // namespace usp
