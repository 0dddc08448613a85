#include "types/checker.h"

#include <algorithm>

#include "train/checkpoint_state.h"
#include "types/rules.h"

namespace usp::types {

bool is_inside(const Tensor& part, const Tensor& whole) {
  const auto* at = static_cast<const char*>(part.address());
  const auto* begin = static_cast<const char*>(whole.address());
  return at >= begin && at < begin + whole.bytes();
}

Checker::Checker(Setting setting) : setting_(std::move(setting)) {
  for (std::vector<Phase>& phases : phases_) phases.emplace_back();
  for (const Factor& factor : setting_.factors) {
    is_first_.push_back(factor.place(setting_.mesh, setting_.rank) == 0);
  }
}

void Checker::declare(ParameterList& parameters, const std::map<std::string, Declared>& types) {
  parameters_ = &parameters;
  versions_.clear();
  all_have_stage_copies_ = setting_.mesh.pp > 1;
  const auto is_sharded = [&](const Parameter& parameter) {  // with others of its group
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& other = parameters[i];
      if (other.grad_groups.front() != parameter.grad_groups.front()) continue;
      if (other.shard.numel() != other.local_shape().numel()) return true;
    }
    return false;
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i];
    const Declared& declared = types.at(parameter.name);
    declared_.emplace(&parameter, declared);
    versions_.push_back(parameter.version);
    const int pp = count() - 1;
    const bool has_copies = pp >= 0 && is_pp(pp) && declared.type[pp] == Kind::replicated;
    has_stage_copies_ = has_stage_copies_ || has_copies;
    all_have_stage_copies_ = all_have_stage_copies_ && has_copies;
    for (const Tensor& tensor : {parameter.value, parameter.shard.value, parameter.shard.master}) {
      // Of shards of weights, the groups say later who has which.
      const bool is_here = parameter.value.defined() || !is_sharded(parameter);
      const Type type = is_here ? declared.type : all_of(Kind::zero);
      write(tensor, kWhole, type, "the initial values", &parameter);
    }
  }
}

bool Checker::is_first(int factor, const Parameter* parameter) const {
  if (is_pp(factor) && parameter != nullptr) return declared_.at(parameter).is_first_holder;
  return is_first_[factor];
}

std::string Checker::where() const {
  std::string text;
  if (!phase().pass.empty()) text += " in " + phase().pass;
  if (phase().micro_batch >= 0) text += fmt::format(" of micro-batch {}", phase().micro_batch);
  if (is_in("evaluate")) text += " of an evaluation";
  if (is_decoding_) text += " while decoding";
  const int block = Runtime::current().block();
  if (block >= 0) text += fmt::format("{}block {}", text.empty() ? " in " : ", ", block);
  return text;
}

void Checker::refuse(std::string_view operation, int factor, const std::string& what) const {
  std::string along;
  if (factor >= 0) along = fmt::format(", over {}", setting_.factors[factor].name());
  throw TypeError(fmt::format("{}{}{}: {}", operation, where(), along, what));
}

std::string Checker::told(const Region& x, int f) {
  std::string text = fmt::format("{}, {} (from {}", x.parameter ? x.parameter->name : "a tensor",
                                 words(x.type[f]), x.origin);
  if (x.block >= 0) text += fmt::format(" in block {}", x.block);
  return text + ")";
}

void Checker::check_arrived(std::string_view operation, std::string_view verb,
                            const Region& region) const {
  if (region.arriving == 0) return;
  refuse(operation, -1,
         fmt::format("{} what {} has not brought yet: a wait is missing", verb, region.origin));
}

void Checker::check_there(std::string_view operation, std::string_view verb, const Tensor& x,
                          const std::vector<Region>& all) {
  for (const Region& region : all) {
    for (int f = 0; f < count(); ++f) {
      if (region.type[f] != Kind::unwritten) continue;
      refuse(operation, f,
             fmt::format("{} {}, which is not there: written by {}", verb,
                         region.parameter ? region.parameter->name : "a tensor",
                         region.origin.empty() ? "nothing" : region.origin));
    }
  }
  check_covered(operation, verb, x, kWhole, all);
}

void Checker::check_covered(std::string_view operation, std::string_view verb, const Tensor& x,
                            Part part, const std::vector<Region>& all) {
  const Part asked = part.within({0, regions_.width(x)});
  int64_t missing = asked.end - asked.begin;
  for (const Region& region : all) missing -= region.end - region.begin;
  if (missing > 0) refuse(operation, -1, fmt::format("{} what nothing has written", verb));
}

void Checker::check_read(std::string_view operation, const std::vector<Region>& all) const {
  const auto lost = std::ranges::find_if(all, &Region::is_unread_gradient);
  if (lost == all.end()) return;
  refuse(operation, -1,
         fmt::format("writes over a gradient that nothing has read, from {}", lost->origin));
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
    region.link = link_;
    region.is_gathered = false;
    if (parameter != nullptr) region.parameter = parameter;
  });
}

std::vector<Region> Checker::as_read(const Tensor& tensor) {
  std::vector<Region> all = regions_.of(tensor);
  for (Region& region : all) {
    for (int f = 0; region.is_gathered && f < count(); ++f) {
      const bool is_part = setting_.factors[f].axis == MeshAxis::cp && region.type[f] == Kind::rows;
      if (is_part) region.type[f] = Kind::replicated;
    }
  }
  return all;
}

void Checker::copy(const Tensor& to, const Tensor& from) {
  if (from.numel() == 0) return;
  std::vector<Region> all = as_read(from);
  if (all.empty()) return;  // integers that the host makes
  if (is_in("own positions"))
    std::ranges::for_each(all, [&](Region& r) { r.type = own_part_of(r.type); });
  const int64_t width = regions_.width(from), rows = from.numel() / std::max<int64_t>(1, width);
  if (all.size() > 1 && rows > 1) regions_.divide_into_columns(to, width);
  if (regions_.width(to) == width) {
    for (const Region& region : all) {
      write(to, region, region.type, "copy", region.parameter);
    }
    return;
  }
  write(to, kWhole, as_one("copy", all).type, "copy");
}

Region Checker::as_one(std::string_view operation, const std::vector<Region>& all) const {
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

Type Checker::own_part_of(Type type) const {
  for (int f = 0; f < count(); ++f) {
    if (setting_.factors[f].axis != MeshAxis::cp || is_neutral(type[f])) continue;
    if (type[f] != Kind::replicated) {
      refuse("copy", f, fmt::format("takes a rank's own part of what is {}", words(type[f])));
    }
    type[f] = Kind::rows;
  }
  return type;
}

void Checker::set_under_way(const UnderWay& message, int change) {
  const auto add = [&](const Tensor& tensor, int16_t Region::*counter, int by) {
    regions_.change(tensor, kWhole, [&](Region& r) { r.*counter = int16_t(r.*counter + by); });
  };
  add(message.input, &Region::reading, change);
  add(message.output, &Region::arriving, change);
  if (message.keeps_input) add(message.input, &Region::arriving, -change);
}

void Checker::note_read(const Tensor& tensor, const std::vector<Region>& all) {
  if (std::ranges::none_of(all, &Region::is_unread_gradient)) return;
  regions_.change(tensor, kWhole, [](Region& region) { region.is_unread_gradient = false; });
}

void Checker::add_to_link(const Region& read) {
  if (link_ >= 0) history_[link_].of.push_back(read);
}

std::vector<Checker::OfParameter> Checker::parameters_in(const Tensor& tensor,
                                                         Tensor Parameter::*member) const {
  std::vector<OfParameter> found;
  if (!tensor.defined() || tensor.numel() == 0 || parameters_ == nullptr) return found;
  for (size_t i = 0; i < parameters_->size(); ++i) {
    const Tensor& part = (*parameters_)[i].*member;
    if (!part.defined() || part.numel() == 0 || !is_inside(part, tensor)) continue;
    const int64_t begin =
        (static_cast<const char*>(part.address()) - static_cast<const char*>(tensor.address())) /
        bytes_of(tensor.dtype());
    found.push_back({{begin, begin + part.numel()}, &(*parameters_)[i]});
  }
  return found;
}

void Checker::own_stage_enters(const Tensor& gradient) {
  const auto has_name = [](const Region& region) { return region.parameter != nullptr; };
  if (!std::ranges::all_of(regions_.of(gradient), has_name)) {
    for (const OfParameter& part : parameters_in(gradient, &Parameter::grad)) {
      regions_.change(gradient, part, [&](Region& r) { r.parameter = part.parameter; });
    }
  }
  if (!has_stage_copies_) return;
  const int pp = count() - 1;
  regions_.change(gradient, kWhole, [&](Region& region) {
    if (region.parameter == nullptr || region.type[pp] != Kind::layers) return;
    if (declared_.at(region.parameter).type[pp] != Kind::replicated) return;
    region.type[pp] = Kind::partial;
  });
}

void Checker::check_norm() {
  for (size_t i = 0; i < parameters_->size(); ++i) {
    const Parameter& parameter = (*parameters_)[i];
    const std::vector<Region> all = regions_.of(parameter.shard.grad);
    if (all.empty() || in_norm_.contains(parameter.shard.grad.address())) continue;
    const Type& type = all.front().type;
    bool is_first_with_it = !without_rows_.contains(&parameter);
    for (int f = 0; f < count(); ++f) {
      const bool is_copy = type[f] == Kind::replicated && !is_first(f, &parameter);
      is_first_with_it = is_first_with_it && !is_copy && !is_neutral(type[f]);
    }
    if (!is_first_with_it) continue;
    refuse(
        "the gradient norm", -1,
        fmt::format("leaves out {}, which is here and on no rank that enters it", parameter.name));
  }
  in_norm_.clear();
}

void Checker::note_updates() {
  if (!is_updating_) return;
  is_updating_ = false;
  for (size_t i = 0; i < parameters_->size(); ++i) {
    const Parameter& parameter = (*parameters_)[i];
    if (std::exchange(versions_[i], parameter.version) == parameter.version) continue;
    set_out_of_date(parameter, "an update on other ranks");
  }
}

void Checker::set_out_of_date(const Parameter& parameter, std::string_view origin) {
  const Tensor& value = parameter.value;
  if (!value.defined() || parameter.shard.numel() == value.numel()) return;
  const auto out_of_date = [&](Region& region) {
    region.type = all_of(Kind::unwritten);
    region.origin = origin;
  };
  regions_.change(value, {0, parameter.shard.begin}, out_of_date);
  regions_.change(value, {parameter.shard.end, value.numel()}, out_of_date);
}

void Checker::begin_decoding() {
  is_decoding_ = true;
  for (int f = 0; f < count(); ++f) {
    if (!is_pp(f)) setting_.batch[f] = setting_.boundary[f] = Kind::replicated;
  }
}

void Checker::save(const TrainState& state) {
  constexpr const char* kBy = "the checkpoint";
  each_stored(state, [&](const Parameter& parameter, const std::string& name, const Tensor& part) {
    const bool is_declared = declared_.contains(&parameter);
    for (const Region& region : regions_.of(part)) {
      check_arrived(kBy, "takes", region);
      bool is_copy = false;
      for (int f = 0; f < count(); ++f) {
        const Kind kind = region.type[f];
        if (kind == Kind::partial || kind == Kind::unwritten) {
          refuse(kBy, f, fmt::format("takes {}: {}", name, words(kind)));
        }
        const bool is_others = !is_first(f, is_declared ? &parameter : nullptr);
        is_copy = is_copy || (kind == Kind::replicated && is_others);
      }
      in_file_[name] = region.type;
      if (!is_of_optimizer(parameter, part)) continue;
      if (is_stored(parameter) && is_copy) {
        refuse(kBy, -1, fmt::format("has {} from this rank and from others", name));
      }
      if (!is_stored(parameter) && !is_copy) {
        refuse(kBy, -1,
               fmt::format("leaves out {}, which is here and on no rank that writes it", name));
      }
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
  const Type type = type_for_host(*this, tensor);
  for (int f = 0; f < count(); ++f) {
    // What belongs to a stage's layers, the host of each stage reads.
    const bool fits = type[f] == Kind::replicated || type[f] == Kind::layers;
    if (fits || is_neutral(type[f])) continue;
    refuse("the host", f, fmt::format("reads what is {}", words(type[f])));
  }
  return true;
}

void Checker::end_step() {
  note_updates();
  for (size_t i = 0; i < parameters_->size(); ++i) {
    const Parameter& parameter = (*parameters_)[i];
    const Type& declared = declared_.at(&parameter).type;
    for (const Region& region : regions_.of(parameter.value)) {
      for (int f = 0; f < count(); ++f) {
        if (region.type[f] == declared[f]) continue;
        refuse("the end of the step", f,
               fmt::format("{} was {}, and is left {} (by {})", parameter.name, words(declared[f]),
                           words(region.type[f]), region.origin));
      }
    }
  }
  const auto lost = regions_.find([](const Region& r) { return r.is_unread_gradient; });
  if (lost) {
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
  TypedOp typed = begin(name, operands);
  apply_rule(*this, name, operands, flag);
  if (listener_) note_parameter(typed, *operands.front());  // a gradient has its name now
  end(std::move(typed), *operands.front());
}

TypedOp Checker::begin(std::string_view name, std::span<const Tensor* const> operands) {
  TypedOp typed;
  if (!listener_) return typed;
  typed.name = name;
  typed.phase = phase().pass;
  typed.block = Runtime::current().block();
  typed.micro_batch = phase().micro_batch;
  for (const Tensor* operand : operands) {
    const std::vector<Region> all = regions_.of(*operand);
    if (all.empty()) continue;
    typed.operands.push_back(all.front().type);
    note_parameter(typed, *operand);
  }
  if (!keeps_history_) return typed;
  link_ = std::ssize(history_);
  history_.push_back({typed, {}});
  return typed;
}

void Checker::note_parameter(TypedOp& typed, const Tensor& x) {
  const std::vector<Region> all = regions_.of(x);
  if (all.empty() || all.front().parameter == nullptr) return;
  typed.parameter = all.front().parameter->name;
  typed.taken = x.shape();
}

void Checker::end(TypedOp typed, const Tensor& made) {
  link_ = -1;
  if (!listener_) return;
  for (const Region& region : regions_.of(made)) {
    if (!typed.result) typed.result = region.type;
    typed.is_mixed = typed.is_mixed || region.type != *typed.result;
  }
  if (typed.result) typed.shape = made.shape();
  listener_(typed);
}

bool Checker::is_zero(const Tensor& tensor) {
  const std::vector<Region> regions = regions_.of(tensor);
  return std::ranges::all_of(regions, [&](const Region& region) {
    return std::all_of(region.type.begin(), region.type.begin() + count(),
                       [](Kind kind) { return kind == Kind::zero; });
  });
}

int64_t Checker::post(const Posted& operation) {
  note_updates();
  const int64_t number = messages_++;
  const Mutation& mutation = setting_.mutation;
  const bool is_mutated = mutation.what != Mutation::What::none && number == mutation.message;
  const std::string_view origin =
      lasting(fmt::format("{} over {}", name(operation.kind), operation.group));
  if (is_mutated) {
    mutated_ = origin;
    const Tensor& any = operation.input->defined() ? *operation.input : *operation.output;
    mutated_untyped_ = any.defined() && (any.dtype() == DType::i32 ||
                                         (operation.kind == CommKind::all_reduce && is_zero(any)));
  }
  UnderWay& message = under_way_.emplace_back();
  const int64_t posted = std::ssize(under_way_) - 1;
  if (is_mutated && mutation.what == Mutation::What::left_out) return posted;
  TypedOp typed = begin(origin, {&operation.input, 1});
  typed.peer = operation.peer;
  if (operation.input->defined()) typed.taken = operation.input->shape();
  const int times = is_mutated && mutation.what == Mutation::What::twice ? 2 : 1;
  for (int i = 0; i < times; ++i) apply_message_rule(*this, operation, origin);
  const bool gathers = operation.kind == CommKind::all_gather;
  message = {*operation.input, *operation.output,
             gathers && is_inside(*operation.input, *operation.output)};
  set_under_way(message, +1);
  end(std::move(typed), *operation.output);
  return posted;
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
    begin("copy", {});
    for (const Region& region : as_read(*from)) add_to_link(region);
    copy(tensor, *from);
    link_ = -1;
    return;
  }
  if (source == Source::zeros) return write(tensor, kWhole, all_of(Kind::zero), "zeros");
  Type type = all_of(tensor.dtype() == DType::i32 ? Kind::unknown : Kind::replicated);
  const bool is_batch = name == "tokens" || name == "targets";
  if (is_batch) type = setting_.batch;
  if (is_in("sums over rows")) {
    for (int f = 0; f < count(); ++f) {
      type[f] = term(scores_[f], is_first(f, nullptr));
      if (is_of_own_layers(f)) type[f] = Kind::layers;  // which are counted apart
    }
  }
  write(tensor, kWhole, type, is_batch ? "the batch" : "values of the host");
}

}  // namespace usp::types
