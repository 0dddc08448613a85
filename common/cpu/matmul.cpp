
#include <algorithm>
#include <array>
#include <bit>
#include <dnnl.hpp>
#include <map>
#include <string_view>
#include <unordered_map>

#include "cpu/cpu_backend.h"
#include "cpu/parallel.h"

namespace usp::cpu {

namespace {

/// How a matrix lies in memory: rows (or, transposed, columns) `leading` elements apart.
struct Layout {
  int64_t leading;
  bool transposed;

  explicit Layout(const Tensor& x) {
    const int64_t rows = x.size(0), columns = x.size(1);
    // The stride of an axis of size 1 means nothing, but the library checks it.
    transposed = columns > 1 && x.stride(1) != 1;
    USP_CHECK(!transposed || rows <= 1 || x.stride(0) == 1,
              "matmul of strides [{}, {}]: one axis must be contiguous", x.stride(0), x.stride(1));
    leading = transposed ? std::max(x.stride(1), rows)
              : rows > 1 ? std::max(x.stride(0), columns)
                         : columns;
  }
  dnnl::memory::dims strides() const {
    return transposed ? dnnl::memory::dims{1, leading} : dnnl::memory::dims{leading, 1};
  }
};

dnnl::memory::desc describe(const Tensor& x) {
  const auto type =
      x.dtype() == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  return {{x.size(0), x.size(1)}, type, Layout(x).strides()};
}

/// One matrix product of oneDNN, prepared for given shapes, strides and dtypes.
class Product {
 public:
  Product(const dnnl::engine& engine, const Tensor& c, const Tensor& a, const Tensor& b,
          bool accumulate) {
    dnnl::primitive_attr attributes;
    // With the library's own scratchpad a primitive must not run in two threads at once.
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (accumulate) {
      dnnl::post_ops add_to_c;
      add_to_c.append_sum(1.0F);
      attributes.set_post_ops(add_to_c);
    }
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc prepared(engine, describe(a), describe(b), describe(c),
                                                attributes);
#else
    const dnnl::matmul::desc operation(describe(a), describe(b), describe(c));
    const dnnl::matmul::primitive_desc prepared(operation, attributes, engine);
#endif
    // The library's fallback for what it has no kernel for is a thousand times slower.
    USP_CHECK(!std::string_view(prepared.impl_info_str()).starts_with("ref"),
              "oneDNN has no fast kernel for {} x {} -> {} of {}", a.shape().to_string(),
              b.shape().to_string(), c.shape().to_string(), name(a.dtype()));
    primitive_ = dnnl::matmul(prepared);
    scratchpad_bytes_ = static_cast<int64_t>(prepared.scratchpad_desc().get_size());
    const auto bind = [&](int argument, const dnnl::memory::desc& desc) {
      arguments_[argument] = dnnl::memory(desc, engine, DNNL_MEMORY_NONE);
    };
    bind(DNNL_ARG_SRC, prepared.src_desc());
    bind(DNNL_ARG_WEIGHTS, prepared.weights_desc());
    bind(DNNL_ARG_DST, prepared.dst_desc());
    bind(DNNL_ARG_SCRATCHPAD, prepared.scratchpad_desc());
  }

  void run(dnnl::stream& stream, const Tensor& c, const Tensor& a, const Tensor& b) {
    const Tensor scratchpad = workspace({(scratchpad_bytes_ + 3) / 4}, DType::f32);
    arguments_.at(DNNL_ARG_SRC).set_data_handle(a.address());
    arguments_.at(DNNL_ARG_WEIGHTS).set_data_handle(b.address());
    arguments_.at(DNNL_ARG_DST).set_data_handle(c.address());
    arguments_.at(DNNL_ARG_SCRATCHPAD).set_data_handle(scratchpad.address());
    primitive_.execute(stream, arguments_);
    stream.wait();
  }

 private:
  dnnl::matmul primitive_;
  std::unordered_map<int, dnnl::memory> arguments_;
  int64_t scratchpad_bytes_ = 0;
};

/// The products of one thread: making one compiles code (0.2 ms), looking one up costs 0.1 us, and
/// the memory objects of one cannot be shared between threads.
class Products {
 public:
  static Products& of_this_thread() {
    static thread_local Products products;
    return products;
  }

  void run(const Tensor& c, const Tensor& a, const Tensor& b, bool accumulate) {
    const Layout la(a), lb(b), lc(c);
    const int64_t flags = accumulate + 2 * la.transposed + 4 * lb.transposed +
                          8 * (a.dtype() == DType::bf16) + 16 * (c.dtype() == DType::bf16);
    // The library fixes the split over threads when it makes a product.
    const Key key{a.size(0),  a.size(1),  b.size(1), la.leading,
                  lb.leading, lc.leading, flags,     num_threads()};
    auto entry = products_.find(key);
    if (entry == products_.end()) {
      // Where shapes depend on data, as an expert's last rows do, some never come again.
      if (products_.size() == kMostProducts) products_.clear();
      entry = products_.try_emplace(key, engine_, c, a, b, accumulate).first;
    }
    entry->second.run(stream_, c, a, b);
  }

 private:
  using Key = std::array<int64_t, 8>;
  static constexpr size_t kMostProducts = 1024;  ///< of some 50 KiB each

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<Key, Product> products_;
};

/// Whether the library multiplies bf16 matrices with the CPU's own bf16 instructions; elsewhere it
/// would refuse, or take several times as long as for f32.
bool has_native_bf16() {
#if defined(__x86_64__)
  // The enumerators are sets of bits: one bit per step from one instruction set to the next.
  static const int isa = static_cast<int>(dnnl::get_effective_cpu_isa());
  constexpr int kBf16 = static_cast<int>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & kBf16) == kBf16;
#else
  return false;
#endif
}

/// x in f32, in x's order in memory.
Tensor widened(CpuBackend& backend, const Tensor& x) {
  const bool transposed = Layout(x).transposed;
  const Tensor rows = transposed ? x.transposed() : x;
  const Tensor wide = workspace(rows.shape(), DType::f32);
  backend.copy(wide, rows);
  return transposed ? wide.transposed() : wide;
}

}  // namespace

void CpuBackend::matmul(Tensor c, const Tensor& a, const Tensor& b, bool accumulate) {
  if (c.numel() == 0) return;  // oneDNN divides by the sizes
  if (a.size(1) == 0) {
    for (int64_t row = 0; row < c.size(0) && !accumulate; ++row) fill(c.narrow(0, row, 1), 0);
    return;
  }
  if (a.dtype() == DType::f64) {
    matmul_f64(c, a, b, accumulate);
    return;
  }
  Products& products = Products::of_this_thread();
  if (a.dtype() == DType::f32 || has_native_bf16()) {
    products.run(c, a, b, accumulate);
    return;
  }
  const Tensor wide_a = widened(*this, a), wide_b = widened(*this, b);
  if (c.dtype() == DType::f32) {
    products.run(c, wide_a, wide_b, accumulate);
    return;
  }
  const Tensor wide_c = accumulate ? widened(*this, c) : workspace(c.shape(), DType::f32);
  products.run(wide_c, wide_a, wide_b, accumulate);
  copy(c, wide_c);  // rounds once
}

/// Unit that leaves 32 shapes from one power of 2 to the next: the nearest is within 1/32.
int64_t CpuBackend::unit_of_rows(int64_t rows) const {
  constexpr int kDigits = 6;
  const int digits = static_cast<int>(std::bit_width(static_cast<uint64_t>(rows)));
  return int64_t{1} << std::max(0, digits - kDigits);
}

}  // namespace usp::cpu
