#include "cuda/matmul.h"

#include <algorithm>
#include <bit>

#include "cuda/operands.h"
#include "tensor/launches.h"
#include "tensor/runtime.h"

namespace usp::cuda {

namespace {

/// What a kernel may ask for as workspace: NVIDIA's advice for Hopper, more than any other needs.
constexpr size_t kMaxWorkspaceBytes = size_t{32} << 20;

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const Runtime* runtime = Runtime::find();  // none while one is being made
  fail("{} failed{}: {}", call,
       runtime == nullptr ? "" : fmt::format(" on rank {}", runtime->rank()),
       cublasLtGetStatusString(status));
}

#define USP_CUBLAS(call) check((call), #call)

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::f64 ? CUDA_R_64F : dtype == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

/// A factor in the type in which the products of `dtype` are summed.
struct Factor {
  double wide;
  float narrow;
  bool is_wide;

  Factor(double value, DType dtype)
      : wide(value), narrow(static_cast<float>(value)), is_wide(dtype == DType::f64) {}
  const void* address() const { return is_wide ? static_cast<const void*>(&wide) : &narrow; }
};

/// The smallest multiple of `size` that is not below `count`.
int64_t rounded_up(int64_t count, int64_t size) { return (count + size - 1) / size * size; }

/// The largest power of two, up to 16, that divides `value`; 16 for 0.
int alignment_of(uint64_t value) {
  return static_cast<int>(std::min<uint64_t>(16, uint64_t{1} << std::countr_zero(value | 16)));
}

}  // namespace

MatmulLibrary::Layout::Layout(const Matrices& x) : batch_stride(x.batch_stride) {
  const Tensor& matrix = x.first;
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  const uint64_t element = bytes_of(matrix.dtype());
  // The stride of an axis of size 1 means nothing, but the library checks it.
  transposed = columns > 1 && matrix.stride(1) != 1;
  USP_CHECK(!transposed || rows <= 1 || matrix.stride(0) == 1,
            "matmul of strides [{}, {}]: one axis must be contiguous", matrix.stride(0),
            matrix.stride(1));
  leading = transposed ? std::max(matrix.stride(1), rows)
            : rows > 1 ? std::max(matrix.stride(0), columns)
                       : rounded_up(columns, 16 / int64_t(element));
  alignment = std::min({alignment_of(reinterpret_cast<uint64_t>(matrix.address())),
                        alignment_of(leading * element), alignment_of(batch_stride * element)});
}

/// The library's objects for one problem, and the kernel that it chose.
class MatmulLibrary::Plan {
 public:
  Plan(cublasLtHandle_t library, const Problem& p) : dtype_(p.dtype) {
    const bool wide = p.dtype == DType::f64;
    USP_CUBLAS(cublasLtMatmulDescCreate(&operation_, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                        wide ? CUDA_R_64F : CUDA_R_32F));
    // Column by column, a row-major matrix is its transpose, and c = a b means cᵀ = bᵀ aᵀ: b is the
    // left operand.
    set_transposed(CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed);
    set_transposed(CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed);
    describe(&left_, p.b, p.dtype, p.n, p.k, p.count);
    describe(&right_, p.a, p.dtype, p.k, p.m, p.count);
    describe(&result_, p.c, p.c_dtype, p.n, p.m, p.count);
    choose(library, p);
  }
  ~Plan() {
    cublasLtMatrixLayoutDestroy(result_);
    cublasLtMatrixLayoutDestroy(right_);
    cublasLtMatrixLayoutDestroy(left_);
    cublasLtMatmulDescDestroy(operation_);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  /// Whether the library has a kernel for it.
  bool found() const { return found_; }
  /// c = a b, or addend + a b where there is an addend, which may be c.
  void run(cublasLtHandle_t library, cudaStream_t stream, const Tensor& c, const Tensor& a,
           const Tensor& b, const Tensor& addend) const {
    const CategoryScope scope(Category::workspace);
    const auto bytes = static_cast<int64_t>(choice_.workspaceSize);
    const Tensor workspace = Tensor::empty({(bytes + 3) / 4}, DType::f32);
    const Factor alpha(1, dtype_), beta(addend.defined() ? 1 : 0, dtype_);
    const Tensor& before = addend.defined() ? addend : c;
    USP_CUBLAS(cublasLtMatmul(library, operation_, alpha.address(), b.address(), left_, a.address(),
                              right_, beta.address(), before.address(), result_, c.address(),
                              result_, &choice_.algo, workspace.address(), choice_.workspaceSize,
                              stream));
    ++launches;
  }

 private:
  void set_transposed(cublasLtMatmulDescAttributes_t operand, bool transposed) {
    const cublasOperation_t how = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    USP_CUBLAS(cublasLtMatmulDescSetAttribute(operation_, operand, &how, sizeof(how)));
  }

  /// `rows` and `columns` are those of the operand in the product, in the library's order.
  static void describe(cublasLtMatrixLayout_t* matrix, const Layout& x, DType dtype, int64_t rows,
                       int64_t columns, int64_t count) {
    if (x.transposed) std::swap(rows, columns);
    USP_CUBLAS(cublasLtMatrixLayoutCreate(matrix, type_of(dtype), rows, columns, x.leading));
    const auto batch = static_cast<int32_t>(count);
    USP_CUBLAS(cublasLtMatrixLayoutSetAttribute(*matrix, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                                sizeof(batch)));
    USP_CUBLAS(cublasLtMatrixLayoutSetAttribute(*matrix,
                                                CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                &x.batch_stride, sizeof(x.batch_stride)));
  }

  void choose(cublasLtHandle_t library, const Problem& p) {
    cublasLtMatmulPreference_t preference = nullptr;
    USP_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      USP_CUBLAS(
          cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspaceBytes);
    // Deep products may be cut into parts. Their sums are bf16's, too, unless that is forbidden.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    // It would rely on 256 bytes otherwise.
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(p.b.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(p.a.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(p.c.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(p.c.alignment));
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        library, operation_, left_, right_, result_, result_, preference, 1, &choice_, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    found_ = status == CUBLAS_STATUS_SUCCESS && found > 0;
  }

  DType dtype_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t left_ = nullptr, right_ = nullptr, result_ = nullptr;
  cublasLtMatmulHeuristicResult_t choice_{};
  bool found_ = false;
};

MatmulLibrary::MatmulLibrary(cudaStream_t stream, MatmulDetours& detours)
    : stream_(stream), detours_(detours) {
  USP_CUBLAS(cublasLtCreate(&library_));
}

MatmulLibrary::~MatmulLibrary() {
  plans_.clear();
  cublasLtDestroy(library_);
}

MatmulLibrary::Plan* MatmulLibrary::find(const Matrices& c, const Matrices& a, const Matrices& b) {
  const Problem problem{a.first.size(0), b.first.size(1), a.first.size(1),
                        c.count,         a.first.dtype(), c.first.dtype(),
                        Layout(a),       Layout(b),       Layout(c)};
  // Where shapes depend on data, as the rows of an expert do, most never come again.
  constexpr size_t kMostPlans = 1024;
  if (plans_.size() == kMostPlans && !plans_.contains(problem)) {
    plans_.erase(std::ranges::min_element(plans_, {},
                                          [](const auto& plan) { return plan.second.last_use; }));
  }
  Kept& kept = plans_[problem];
  if (kept.plan == nullptr) kept.plan = std::make_unique<Plan>(library_, problem);
  kept.last_use = ++uses_;
  return kept.plan->found() ? kept.plan.get() : nullptr;
}

void MatmulLibrary::multiply(const Matrices& c, const Matrices& a, const Matrices& b,
                             bool accumulate) {
  if (const Plan* plan = find(c, a, b)) {
    return plan->run(library_, stream_, c.first, a.first, b.first, accumulate ? c.first : Tensor());
  }
  multiply_copies(c, a, b, accumulate);
}

bool MatmulLibrary::multiply_onto(const Matrices& c, const Matrices& a, const Matrices& b,
                                  const Matrices& addend) {
  const Plan* plan = Layout(addend) == Layout(c) ? find(c, a, b) : nullptr;
  if (plan == nullptr) return false;
  plan->run(library_, stream_, c.first, a.first, b.first, addend.first);
  return true;
}

namespace {

/// As many matrices, row by row, in rows of whole 16 bytes; `memory` holds them.
Matrices aligned(const Matrices& x, Tensor& memory) {
  const int64_t rows = x.first.size(0), columns = x.first.size(1);
  const int64_t row = rounded_up(columns, 16 / bytes_of(x.first.dtype()));
  memory = workspace({x.count * rows, row}, x.first.dtype());
  return {memory.narrow(0, 0, rows).narrow(1, 0, columns), x.count, rows * row};
}

void copy(cudaStream_t stream, const Matrices& to, const Matrices& from) {
  const Tensor &y = to.first, &x = from.first;
  const CopyShape shape{{1, 1, to.count, y.size(0), y.size(1)},
                        {0, 0, to.batch_stride, y.stride(0), y.stride(1)},
                        {0, 0, from.batch_stride, x.stride(0), x.stride(1)},
                        /*contiguous=*/false};
  with_type(y.dtype(), [&]<class T>(T) { Copy<T, T>::run(stream, data<T>(y), data<T>(x), shape); });
}

}  // namespace

void MatmulLibrary::multiply_copies(const Matrices& c, const Matrices& a, const Matrices& b,
                                    bool accumulate) {
  Tensor memory_c, memory_a, memory_b;
  const Matrices to = aligned(c, memory_c), left = aligned(a, memory_a),
                 right = aligned(b, memory_b);
  if (const Plan* plan = find(to, left, right)) {
    ++detours_.by_copies;
    copy(stream_, left, a);
    copy(stream_, right, b);
    if (accumulate) copy(stream_, to, c);
    plan->run(library_, stream_, to.first, left.first, right.first,
              accumulate ? to.first : Tensor());
    return copy(stream_, c, to);
  }
  ++detours_.by_own_kernel;
  with_type(a.first.dtype(), c.first.dtype(), [&]<class T, class G>(T, G) {
    const auto of = []<class U>(const Matrices& x, U) {
      return Strided<U>{data<U>(x.first), x.batch_stride, x.first.stride(0), x.first.stride(1)};
    };
    Matmul<T, G>::run(stream_, of(c, G{}), of(a, T{}), of(b, T{}), c.count, a.first.size(0),
                      b.first.size(1), a.first.size(1), accumulate);
  });
}

}  // namespace usp::cuda
