#include "types/checker.h"

#include <algorithm>

#include "train/checkpoint_state.h"
#include "types/rules.h"

namespace usp::types {

using enum Kind;

bool is_inside(const Tensor& part, const Tensor& whole) {
  const auto* at = static_cast<const char*>(part.address());
  const auto* begin = static_cast<const char*>(whole.address());
  return at >= begin && at < begin + whole.bytes();
}

void Checker::declare(const ParameterList& parameters,
                      const std::map<std::string, Declared>& types) {
  parameters_.clear();
  versions_.clear();
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters_.push_back(&parameters[i]);
    versions_.push_back(parameters[i].version);
    declared_.emplace(&parameters[i], types.at(parameters[i].name));
  }
  all_have_stage_copies_ = setting_.mesh.pp > 1;
  const auto is_sharded = [&](const Parameter& parameter) {  // with others of its group
    return std::ranges::any_of(parameters_, [&](const Parameter* other) {
      return other->grad_groups.front() == parameter.grad_groups.front() &&
             other->shard.numel() != other->local_shape().numel();
    });
  };
  for (const Parameter* parameter : parameters_) {
    const Type& declared = declared_.at(parameter).type;
    const int pp = count() - 1;
    const bool has_copies = pp >= 0 && is_pp(pp) && declared[pp] == replicated;
    has_stage_copies_ = has_stage_copies_ || has_copies;
    all_have_stage_copies_ = all_have_stage_copies_ && has_copies;
    // Of shards of weights, the groups say later who has which.
    const bool is_here = parameter->value.defined() || !is_sharded(*parameter);
    for (const Tensor& of : {parameter->value, parameter->shard.value, parameter->shard.master}) {
      write(of, kWhole, is_here ? declared : all_of(zero), "the initial values", parameter);
    }
  }
}

bool Checker::is_first(int factor, const Parameter* parameter) const {
  if (is_pp(factor) && parameter != nullptr) return declared_.at(parameter).is_first_holder;
  return setting_.factors[factor].place(setting_.mesh, setting_.rank) == 0;
}

void Checker::refuse(std::string_view operation, int factor, const std::string& what) const {
  std::string where;
  if (!phase().pass.empty()) where += " in " + phase().pass;
  if (phase().micro_batch >= 0) where += fmt::format(" of micro-batch {}", phase().micro_batch);
  if (is_in("evaluate")) where += " of an evaluation";
  if (is_decoding_) where += " while decoding";
  const int block = Runtime::current().block();
  if (block >= 0) where += fmt::format("{}block {}", where.empty() ? " in " : ", ", block);
  if (factor >= 0) where += fmt::format(", over {}", setting_.factors[factor].name());
  throw TypeError(fmt::format("{}{}: {}", operation, where, what));
}

std::string Checker::told(const Region& x, int f) {
  std::string text = fmt::format("{}, {} (from {}", x.parameter ? x.parameter->name : "a tensor",
                                 words(x.type[f]), x.origin);
  if (x.block >= 0) text += fmt::format(" in block {}", x.block);
  return text + ")";
}

void Checker::need(std::string_view operation, const char* what, const Region& x,
                   bool (*fits)(Kind)) const {
  for (int f = 0; f < count(); ++f) {
    if (!fits(x.type[f])) refuse(operation, f, fmt::format("{} {}", what, told(x, f)));
  }
}

void Checker::check_written(std::string_view operation, const char* verb, const Region& x) const {
  if (!x.is_written() && x.type == all_of(unwritten)) {
    refuse(operation, -1, fmt::format("{} what nothing has written", verb));
  }
  need(operation, verb, x, [](Kind kind) { return kind != unwritten; });
}

std::vector<Region> Checker::taken(std::string_view operation, const char* verb, const Tensor& x,
                                   std::vector<Region> all) {
  for (Region& region : all) {
    if (x.dtype() == DType::i32 && !region.is_written()) region.type = all_of(unknown);
    if (region.arriving > 0) {
      refuse(operation, -1,
             fmt::format("{} what {} has not brought yet: a wait is missing", verb, region.origin));
    }
    check_written(operation, verb, region);
    log_.note_read(region);
  }
  if (std::ranges::any_of(all, &Region::is_unread_gradient)) set_unread(x, kWhole, false);
  return all;
}

void Checker::check_read(std::string_view operation, const std::vector<Region>& all) const {
  const auto lost = std::ranges::find_if(all, &Region::is_unread_gradient);
  if (lost == all.end()) return;
  refuse(operation, -1,
         fmt::format("writes over a gradient that nothing has read, from {}", lost->origin));
}

void Checker::check_declared(std::string_view operation, const Parameter& parameter,
                             const Region& region) const {
  const Type& declared = declared_.at(&parameter).type;
  for (int f = 0; f < count(); ++f) {
    if (region.type[f] == declared[f] || region.type[f] == zero) continue;
    refuse(operation, f,
           fmt::format("{} was {}, and is left {} (by {})", parameter.name, words(declared[f]),
                       words(region.type[f]), region.origin));
  }
}

void Checker::write(const Tensor& tensor, Part part, const Type& type, std::string_view origin,
                    const Parameter* parameter) {
  const int block = Runtime::current().block();
  regions_.change(tensor, part, [&](Region& region) {
    if (region.arriving > 0 || region.reading > 0) {
      refuse(origin, -1,
             fmt::format("writes into what a message that is under way {} (last written by {})",
                         region.arriving > 0 ? "writes too" : "still reads", region.origin));
    }
    region.type = type;
    region.origin = origin;
    region.block = block;
    region.link = log_.link();
    region.is_gathered = false;
    if (parameter != nullptr) region.parameter = parameter;
  });
}

std::vector<Region> Checker::as_read(const Tensor& tensor) {
  std::vector<Region> all = regions_.of(tensor);
  for (Region& region : all) {
    for (int f = 0; region.is_gathered && f < count(); ++f) {
      const bool is_part = axis(f) == MeshAxis::cp && region.type[f] == rows;
      if (is_part) region.type[f] = replicated;
    }
  }
  return all;
}

void Checker::copy(const Tensor& to, const Tensor& from, std::vector<Region> all) {
  if (all.empty()) return;
  const bool takes_own_part = is_in("own positions");  // of what all ranks of cp have
  for (Region& region : all) {
    for (int f = 0; takes_own_part && f < count(); ++f) {
      Kind& kind = region.type[f];
      if (axis(f) != MeshAxis::cp || is_neutral(kind)) continue;
      if (kind != replicated) refuse("copy", f, "takes a rank's own part of " + told(region, f));
      kind = rows;
    }
  }
  const int64_t width = regions_.width(from);
  if (all.size() > 1 && from.numel() > width) regions_.divide_into_columns(to, width);
  if (regions_.width(to) != width) return write(to, kWhole, as_one("copy", all).type, "copy");
  for (const Region& region : all) write(to, region, region.type, "copy", region.parameter);
}

Region Checker::as_one(std::string_view operation, const std::vector<Region>& all) const {
  if (all.empty()) return {};
  Region one = all.front();
  for (const Region& part : all) {
    for (int f = 0; f < count(); ++f) {
      const Kind both = beside(one.type[f], part.type[f]);
      if (both == kRefused) {
        refuse(operation, f,
               fmt::format("one part of what it reads is {}, and another {}", told(one, f),
                           told(part, f)));
      }
      if (both != one.type[f]) one.origin = part.origin, one.block = part.block;
      one.type[f] = both;
    }
  }
  return one;
}

void Checker::set_under_way(const UnderWay& message, int change) {
  const auto add = [&](const Tensor& tensor, int16_t Region::*counter, int by) {
    regions_.change(tensor, kWhole, [&](Region& r) { r.*counter = int16_t(r.*counter + by); });
  };
  add(message.input, &Region::reading, change);
  add(message.output, &Region::arriving, change);
  if (message.keeps_input) add(message.input, &Region::arriving, -change);
}

void Checker::set_unread(const Tensor& tensor, Part part, bool is_unread) {
  regions_.change(tensor, part, [=](Region& r) { r.is_unread_gradient = is_unread; });
}

std::vector<Checker::OfParameter> Checker::parameters_in(const Tensor& tensor,
                                                         Tensor Parameter::*member) const {
  std::vector<OfParameter> found;
  if (!tensor.defined() || tensor.numel() == 0) return found;
  for (const Parameter* parameter : parameters_) {
    const Tensor& part = parameter->*member;
    if (!part.defined() || part.numel() == 0 || !is_inside(part, tensor)) continue;
    const int64_t begin =
        (static_cast<const char*>(part.address()) - static_cast<const char*>(tensor.address())) /
        bytes_of(tensor.dtype());
    found.push_back({{begin, begin + part.numel()}, parameter});
  }
  return found;
}

void Checker::own_stage_enters(const Tensor& gradient) {
  const std::vector<Region> all = regions_.of(gradient);
  if (std::ranges::count(all, nullptr, &Region::parameter) > 0) {
    for (const OfParameter& part : parameters_in(gradient, &Parameter::grad)) {
      regions_.change(gradient, part, [&](Region& r) { r.parameter = part.parameter; });
    }
  }
  if (!has_stage_copies_) return;
  const int pp = count() - 1;
  regions_.change(gradient, kWhole, [&](Region& region) {
    if (region.parameter == nullptr || region.type[pp] != layers) return;
    if (declared_.at(region.parameter).type[pp] != replicated) return;
    region.type[pp] = partial;
  });
}

void Checker::check_norm() {
  for (const Parameter* parameter : parameters_) {
    const Tensor& grad = parameter->shard.grad;
    const std::vector<Region> all = regions_.of(grad);
    if (all.empty() || !all.front().is_written() || in_norm_.contains(grad.address())) continue;
    bool is_first_with_it = !without_rows_.contains(parameter);
    for (int f = 0; f < count(); ++f) {
      const Kind kind = all.front().type[f];
      const bool is_copy = kind == replicated && !is_first(f, parameter);
      is_first_with_it = is_first_with_it && !is_copy && !is_neutral(kind);
    }
    if (!is_first_with_it) continue;
    refuse(
        "the gradient norm", -1,
        fmt::format("leaves out {}, which is here and on no rank that enters it", parameter->name));
  }
  in_norm_.clear();
}

void Checker::note_updates() {
  if (!std::exchange(is_updating_, false)) return;
  for (const Parameter* parameter : parameters_) {
    const int64_t before = std::exchange(versions_[parameter->index], parameter->version);
    if (before != parameter->version) set_out_of_date(*parameter, "an update on other ranks");
  }
}

void Checker::set_out_of_date(const Parameter& parameter, std::string_view origin) {
  const Tensor& value = parameter.value;
  if (!value.defined() || parameter.shard.numel() == value.numel()) return;
  const auto out_of_date = [&](Region& region) {
    region.type = all_of(unwritten);
    region.origin = origin;
  };
  regions_.change(value, {0, parameter.shard.begin}, out_of_date);
  regions_.change(value, {parameter.shard.end, value.numel()}, out_of_date);
}

void Checker::begin_decoding() {
  is_decoding_ = true;
  for (int f = 0; f < count(); ++f) {
    if (!is_pp(f)) setting_.batch[f] = setting_.boundary[f] = replicated;
  }
}

void Checker::save(const TrainState& state) {
  constexpr const char* kBy = "the checkpoint";
  each_stored(state, [&](const Parameter& parameter, const std::string& name, const Tensor& part) {
    const Parameter* declared = declared_.contains(&parameter) ? &parameter : nullptr;
    for (const Region& region : taken(kBy, "takes", part, regions_.of(part))) {
      need(kBy, "takes", region, [](Kind kind) { return kind != partial; });
      bool is_copy = false;
      for (int f = 0; f < count(); ++f) {
        is_copy = is_copy || (region.type[f] == replicated && !is_first(f, declared));
      }
      in_file_[name] = region.type;
      if (!is_of_optimizer(parameter, part) || is_stored(parameter) != is_copy) continue;
      refuse(kBy, -1,
             is_copy
                 ? fmt::format("has {} from this rank and from others", name)
                 : fmt::format("leaves out {}, which is here and on no rank that writes it", name));
    }
  });
}

bool Checker::is_of_optimizer(const Parameter& parameter, const Tensor& part) const {
  return declared_.contains(&parameter) && part.address() != parameter.shard.value.address() &&
         part.address() != parameter.shard.master.address();
}

void Checker::load(const TrainState& state) {
  each_stored(state, [&](const Parameter& parameter, const std::string& name, const Tensor& part) {
    const auto type = in_file_.find(name);
    if (type == in_file_.end()) return;
    if (!declared_.contains(&parameter)) return write(part, kWhole, type->second, "a checkpoint");
    if (!is_of_optimizer(parameter, part)) return;
    set_out_of_date(parameter, "a checkpoint on other ranks");
    for (const Tensor& own : {parameter.shard.value, parameter.shard.master, part}) {
      write(own, kWhole, type->second, "a checkpoint");
    }
  });
  note_loaded(state);
}

bool Checker::host_reads(const Tensor& tensor) {
  // What belongs to a stage's layers, the host of each stage reads.
  need("the host", "reads", read("the host", tensor),
       [](Kind kind) { return kind == replicated || kind == layers || is_neutral(kind); });
  return true;
}

void Checker::end_step() {
  note_updates();
  for (const Parameter* parameter : parameters_) {
    for (const Region& region : regions_.of(parameter->value)) {
      check_declared("the end of the step", *parameter, region);
    }
  }
  if (const auto lost = regions_.unread_gradient()) {
    refuse("the end of the step", -1,
           fmt::format("nothing has read the gradient{} that {} left in block {}",
                       lost->parameter ? " of " + lost->parameter->name : "", lost->origin,
                       lost->block));
  }
  for (const auto& [group, sends] : in_ring_) {
    if (sends == 0) continue;
    refuse("the end of the step", -1,
           sends > 0 ? "a rank sends on what it has not received: a receive is missing"
                     : "a rank receives more than it sends on: a send is missing");
  }
}

void Checker::op(std::string_view name, int64_t, int64_t, std::span<const Tensor* const> operands,
                 bool flag) {
  note_updates();
  ++ops_;
  TypedOp typed = log_.begin(name, phase().pass, phase().micro_batch, operands);
  apply_rule(*this, name, operands, flag);
  log_.note_parameter(typed, *operands.front());  // a gradient has its name now
  log_.end(std::move(typed), *operands.front());
}

int64_t Checker::post(const Posted& operation) {
  note_updates();
  ++messages_;
  const Tensor &input = *operation.input, &output = *operation.output;
  const std::string_view origin =
      *origins_.insert(fmt::format("{} over {}", name(operation.kind), operation.group)).first;
  TypedOp typed = log_.begin(origin, phase().pass, phase().micro_batch, {&operation.input, 1});
  typed.peer = operation.peer;
  if (input.defined()) typed.taken = input.shape();
  apply_message_rule(*this, operation, origin);
  const bool keeps_input = operation.kind == CommKind::all_gather && is_inside(input, output);
  under_way_.push_back({input, output, keeps_input});
  set_under_way(under_way_.back(), +1);
  log_.end(std::move(typed), output);
  return std::ssize(under_way_) - 1;
}

void Checker::wait(int64_t posted) { set_under_way(std::exchange(under_way_[posted], {}), -1); }

void Checker::begin_phase(std::string_view name, int64_t, int64_t micro_batch) {
  Phase now = phase();
  now.name = name;
  if (name == "forward" || name == "backward" || name == "recompute") now.pass = name;
  if (micro_batch >= 0) now.micro_batch = micro_batch;
  phases_[thread_turn()].push_back(now);
}

void Checker::end_phase() {
  if (phases_[thread_turn()].size() > 1) phases_[thread_turn()].pop_back();
}

void Checker::made(const Tensor& tensor, Source source, std::string_view name, const Tensor* from) {
  if (tensor.numel() == 0) return;
  if (source == Source::copy) {
    log_.begin("copy", phase().pass, phase().micro_batch, {});
    copy(tensor, *from, taken("copy", "reads", *from, as_read(*from)));
    return log_.end();
  }
  if (source == Source::zeros) return write(tensor, kWhole, all_of(zero), "zeros");
  Type type = all_of(tensor.dtype() == DType::i32 ? unknown : replicated);
  const bool is_batch = name == "tokens" || name == "targets";
  if (is_batch) type = setting_.batch;
  if (is_in("sums over rows")) {
    for (int f = 0; f < count(); ++f) {
      type[f] = term(scores_[f], is_first(f, nullptr));
      if (is_of_own_layers(f)) type[f] = layers;  // which are counted apart
    }
  }
  write(tensor, kWhole, type, is_batch ? "the batch" : "values of the host");
}

}  // namespace usp::types
