
#include <algorithm>
#include <array>
#include <cmath>

#include "causal_mask.h"
#include "cpu_backend.h"
#include "microkernel.h"
#include "parallel.h"
#include "simd.h"

/// Blockwise attention: a block of queries meets one tile of keys after the other, so that of a
/// head's scores no more than kQueryRows x kKeyTile exist at a time. Dao et al. (2022).
///
/// Every product is made of multiply_tile(), whose right operand is packed in panels, once per
/// head. Queries are taken in groups of kTileRows, and of each tile a group computes the keys up to
/// the last one that it sees. All sums are in f32 (f64 for f64 tensors).
namespace usp::cpu {

namespace {

constexpr int64_t kGroups = 8;
constexpr int64_t kQueryRows = kGroups * kTileRows;

/// The rows of one head of a [B, rows, heads, D] tensor.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride;

  HeadRows(const Tensor& x, int64_t sample, int64_t head) : data(x.data<T>()), stride(x.stride(1)) {
    if (x.numel() > 0) data += sample * x.stride(0) + head * x.stride(2);
  }
  T* operator[](int64_t row) const { return data + row * stride; }
};

/// Operands and sizes of one call, and who sees whom.
struct Problem {
  const Tensor &q, &k, &v;
  double scale;
  CausalMask mask;
  int64_t B = q.size(0), S = q.size(1), N = q.size(2), D = q.size(3);
  int64_t K = k.size(1), G = k.size(2);
  int64_t padded_K = mask.num_tiles() * kKeyTile;
};

/// Up to kQueryRows consecutive queries.
struct QueryBlock {
  int64_t first, rows, groups;
  std::array<int32_t, kGroups> lowest{}, highest{};  ///< position in each group

  QueryBlock(const CausalMask& mask, int64_t first, int64_t num_queries)
      : first(first),
        rows(std::min(kQueryRows, num_queries - first)),
        groups(round_up(rows, kTileRows) / kTileRows) {
    for (int64_t g = 0; g < groups; ++g) {
      const int32_t* query = mask.queries() + first + g * kTileRows;
      const int64_t count = std::min(kTileRows, rows - g * kTileRows);
      lowest[g] = *std::min_element(query, query + count);
      highest[g] = *std::max_element(query, query + count);
    }
  }
};

/// How many keys of a tile each group of a block has to look at.
struct Seen {
  std::array<int64_t, kGroups> keys{};
  int64_t any = 0;  ///< the largest of them

  Seen(const QueryBlock& block, const CausalMask& mask, int64_t tile) {
    for (int64_t g = 0; g < block.groups; ++g) {
      keys[g] = mask.num_seen(block.highest[g], tile);
      any = std::max(any, keys[g]);
    }
  }
};

/// to [kQueryRows, D] = factor * the block's rows of x. Rows that only fill up a group are 0.
template <class A, class T>
void load_block(A* to, const HeadRows<T>& x, const QueryBlock& block, int64_t D, A factor) {
  for (int64_t i = 0; i < block.rows; ++i, to += D) {
    const T* row = x[block.first + i];
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) to[d] = factor * load(row[d]);
  }
  std::fill_n(to, (block.groups * kTileRows - block.rows) * D, A{0});
}

/// Packs all keys (or values), tile after tile, as a right operand [D, padded_K].
template <class A, class T>
void pack_transposed(A* to, const HeadRows<T>& x, const Problem& p) {
  for (int64_t first = 0; first < p.K; first += kKeyTile, to += p.D * kKeyTile) {
    pack_panels(to, x[first], 1, x.stride, p.D, std::min(kKeyTile, p.K - first), p.D);
  }
}

/// Packs all keys (or values), tile after tile, as a right operand [padded_K, D].
template <class A, class T>
void pack(A* to, const HeadRows<T>& x, const Problem& p) {
  const int64_t tile_size = kKeyTile * round_up(p.D, kTileColumns<A>);
  for (int64_t first = 0; first < p.K; first += kKeyTile, to += tile_size) {
    pack_panels(to, x[first], x.stride, 1, std::min(kKeyTile, p.K - first), p.D, kKeyTile);
  }
}

/// scores [kQueryRows, kKeyTile] = queries [kQueryRows, D] keys [D, kKeyTile]
template <class A>
void multiply_keys(A* scores, const A* queries, const A* keys, int64_t D, const QueryBlock& block,
                   const Seen& seen) {
  for (int64_t t = 0; t < seen.any; t += kTileColumns<A>) {
    for (int64_t g = 0; g < block.groups; ++g) {
      if (t >= seen.keys[g]) continue;
      multiply_tile(D, queries + g * kTileRows * D, D, 1, keys + t * D,
                    scores + g * kTileRows * kKeyTile + t, kKeyTile, /*accumulate=*/false);
    }
  }
}

/// out [kQueryRows, width] += weights [kQueryRows, kKeyTile] values [kKeyTile, width]
template <class A>
void add_over_keys(A* out, const A* weights, const A* values, int64_t width,
                   const QueryBlock& block, const Seen& seen) {
  for (int64_t d = 0; d < width; d += kTileColumns<A>) {
    for (int64_t g = 0; g < block.groups; ++g) {
      multiply_tile(seen.keys[g], weights + g * kTileRows * kKeyTile, kKeyTile, 1,
                    values + d * kKeyTile, out + g * kTileRows * width + d, width,
                    /*accumulate=*/true);
    }
  }
}

/// out [kKeyTile, width] += weightsᵀ [kKeyTile, kQueryRows] values [kQueryRows, width]
template <class A>
void add_over_queries(A* out, const A* weights, const A* values, int64_t width,
                      const QueryBlock& block, const Seen& seen) {
  for (int64_t t = 0; t < seen.any; t += kTileRows) {
    int64_t row = 0;  // the first that may see one of these keys
    for (int64_t g = 0; seen.keys[g] <= t; ++g) row += kTileRows;
    for (int64_t d = 0; d < width; d += kTileColumns<A>) {
      multiply_tile(block.rows - row, weights + row * kKeyTile + t, 1, kKeyTile,
                    values + d * kQueryRows + row * kTileColumns<A>, out + t * width + d, width,
                    /*accumulate=*/true);
    }
  }
}

/// Gives keys of the tile that the block's query `row` does not see the score -inf. Returns how
/// many scores of the row, in whole panels, there are to look at.
template <class A>
int64_t hide_keys(A* scores, int64_t row, const QueryBlock& block, const Seen& seen,
                  const CausalMask& mask, int64_t tile) {
  const int64_t count = round_up(seen.keys[row / kTileRows], kTileColumns<A>);
  if (mask.sees_all(block.lowest[row / kTileRows], tile)) return count;
  const int32_t query = mask.queries()[block.first + row];
  const int32_t* keys = mask.keys() + tile * kKeyTile;
  simd_map(scores, count, [=](auto t) { return hide_later(load(scores, t), keys, t, query); });
  return count;
}

/// One row of attention while its keys come in tile by tile: the highest score so far and the sum
/// of exp(score - max).
template <class T>
struct RunningSoftmax {
  using A = accumulate_t<T>;
  A max = -kInfinity<A>;
  A sum = 0;

  /// Replaces scores by exp(score - new max) and rescales `out` [size], the values weighted so far,
  /// from the old max to the new.
  void add_tile(A* scores, int64_t count, A* out, int64_t size) {
    const A new_max = simd_max(count, max, [=](auto t) { return load(scores, t); });
    const A shift = new_max == -kInfinity<A> ? 0 : new_max;  // -inf - -inf would be NaN
    const auto term = [=](auto t) {
      const auto e = exp<T>(load(scores, t) - shift);
      store(scores, t, e);
      return e;
    };
    const A tile_sum = fast_sum<A>(count, term);
    const A correction = exp<T>(max - shift);
    sum = sum * correction + tile_sum;
    max = new_max;
    simd_map(out, size, [=](auto d) { return load(out, d) * correction; });
  }
};

/// Each task is one query head of one sample.
template <class T>
class Forward {
 public:
  using A = accumulate_t<T>;

  Forward(const Tensor& out, const Tensor& lse, const Problem& problem)
      : p_(problem), out_(out), lse_(lse.data<A>()) {}

  void run() const {
    parallel_for(tasks_, p_.S * p_.K * p_.D / 8, [this](int64_t task) {
      const int64_t b = task / p_.N, n = task % p_.N, g = n / (p_.N / p_.G);
      pack_transposed(keys_.mine(), HeadRows<T>(p_.k, b, g), p_);
      pack(values_.mine(), HeadRows<T>(p_.v, b, g), p_);
      for (int64_t first = 0; first < p_.S; first += kQueryRows) {
        query_block(QueryBlock(p_.mask, first, p_.S), b, n);
      }
    });
  }

 private:
  void query_block(const QueryBlock& block, int64_t b, int64_t n) const {
    A *queries = queries_.mine(), *scores = scores_.mine(), *sums = sums_.mine();
    load_block(queries, HeadRows<T>(p_.q, b, n), block, p_.D, A(p_.scale));
    std::fill_n(sums, kQueryRows * width_, A{0});
    std::array<RunningSoftmax<T>, kQueryRows> softmax;
    for (int64_t tile = 0; tile < p_.mask.num_tiles(); ++tile) {
      const Seen seen(block, p_.mask, tile);
      if (seen.any == 0) continue;
      multiply_keys(scores, queries, keys_.mine() + tile * kKeyTile * p_.D, p_.D, block, seen);
      for (int64_t row = 0; row < block.rows; ++row) {
        A* row_scores = scores + row * kKeyTile;
        const int64_t count = hide_keys(row_scores, row, block, seen, p_.mask, tile);
        softmax[row].add_tile(row_scores, count, sums + row * width_, width_);
      }
      add_over_keys(sums, scores, values_.mine() + tile * kKeyTile * width_, width_, block, seen);
    }
    const HeadRows<T> out(out_, b, n);
    for (int64_t row = 0; row < block.rows; ++row, sums += width_) {
      const auto [max, sum] = softmax[row];
      const A inverse = sum == 0 ? 0 : 1 / sum;
      T* out_row = out[block.first + row];
      simd_map(out_row, p_.D, [=](auto d) { return load(sums, d) * inverse; });
      lse_[(b * p_.N + n) * p_.S + block.first + row] = max + std::log(sum);
    }
  }

  const Problem& p_;
  const Tensor& out_;
  A* lse_;
  const int64_t tasks_ = p_.B * p_.N;
  const int64_t width_ = round_up(p_.D, kTileColumns<A>);    ///< channels in whole panels
  const PerThread<A> keys_{tasks_, p_.D* p_.padded_K};       ///< [D, padded_K] in panels
  const PerThread<A> values_{tasks_, p_.padded_K* width_};   ///< [padded_K, D] in panels
  const PerThread<A> queries_{tasks_, kQueryRows* p_.D};     ///< [kQueryRows, D], times scale
  const PerThread<A> scores_{tasks_, kQueryRows* kKeyTile};  ///< [kQueryRows, kKeyTile]
  const PerThread<A> sums_{tasks_, kQueryRows* width_};      ///< [kQueryRows, width]
};

/// Each task is one kv head of one sample with all query heads that read it, so that one thread
/// sums dk and dv in a fixed order.
template <class T>
class Backward {
 public:
  using A = accumulate_t<T>;

  struct Gradients {
    const Tensor &dq, &dk, &dv, &dout, &lse, &delta;
  };

  Backward(const Gradients& gradients, const Problem& problem) : p_(problem), g_(gradients) {}

  void run() const {
    const int64_t group = p_.N / p_.G;
    parallel_for(tasks_, group * p_.S * p_.K * p_.D / 8, [=, this](int64_t task) {
      const int64_t b = task / p_.G, g = task % p_.G;
      const HeadRows<T> keys(p_.k, b, g);
      pack_transposed(keys_transposed_.mine(), keys, p_);
      pack_transposed(values_transposed_.mine(), HeadRows<T>(p_.v, b, g), p_);
      pack(keys_.mine(), keys, p_);
      std::fill_n(dkeys_.mine(), p_.padded_K * width_, A{0});
      std::fill_n(dvalues_.mine(), p_.padded_K * width_, A{0});
      for (int64_t n = g * group; n < (g + 1) * group; ++n) {
        for (int64_t first = 0; first < p_.S; first += kQueryRows) {
          query_block(QueryBlock(p_.mask, first, p_.S), b, n);
        }
      }
      add_to_rows(HeadRows<A>(g_.dk, b, g), 0, p_.K, dkeys_.mine(), 1);
      add_to_rows(HeadRows<A>(g_.dv, b, g), 0, p_.K, dvalues_.mine(), 1);
    });
  }

 private:
  void query_block(const QueryBlock& block, int64_t b, int64_t n) const {
    A *queries = queries_.mine(), *douts = douts_.mine(), *dqueries = dqueries_.mine();
    A *probs = probs_.mine(), *dscores = dscores_.mine();
    const int64_t D = p_.D;
    load_block(queries, HeadRows<T>(p_.q, b, n), block, D, A(p_.scale));
    load_block(douts, HeadRows<T>(g_.dout, b, n), block, D, A{1});
    pack_panels(query_panels_.mine(), queries, D, 1, block.rows, D, kQueryRows);
    pack_panels(dout_panels_.mine(), douts, D, 1, block.rows, D, kQueryRows);
    std::fill_n(dqueries, kQueryRows * width_, A{0});
    for (int64_t tile = 0; tile < p_.mask.num_tiles(); ++tile) {
      const Seen seen(block, p_.mask, tile);
      if (seen.any == 0) continue;
      const int64_t columns = tile * kKeyTile * D, rows = tile * kKeyTile * width_;
      multiply_keys(probs, queries, keys_transposed_.mine() + columns, D, block, seen);
      multiply_keys(dscores, douts, values_transposed_.mine() + columns, D, block, seen);
      softmax_backward(probs, dscores, block, seen, tile, (b * p_.N + n) * p_.S + block.first);
      add_over_keys(dqueries, dscores, keys_.mine() + rows, width_, block, seen);
      add_over_queries(dvalues_.mine() + rows, probs, dout_panels_.mine(), width_, block, seen);
      add_over_queries(dkeys_.mine() + rows, dscores, query_panels_.mine(), width_, block, seen);
    }
    add_to_rows(HeadRows<A>(g_.dq, b, n), block.first, block.rows, dqueries, A(p_.scale));
  }

  /// Scores become probabilities, gradients of probabilities those of scores; both are 0 beyond
  /// what a row's group sees. `first` is the block's first row in lse and delta.
  void softmax_backward(A* probs, A* dscores, const QueryBlock& block, const Seen& seen,
                        int64_t tile, int64_t first) const {
    for (int64_t row = 0; row < block.rows; ++row, probs += kKeyTile, dscores += kKeyTile) {
      const int64_t count = hide_keys(probs, row, block, seen, p_.mask, tile);
      // A row that sees nothing has lse -inf. Its probabilities are 0 = exp(-inf - inf), where
      // exp(-inf - -inf) would be NaN.
      const A saved_lse = lse_[first + row], delta = delta_[first + row];
      const A lse = saved_lse == -kInfinity<A> ? kInfinity<A> : saved_lse;
      const auto prob_and_dscore = [=](auto t) {
        const auto p = exp<T>(load(probs, t) - lse);
        return std::array{p, p * (load(dscores, t) - delta)};
      };
      simd_map(std::array{probs, dscores}, count, prob_and_dscore);
      std::fill(probs + count, probs + kKeyTile, A{0});
      std::fill(dscores + count, dscores + kKeyTile, A{0});
    }
  }

  /// Rows [first, first + count) of x += factor * sums [count, width].
  void add_to_rows(const HeadRows<A>& x, int64_t first, int64_t count, const A* sums,
                   A factor) const {
    for (int64_t i = 0; i < count; ++i, sums += width_) {
      A* row = x[first + i];
#pragma omp simd
      for (int64_t d = 0; d < p_.D; ++d) row[d] += factor * sums[d];
    }
  }

  const Problem& p_;
  const Gradients g_;
  const A *lse_ = g_.lse.template data<A>(), *delta_ = g_.delta.template data<A>();
  const int64_t tasks_ = p_.B * p_.G;
  const int64_t width_ = round_up(p_.D, kTileColumns<A>);            ///< channels in whole panels
  const PerThread<A> keys_transposed_{tasks_, p_.D* p_.padded_K};    ///< [D, padded_K] in panels
  const PerThread<A> values_transposed_{tasks_, p_.D* p_.padded_K};  ///< the same
  const PerThread<A> keys_{tasks_, p_.padded_K* width_};             ///< [padded_K, D] in panels
  const PerThread<A> dkeys_{tasks_, p_.padded_K* width_};            ///< [padded_K, width]
  const PerThread<A> dvalues_{tasks_, p_.padded_K* width_};          ///< the same
  const PerThread<A> queries_{tasks_, kQueryRows* p_.D};         ///< [kQueryRows, D], times scale
  const PerThread<A> douts_{tasks_, kQueryRows* p_.D};           ///< [kQueryRows, D]
  const PerThread<A> query_panels_{tasks_, kQueryRows* width_};  ///< queries, in panels
  const PerThread<A> dout_panels_{tasks_, kQueryRows* width_};   ///< douts, in panels
  const PerThread<A> probs_{tasks_, kQueryRows* kKeyTile};       ///< [kQueryRows, kKeyTile]
  const PerThread<A> dscores_{tasks_, kQueryRows* kKeyTile};     ///< the same
  const PerThread<A> dqueries_{tasks_, kQueryRows* width_};      ///< [kQueryRows, width]
};

}  // namespace

void CpuBackend::attention_forward(Tensor out, Tensor lse, const Tensor& q, const Tensor& k,
                                   const Tensor& v, double scale, const Positions& queries,
                                   const Positions& keys) {
  const Problem problem{q, k, v, scale, CausalMask(queries, keys)};
  dispatch(q.dtype(), [&]<class T>(T) { Forward<T>(out, lse, problem).run(); });
}

void CpuBackend::attention_delta(Tensor delta, const Tensor& dout, const Tensor& out) {
  dispatch(out.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t S = out.size(1), N = out.size(2), D = out.size(3);
    A* sums = delta.data<A>();
    parallel_for(out.size(0) * S, 2 * N * D, [=, &dout, &out](int64_t row) {
      const int64_t b = row / S, s = row % S;
      for (int64_t n = 0; n < N; ++n) {
        const T *x = HeadRows<T>(dout, b, n)[s], *y = HeadRows<T>(out, b, n)[s];
        const auto product = [=](auto d) { return load(x, d) * load(y, d); };
        sums[(b * N + n) * S + s] = fast_sum<A>(D, product);
      }
    });
  });
}

void CpuBackend::attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout,
                                    const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& lse, const Tensor& delta, double scale,
                                    const Positions& queries, const Positions& keys) {
  if (q.numel() == 0 || k.numel() == 0) return;  // nothing to add
  const Problem problem{q, k, v, scale, CausalMask(queries, keys)};
  dispatch(q.dtype(), [&]<class T>(T) {
    Backward<T>({dq, dk, dv, dout, lse, delta}, problem).run();
  });
}

}  // namespace usp::cpu
