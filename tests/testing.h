#pragma once

#include <stdlib.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/threads.h"
#include "catch.h"
#include "tensor/runtime.h"
#include "tensor/tensor.h"
#include "tolerances.h"

/// What the tests share: random inputs, comparisons that a NaN fails, finite differences.
namespace usp::test {

using Values = std::vector<double>;

/// Under a sanitizer, where everything takes ten times as long, a few cases of each kind have the
/// same memory and the same races as all. What they compute is tested without it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// The device that the variable USP_TEST_DEVICE names, so that the same executable tests either;
/// without it, the CPU.
inline Device default_device() {
  const char* given = std::getenv("USP_TEST_DEVICE");
  return given != nullptr && given == name(Device::cuda) ? Device::cuda : Device::cpu;
}

/// A runtime in force for the lifetime of the object: the first line of a test that makes tensors.
struct OnDevice {
  explicit OnDevice(Device device = default_device()) : runtime(device), use(runtime) {}
  Allocator& allocator() { return runtime.allocator(); }

  Runtime runtime;
  Runtime::Use use;
};

/// So many OpenMP threads for the lifetime of the object.
class Threads {
 public:
  explicit Threads(int count) : previous_(num_threads()) { set_num_threads(count); }
  ~Threads() { set_num_threads(previous_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int previous_;
};

/// Random inputs; shares nothing with the generator of common/base/rng.h.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  /// In [lowest, highest].
  int64_t integer(int64_t lowest, int64_t highest) {
    return std::uniform_int_distribution<int64_t>(lowest, highest)(engine_);
  }
  double normal() { return std::normal_distribution<double>()(engine_); }
  Values normals(int64_t count, double std = 1) {
    Values values(count);
    for (double& value : values) value = std * normal();
    return values;
  }
  Tensor tensor(const Shape& shape, DType dtype = DType::f64, double std = 1) {
    return Tensor::from_host(normals(shape.numel(), std), shape, dtype);
  }
  std::vector<int32_t> tokens(int64_t count, int64_t vocab_size) {
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens) token = static_cast<int32_t>(integer(0, vocab_size - 1));
    return tokens;
  }
  Tensor token_tensor(int64_t count, int64_t vocab_size) {
    return Tensor::from_host(tokens(count, vocab_size), {count});
  }

 private:
  std::mt19937_64 engine_;
};

inline Values values_of(const Tensor& tensor) { return tensor.items(); }
inline const Values& values_of(const Values& values) { return values; }

/// max |a - b| / max |b|. Equal infinities agree. Where b is all zero, a has to be, or the error is
/// infinite; a NaN anywhere makes the error NaN.
inline double relative_error(const Values& a, const Values& b) {
  if (a.size() != b.size()) return kNaN;
  double difference = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) || std::isnan(b[i])) return kNaN;
    if (a[i] == b[i] && std::isinf(b[i])) continue;
    difference = std::max(difference, std::abs(a[i] - b[i]));
    scale = std::max(scale, std::abs(b[i]));
  }
  if (difference == 0) return 0;
  return scale == 0 ? kInf : difference / scale;
}

/// An executable that sets it asks how much is left of the tolerances: an error may be no more than
/// such a part of them. Results are rounded once to f32 in any case, and tolerances of bf16 are for
/// roundings to 8 bits, as many on every device, so of these nothing is asked.
inline double margin = 1;

/// How large a relative error may be where `tolerance` is granted.
inline double granted(double tolerance) {
  constexpr double kLeastOfBf16 = 1e-3, kOneRounding = 0x1p-24;
  if (margin == 1 || tolerance >= kLeastOfBf16) return tolerance;
  const double rounding = tolerance > kOneRounding ? kOneRounding : 0;
  return rounding + (tolerance - rounding) / margin;
}

/// Fails the test unless relative_error(actual, expected) <= granted(tolerance), naming the worst
/// element.
template <class Actual, class Expected>
void check_close(const Actual& actual, const Expected& expected, double tolerance,
                 std::string_view what = "values") {
  const Values a = values_of(actual), b = values_of(expected);
  REQUIRE(a.size() == b.size());
  size_t worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i] - b[i]) <= std::abs(a[worst] - b[worst])) && a[i] != b[i]) worst = i;
  }
  if (!a.empty()) {
    UNSCOPED_INFO(fmt::format("{}: element {} of {} is {}, expected {}", what, worst, a.size(),
                              a[worst], b[worst]));
  }
  REQUIRE(relative_error(a, b) <= granted(tolerance));
}

/// Relative rounding that a kernel's result may carry; of other numbers, by a row of the table.
inline double tolerance_of(DType dtype, const Tolerance& of = kOperationTolerance) {
  return dtype == DType::f64 ? of.f64 : dtype == DType::f32 ? of.f32 : of.bf16;
}

inline constexpr DType kFloatDTypes[] = {DType::f64, DType::f32, DType::bf16};

/// The bytes of all elements in row-major order.
inline std::vector<char> bits_of(const Tensor& tensor) {
  const Tensor dense = tensor.to_host().to_contiguous();
  std::vector<char> bits(dense.bytes());
  if (!bits.empty()) std::memcpy(bits.data(), dense.address(), bits.size());
  return bits;
}

/// A tensor of its own with the same elements.
inline Tensor clone(const Tensor& tensor) {
  Tensor copy = Tensor::empty(tensor.shape(), tensor.dtype());
  const std::vector<char> bits = bits_of(tensor);
  copy.assign_bytes(std::as_bytes(std::span(bits)));
  return copy;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() && bits_of(a) == bits_of(b);
}

inline double dot(const Tensor& a, const Tensor& b) {
  const Values x = a.items(), y = b.items();
  REQUIRE(x.size() == y.size());
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

/// f'(0) by central differences of fourth order: with values near 1, exact to about 1e-10.
inline double numeric_derivative(const std::function<double(double)>& f) {
  constexpr double kStep = 3e-4;
  const double near = f(kStep) - f(-kStep), far = f(2 * kStep) - f(-2 * kStep);
  return (8 * near - far) / (12 * kStep);
}

/// d loss / d x[index] of a contiguous f64 tensor for each of `indices` (row-major), as exact as
/// numeric_derivative().
inline Values numeric_gradient(const Tensor& x, const std::vector<int64_t>& indices,
                               const std::function<double()>& loss) {
  REQUIRE(x.contiguous());
  const Values centres = x.items();
  Values gradient;
  for (int64_t index : indices) {
    Tensor element = x.view({x.numel()}).narrow(0, index, 1);
    const double centre = centres[index];
    gradient.push_back(numeric_derivative([&](double offset) {
      element.assign(Values{centre + offset});
      return loss();
    }));
    element.assign(Values{centre});
  }
  return gradient;
}

/// Set by an executable that checks every access of its kernels: then one pass is enough. Another
/// executable with the same tests takes finite differences, and does again what has to repeat.
inline bool one_pass = false;

/// Compares `gradient` with finite differences of `loss` at `samples` random elements of x, or at
/// all of them where there are no more.
inline void check_gradient(const Tensor& gradient, const Tensor& x,
                           const std::function<double()>& loss, std::string_view what,
                           int64_t samples = 1000, double tolerance = 1e-9) {
  REQUIRE(gradient.shape() == x.shape());
  if (one_pass) return static_cast<void>(loss());
  Random random(x.numel());
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < std::min(samples, x.numel()); ++i) {
    indices.push_back(x.numel() <= samples ? i : random.integer(0, x.numel() - 1));
  }
  const Values all = gradient.items();
  Values analytic;
  for (int64_t index : indices) analytic.push_back(all[index]);
  check_close(analytic, numeric_gradient(x, indices, loss), tolerance, what);
}

/// Compares `gradient` with finite differences of `loss` in a random direction, in which all
/// elements of the f64 tensor x move at once: four evaluations, however many elements. A wrong one
/// shows wherever it lies, but not which it is. The tolerance is of the whole gradient's length.
inline void check_gradient_along(const Tensor& gradient, Tensor x,
                                 const std::function<double()>& loss, std::string_view what,
                                 double tolerance = 1e-9) {
  REQUIRE(gradient.shape() == x.shape());
  if (one_pass) return static_cast<void>(loss());
  const Values centres = x.items(), slopes = gradient.items();
  const Values direction = Random(x.numel()).normals(x.numel());
  double analytic = 0, squares = 0;
  for (size_t i = 0; i < slopes.size(); ++i) {
    analytic += slopes[i] * direction[i];
    squares += slopes[i] * slopes[i];
  }
  const double numeric = numeric_derivative([&](double offset) {
    Values moved = centres;
    for (size_t i = 0; i < moved.size(); ++i) moved[i] += offset * direction[i];
    x.assign(moved);
    return loss();
  });
  x.assign(centres);
  INFO(fmt::format("{}: the slope in a direction is {}, by finite differences {}", what, analytic,
                   numeric));
  REQUIRE(std::abs(analytic - numeric) <= tolerance * std::sqrt(squares));
}

/// Fails the test unless body() throws an E whose message holds every one of `parts`.
template <class E>
void check_throws(const std::function<void()>& body, const std::vector<std::string>& parts) {
  std::string message;
  try {
    body();
    FAIL("nothing was thrown, expected a message with: " << fmt::format("{}", parts[0]));
  } catch (const E& error) {
    message = error.what();
  }
  for (const std::string& part : parts) {
    INFO("message: " << message << "\nexpected in it: " << part);
    REQUIRE(message.find(part) != std::string::npos);
  }
}

/// A directory that goes with everything in it.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "usp_test_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }
  /// Writes a file and returns its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return file(name);
  }

 private:
  std::filesystem::path path_;
};

/// Changes one bit of a file.
inline void flip_byte(const std::string& path, int64_t position) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(position);
  const char byte = static_cast<char>(file.get());
  file.seekp(position);
  file.put(static_cast<char>(byte ^ 4));
}

inline std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace usp::test
