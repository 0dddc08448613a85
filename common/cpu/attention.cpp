#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "causal_mask.h"
#include "cpu_backend.h"
#include "microkernel.h"
#include "parallel.h"
#include "vector_math.h"

/// Blockwise attention: a block of query rows meets one tile of keys after the other, so that no
/// more than kQueryRows x kKeyTile scores of a head exist at a time. Dao et al. (2022).
///
/// Every product is made of multiply_tile(), whose right operand is a panel; the panels of a head
/// are packed once. Within a block, queries are taken in groups of kTileRows, and of each tile a
/// group computes the keys up to the last one that it sees.
namespace usp::cpu {

namespace {

constexpr int64_t kGroups = 8;
constexpr int64_t kQueryRows = kGroups * kTileRows;

template <class T>
struct HeadRows {
  T* data;
  int64_t stride;  ///< from one row of the head to the next
  T* operator[](int64_t row) const { return data + row * stride; }
};

/// The rows of one head of x [B, rows, heads, D].
template <class T>
HeadRows<T> rows_of(const Tensor& x, int64_t sample, int64_t head) {
  return {x.data<T>() + sample * x.stride(0) + head * x.stride(2), x.stride(1)};
}

/// to [round_up(count, kTileRows), D] = factor * rows, zeros below.
template <class A, class T>
void load_rows(A* to, const HeadRows<T>& rows, int64_t first, int64_t count, int64_t D, A factor) {
  for (int64_t i = 0; i < count; ++i, to += D) {
    const T* row = rows[first + i];
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) to[d] = factor * load(row[d]);
  }
  std::fill_n(to, (round_up(count, kTileRows) - count) * D, A{0});
}

/// Packs `count` rows as the columns of a [D, padded] right operand, zeros beyond them. The panel
/// of columns c.. begins at to + c * D.
template <class A, class T>
void pack_as_columns(A* to, const HeadRows<T>& rows, int64_t first, int64_t count, int64_t padded,
                     int64_t D) {
  constexpr int64_t kColumns = kTileColumns<A>;
  for (int64_t c = 0; c < padded; c += kColumns) {
    const int64_t filled = std::clamp<int64_t>(count - c, 0, kColumns);
    for (int64_t d = 0; d < D; ++d, to += kColumns) {
      for (int64_t j = 0; j < filled; ++j) to[j] = load(rows[first + c + j][d]);
      for (int64_t j = filled; j < kColumns; ++j) to[j] = 0;
    }
  }
}

/// Packs `count` rows as the rows of a [padded, D] right operand, zeros beyond them. The panel of
/// columns c.. begins at to + c * padded.
template <class A, class T>
void pack_as_rows(A* to, const HeadRows<T>& rows, int64_t first, int64_t count, int64_t padded,
                  int64_t D) {
  constexpr int64_t kColumns = kTileColumns<A>;
  for (int64_t c = 0; c < D; c += kColumns) {
    const int64_t filled = std::min(kColumns, D - c);
    for (int64_t i = 0; i < count; ++i, to += kColumns) {
      const T* row = rows[first + i] + c;
      for (int64_t j = 0; j < filled; ++j) to[j] = load(row[j]);
      for (int64_t j = filled; j < kColumns; ++j) to[j] = 0;
    }
    std::fill_n(to, (padded - count) * kColumns, A{0});
    to += (padded - count) * kColumns;
  }
}

/// Up to kQueryRows consecutive queries, and what each group of them sees of a tile of keys.
struct QueryBlock {
  int64_t first, rows, groups;
  std::array<int32_t, kGroups> lowest{}, highest{};  ///< position in each group

  QueryBlock(const CausalMask& mask, int64_t first, int64_t num_queries)
      : first(first),
        rows(std::min(kQueryRows, num_queries - first)),
        groups((rows + kTileRows - 1) / kTileRows) {
    for (int64_t g = 0; g < groups; ++g) {
      const int32_t* query = mask.queries() + first + g * kTileRows;
      const int64_t count = std::min(kTileRows, rows - g * kTileRows);
      lowest[g] = *std::min_element(query, query + count);
      highest[g] = *std::max_element(query, query + count);
    }
  }
};

/// How many keys of the tile each group has to look at; `any` is the largest of them.
struct Seen {
  std::array<int64_t, kGroups> keys{};
  int64_t any = 0;

  Seen(const QueryBlock& block, const CausalMask& mask, int64_t tile) {
    for (int64_t g = 0; g < block.groups; ++g) {
      keys[g] = mask.num_seen(block.highest[g], tile);
      any = std::max(any, keys[g]);
    }
  }
};

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

/// out [kQueryRows, padded_D] += weights [kQueryRows, kKeyTile] values [kKeyTile, padded_D]
template <class A>
void add_over_keys(A* out, const A* weights, const A* values, int64_t padded_D,
                   const QueryBlock& block, const Seen& seen) {
  for (int64_t d = 0; d < padded_D; d += kTileColumns<A>) {
    for (int64_t g = 0; g < block.groups; ++g) {
      multiply_tile(seen.keys[g], weights + g * kTileRows * kKeyTile, kKeyTile, 1,
                    values + d * kKeyTile, out + g * kTileRows * padded_D + d, padded_D,
                    /*accumulate=*/true);
    }
  }
}

/// out [kKeyTile, padded_D] += weights^T [kKeyTile, kQueryRows] values [kQueryRows, padded_D]
template <class A>
void add_over_queries(A* out, const A* weights, const A* values, int64_t padded_D,
                      const QueryBlock& block, const Seen& seen) {
  for (int64_t t = 0; t < seen.any; t += kTileRows) {
    int64_t row = 0;  // the first that sees one of these keys
    for (int64_t g = 0; seen.keys[g] <= t; ++g) row += kTileRows;
    for (int64_t d = 0; d < padded_D; d += kTileColumns<A>) {
      multiply_tile(block.rows - row, weights + row * kKeyTile + t, 1, kKeyTile,
                    values + d * kQueryRows + row * kTileColumns<A>, out + t * padded_D + d,
                    padded_D, /*accumulate=*/true);
    }
  }
}

/// Gives keys of the tile that the block's query `row` does not see the score -inf. Returns how
/// many scores of the row, whole panels, there are to look at.
template <class A>
int64_t hide_keys(A* scores, int64_t row, const QueryBlock& block, const Seen& seen,
                  const CausalMask& mask, int64_t tile) {
  const int64_t count = round_up(seen.keys[row / kTileRows], kTileColumns<A>);
  if (mask.sees_all(block.lowest[row / kTileRows], tile)) return count;
  const int32_t query = mask.queries()[block.first + row];
  const int32_t* keys = mask.keys() + tile * kKeyTile;
#pragma omp simd
  for (int64_t t = 0; t < count; ++t) scores[t] = keys[t] <= query ? scores[t] : -kInfinity<A>;
  return count;
}

/// rows [first, first + count) += factor * sums [count, padded_D]
template <class A>
void add_to_rows(const HeadRows<A>& rows, int64_t first, int64_t count, const A* sums, int64_t D,
                 int64_t padded_D, A factor) {
  for (int64_t i = 0; i < count; ++i, sums += padded_D) {
    A* row = rows[first + i];
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) row[d] += factor * sums[d];
  }
}

/// One row of attention while its keys come in tile by tile: the highest score and the sum of
/// exp(score - max).
template <class A>
struct RunningSoftmax {
  A max = -kInfinity<A>;
  A sum = 0;

  /// Replaces scores by exp(score - new max) and rescales `out`, the values weighted so far, from
  /// the old max to the new.
  void add_tile(A* scores, int64_t count, A* out, int64_t out_size) {
    const A new_max = max_of(scores, count, max);
    const A shift = new_max == -kInfinity<A> ? 0 : new_max;  // -inf - -inf would be NaN
    A tile_sum = 0;
#pragma omp simd reduction(+ : tile_sum)
    for (int64_t t = 0; t < count; ++t) {
      scores[t] = exp(scores[t] - shift);
      tile_sum += scores[t];
    }
    const A correction = exp(max - shift);
    sum = sum * correction + tile_sum;
    max = new_max;
#pragma omp simd
    for (int64_t d = 0; d < out_size; ++d) out[d] *= correction;
  }
};

/// An array of `size` elements for each of `threads` threads.
template <class A>
class PerThread {
 public:
  PerThread(int64_t threads, int64_t size)
      : storage_(workspace({threads, size}, dtype_of<A>)), size_(size) {}
  /// The calling thread's.
  A* mine() const { return static_cast<A*>(storage_.address()) + omp_get_thread_num() * size_; }

 private:
  Tensor storage_;
  int64_t size_;
};

/// What forward and backward have in common: the operands, their sizes, who sees whom.
struct Problem {
  const Tensor &q, &k, &v;
  double scale;
  CausalMask mask;
  int64_t B, S, N, D, K, G;

  Problem(const Tensor& q, const Tensor& k, const Tensor& v, double scale, const Positions& queries,
          const Positions& keys)
      : q(q),
        k(k),
        v(v),
        scale(scale),
        mask(queries, keys),
        B(q.size(0)),
        S(q.size(1)),
        N(q.size(2)),
        D(q.size(3)),
        K(k.size(1)),
        G(k.size(2)) {}
  int64_t tiles() const { return mask.num_tiles(); }
  int64_t threads(int64_t tasks) const { return std::min<int64_t>(tasks, omp_get_max_threads()); }
};

/// Each task is one query head of one sample.
template <class T>
class Forward {
 public:
  using A = accumulate_t<T>;

  Forward(const Tensor& out, const Tensor& lse, const Problem& problem)
      : out_(out),
        lse_(lse.data<A>()),
        p_(problem),
        padded_D_(round_up(p_.D, kTileColumns<A>)),
        tasks_(p_.B * p_.N),
        keys_(p_.threads(tasks_), p_.tiles() * kKeyTile * p_.D),
        values_(p_.threads(tasks_), p_.tiles() * kKeyTile * padded_D_),
        queries_(p_.threads(tasks_), kQueryRows * p_.D),
        scores_(p_.threads(tasks_), kQueryRows * kKeyTile),
        sums_(p_.threads(tasks_), kQueryRows * padded_D_) {}

  void run() const {
    parallel_for(tasks_, p_.S * p_.K, [this](int64_t task) { head(task / p_.N, task % p_.N); });
  }

 private:
  void head(int64_t b, int64_t n) const {
    const int64_t g = n / (p_.N / p_.G);
    for (int64_t tile = 0; tile < p_.tiles(); ++tile) {
      const int64_t first = tile * kKeyTile, count = std::min(kKeyTile, p_.K - first);
      pack_as_columns(keys_.mine() + first * p_.D, rows_of<T>(p_.k, b, g), first, count, kKeyTile,
                      p_.D);
      pack_as_rows(values_.mine() + first * padded_D_, rows_of<T>(p_.v, b, g), first, count,
                   kKeyTile, p_.D);
    }
    for (int64_t first = 0; first < p_.S; first += kQueryRows) {
      query_block(QueryBlock(p_.mask, first, p_.S), b, n);
    }
  }

  void query_block(const QueryBlock& block, int64_t b, int64_t n) const {
    A *queries = queries_.mine(), *scores = scores_.mine(), *sums = sums_.mine();
    load_rows(queries, rows_of<T>(p_.q, b, n), block.first, block.rows, p_.D, A(p_.scale));
    std::fill_n(sums, kQueryRows * padded_D_, A{0});
    std::array<RunningSoftmax<A>, kQueryRows> softmax;
    for (int64_t tile = 0; tile < p_.tiles(); ++tile) {
      const Seen seen(block, p_.mask, tile);
      if (seen.any == 0) continue;
      multiply_keys(scores, queries, keys_.mine() + tile * kKeyTile * p_.D, p_.D, block, seen);
      for (int64_t row = 0; row < block.rows; ++row) {
        A* row_scores = scores + row * kKeyTile;
        const int64_t count = hide_keys(row_scores, row, block, seen, p_.mask, tile);
        softmax[row].add_tile(row_scores, count, sums + row * padded_D_, padded_D_);
      }
      add_over_keys(sums, scores, values_.mine() + tile * kKeyTile * padded_D_, padded_D_, block,
                    seen);
    }
    const HeadRows<T> out = rows_of<T>(out_, b, n);
    for (int64_t row = 0; row < block.rows; ++row, sums += padded_D_) {
      T* out_row = out[block.first + row];
      const A inverse = softmax[row].sum == 0 ? 0 : 1 / softmax[row].sum;
#pragma omp simd
      for (int64_t d = 0; d < p_.D; ++d) store(out_row[d], sums[d] * inverse);
      lse_[(b * p_.N + n) * p_.S + block.first + row] =
          softmax[row].max + std::log(softmax[row].sum);
    }
  }

  const Tensor& out_;
  A* lse_;
  const Problem& p_;
  int64_t padded_D_;  ///< channels in whole panels
  int64_t tasks_;
  PerThread<A> keys_;     ///< [D, K] in panels
  PerThread<A> values_;   ///< [K, D] in panels
  PerThread<A> queries_;  ///< [kQueryRows, D], times scale
  PerThread<A> scores_;   ///< [kQueryRows, kKeyTile]
  PerThread<A> sums_;     ///< [kQueryRows, padded_D]
};

/// Each task is one kv head of one sample with all query heads that read it, so that dk and dv are
/// summed by one thread in a fixed order.
template <class T>
class Backward {
 public:
  using A = accumulate_t<T>;

  struct Gradients {
    const Tensor &dq, &dk, &dv;
  };

  Backward(const Gradients& gradients, const Tensor& dout, const Tensor& lse, const Tensor& delta,
           const Problem& problem)
      : gradients_(gradients),
        dout_(dout),
        lse_(lse.data<A>()),
        delta_(delta.data<A>()),
        p_(problem),
        padded_D_(round_up(p_.D, kTileColumns<A>)),
        tasks_(p_.B * p_.G),
        key_columns_(p_.threads(tasks_), p_.tiles() * kKeyTile * p_.D),
        value_columns_(p_.threads(tasks_), p_.tiles() * kKeyTile * p_.D),
        key_rows_(p_.threads(tasks_), p_.tiles() * kKeyTile * padded_D_),
        dkeys_(p_.threads(tasks_), p_.tiles() * kKeyTile * padded_D_),
        dvalues_(p_.threads(tasks_), p_.tiles() * kKeyTile * padded_D_),
        queries_(p_.threads(tasks_), kQueryRows * p_.D),
        douts_(p_.threads(tasks_), kQueryRows * p_.D),
        query_rows_(p_.threads(tasks_), kQueryRows * padded_D_),
        dout_rows_(p_.threads(tasks_), kQueryRows * padded_D_),
        probs_(p_.threads(tasks_), kQueryRows * kKeyTile),
        dscores_(p_.threads(tasks_), kQueryRows * kKeyTile),
        dqueries_(p_.threads(tasks_), kQueryRows * padded_D_) {}

  void run() const {
    const int64_t group = p_.N / p_.G;
    parallel_for(tasks_, group * p_.S * p_.K, [=, this](int64_t task) {
      const int64_t b = task / p_.G, g = task % p_.G;
      load_keys(b, g);
      for (int64_t n = g * group; n < (g + 1) * group; ++n) {
        for (int64_t first = 0; first < p_.S; first += kQueryRows) {
          query_block(QueryBlock(p_.mask, first, p_.S), b, n);
        }
      }
      add_to_rows(rows_of<A>(gradients_.dk, b, g), 0, p_.K, dkeys_.mine(), p_.D, padded_D_, A{1});
      add_to_rows(rows_of<A>(gradients_.dv, b, g), 0, p_.K, dvalues_.mine(), p_.D, padded_D_, A{1});
    });
  }

 private:
  void load_keys(int64_t b, int64_t g) const {
    const HeadRows<T> keys = rows_of<T>(p_.k, b, g), values = rows_of<T>(p_.v, b, g);
    for (int64_t tile = 0; tile < p_.tiles(); ++tile) {
      const int64_t first = tile * kKeyTile, count = std::min(kKeyTile, p_.K - first);
      pack_as_columns(key_columns_.mine() + first * p_.D, keys, first, count, kKeyTile, p_.D);
      pack_as_columns(value_columns_.mine() + first * p_.D, values, first, count, kKeyTile, p_.D);
      pack_as_rows(key_rows_.mine() + first * padded_D_, keys, first, count, kKeyTile, p_.D);
    }
    std::fill_n(dkeys_.mine(), p_.tiles() * kKeyTile * padded_D_, A{0});
    std::fill_n(dvalues_.mine(), p_.tiles() * kKeyTile * padded_D_, A{0});
  }

  void query_block(const QueryBlock& block, int64_t b, int64_t n) const {
    A *queries = queries_.mine(), *douts = douts_.mine(), *dqueries = dqueries_.mine();
    A *probs = probs_.mine(), *dscores = dscores_.mine();
    const int64_t D = p_.D, rows = block.rows;
    load_rows(queries, rows_of<T>(p_.q, b, n), block.first, rows, D, A(p_.scale));
    load_rows(douts, rows_of<T>(dout_, b, n), block.first, rows, D, A{1});
    pack_as_rows(query_rows_.mine(), HeadRows<A>{queries, D}, 0, rows, kQueryRows, D);
    pack_as_rows(dout_rows_.mine(), HeadRows<A>{douts, D}, 0, rows, kQueryRows, D);
    std::fill_n(dqueries, kQueryRows * padded_D_, A{0});
    for (int64_t tile = 0; tile < p_.tiles(); ++tile) {
      const Seen seen(block, p_.mask, tile);
      if (seen.any == 0) continue;
      const int64_t columns = tile * kKeyTile * D, padded_rows = tile * kKeyTile * padded_D_;
      multiply_keys(probs, queries, key_columns_.mine() + columns, D, block, seen);
      multiply_keys(dscores, douts, value_columns_.mine() + columns, D, block, seen);
      softmax_backward(probs, dscores, block, seen, tile, (b * p_.N + n) * p_.S + block.first);
      add_over_keys(dqueries, dscores, key_rows_.mine() + padded_rows, padded_D_, block, seen);
      add_over_queries(dvalues_.mine() + padded_rows, probs, dout_rows_.mine(), padded_D_, block,
                       seen);
      add_over_queries(dkeys_.mine() + padded_rows, dscores, query_rows_.mine(), padded_D_, block,
                       seen);
    }
    add_to_rows(rows_of<A>(gradients_.dq, b, n), block.first, rows, dqueries, D, padded_D_,
                A(p_.scale));
  }

  /// Scores become probabilities, gradients of probabilities those of scores; zeros beyond what a
  /// row's group sees. `first` is the block's first row in lse and delta.
  void softmax_backward(A* probs, A* dscores, const QueryBlock& block, const Seen& seen,
                        int64_t tile, int64_t first) const {
    for (int64_t row = 0; row < block.rows; ++row, probs += kKeyTile, dscores += kKeyTile) {
      const int64_t count = hide_keys(probs, row, block, seen, p_.mask, tile);
      // A row that sees nothing has lse -inf; -inf - inf is still -inf, -inf - -inf would be NaN.
      const A lse = lse_[first + row] == -kInfinity<A> ? kInfinity<A> : lse_[first + row];
      const A delta = delta_[first + row];
#pragma omp simd
      for (int64_t t = 0; t < count; ++t) {
        probs[t] = exp(probs[t] - lse);
        dscores[t] = probs[t] * (dscores[t] - delta);
      }
      std::fill(probs + count, probs + kKeyTile, A{0});
      std::fill(dscores + count, dscores + kKeyTile, A{0});
    }
  }

  Gradients gradients_;
  const Tensor& dout_;
  const A *lse_, *delta_;
  const Problem& p_;
  int64_t padded_D_;  ///< channels in whole panels
  int64_t tasks_;
  PerThread<A> key_columns_, value_columns_;  ///< [D, K] in panels
  PerThread<A> key_rows_;                     ///< [K, D] in panels
  PerThread<A> dkeys_, dvalues_;              ///< [K, padded_D]
  PerThread<A> queries_, douts_;              ///< [kQueryRows, D], queries times scale
  PerThread<A> query_rows_, dout_rows_;       ///< the same in panels
  PerThread<A> probs_, dscores_;              ///< [kQueryRows, kKeyTile]
  PerThread<A> dqueries_;                     ///< [kQueryRows, padded_D]
};

}  // namespace

void CpuBackend::attention_forward(Tensor out, Tensor lse, const Tensor& q, const Tensor& k,
                                   const Tensor& v, double scale, const Positions& queries,
                                   const Positions& keys) {
  const Problem problem(q, k, v, scale, queries, keys);
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
        const T *x = rows_of<T>(dout, b, n)[s], *y = rows_of<T>(out, b, n)[s];
        A sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < D; ++d) sum += load(x[d]) * load(y[d]);
        sums[(b * N + n) * S + s] = sum;
      }
    });
  });
}

void CpuBackend::attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout,
                                    const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& lse, const Tensor& delta, double scale,
                                    const Positions& queries, const Positions& keys) {
  const Problem problem(q, k, v, scale, queries, keys);
  dispatch(q.dtype(), [&]<class T>(T) {
    Backward<T>({dq, dk, dv}, dout, lse, delta, problem).run();
  });
}

}  // namespace usp::cpu
