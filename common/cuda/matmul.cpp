#include "cuda/matmul.h"

#include <algorithm>
#include <bit>

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

/// The largest power of two, up to 16, that divides `value`; 16 for 0.
int alignment_of(uint64_t value) {
  return static_cast<int>(std::min<uint64_t>(16, uint64_t{1} << std::countr_zero(value | 16)));
}

}  // namespace

MatmulLibrary::Layout::Layout(const Matrices& x) : batch_stride(x.batch_stride) {
  const Tensor& matrix = x.first;
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  // The stride of an axis of size 1 means nothing, but the library checks it.
  transposed = columns > 1 && matrix.stride(1) != 1;
  USP_CHECK(!transposed || rows <= 1 || matrix.stride(0) == 1,
            "matmul of strides [{}, {}]: one axis must be contiguous", matrix.stride(0),
            matrix.stride(1));
  leading = transposed ? std::max(matrix.stride(1), rows)
            : rows > 1 ? std::max(matrix.stride(0), columns)
                       : columns;
  const uint64_t element = bytes_of(matrix.dtype());
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

  void run(cublasLtHandle_t library, cudaStream_t stream, const Tensor& c, const Tensor& a,
           const Tensor& b, bool accumulate) const {
    const CategoryScope scope(Category::workspace);
    const auto bytes = static_cast<int64_t>(choice_.workspaceSize);
    const Tensor workspace = Tensor::empty({(bytes + 3) / 4}, DType::f32);
    const Factor alpha(1, dtype_), beta(accumulate ? 1 : 0, dtype_);
    USP_CUBLAS(cublasLtMatmul(library, operation_, alpha.address(), b.address(), left_, a.address(),
                              right_, beta.address(), c.address(), result_, c.address(), result_,
                              &choice_.algo, workspace.address(), choice_.workspaceSize, stream));
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
    // It would rely on 256 bytes otherwise.
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(p.b.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(p.a.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(p.c.alignment));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(p.c.alignment));
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        library, operation_, left_, right_, result_, result_, preference, 1, &choice_, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    USP_CHECK(status == CUBLAS_STATUS_SUCCESS && found == 1,
              "cuBLASLt has no kernel for {} products [{}, {}] x [{}, {}] -> {} of {}: {}", p.count,
              p.m, p.k, p.k, p.n, name(p.c_dtype), name(p.dtype), cublasLtGetStatusString(status));
  }

  DType dtype_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t left_ = nullptr, right_ = nullptr, result_ = nullptr;
  cublasLtMatmulHeuristicResult_t choice_{};
};

MatmulLibrary::MatmulLibrary(cudaStream_t stream) : stream_(stream) {
  USP_CUBLAS(cublasLtCreate(&library_));
}

MatmulLibrary::~MatmulLibrary() {
  plans_.clear();
  cublasLtDestroy(library_);
}

void MatmulLibrary::multiply(const Matrices& c, const Matrices& a, const Matrices& b,
                             bool accumulate) {
  const Problem problem{a.first.size(0), b.first.size(1), a.first.size(1),
                        c.count,         a.first.dtype(), c.first.dtype(),
                        Layout(a),       Layout(b),       Layout(c)};
  // Where shapes depend on data, as the rows of an expert do, most never come again.
  constexpr size_t kMostPlans = 1024;
  if (plans_.size() == kMostPlans) plans_.clear();
  std::unique_ptr<Plan>& plan = plans_[problem];
  if (!plan) plan = std::make_unique<Plan>(library_, problem);
  plan->run(library_, stream_, c.first, a.first, b.first, accumulate);
}

}  // namespace usp::cuda
