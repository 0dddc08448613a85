#include "train/checkpoint_state.h"

#include <algorithm>
#include <map>

#include "base/json_reader.h"

namespace usp {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

namespace {

/// Which part of the whole weight a file holds.
OrderedJson layout_of(const Parameter& parameter) {
  OrderedJson slices = OrderedJson::array();
  for (const Slice& slice : parameter.slices) {
    slices.push_back({slice.axis, slice.offset, slice.length});
  }
  const Shape& shape = parameter.global_shape;
  return {{"global_shape", std::vector<int64_t>(shape.begin(), shape.end())},
          {"slices", slices},
          {"range", {parameter.shard.begin, parameter.shard.end}}};
}

std::vector<int64_t> stored_shape(const Parameter& parameter) {
  const Shape local = parameter.local_shape();
  if (parameter.shard.numel() != local.numel()) return {parameter.shard.numel()};
  return {local.begin(), local.end()};
}

/// Elements of a shard that lie side by side in the whole weight too.
struct Run {
  int64_t global;  ///< row-major index of the first in the whole weight
  int64_t local;   ///< its position in the shard
  int64_t length;
};

/// The elements of a shard in their order, which is also that of the whole weight.
std::vector<Run> runs_of(const Parameter& parameter) {
  const Shape local = parameter.local_shape();
  int64_t length = 1;  // of the longest runs: up to the last axis that is cut
  for (int axis = local.rank() - 1; axis >= 0; --axis) {
    length *= local[axis];
    if (local[axis] != parameter.global_shape[axis]) break;
  }
  const auto [begin, end] = std::pair(parameter.shard.begin, parameter.shard.end);
  std::vector<Run> runs;
  for (int64_t at = begin; at < end; at += runs.back().length) {
    const int64_t next = std::min(end, (at / length + 1) * length);
    runs.push_back({parameter.global_index(at, local), at - begin, next - at});
  }
  return runs;
}

/// The reverse of layout_of(), without tensors.
Parameter shard_of(const nlohmann::json& layout, const Shape& global_shape) {
  Parameter parameter;
  parameter.global_shape = global_shape;
  for (const nlohmann::json& slice : layout.at("slices")) {
    parameter.slices.push_back({slice.at(0), slice.at(1), slice.at(2)});
    const int axis = parameter.slices.back().axis;
    USP_CHECK(axis >= 0 && axis < global_shape.rank(), "a slice of axis {} of {}", axis,
              global_shape.to_string());
  }
  parameter.shard.begin = layout.at("range").at(0);
  parameter.shard.end = layout.at("range").at(1);
  return parameter;
}

}  // namespace

void each_stored(
    const TrainState& state,
    const std::function<void(const Parameter&, const std::string&, const Tensor&)>& visit) {
  int64_t offset = 0;  // of the parameter's first element in the optimizer's states
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    const Parameter& parameter = state.parameters[i];
    const Shard& shard = parameter.shard;
    if (shard.numel() == 0) continue;
    visit(parameter, parameter.name, shard.value);
    if (shard.master.address() != shard.value.address()) {
      visit(parameter, parameter.name + "/master", shard.master);
    }
    for (const OptimizerState& states : state.optimizer) {
      visit(parameter, parameter.name + "/" + states.name,
            states.values.narrow(0, offset, shard.numel()));
    }
    offset += shard.numel();
  }
  for (const Parameter* buffer : state.buffers) visit(*buffer, buffer->name, buffer->shard.value);
}

bool is_stored(const Parameter& parameter) {
  return parameter.counted && parameter.shard.numel() > 0;
}

void note_loaded(const TrainState& state) {
  for (size_t i = 0; i < state.parameters.size(); ++i) ++state.parameters[i].version;
  for (Parameter* buffer : state.buffers) ++buffer->version;
}

bool writes_any(const TrainState& state) {
  bool any = false;
  each_stored(state, [&](const Parameter& parameter, const std::string&, const Tensor&) {
    any = any || is_stored(parameter);
  });
  return any;
}

void write_state(const std::string& path, const TrainState& state) {
  OrderedJson layouts = OrderedJson::object();
  std::vector<TensorToStore> tensors;
  each_stored(state,
              [&](const Parameter& parameter, const std::string& name, const Tensor& tensor) {
                if (!is_stored(parameter)) return;
                layouts[parameter.name] = layout_of(parameter);
                tensors.push_back(to_store(name, tensor, stored_shape(parameter)));
              });
  write_safetensors(path, std::move(tensors), {{"format", "usp"}, {"parameters", layouts.dump()}});
}

StoredState::File::File(const std::string& path) : tensors(path) {
  const auto metadata = tensors.metadata().find("parameters");
  if (metadata == tensors.metadata().end()) fail("{}: no parameters in its metadata", path);
  layouts = parse_json(metadata->second, path + " (metadata)");
}

StoredState::StoredState(const fs::path& directory, const nlohmann::json& files)
    : directory_(directory) {
  for (const auto& [name, record] : files.items()) files_.emplace_back(directory / name);
}

void StoredState::check_cover(const TrainState& state) const {
  std::map<std::string, int64_t> missing;  // elements
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    missing[state.parameters[i].name] = state.parameters[i].global_shape.numel();
  }
  for (const Parameter* buffer : state.buffers) {
    missing[buffer->name] = buffer->global_shape.numel();
  }
  for (const File& file : files_) {
    for (const auto& [name, layout] : file.layouts.items()) {
      int64_t numel = 1;
      for (const int64_t size : layout.at("global_shape")) numel *= size;
      const nlohmann::json& range = layout.at("range");
      missing.emplace(name, numel).first->second -=
          range.at(1).get<int64_t>() - range.at(0).get<int64_t>();
    }
  }
  for (const auto& [name, elements] : missing) {
    USP_CHECK(elements == 0, "{}: every element of {} is to be counted by one rank; {} by {}",
              directory_.string(), name, std::abs(elements), elements > 0 ? "none" : "too many");
  }
}

void StoredState::find(const TrainState& state) {
  const Parameter* found = nullptr;
  std::vector<Transfer> of_shard;
  each_stored(state,
              [&](const Parameter& parameter, const std::string& name, const Tensor& tensor) {
                if (found != &parameter) of_shard = transfers(parameter);
                found = &parameter;
                find(name, tensor, of_shard);
              });
}

/// What the files have of a parameter, in the order of the whole weight.
std::vector<StoredState::Source> StoredState::sources_of(const Parameter& parameter) const {
  const Shape& shape = parameter.global_shape;
  const std::vector<int64_t> expected(shape.begin(), shape.end());
  std::vector<Source> sources;
  for (const File& file : files_) {
    const auto layout = file.layouts.find(parameter.name);
    if (layout == file.layouts.end()) continue;
    if (layout->at("global_shape") != expected) {
      fail("{}: {} is part of {}, needed is one of {}", file.tensors.path(), parameter.name,
           layout->at("global_shape").dump(), shape.to_string());
    }
    for (const Run& run : runs_of(shard_of(*layout, shape))) {
      sources.push_back({&file, run.global, run.local, run.length});
    }
  }
  std::ranges::sort(sources, {}, &Source::global);
  return sources;
}

// [transfers]
/// Where the elements of this rank's shard come from.
std::vector<StoredState::Transfer> StoredState::transfers(const Parameter& parameter) const {
  const std::vector<Source> sources = sources_of(parameter);
  std::vector<Transfer> transfers;
  for (const Run& needed : runs_of(parameter)) {
    for (int64_t done = 0; done < needed.length; done += transfers.back().length) {
      const int64_t at = needed.global + done, end = needed.global + needed.length;
      const auto next = std::ranges::upper_bound(sources, at, {}, &Source::global);
      const bool found = next != sources.begin() && at < (next - 1)->global + (next - 1)->length;
      if (!found) {
        fail_missing(parameter, at, next == sources.end() ? end : std::min(end, next->global));
      }
      const Source& source = *(next - 1);
      const int64_t skipped = at - source.global;
      transfers.push_back({source.file, source.local + skipped, needed.local + done,
                           std::min(end - at, source.length - skipped)});
    }
  }
  return transfers;
}
// [transfers]

void StoredState::fail_missing(const Parameter& parameter, int64_t begin, int64_t end) const {
  std::vector<std::string> names;
  for (const File& file : files_) names.push_back(fs::path(file.tensors.path()).filename());
  fail("{}: elements {} to {} of {} {} are in none of its files: {}", directory_.string(), begin,
       end - 1, parameter.name, parameter.global_shape.to_string(), fmt::join(names, ", "));
}

/// Looks up one tensor, in the files that have its elements.
void StoredState::find(const std::string& name, const Tensor& target,
                       const std::vector<Transfer>& transfers) {
  USP_CHECK(target.contiguous(), "{} is not contiguous", name);
  const ElementType type = element_type(target.dtype());
  const int64_t width = bytes_of(type);
  for (const Transfer& transfer : transfers) {
    const StoredTensor& stored = transfer.file->tensors.get(name);
    if (stored.type != type || stored.numel() < transfer.source + transfer.length) {
      fail("{}: tensor {} is {} {}, needed are elements {} to {} as {}", stored.file, name,
           usp::name(stored.type), stored.shape_text(), transfer.source,
           transfer.source + transfer.length - 1, usp::name(type));
    }
    copies_.push_back({target.view({target.numel()}).narrow(0, transfer.target, transfer.length),
                       stored.bytes.subspan(transfer.source * width, transfer.length * width)});
  }
}

void StoredState::copy() const {
  for (const Copy& copy : copies_) Tensor(copy.target).assign_bytes(copy.source);
}

}  // namespace usp
