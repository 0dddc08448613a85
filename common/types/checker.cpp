#include "types/checker.h"

#include <algorithm>

#include "train/checkpoint_state.h"
#include "types/rules.h"

namespace usp::types {

Checker::Checker(Setting setting) : setting_(std::move(setting)) {
  for (std::vector<Phase>& phases : phases_) phases.emplace_back();
  for (const Factor& factor : setting_.factors) {
    is_first_.push_back(factor.place(setting_.mesh, setting_.rank) == 0);
  }
}

void Checker::declare(ParameterList& parameters, const std::map<std::string, Declared>& types) {
  parameters_ = &parameters;
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
      if (!tensor.defined() || tensor.numel() == 0) continue;
      // Of shards of weights, the groups say later who has which.
      const bool is_here = parameter.value.defined() || !is_sharded(parameter);
      const Type type = is_here ? declared.type : all_of(Kind::zero);
      write(tensor, 0, regions_.width(tensor), type, "the initial values", &parameter);
    }
  }
  lasts_ = regions_.mark();
}

bool Checker::is_first(int factor, const Parameter* parameter) const {
  if (is_pp(factor) && parameter != nullptr) return declared_.at(parameter).is_first_holder;
  return is_first_[factor];
}

std::string Checker::where() const {
  std::string text;
  const Phase& phase = phases_[thread_turn()].back();
  if (!phase.name.empty()) text += " in " + phase.name;
  if (phase.micro_batch >= 0) text += fmt::format(" of micro-batch {}", phase.micro_batch);
  if (phase.is_evaluating) text += " of an evaluation";
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
  int64_t covered = 0;
  for (const Region& region : all) {
    covered += region.end - region.begin;
    for (int f = 0; f < count(); ++f) {
      if (region.type[f] != Kind::unwritten) continue;
      refuse(operation, f,
             fmt::format("{} {}, which is not there: written by {}", verb,
                         region.parameter ? region.parameter->name : "a tensor",
                         region.origin.empty() ? "nothing" : region.origin));
    }
  }
  if (covered < regions_.width(x)) {
    refuse(operation, -1, fmt::format("{} what nothing has written", verb));
  }
}

void Checker::write(const Tensor& tensor, int64_t begin, int64_t end, const Type& type,
                    std::string_view origin, const Parameter* parameter) {
  const int block = Runtime::current().block();
  regions_.change(tensor, begin, end, [&](Region& region) {
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

void Checker::write(const Tensor& tensor, const Type& type, std::string_view origin) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  write(tensor, 0, regions_.width(tensor), type, origin);
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
  if (phase().takes_own)
    std::ranges::for_each(all, [&](Region& r) { r.type = own_part_of(r.type); });
  const int64_t width = regions_.width(from), rows = from.numel() / std::max<int64_t>(1, width);
  if (all.size() > 1 && rows > 1) regions_.divide_into_columns(to, width);
  if (regions_.width(to) == width) {
    for (const Region& region : all) {
      write(to, region.begin, region.end, region.type, "copy", region.parameter);
    }
    return;
  }
  Type type = all_of(Kind::unwritten);
  for (int f = 0; f < count(); ++f) {
    for (const Region& region : all) {
      const Kind before = std::exchange(type[f], beside(type[f], region.type[f]));
      if (type[f] != kRefused) continue;
      refuse("copy", f,
             fmt::format("one part of it is {}, another {}", words(before), words(region.type[f])));
    }
  }
  write(to, type, "copy");
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

void Checker::set_under_way(const Tensor& tensor, bool arrives, int change) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  regions_.change(tensor, [&](Region& region) {
    auto& counter = arrives ? region.arriving : region.reading;
    counter = static_cast<int16_t>(counter + change);
  });
}

void Checker::note_read(const Tensor& tensor, const std::vector<Region>& all) {
  if (std::ranges::none_of(all, &Region::is_unread_gradient)) return;
  regions_.change(tensor, [](Region& region) { region.is_unread_gradient = false; });
}

void Checker::begin_link(const TypedOp& op) {
  if (!keeps_history_) return;
  link_ = std::ssize(history_);
  history_.push_back({op, {}});
}

void Checker::add_to_link(const Region& read) {
  if (link_ >= 0) history_[link_].of.push_back(read);
}

std::vector<Checker::Part> Checker::parts_of(const Tensor& tensor,
                                             Tensor Parameter::*member) const {
  std::vector<Part> parts;
  if (!tensor.defined() || tensor.numel() == 0 || parameters_ == nullptr) return parts;
  const auto* first = static_cast<const char*>(tensor.address());
  const auto* end = first + tensor.bytes();
  for (size_t i = 0; i < parameters_->size(); ++i) {
    const Tensor& part = (*parameters_)[i].*member;
    if (!part.defined()) continue;
    const auto* at = static_cast<const char*>(part.address());
    if (at < first || at >= end || part.numel() == 0) continue;
    const int64_t begin = (at - first) / bytes_of(tensor.dtype());
    parts.push_back({&(*parameters_)[i], begin, begin + part.numel()});
  }
  return parts;
}

void Checker::own_stage_enters(const Tensor& gradient) {
  const auto has_name = [](const Region& region) { return region.parameter != nullptr; };
  if (!std::ranges::all_of(regions_.of(gradient), has_name)) {
    for (const auto& [parameter, begin, end] : parts_of(gradient, &Parameter::grad)) {
      regions_.change(gradient, begin, end, [&](Region& r) { r.parameter = parameter; });
    }
  }
  if (!has_stage_copies_) return;
  const int pp = count() - 1;
  regions_.change(gradient, [&](Region& region) {
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
  regions_.change(value, 0, parameter.shard.begin, out_of_date);
  regions_.change(value, parameter.shard.end, value.numel(), out_of_date);
}

void Checker::begin_decoding() {
  is_decoding_ = true;
  for (int f = 0; f < count(); ++f) {
    if (!is_pp(f)) setting_.batch[f] = setting_.boundary[f] = Kind::replicated;
  }
}

void Checker::save(const TrainState& state) {
  each_stored(state, [&](const Parameter& parameter, const std::string& name, const Tensor& part) {
    const auto refuse_it = [&](const std::string& what) { refuse("the checkpoint", -1, what); };
    for (const Region& region : regions_.of(part)) {
      for (int f = 0; f < count(); ++f) {
        if (region.type[f] != Kind::partial && region.type[f] != Kind::unwritten) continue;
        refuse("the checkpoint", f, fmt::format("takes {}: {}", name, words(region.type[f])));
      }
      // Weights are gathered; what the optimizer keeps is not, and says who has which.
      if (!declared_.contains(&parameter) || !is_of_optimizer(parameter, part)) continue;
      bool is_copy = false;
      for (int f = 0; f < count(); ++f) {
        is_copy = is_copy || (region.type[f] == Kind::replicated && !is_first(f, &parameter));
      }
      if (is_stored(parameter) && is_copy) {
        refuse_it(fmt::format("has {} from this rank and from others", name));
      }
      if (!is_stored(parameter) && !is_copy) {
        refuse_it(fmt::format("leaves out {}, which is here and on no rank that writes it", name));
      }
    }
  });
}

bool Checker::is_of_optimizer(const Parameter& parameter, const Tensor& part) {
  return part.address() != parameter.shard.value.address() &&
         part.address() != parameter.shard.master.address();
}

void Checker::load(const TrainState& state) {
  // A run begins by reading: nothing that the run before has sent is still under way.
  for (int64_t posted = 0; posted < std::ssize(under_way_); ++posted) wait(posted);
  each_stored(state, [&](const Parameter& parameter, const std::string&, const Tensor& part) {
    const std::vector<Region> all = regions_.of(part);
    if (!declared_.contains(&parameter) || !is_of_optimizer(parameter, part) || all.empty()) return;
    set_out_of_date(parameter, "a checkpoint on other ranks");
    for (const Tensor& values : {parameter.shard.value, parameter.shard.master}) {
      regions_.change(values, [&](Region& region) {
        region.type = all.front().type;
        region.origin = "a checkpoint";
      });
    }
  });
  note_loaded(state);
}

bool Checker::host_reads(const Tensor& tensor) {
  const Type type = type_for_host({*this, "the host", {}, false}, tensor);
  for (int f = 0; f < count(); ++f) {
    if (type[f] == Kind::replicated || is_neutral(type[f])) continue;
    refuse("the host", f, fmt::format("reads what is {}", words(type[f])));
  }
  std::erase_if(terms_, [&](const Tensor& sum) { return sum.address() == tensor.address(); });
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
  for (const Tensor& number : terms_) {
    for (const Region& region : regions_.of(number)) {
      for (int f = 0; f < count(); ++f) {
        if (is_neutral(region.type[f]) || region.type[f] == Kind::partial) continue;
        refuse(region.origin, f,
               fmt::format("the report sums this number over all ranks, and it is {}: it counts "
                           "{} times",
                           words(region.type[f]), setting_.factors[f].size));
      }
    }
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
  TypedOp typed;
  const auto first_of = [&](const Tensor& operand) -> std::optional<Type> {
    const std::vector<Region> all = regions_.of(operand);
    if (all.empty()) return {};
    if (all.front().parameter != nullptr) {
      typed.parameter = all.front().parameter->name;
      typed.taken = operand.shape();
    }
    return all.front().type;
  };
  if (listener_) {
    typed = typed_here(name);
    for (const Tensor* operand : operands) {
      if (const auto type = first_of(*operand)) typed.operands.push_back(*type);
    }
    begin_link(typed);
  }
  apply_rule({*this, name, operands, flag});
  end_link();
  if (!listener_) return;
  typed.result = first_of(*operands.front());
  if (typed.result) typed.shape = operands.front()->shape();
  for (const Region& region : regions_.of(*operands.front())) {
    typed.is_mixed = typed.is_mixed || region.type != *typed.result;
  }
  listener_(typed);
}

TypedOp Checker::typed_here(std::string_view name) {
  TypedOp typed;
  typed.name = name;
  typed.phase = phase().name;
  typed.block = Runtime::current().block();
  typed.micro_batch = phase().micro_batch;
  return typed;
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
    mutated_integers_ = any.defined() && any.dtype() == DType::i32;
  }
  if (is_mutated && mutation.what == Mutation::What::left_out) {
    under_way_.emplace_back();
    return std::ssize(under_way_) - 1;
  }
  TypedOp typed;
  if (listener_) {
    typed = typed_here(origin);
    typed.peer = operation.peer;
    if (operation.input->defined()) typed.taken = operation.input->shape();
    if (operation.output->defined()) typed.shape = operation.output->shape();
    const std::vector<Region> all = regions_.of(*operation.input);
    if (!all.empty()) typed.operands.push_back(all.front().type);
    if (!all.empty() && all.front().parameter) typed.parameter = all.front().parameter->name;
    begin_link(typed);
  }
  apply_message_rule({*this, operation, origin});
  if (is_mutated && mutation.what == Mutation::What::twice) {
    apply_message_rule({*this, operation, origin});
  }
  end_link();
  set_under_way(*operation.input, /*arrives=*/false, +1);
  set_under_way(*operation.output, /*arrives=*/true, +1);
  under_way_.push_back({*operation.input, *operation.output});
  if (listener_) {
    const std::vector<Region> all = regions_.of(*operation.output);
    if (!all.empty()) typed.result = all.front().type;
    listener_(typed);
  }
  return std::ssize(under_way_) - 1;
}

void Checker::wait(int64_t posted) {
  const UnderWay over = std::exchange(under_way_[posted], {});
  set_under_way(over.input, /*arrives=*/false, -1);
  set_under_way(over.output, /*arrives=*/true, -1);
}

void Checker::begin_phase(std::string_view name, int64_t, int64_t micro_batch) {
  Phase now = phase();
  if (name == "forward" || name == "backward" || name == "recompute") now.name = name;
  if (micro_batch >= 0) now.micro_batch = micro_batch;
  now.is_recomputing = now.is_recomputing || name == "recompute";
  now.sums_rows = name == "sums over rows";
  now.sums_heads = name == "sums over heads";
  now.has_heads_apart = name == "heads apart";
  now.takes_own = name == "own positions";
  now.is_evaluating = now.is_evaluating || name == "evaluate";
  phases_[thread_turn()].push_back(now);
}

void Checker::end_phase() {
  if (phases_[thread_turn()].size() > 1) phases_[thread_turn()].pop_back();
}

void Checker::made(const Tensor& tensor, Source source, std::string_view name, const Tensor* from) {
  if (tensor.numel() == 0) return;
  if (source == Source::copy) {
    begin_link(typed_here("copy"));
    for (const Region& region : as_read(*from)) add_to_link(region);
    copy(tensor, *from);
    return end_link();
  }
  if (source == Source::zeros) return write(tensor, all_of(Kind::zero), "zeros");
  Type type = all_of(tensor.dtype() == DType::i32 ? Kind::unknown : Kind::replicated);
  const bool is_batch = name == "tokens" || name == "targets";
  if (is_batch) type = setting_.batch;
  if (phase().sums_rows) {
    for (int f = 0; f < count(); ++f) {
      type[f] = term(scores_[f], is_first(f, nullptr));
      // Stages whose layers no other one has count apart.
      if (is_pp(f) && !all_have_stage_copies_) type[f] = Kind::layers;
    }
  }
  write(tensor, type, is_batch ? "the batch" : "values of the host");
}

}  // namespace usp::types
