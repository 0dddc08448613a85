#include "run/rank_classes.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

namespace usp {

std::vector<int64_t> trait_values(const std::vector<RankTrait>& traits, const MeshPlace& at) {
  std::vector<int64_t> values;
  for (const RankTrait& trait : traits) values.push_back(trait.value(at));
  return values;
}

std::vector<RankClass> classes_of_ranks(const MeshSizes& mesh,
                                        const std::vector<RankTrait>& traits) {
  std::map<std::vector<int64_t>, RankClass> classes;  // by values of the traits
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const std::vector<int64_t> values = trait_values(traits, mesh.place_of(rank));
    RankClass& of_rank = classes[values];
    if (of_rank.ranks++ > 0) continue;
    std::vector<std::string> what;
    for (size_t i = 0; i < traits.size(); ++i) {
      std::string text = traits[i].text(values[i]);
      if (!text.empty()) what.push_back(std::move(text));
    }
    of_rank.rank = rank;
    of_rank.what = fmt::format("{}", fmt::join(what, ", "));
  }
  std::vector<RankClass> distinct;
  for (const auto& [values, of_values] : classes) distinct.push_back(of_values);
  std::ranges::sort(distinct, {}, &RankClass::rank);
  return distinct;
}

}  // namespace usp
