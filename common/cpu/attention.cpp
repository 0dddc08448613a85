
#include <algorithm>
#include <array>
#include <cmath>

#include "cpu/attention_blocks.h"
#include "cpu/cpu_backend.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

/// Blockwise attention: a block of queries meets one tile of keys after the other, so that of a
/// head's scores no more than kQueryRows x kKeyTile exist at a time. Dao et al. (2022),
/// https://arxiv.org/abs/2205.14135.
///
/// All sums are in f32 (f64 for f64 tensors), and so is all arithmetic between the products of
/// attention_blocks.h. Where those multiply bf16, the probabilities and the scores' gradients are
/// rounded to it first; the scale goes to the scores, in f32, and not to the queries.
namespace usp::cpu {

namespace {

/// One row of attention while its keys come in tile by tile: the highest score so far and the sum
/// of exp(score - max).
template <class T>
struct RunningSoftmax {
  using A = accumulate_t<T>;
  A max = -kInfinity<A>;
  A sum = 0;

  /// weights = exp(scores - new max), maybe in the same place, and rescales `out` [size], the
  /// values weighted so far, from the old max to the new.
  template <class X>
  void add_tile(X* weights, const A* scores, int64_t count, A* out, int64_t size) {
    const A new_max = simd_max(count, max, [=](auto t) { return load(scores, t); });
    const A shift = new_max == -kInfinity<A> ? 0 : new_max;  // -inf - -inf would be NaN
    const auto term = [=](auto t) {
      const auto e = exp<T>(load(scores, t) - shift);
      store(weights, t, e);
      return e;
    };
    const A tile_sum = fast_sum<A>(count, term);
    const A correction = exp<T>(max - shift);
    sum = sum * correction + tile_sum;
    max = new_max;
    simd_map(out, size, [=](auto d) { return load(out, d) * correction; });
  }
};

/// Weights [kQueryRows, kKeyTile] of each thread, made of scores: in their place if they are of the
/// same type.
template <class X, class A>
struct Weights {
  PerThread<X> own{std::is_same_v<X, A> ? 0 : kQueryRows<X> * kKeyTile};

  X* mine(A* scores) const {
    if constexpr (std::is_same_v<X, A>)
      return scores;
    else
      return own.mine();
  }
};

/// The scale is a factor of the queries, or of the scores where the queries would be rounded.
template <class X, class A>
struct Scale {
  A of_queries, of_scores;

  explicit Scale(double scale)
      : of_queries(std::is_same_v<X, A> ? A(scale) : 1),
        of_scores(std::is_same_v<X, A> ? 1 : A(scale)) {}
};

/// Each task is one query head of one sample.
template <class T>
class Forward {
 public:
  using A = accumulate_t<T>;
  using X = operand_t<T>;

  Forward(const Tensor& out, const Tensor& lse, const Problem& problem)
      : p_(problem), out_(out), lse_(lse.data<A>()) {}

  void run() const {
    parallel_for(tasks_, p_.S * p_.K * p_.D / 8, [this](int64_t task) {
      [[maybe_unused]] const TileRegisters<X> registers;
      const int64_t b = task / p_.N, n = task % p_.N, g = n / (p_.N / p_.G);
      pack_transposed(keys_.mine(), HeadRows<T>(p_.k, b, g), p_);
      pack(values_.mine(), HeadRows<T>(p_.v, b, g), p_);
      for (int64_t first = 0; first < p_.S; first += kQueryRows<X>) {
        query_block(QueryBlock<X>(p_.mask, b, first, p_.S), b, n);
      }
    });
  }

 private:
  void query_block(const QueryBlock<X>& block, int64_t b, int64_t n) const {
    A *scores = scores_.mine(), *sums = sums_.mine();
    X *queries = queries_.mine(), *probs = probs_.mine(scores);
    if (block.sees_any(p_.mask)) {
      load_block(queries, HeadRows<T>(p_.q, b, n), block, p_.D, scale_.of_queries);
    }
    std::fill_n(sums, kQueryRows<X> * width_, A{0});
    std::array<RunningSoftmax<T>, kQueryRows<X>> softmax;
    for (int64_t tile = 0; tile < p_.mask.num_tiles(); ++tile) {
      const Seen<X> seen(block, p_.mask, tile);
      if (seen.any == 0) continue;
      multiply_keys(scores, queries, keys_.mine() + tile * kKeyTile * depth_, depth_, block, seen);
      for (int64_t row = 0; row < block.rows; ++row) {
        A* row_scores = scores + row * kKeyTile;
        const int64_t count =
            finish_scores(row_scores, scale_.of_scores, row, block, seen, p_.mask, tile);
        softmax[row].add_tile(probs + row * kKeyTile, row_scores, count, sums + row * width_,
                              width_);
      }
      add_over_keys(sums, probs, values_.mine() + tile * kKeyTile * width_, width_, block, seen);
    }
    for (int64_t row = 0; row < block.rows; ++row, sums += width_) {
      const auto [max, sum] = softmax[row];
      const A inverse = sum == 0 ? 0 : 1 / sum;
      const int64_t s = block.first + row;
      if (out_.dtype() == dtype_of<T>) {
        write_row(HeadRows<T>(out_, b, n)[s], sums, inverse);
      } else {
        write_row(HeadRows<A>(out_, b, n)[s], sums, inverse);
      }
      lse_[(b * p_.N + n) * p_.S + s] = max + std::log(sum);
    }
  }

  template <class O>
  void write_row(O* out, const A* sums, A inverse) const {
    simd_map(out, p_.D, [=](auto d) { return load(sums, d) * inverse; });
  }

  const Problem& p_;
  const Tensor& out_;
  A* lse_;
  const int64_t tasks_ = p_.B * p_.N;
  const Scale<X, A> scale_{p_.scale};
  const int64_t depth_ = round_up(p_.D, kTileDepth<X>);    ///< channels of a left operand
  const int64_t width_ = round_up(p_.D, kTileColumns<X>);  ///< channels in whole panels
  const PerThread<X> keys_{depth_ * p_.padded_K};          ///< [depth, padded_K] in panels
  const PerThread<X> values_{p_.padded_K * width_};        ///< [padded_K, D] in panels
  const PerThread<X> queries_{kQueryRows<X> * depth_};     ///< [kQueryRows, depth], scaled
  const PerThread<A> scores_{kQueryRows<X> * kKeyTile};    ///< [kQueryRows, kKeyTile]
  const Weights<X, A> probs_;                              ///< the same
  const PerThread<A> sums_{kQueryRows<X> * width_};        ///< [kQueryRows, width]
};

/// Each task is one kv head of one sample with all query heads that read it, so that one thread
/// sums dk and dv in a fixed order. The gradients are in O: T or, where more is added, A.
template <class T, class O>
class Backward {
 public:
  using A = accumulate_t<T>;
  using X = operand_t<T>;

  struct Gradients {
    const Tensor &dq, &dk, &dv, &dout, &lse, &delta;
    bool accumulate;
  };

  Backward(const Gradients& gradients, const Problem& problem) : p_(problem), g_(gradients) {}

  void run() const {
    const int64_t group = p_.N / p_.G;
    parallel_for(tasks_, group * p_.S * p_.K * p_.D / 8, [=, this](int64_t task) {
      [[maybe_unused]] const TileRegisters<X> registers;
      const int64_t b = task / p_.G, g = task % p_.G;
      const HeadRows<T> keys(p_.k, b, g);
      pack_transposed(keys_transposed_.mine(), keys, p_);
      pack_transposed(values_transposed_.mine(), HeadRows<T>(p_.v, b, g), p_);
      pack(keys_.mine(), keys, p_);
      std::fill_n(dkeys_.mine(), p_.padded_K * width_, A{0});
      std::fill_n(dvalues_.mine(), p_.padded_K * width_, A{0});
      for (int64_t n = g * group; n < (g + 1) * group; ++n) {
        for (int64_t first = 0; first < p_.S; first += kQueryRows<X>) {
          query_block(QueryBlock<X>(p_.mask, b, first, p_.S), b, n);
        }
      }
      leave_tiles(HeadRows<O>(g_.dk, b, g), dkeys_.mine(), scale_.of_scores);
      leave_tiles(HeadRows<O>(g_.dv, b, g), dvalues_.mine(), 1);
    });
  }

 private:
  void query_block(const QueryBlock<X>& block, int64_t b, int64_t n) const {
    const HeadRows<O> dq(g_.dq, b, n);
    if (!block.sees_any(p_.mask)) {
      leave_nothing(dq, block.first, block.first + block.rows);
      return;
    }
    X *queries = queries_.mine(), *douts = douts_.mine(), *panels = panels_.mine();
    A *scores = scores_.mine(), *dprobs = dprobs_.mine(), *dqueries = dqueries_.mine();
    X *probs = probs_.mine(scores), *dscores = dscores_.mine(dprobs);
    load_block(queries, HeadRows<T>(p_.q, b, n), block, p_.D, scale_.of_queries);
    load_block(douts, HeadRows<T>(g_.dout, b, n), block, p_.D, A{1});
    OverQueries<X>::pack(packed_queries_.mine(), queries, block, depth_);
    OverQueries<X>::pack(packed_douts_.mine(), douts, block, depth_);
    std::fill_n(dqueries, kQueryRows<X> * width_, A{0});
    for (int64_t tile = 0; tile < p_.mask.num_tiles(); ++tile) {
      const Seen<X> seen(block, p_.mask, tile);
      if (seen.any == 0) continue;
      const int64_t columns = tile * kKeyTile * depth_, rows = tile * kKeyTile * width_;
      multiply_keys(scores, queries, keys_transposed_.mine() + columns, depth_, block, seen);
      multiply_keys(dprobs, douts, values_transposed_.mine() + columns, depth_, block, seen);
      softmax_backward(probs, dscores, scores, dprobs, block, seen, tile,
                       (b * p_.N + n) * p_.S + block.first);
      add_over_keys(dqueries, dscores, keys_.mine() + rows, width_, block, seen);
      OverQueries<X>::add(dvalues_.mine() + rows, probs, panels, packed_douts_.mine(), width_,
                          block, seen);
      OverQueries<X>::add(dkeys_.mine() + rows, dscores, panels, packed_queries_.mine(), width_,
                          block, seen);
    }
    for (int64_t i = 0; i < block.rows; ++i, dqueries += width_) {
      dq.fetch_after(block.first + i);
      leave_row(dq[block.first + i], dqueries, 1, A(p_.scale));
    }
  }

  /// Makes probabilities of the scores and dscores of the dprobs, maybe in the same place; both are
  /// 0 beyond what a row's group sees. `first` is the block's first row in lse and delta.
  /// Differentiates add_tile's `exp<T>(load(scores, t) - shift)` over its sum.
  void softmax_backward(X* probs, X* dscores, A* scores, const A* dprobs,
                        const QueryBlock<X>& block, const Seen<X>& seen, int64_t tile,
                        int64_t first) const {
    for (int64_t row = 0; row < block.rows; ++row) {
      const int64_t count =
          finish_scores(scores, scale_.of_scores, row, block, seen, p_.mask, tile);
      // A row that sees nothing has lse -inf. Its probabilities are 0 = exp(-inf - inf), where
      // exp(-inf - -inf) would be NaN.
      const A saved_lse = lse_[first + row], delta = delta_[first + row];
      const A lse = saved_lse == -kInfinity<A> ? kInfinity<A> : saved_lse;
      const auto prob_and_dscore = [=](auto t) {
        const auto p = exp<T>(load(scores, t) - lse);
        return std::array{p, p * (load(dprobs, t) - delta)};
      };
      simd_map(std::array{probs, dscores}, count, prob_and_dscore);
      std::fill(probs + count, probs + kKeyTile, X{});
      std::fill(dscores + count, dscores + kKeyTile, X{});
      probs += kKeyTile, dscores += kKeyTile, scores += kKeyTile, dprobs += kKeyTile;
    }
  }

  /// row [D] = or += factor * sums, which are `column` apart.
  void leave_row(O* row, const A* sums, int64_t column, A factor) const {
    if (!g_.accumulate) {
#pragma omp simd
      for (int64_t d = 0; d < p_.D; ++d) store(row[d], factor * sums[d * column]);
      return;
    }
#pragma omp simd
    for (int64_t d = 0; d < p_.D; ++d) store(row[d], load(row[d]) + factor * sums[d * column]);
  }
  /// Rows `first` to `end` of x = or += 0.
  void leave_nothing(const HeadRows<O>& x, int64_t first, int64_t end) const {
    for (int64_t row = first; row < end && !g_.accumulate; ++row) std::fill_n(x[row], p_.D, O{});
  }
  /// All rows of x = or += factor * sums, tile after tile; of keys that nobody sees there are none.
  void leave_tiles(const HeadRows<O>& x, const A* sums, A factor) const {
    constexpr int64_t kColumn = OverQueries<X>::kOutColumn;
    for (int64_t i = 0; i < p_.K; ++i) {
      x.fetch_after(i);
      const A* tile = sums + i / kKeyTile * kKeyTile * width_;
      leave_row(x[i], tile + i % kKeyTile * (kColumn == 1 ? width_ : 1), kColumn, factor);
    }
    leave_nothing(x, p_.K, p_.k.size(1));
  }

  const Problem& p_;
  const Gradients g_;
  const A *lse_ = g_.lse.template data<A>(), *delta_ = g_.delta.template data<A>();
  const int64_t tasks_ = p_.B * p_.G;
  const Scale<X, A> scale_{p_.scale};
  const int64_t depth_ = round_up(p_.D, kTileDepth<X>);    ///< channels of a left operand
  const int64_t width_ = round_up(p_.D, kTileColumns<X>);  ///< channels in whole panels
  // Packed: [depth, padded_K] twice, [padded_K, D].
  const PerThread<X> keys_transposed_{depth_ * p_.padded_K};
  const PerThread<X> values_transposed_{depth_ * p_.padded_K};
  const PerThread<X> keys_{p_.padded_K * width_};
  // Tile after tile [kKeyTile, width], or its transpose.
  const PerThread<A> dkeys_{p_.padded_K * width_};
  const PerThread<A> dvalues_{p_.padded_K * width_};
  // [kQueryRows, depth], and what OverQueries makes of it.
  const PerThread<X> queries_{kQueryRows<X> * depth_};  ///< scaled
  const PerThread<X> douts_{kQueryRows<X> * depth_};
  const PerThread<X> packed_queries_{kQueryRows<X> * width_};
  const PerThread<X> packed_douts_{kQueryRows<X> * width_};
  // [kQueryRows, kKeyTile]
  const PerThread<A> scores_{kQueryRows<X> * kKeyTile};
  const PerThread<A> dprobs_{kQueryRows<X> * kKeyTile};
  const Weights<X, A> probs_, dscores_;
  const PerThread<X> panels_{std::is_same_v<X, A> ? 0 : kQueryRows<X> * kKeyTile};
  const PerThread<A> dqueries_{kQueryRows<X> * width_};  ///< [kQueryRows, width]
};

}  // namespace

void CpuBackend::attention_forward(Tensor out, Tensor lse, const Tensor& q, const Tensor& k,
                                   const Tensor& v, double scale, const Positions& queries,
                                   const Positions& keys, const Tensor& begins) {
  const Problem problem{q, k, v, scale, CausalMask(queries, keys, begins)};
  dispatch(q.dtype(), [&]<class T>(T) { Forward<T>(out, lse, problem).run(); });
}

void CpuBackend::attention_merge(Tensor out, Tensor lse, const Tensor& part_out,
                                 const Tensor& part_lse) {
  dispatch(out.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t S = out.size(1), N = out.size(2), D = out.size(3);
    A* log_sums = lse.data<A>();
    const A* part_log_sums = part_lse.data<A>();
    parallel_for(out.size(0) * S, 2 * N * D, [=, &out, &part_out](int64_t row) {
      const int64_t b = row / S, s = row % S;
      for (int64_t n = 0; n < N; ++n) {
        A& log_sum = log_sums[(b * N + n) * S + s];
        const A part_log_sum = part_log_sums[(b * N + n) * S + s];
        // [merge]
        const A max = cpu::max(log_sum, part_log_sum);
        const A shift = max == -kInfinity<A> ? 0 : max;  // -inf - -inf would be NaN
        A own = std::exp(log_sum - shift), other = std::exp(part_log_sum - shift);
        const A sum = own + other, inverse = sum == 0 ? 0 : 1 / sum;
        own *= inverse, other *= inverse;
        A* x = HeadRows<A>(out, b, n)[s];
        const A* y = HeadRows<A>(part_out, b, n)[s];
        simd_map(x, D, [=](auto d) { return load(x, d) * own + load(y, d) * other; });
        log_sum = max + std::log(sum);
        // [merge]
      }
    });
  });
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

// Differentiates Forward's `add_over_keys(sums, probs, values_.mine() + tile * kKeyTile * width_,
// width_, block, seen)`, and the softmax and the scores before it.
void CpuBackend::attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout,
                                    const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& lse, const Tensor& delta, double scale,
                                    const Positions& queries, const Positions& keys,
                                    bool accumulate, const Tensor& begins) {
  const Problem problem{q, k, v, scale, CausalMask(queries, keys, begins)};
  dispatch(q.dtype(), [&]<class T>(T) {
    if (dq.dtype() == dtype_of<T>) {
      Backward<T, T>({dq, dk, dv, dout, lse, delta, accumulate}, problem).run();
    } else {
      Backward<T, accumulate_t<T>>({dq, dk, dv, dout, lse, delta, accumulate}, problem).run();
    }
  });
}

}  // namespace usp::cpu
