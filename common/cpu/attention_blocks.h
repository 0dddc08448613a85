#pragma once

#include <algorithm>
#include <array>

#include "cpu/causal_mask.h"
#include "cpu/microkernel.h"

/// The matrix products of blockwise attention, of a block of queries and a tile of keys. Each is
/// made of multiply_tile(), whose right operand is packed in panels. Queries are taken in groups of
/// kTileRows, and of each tile a group computes the keys up to the last one that it sees.
///
/// Operands are of type X: f32 or f64, or bf16 where the CPU multiplies it. Results are of type A.
namespace usp::cpu {

/// Queries of a block: 8 groups of 6, or 2 of 32.
template <class X>
inline constexpr int64_t kQueryRows = round_up(48, kTileRows<X>);
template <class X>
inline constexpr int64_t kGroups = kQueryRows<X> / kTileRows<X>;

/// The rows of one head of a [B, rows, heads, D] tensor.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride;

  HeadRows(const Tensor& x, int64_t sample, int64_t head) : data(x.data<T>()), stride(x.stride(1)) {
    if (x.numel() > 0) data += sample * x.stride(0) + head * x.stride(2);
  }
  T* operator[](int64_t row) const { return data + row * stride; }
  /// Asks for the row that will be wanted soon after this one; it need not exist. A head's rows lie
  /// too far apart for the hardware to guess.
  void fetch_after(int64_t row) const {
    constexpr int64_t kAhead = 8;
    prefetch((*this)[row + kAhead]);
  }
};

/// Operands and sizes of one call, and who sees whom.
struct Problem {
  const Tensor &q, &k, &v;
  double scale;
  CausalMask mask;
  int64_t B = q.size(0), S = q.size(1), N = q.size(2), D = q.size(3);
  int64_t G = k.size(2);
  /// Keys up to the last one that any query may see, in whole tiles: nothing is done with others.
  int64_t padded_K = mask.num_seen({0, mask.last_query()});
  int64_t K = std::min(k.size(1), padded_K);
};

/// Up to kQueryRows consecutive queries of a sample.
template <class X>
struct QueryBlock {
  int64_t sample, first, rows, groups;
  std::array<Window, kGroups<X>> all{}, any{};  ///< what all of a group see, and what any may see

  QueryBlock(const CausalMask& mask, int64_t sample, int64_t first, int64_t num_queries)
      : sample(sample),
        first(first),
        rows(std::min(kQueryRows<X>, num_queries - first)),
        groups(round_up(rows, kTileRows<X>) / kTileRows<X>) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * kTileRows<X>, end = std::min(begin + kTileRows<X>, rows);
      all[g] = any[g] = mask.window(sample, first + begin);
      for (int64_t row = begin + 1; row < end; ++row) {
        const auto [from, to] = mask.window(sample, first + row);
        all[g] = {std::max(all[g].from, from), std::min(all[g].to, to)};
        any[g] = {std::min(any[g].from, from), std::max(any[g].to, to)};
      }
    }
  }

  /// Whether there is a key that one of them may see.
  bool sees_any(const CausalMask& mask) const {
    for (int64_t tile = 0; tile < mask.num_tiles(); ++tile) {
      for (int64_t g = 0; g < groups; ++g) {
        if (mask.num_seen(any[g], tile) > 0) return true;
      }
    }
    return false;
  }
};

/// How many keys of a tile each group of a block has to look at.
template <class X>
struct Seen {
  std::array<int64_t, kGroups<X>> keys{};
  int64_t any = 0;  ///< the largest of them

  Seen(const QueryBlock<X>& block, const CausalMask& mask, int64_t tile) {
    for (int64_t g = 0; g < block.groups; ++g) {
      keys[g] = mask.num_seen(block.any[g], tile);
      any = std::max(any, keys[g]);
    }
  }
};

/// to [D] = factor * row, rounded.
template <class X, class T>
void load_row(X* to, const T* row, int64_t D, accumulate_t<T> factor) {
  if constexpr (std::is_same_v<X, T>) {
    if (factor == 1) {
      std::copy_n(row, D, to);
      return;
    }
  }
#pragma omp simd
  for (int64_t d = 0; d < D; ++d) store(to[d], factor * load(row[d]));
}

/// to [kQueryRows, depth] = factor * the block's rows of x. What only fills up a group or the depth
/// is 0.
template <class X, class T>
void load_block(X* to, const HeadRows<T>& x, const QueryBlock<X>& block, int64_t D,
                accumulate_t<T> factor) {
  const int64_t padding = round_up(D, kTileDepth<X>) - D;
  for (int64_t i = 0; i < block.rows; ++i, to += D) {
    x.fetch_after(block.first + i);
    load_row(to, x[block.first + i], D, factor);
    std::fill_n(to + D, padding, X{});
    to += padding;
  }
  std::fill_n(to, (block.groups * kTileRows<X> - block.rows) * (D + padding), X{});
}

/// Packs all keys (or values), tile after tile, as a right operand [depth, padded_K].
template <class X, class T>
void pack_transposed(X* to, const HeadRows<T>& x, const Problem& p) {
  const int64_t depth = round_up(p.D, kTileDepth<X>);
  for (int64_t first = 0; first < p.K; first += kKeyTile, to += depth * kKeyTile) {
    pack_panels(to, x[first], 1, x.stride, p.D, std::min(kKeyTile, p.K - first), depth);
  }
}

/// Packs all keys (or values), tile after tile, as a right operand [padded_K, D].
template <class X, class T>
void pack(X* to, const HeadRows<T>& x, const Problem& p) {
  const int64_t tile_size = kKeyTile * round_up(p.D, kTileColumns<X>);
  for (int64_t first = 0; first < p.K; first += kKeyTile, to += tile_size) {
    pack_panels(to, x[first], x.stride, 1, std::min(kKeyTile, p.K - first), p.D, kKeyTile);
  }
}

/// scores [kQueryRows, kKeyTile] = queries [kQueryRows, depth] keys [depth, kKeyTile]
template <class A, class X>
void multiply_keys(A* scores, const X* queries, const X* keys, int64_t depth,
                   const QueryBlock<X>& block, const Seen<X>& seen) {
  for (int64_t t = 0; t < seen.any; t += kTileColumns<X>) {
    for (int64_t g = 0; g < block.groups; ++g) {
      if (t >= seen.keys[g]) continue;
      multiply_tile(depth, queries + g * kTileRows<X> * depth, depth, keys + t * depth,
                    scores + g * kTileRows<X> * kKeyTile + t, kKeyTile, /*accumulate=*/false);
    }
  }
}

/// out [kQueryRows, width] += weights [kQueryRows, kKeyTile] values [kKeyTile, width]
template <class A, class X>
void add_over_keys(A* out, const X* weights, const X* values, int64_t width,
                   const QueryBlock<X>& block, const Seen<X>& seen) {
  for (int64_t d = 0; d < width; d += kTileColumns<X>) {
    for (int64_t g = 0; g < block.groups; ++g) {
      multiply_tile(round_up(seen.keys[g], kTileDepth<X>), weights + g * kTileRows<X> * kKeyTile,
                    kKeyTile, values + d * kKeyTile, out + g * kTileRows<X> * width + d, width,
                    /*accumulate=*/true);
    }
  }
}

/// The product over queries: out [kKeyTile, width] += weightsᵀ [kKeyTile, kQueryRows]
/// values [kQueryRows, width].
template <class A>
struct OverQueries {
  static constexpr int64_t kOutColumn = 1;  ///< from one column of out to the next

  /// to = the right operand for add(), of rows [kQueryRows, D].
  static void pack(A* to, const A* rows, const QueryBlock<A>& block, int64_t D) {
    pack_panels(to, rows, D, 1, block.rows, D, kQueryRows<A>);
  }
  static void add(A* out, const A* weights, A* /*panels*/, const A* values, int64_t width,
                  const QueryBlock<A>& block, const Seen<A>& seen) {
    for (int64_t t = 0; t < seen.any; t += kTileRows<A>) {
      int64_t row = 0;  // the first that may see one of these keys
      for (int64_t g = 0; seen.keys[g] <= t; ++g) row += kTileRows<A>;
      for (int64_t d = 0; d < width; d += kTileColumns<A>) {
        multiply_tile(block.rows - row, weights + row * kKeyTile + t, 1,
                      values + d * kQueryRows<A> + row * kTileColumns<A>, out + t * width + d,
                      width, /*accumulate=*/true, kKeyTile);
      }
    }
  }
};

/// The same, transposed: outᵀ [width, kKeyTile] += valuesᵀ [width, kQueryRows] weights [kQueryRows,
/// kKeyTile]. The pairs are of queries here. Weights on the right only have their rows zipped; on
/// the left they would have to be transposed, tile by tile. So the values are, once per block, and
/// outᵀ is, once per head.
template <>
struct OverQueries<bf16> {
  static constexpr int64_t kOutColumn = kKeyTile;

  /// to [depth, kQueryRows] = the transpose of rows [kQueryRows, depth]: the left operand for
  /// add().
  static void pack(bf16* to, const bf16* rows, const QueryBlock<bf16>& block, int64_t depth) {
    for (int64_t i = 0; i < block.groups * kTileRows<bf16>; i += 2, rows += 2 * depth) {
      for (int64_t d = 0; d < depth; ++d) {
        Pair* row = reinterpret_cast<Pair*>(to + d * kQueryRows<bf16>);
        row[i / 2] = pair_of(rows[d], rows[depth + d]);
      }
    }
  }
  static void add(float* out, const bf16* weights, bf16* panels, const bf16* values, int64_t width,
                  const QueryBlock<bf16>& block, const Seen<bf16>& seen) {
    const int64_t columns = round_up(seen.any, kTileColumns<bf16>);
    pack_panels(panels, weights, kKeyTile, 1, block.rows, columns, kQueryRows<bf16>);
    for (int64_t t = 0; t < columns; t += kTileColumns<bf16>) {
      int64_t row = 0;  // the first that may see one of these keys
      for (int64_t g = 0; seen.keys[g] <= t; ++g) row += kTileRows<bf16>;
      for (int64_t d = 0; d < width; d += kTileRows<bf16>) {
        multiply_tile(block.groups * kTileRows<bf16> - row, values + d * kQueryRows<bf16> + row,
                      kQueryRows<bf16>, panels + t * kQueryRows<bf16> + row * kTileColumns<bf16>,
                      out + d * kKeyTile + t, kKeyTile, /*accumulate=*/true);
      }
    }
  }
};

/// Multiplies the scores of the block's query `row` by `scale` and gives keys of the tile that it
/// does not see the score -inf. Returns how many scores, in whole panels, there are to look at.
template <class A, class X>
int64_t finish_scores(A* scores, A scale, int64_t row, const QueryBlock<X>& block,
                      const Seen<X>& seen, const CausalMask& mask, int64_t tile) {
  const int64_t group = row / kTileRows<X>, count = round_up(seen.keys[group], kTileColumns<X>);
  if (scale != 1) simd_map(scores, count, [=](auto t) { return load(scores, t) * scale; });
  if (mask.sees_all(block.all[group], tile)) return count;
  const Window window = mask.window(block.sample, block.first + row);
  const int32_t* keys = mask.keys() + tile * kKeyTile;
  simd_map(scores, count, [=](auto t) { return hide_unseen(load(scores, t), keys, t, window); });
  return count;
}

}  // namespace usp::cpu
