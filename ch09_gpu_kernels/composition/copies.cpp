#include "composition/copies.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <set>
#include <sstream>

#include "tensor/runtime.h"

namespace usp {

namespace {

/// The same on two ranks where they update the same elements.
std::string identity_of(const Parameter& parameter) {
  std::string text = parameter.name;
  for (const Slice& slice : parameter.slices) {
    text += fmt::format(" {}:{}+{}", slice.axis, slice.offset, slice.length);
  }
  return fmt::format("{} {}-{}", text, parameter.shard.begin, parameter.shard.end);
}

/// Sets of ranks as few partitions of the world: sets that share no rank are in the same one.
std::vector<std::vector<int>> partitions_of(const std::set<std::vector<int>>& sets, int ranks) {
  std::vector<std::vector<int>> partitions;  // of each rank, the first of its set; -1: alone
  for (const std::vector<int>& set : sets) {
    const auto is_free = [&](const std::vector<int>& partition) {
      return std::ranges::all_of(set, [&](int rank) { return partition[rank] < 0; });
    };
    auto found = std::ranges::find_if(partitions, is_free);
    if (found == partitions.end()) found = partitions.insert(found, std::vector<int>(ranks, -1));
    for (int rank : set) (*found)[rank] = set.front();
  }
  return partitions;
}

}  // namespace

uint64_t digest_of(const Tensor& tensor, uint64_t seed) {
  constexpr uint64_t kFactor = 0xd6e8feb86659fd93;
  const auto mix = [](uint64_t word) {  // one to one, as every step here: no word's change is lost
    word *= kFactor;
    return word ^ word >> 32;
  };
  std::array<uint64_t, 8> lanes, words;  // a lane's product does not wait for its neighbor's
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = mix(seed + (i + 1) * kFactor);
  const Tensor host = tensor.to_host().to_contiguous();
  const auto* bytes = static_cast<const char*>(host.address());
  for (int64_t begin = 0; begin < host.bytes(); begin += sizeof(words)) {
    const int64_t rest = host.bytes() - begin;
    if (rest < int64_t{sizeof(words)}) words = {};
    std::memcpy(words.data(), bytes + begin, std::min<int64_t>(sizeof(words), rest));
    for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = mix(lanes[i] ^ words[i]);
  }
  uint64_t digest = seed;
  for (uint64_t lane : lanes) digest = mix(mix(digest ^ lane));
  return digest;
}

Copies::Copies(int64_t every, const Mesh& mesh, ParameterList& parameters,
               const std::vector<Parameter*>& buffers)
    : every_(mesh.world().engine().dry() ? 0 : every), world_(mesh.world()) {
  if (every_ == 0) return;
  for (size_t i = 0; i < parameters.size(); ++i) own_.push_back(&parameters[i]);
  own_.insert(own_.end(), buffers.begin(), buffers.end());
  std::erase_if(own_, [](const Parameter* parameter) { return parameter->shard.numel() == 0; });
  find_copies();
}

void Copies::find_copies() {
  // [sets]
  std::string text;
  for (const Parameter* parameter : own_) text += identity_of(*parameter) + '\n';
  std::map<std::string, std::vector<int>> holders;  // of the same elements
  const std::vector<std::string> texts = world_.all_gather_text(text);
  for (int rank = 0; rank < world_.size(); ++rank) {
    std::istringstream lines(texts[rank]);
    for (std::string line; std::getline(lines, line);) holders[line].push_back(rank);
  }
  std::set<std::vector<int>> sets;
  for (const auto& [identity, ranks] : holders) {
    if (ranks.size() > 1) sets.insert(ranks);
  }
  // [sets]
  for (const std::vector<int>& partition : partitions_of(sets, world_.size())) {
    Held held = held_by(partition, holders);
    if (held.members.size() > 1) held_.push_back(std::move(held));
  }
}

Copies::Held Copies::held_by(const std::vector<int>& partition,
                             const std::map<std::string, std::vector<int>>& holders) const {
  const auto colour_of = [&](int rank) {
    return partition[rank] < 0 ? world_.size() + rank : partition[rank];
  };
  Held held{world_.split("copies", colour_of), {}, {}};
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (colour_of(rank) == colour_of(world_.rank())) held.members.push_back(rank);
  }
  for (size_t i = 0; i < own_.size(); ++i) {
    if (holders.at(identity_of(*own_[i])) == held.members) held.parameters.push_back(i);
  }
  // Mirrored stages have built their blocks in another order.
  std::ranges::sort(held.parameters, {}, [&](size_t i) { return identity_of(*own_[i]); });
  return held;
}

namespace {

/// Digest of each parameter's elements here: the weight and what the optimizer keeps of them.
std::vector<uint64_t> digests_of(const std::vector<const Parameter*>& own,
                                 const TrainState& state) {
  std::map<const Parameter*, int64_t> begins;  // in the optimizer's states, which lie side by side
  int64_t end = 0;
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    begins[&state.parameters[i]] = end;
    end += state.parameters[i].shard.numel();
  }
  std::vector<uint64_t> digests;
  for (const Parameter* parameter : own) {
    const Shard& shard = parameter->shard;
    uint64_t digest = digest_of(shard.value);
    if (shard.master.dtype() != shard.value.dtype()) digest = digest_of(shard.master, digest);
    const auto begin = begins.find(parameter);
    for (const OptimizerState& of_all : state.optimizer) {
      if (begin == begins.end()) continue;  // a buffer
      digest = digest_of(of_all.values.narrow(0, begin->second, shard.numel()), digest);
    }
    digests.push_back(digest);
  }
  return digests;
}

}  // namespace

std::optional<Copies::Difference> Copies::compare(const Held& held,
                                                  const std::vector<uint64_t>& digests) const {
  const size_t count = held.parameters.size(), ranks = held.members.size();
  // [digests]
  std::vector<int32_t> words;  // two to a digest
  for (size_t parameter : held.parameters) {
    const auto halves = std::bit_cast<std::array<int32_t, 2>>(digests[parameter]);
    words.insert(words.end(), halves.begin(), halves.end());
  }
  const HostScope on_host;
  const CategoryScope scope(Category::communication);
  const Tensor all = Tensor::empty({int64_t(2 * ranks * count)}, DType::i32);
  held.ranks.all_gather(all, Tensor::from_host(words, {int64_t(2 * count)}));
  // [digests]
  const auto* of_all = all.data<int32_t>();
  std::optional<Difference> first;
  for (size_t p = 0; p < count; ++p) {
    std::vector<int> as_first, other;
    for (size_t r = 0; r < ranks; ++r) {
      const auto* of_rank = of_all + 2 * (r * count + p);
      const bool equal = std::equal(of_rank, of_rank + 2, of_all + 2 * p);
      (equal ? as_first : other).push_back(held.members[r]);
    }
    const size_t number = held.parameters[p];
    if (other.empty() || (first && first->parameter < number)) continue;
    const Parameter& parameter = *own_[number];
    first = Difference{
        number, fmt::format("{}: ranks {} hold other values than ranks {} of the same {} "
                            "elements",
                            parameter.name, fmt::join(other, ", "), fmt::join(as_first, ", "),
                            parameter.shard.numel())};
  }
  return first;
}

void Copies::after_step(int64_t step, const std::function<TrainState()>& state) {
  if (every_ == 0 || (step + 1) % every_ != 0) return;
  const std::vector<uint64_t> digests = digests_of(own_, state());
  std::optional<Difference> first;
  for (const Held& held : held_) {
    const std::optional<Difference> found = compare(held, digests);
    if (found && (!first || found->parameter < first->parameter)) first = found;
  }
  if (!world_.any(first.has_value())) return;
  for (const std::string& text : world_.all_gather_text(first ? first->text : "")) {
    if (text.empty()) continue;
    if (world_.rank() == 0) fail("after step {}, {}", step + 1, text);
    throw PeerFailed(text);
  }
}

}  // namespace usp
