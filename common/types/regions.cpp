#include "types/regions.h"

#include <algorithm>

namespace usp::types {

namespace {

/// Where a tensor lies in its storage: elements, or columns of rows of `period` elements.
struct Columns : Part {
  int64_t period;
};

Columns columns_of(const Tensor& t, int64_t offset) {
  if (t.contiguous()) return {{offset, offset + t.numel()}, 0};
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride, size
  for (int axis = 0; axis < t.rank(); ++axis) {
    if (t.size(axis) > 1) axes.emplace_back(t.stride(axis), t.size(axis));
  }
  std::ranges::sort(axes);
  int64_t chunk = 1;
  for (const auto& [stride, size] : axes) {
    if (stride != chunk) return {{offset % stride, offset % stride + chunk}, stride};
    chunk *= size;
  }
  return {{offset, offset + chunk}, 0};
}

/// A part that nothing has written.
Region untouched(Part part) { return {part, all_of(Kind::unwritten), ""}; }

/// All regions become one, of rows of `period` columns.
void collapse(std::vector<Region>& regions, int64_t period) {
  const auto written = std::ranges::find_if(regions, &Region::is_written);
  Region all = written == regions.end() ? regions.front() : *written;
  for (const Region& region : regions) {
    for (int f = 0; f < kFactors; ++f) {
      const Kind both = beside(all.type[f], region.type[f]);
      all.type[f] = both == kRefused ? Kind::unknown : both;
    }
    all.reading = std::max(all.reading, region.reading);
    all.arriving = std::max(all.arriving, region.arriving);
  }
  all.begin = 0;
  all.end = period;
  regions = {all};
}

/// Cuts regions so that none crosses `at`; the number of the first behind it.
size_t cut_at(std::vector<Region>& regions, int64_t at) {
  const auto found = std::ranges::partition_point(regions, [=](auto& r) { return r.end <= at; });
  const size_t number = found - regions.begin();
  if (found == regions.end() || found->begin >= at) return number;
  Region tail = *found;
  found->end = tail.begin = at;
  regions.insert(regions.begin() + number + 1, tail);
  return number + 1;
}

bool is_alike(const Region& a, const Region& b) {
  return a.type == b.type && a.parameter == b.parameter && a.reading == b.reading &&
         a.arriving == b.arriving && a.is_gathered == b.is_gathered && a.origin == b.origin &&
         a.is_unread_gradient == b.is_unread_gradient && a.block == b.block && a.link == b.link;
}

}  // namespace

void* Regions::place(int64_t bytes) {
  storages_.push_back({next_, {untouched(kWhole)}});
  const uintptr_t begin = next_;
  next_ += (uintptr_t(bytes) + 127) / 64 * 64;  // none begins where another one ends
  return reinterpret_cast<void*>(begin);        // NOLINT: never read from
}

Regions::Storage& Regions::storage(const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.address());  // NOLINT
  const auto is_behind = [&](size_t at) {
    return at >= storages_.size() || address < storages_[at].begin;
  };
  if (is_behind(last_) || !is_behind(last_ + 1)) {
    const auto next =
        std::ranges::upper_bound(storages_, address, {}, [](const Storage& s) { return s.begin; });
    USP_CHECK(next != storages_.begin(), "a tensor was made before its types were asked for");
    last_ = next - storages_.begin() - 1;
  }
  return storages_[last_];
}

int64_t Regions::offset(const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.address());  // NOLINT
  return int64_t(address - storage(tensor).begin) / bytes_of(tensor.dtype());
}

Part Regions::locate(const Tensor& tensor) {
  Storage& of = storage(tensor);
  const Columns c = columns_of(tensor, offset(tensor));
  if (of.is_new()) of.period = c.period;
  if (c.period == of.period) return c;
  if (c.period == 0 || (of.period > 0 && c.period % of.period == 0)) {
    // Of rows of columns: whole ones, or a part of each.
    const int64_t begin = c.begin % of.period, end = begin + c.size();
    return end > of.period ? Part{0, of.period} : Part{begin, end};
  }
  collapse(of.regions, c.period);
  of.period = c.period;
  return c;
}

std::vector<Region> Regions::of(const Tensor& tensor, Part part) {
  std::vector<Region> result;
  if (!tensor.defined() || tensor.numel() == 0) return result;
  const Part all = locate(tensor), range = (part + all.begin).within(all);
  const std::vector<Region>& regions = storage(tensor).regions;
  auto i = std::ranges::partition_point(regions, [&](auto& r) { return r.end <= range.begin; });
  for (; i != regions.end() && i->begin < range.end; ++i) {
    Part& shown = result.emplace_back(*i);
    shown = shown.within(range) + -all.begin;
  }
  return result;
}

std::span<Region> Regions::cut_out(const Tensor& tensor, Part part) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  const Part all = locate(tensor), range = (part + all.begin).within(all);
  if (range.empty()) return {};
  std::vector<Region>& regions = storage(tensor).regions;
  const size_t first = cut_at(regions, range.begin), last = cut_at(regions, range.end);
  return std::span(regions).subspan(first, last - first);
}

void Regions::join_alike(const Tensor& tensor, std::span<const Region> changed) {
  // What is written in parts is one region in the end, or all who read it see hundreds.
  std::vector<Region>& all = storage(tensor).regions;
  size_t kept = changed.data() - all.data();
  const size_t end = kept + changed.size();
  if (kept > 0) --kept;
  const size_t begin = kept + 1;
  for (size_t i = begin; i < end; ++i) {
    if (all[kept].end == all[i].begin && is_alike(all[kept], all[i])) {
      all[kept].end = all[i].end;
    } else if (++kept < i) {
      all[kept] = all[i];
    }
  }
  if (kept + 1 < end) all.erase(all.begin() + int64_t(kept + 1), all.begin() + int64_t(end));
}

std::optional<Region> Regions::unread_gradient() const {
  for (const Storage& storage : storages_) {
    const auto found = std::ranges::find_if(storage.regions, &Region::is_unread_gradient);
    if (found != storage.regions.end()) return *found;
  }
  return {};
}

void Regions::divide_into_columns(const Tensor& tensor, int64_t columns) {
  Storage& of = storage(tensor);
  const Columns c = columns_of(tensor, offset(tensor));
  if (!of.is_new() || c.size() % columns != 0 || c.begin % columns != 0 || c.period % columns != 0)
    return;
  of.period = columns;
  of.regions = {untouched({0, columns})};
}

}  // namespace usp::types
