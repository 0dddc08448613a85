#pragma once

#include "lab/masks.h"
#include "technique/case_cover.h"

namespace usp::lab {

/// A mask that is drawn, with its heads and lengths.
struct DrawnMask {
  Shape shape;  ///< without its begins
  std::vector<int32_t> begins{};

  /// The shape, which holds as long as the mask does.
  Shape whole() const {
    Shape x = shape;
    if (!begins.empty()) x.begins = begins.data();
    return x;
  }
};

/// Masks among which any two values of these occur together: widths of heads; how many share keys;
/// no mask, a causal one, documents; one range of positions, or two as zig-zag has them with the
/// keys of the same rank, of another, or of all; lengths; keys that begin behind the first queries,
/// which see none; one sample or two. Lengths are multiples of a piece, of which `pieces` has some.
inline std::vector<DrawnMask> drawn_masks(const std::vector<int>& widths,
                                          const std::vector<int>& pieces) {
  using attention::Ranges;
  enum Axis { width, heads, mask, ranges, piece, late, samples };
  enum Mask { full, causal, documents };
  enum Keys { one_range, own, before, behind, all };
  constexpr std::pair<int, int> kHeads[] = {{1, 1}, {2, 1}, {3, 3}, {4, 2}};
  const auto has_meaning = [](const test::Point& p) {
    return p[mask] != full || (p[ranges] == one_range && p[late] == 0);
  };
  std::vector<DrawnMask> drawn;
  for (const test::Point& p :
       test::cover_pairs({widths.size(), std::size(kHeads), 3, 5, pieces.size(), 2, 2},
                         /*random=*/0, has_meaning)) {
    const int n = pieces[p[piece]], rows = 2 * n;
    const auto [query_heads, kv_heads] = kHeads[p[heads]];
    DrawnMask one{{static_cast<int>(p[samples]) + 1, rows, rows, query_heads, kv_heads,
                   widths[p[width]], p[mask] != full}};
    Shape& x = one.shape;
    const Ranges outer{0, n, 5 * n}, inner{n, n, 4 * n};
    if (p[ranges] == one_range) x.keys = rows + n;  // queries see none of the last ones
    if (p[ranges] == own) x.query_at = x.key_at = outer;
    if (p[ranges] == before) x.query_at = inner, x.key_at = outer;
    if (p[ranges] == behind) x.query_at = outer, x.key_at = inner;
    if (p[ranges] == all) x.query_at = {3 * n}, x.keys = 6 * n;
    if (p[late] == 1) {
      x.key_at.begin += n / 2 + 1;
      x.key_at.second += n / 2 + 1;
    }
    if (p[mask] == documents) {
      one.begins = begins_of(x, {0, n / 3, n - 1, n + 5, n + 6, 4 * n + n / 2});
    }
    drawn.push_back(std::move(one));
  }
  return drawn;
}

/// The same for one query of each head whose keys may be split, which stands at the last key, at
/// one in the middle, or before all.
inline std::vector<DrawnMask> drawn_decodings() {
  enum Axis { width, heads, mask, keys, splits, position };
  enum Mask { full, causal, documents };
  constexpr int kWidths[] = {64, 128}, kKeys[] = {1, 33, 190, 299}, kSplits[] = {1, 3, 8};
  constexpr std::pair<int, int> kHeads[] = {{1, 1}, {4, 2}, {3, 3}, {20, 1}};
  const auto has_meaning = [](const test::Point& p) { return p[mask] != full || p[position] == 0; };
  std::vector<DrawnMask> drawn;
  for (const test::Point& p : test::cover_pairs({2, 4, 3, 4, 3, 3}, /*random=*/0, has_meaning)) {
    const int count = kKeys[p[keys]];
    const auto [query_heads, kv_heads] = kHeads[p[heads]];
    DrawnMask one{{2, 1, count, query_heads, kv_heads, kWidths[p[width]], p[mask] != full}};
    one.shape.splits = kSplits[p[splits]];
    one.shape.query_at = {p[position] == 0 ? count - 1 : p[position] == 1 ? count / 2 : -1};
    if (p[mask] == documents) one.begins = begins_of(one.shape, {0, count / 3, count / 3 + 5});
    drawn.push_back(std::move(one));
  }
  return drawn;
}

/// The masks whose turn it is; each rung has others, and in kTurns turns it has all.
inline std::vector<DrawnMask> masks_in_turn(std::vector<DrawnMask> masks, size_t rung) {
  if (test::is_full()) return masks;
  return test::in_turn(std::move(masks), /*always=*/0, test::turn() + rung);
}

}  // namespace usp::lab
