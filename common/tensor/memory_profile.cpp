#include "tensor/memory_profile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <tuple>

namespace usp {

namespace {

constexpr std::array<std::string_view, 4> kPhases = {"train_step", "forward", "backward",
                                                     "optimizer"};

}  // namespace

std::string by_category(const std::function<int64_t(Category)>& bytes) {
  std::vector<std::string> entries;
  for (int i = 0; i < kNumCategories; ++i) {
    const auto category = static_cast<Category>(i);
    entries.push_back(fmt::format("\"{}\": {}", name(category), bytes(category)));
  }
  return fmt::format("{}", fmt::join(entries, ", "));
}

std::vector<LiveBytes> saved_activations(const Allocator& allocator, const Tracer& tracer) {
  const Tracer::Span* forward = nullptr;
  for (const Tracer::Span& span : tracer.spans()) {
    if (span.name != "forward" || span.step < 0) continue;
    if (forward == nullptr || span.step > forward->step ||
        (span.step == forward->step && span.begin_ns < forward->begin_ns)) {
      forward = &span;
    }
  }
  std::vector<LiveBytes> saved;
  if (forward == nullptr) return saved;
  for (const Allocator::Event& event : allocator.events()) {
    if (event.nanoseconds > forward->end_ns) break;
    if (event.tag.category != Category::activations) continue;
    const auto entry = std::ranges::find_if(saved, [&](const LiveBytes& live) {
      return live.block == event.tag.block && live.name == event.tag.name;
    });
    if (entry == saved.end()) {
      saved.push_back({event.tag.block, event.tag.name, event.bytes});
    } else {
      entry->bytes += event.bytes;
    }
  }
  std::erase_if(saved, [](const LiveBytes& live) { return live.bytes == 0; });
  std::ranges::stable_sort(saved, {}, &LiveBytes::block);
  return saved;
}

std::vector<LiveBytes> peaks_by_name(const Allocator& allocator, Category category) {
  std::vector<LiveBytes> live, peaks;
  for (const Allocator::Event& event : allocator.events()) {
    if (event.tag.category != category || event.tag.name.empty()) continue;
    const auto at = std::ranges::find(live, event.tag.name, &LiveBytes::name) - live.begin();
    if (at == std::ssize(live)) {
      live.push_back({-1, event.tag.name, 0});
      peaks.push_back(live.back());
    }
    live[at].bytes += event.bytes;
    peaks[at].bytes = std::max(peaks[at].bytes, live[at].bytes);
  }
  return peaks;
}

std::string memory_json(const Allocator& allocator, const Tracer& tracer) {
  std::vector<std::string> phases, events;
  for (const Tracer::Span& span : tracer.spans()) {
    if (std::ranges::find(kPhases, span.name) == kPhases.end()) continue;
    phases.push_back(
        fmt::format("[{}, {}, \"{}\", {}]", span.begin_ns, span.end_ns, span.name, span.step));
  }
  std::vector<std::string_view> names;
  for (const Allocator::Event& event : allocator.events()) {
    const auto found = std::ranges::find(names, event.tag.name);
    const auto index = found - names.begin();
    if (found == names.end()) names.push_back(event.tag.name);
    events.push_back(fmt::format("[{}, {}, \"{}\", {}, {}]", event.nanoseconds, event.bytes,
                                 name(event.tag.category), event.tag.block, index));
  }
  std::vector<std::string> quoted;
  for (std::string_view name : names) quoted.push_back(fmt::format("\"{}\"", name));
  return fmt::format(
      "{{\"peak_bytes\": {{{}}}, \"peak_total_bytes\": {},\n\"reserved_bytes\": {}, "
      "\"reserved_workspace_bytes\": {}, \"system_allocations\": {},\n"
      "\"initial_bytes\": {{{}}},\n\"names\": [{}],\n\"phases\": [\n{}],\n\"events\": [\n{}]}}\n",
      by_category([&](Category c) { return allocator.peak_bytes(c); }), allocator.peak_bytes(),
      allocator.reserved_bytes(), allocator.reserved_workspace_bytes(),
      allocator.system_allocations(),
      by_category([&](Category c) { return allocator.initial_bytes(c); }), fmt::join(quoted, ", "),
      fmt::join(phases, ",\n"), fmt::join(events, ",\n"));
}

}  // namespace usp
