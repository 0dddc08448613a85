#include <algorithm>

#include "tensor/runtime.h"
#include "types/rules.h"

namespace usp::types {

using enum Kind;

/// The rules of messages, on one that begins.
class MessageRules {
 public:
  MessageRules(Checker& checker, const Recorder::Posted& message, std::string_view origin)
      : c_(checker),
        message_(message),
        origin_(origin),
        input_(*message.input),
        output_(*message.output) {
    find_factors();
  }

  void apply() {
    const Tensor& any = input_.defined() ? input_ : output_;
    const bool has_integers = any.defined() && any.dtype() == DType::i32;
    from_ = c_.regions_.of(input_);
    for (const Region& region : from_) {
      c_.add_to_link(region);
      c_.check_arrived(origin_, "sends", region);
    }
    const bool is_something = input_.defined() && input_.numel() > 0;
    if (is_something && !has_integers) c_.check_there(origin_, "sends", input_, from_);
    c_.note_read(input_, from_);
    if (has_integers) return c_.write(output_, kWhole, all_of(unknown), origin_);
    switch (message_.kind) {
      case CommKind::all_reduce:
        return put(reduced(replicated));
      case CommKind::reduce_scatter:
        return reduce_scatter();
      case CommKind::all_gather:
        return all_gather();
      case CommKind::all_to_all:
        return all_to_all();
      case CommKind::send:
        return send();
      case CommKind::recv:
        return receive();
      case CommKind::broadcast:
        return broadcast();
      default:
        return;  // a barrier
    }
  }

 private:
  /// The factors of the mesh in whose digits the members of the group differ.
  void find_factors() {
    const auto [known, is_new] = c_.along_.try_emplace(message_.group_id);
    along_ = known->second;
    if (!is_new) return;
    int64_t ranks = 1;
    for (int f = 0; f < c_.count(); ++f) {
      std::set<int64_t> places;
      for (int member : *message_.members) {
        places.insert(c_.setting_.factors[f].place(c_.setting_.mesh, member));
      }
      along_[f] = places.size() > 1;
      ranks *= std::ssize(places);
    }
    if (ranks != members()) {
      refuse(-1, fmt::format("the {} ranks of this group are no product of factors of the mesh",
                             members()));
    }
    known->second = along_;
  }
  int64_t members() const { return std::ssize(*message_.members); }
  bool is_along(MeshAxis axis) const {
    for (int f = 0; f < c_.count(); ++f) {
      if (along_[f] && c_.setting_.factors[f].axis == axis) return true;
    }
    return false;
  }

  [[noreturn]] void refuse(int f, const std::string& what) const { c_.refuse(origin_, f, what); }

  // ---- what is sent, and what arrives

  /// What is sent, with what `kind(region, f)` makes of each kind along the group's factors; zeros
  /// stay.
  template <class NewKind>
  std::vector<Region> input_as(const NewKind& kind) const {
    std::vector<Region> parts = from_;
    for (Region& region : parts) {
      for (int f = 0; f < c_.count(); ++f) {
        if (along_[f] && region.type[f] != zero) region.type[f] = kind(region, f);
      }
    }
    return parts;
  }
  /// What a reduction makes of it: terms of a sum become this kind.
  std::vector<Region> reduced(Kind to) const {
    const bool takes_maximum = message_.takes_maximum;
    return input_as([&](const Region& region, int f) {
      const Kind kind = region.type[f];
      if (kind == unknown || (kind == partial && !takes_maximum)) return to;
      if (kind == maximum && takes_maximum) return replicated;
      refuse(f, (takes_maximum ? "takes the maximum of " : "sums what is no term of a sum: ") +
                    Checker::told(region, f));
    });
  }

  /// Whether what is sent lies in columns, whose types differ.
  bool has_columns() const {
    const int64_t period = c_.regions_.period(input_);
    return period > 0 && output_.numel() % period == 0 && c_.regions_.width(input_) == period;
  }
  /// Parts of what is sent arrive, and begin at `offset` of the output.
  void put(const std::vector<Region>& parts, int64_t offset = 0) const {
    for (const Region& region : parts) c_.write(output_, region + offset, region.type, origin_);
  }
  /// The same where they lie in columns; returns whether they do.
  bool put_columns(const std::vector<Region>& parts) const {
    if (!has_columns()) return false;
    const int64_t period = c_.regions_.period(input_);
    c_.regions_.divide_into_columns(output_, period);
    if (c_.regions_.width(output_) == period) {
      put(parts);
    } else {
      c_.write(output_, kWhole, parts[0].type, origin_);
    }
    return true;
  }

  // ---- the messages

  void reduce_scatter() const {
    const std::vector<Region> parts = reduced(rows);
    if (put_columns(parts)) return;
    std::vector<Region> before = c_.regions_.of(output_);
    std::erase_if(before, [](const Region& region) { return region.parameter == nullptr; });
    if (!is_inside(output_, input_)) c_.check_read(origin_, before);
    const int64_t length = c_.regions_.width(input_) / members(), first = length * message_.rank;
    for (const Region& region : parts) {
      const Part part = region.within({first, first + length}) + -first;
      if (part.empty()) continue;
      c_.write(output_, part, region.type, origin_, region.parameter);
      if (region.parameter == nullptr) continue;
      c_.regions_.change(output_, part, [](Region& r) { r.is_unread_gradient = true; });
    }
  }

  void all_gather() const {
    const std::vector<Region> gathered = input_as([&](const Region& region, int f) {
      const Kind kind = region.type[f];
      const bool is_list = c_.is_decoding_ && kind == own_sums;  // which a merge makes one of
      if (kind == rows || kind == columns || kind == dispatched || is_list) return replicated;
      if (kind == unknown) return unknown;
      refuse(f, "gathers " + Checker::told(region, f));
    });
    const auto weights = c_.parameters_in(output_, &Parameter::value);
    if (!weights.empty()) return gather_weights(gathered, weights);
    if (!put_columns(gathered)) {
      for (int64_t slot = 0; slot < members(); ++slot) put(gathered, slot * input_.numel());
    }
    if (!is_along(MeshAxis::cp)) return;
    c_.regions_.change(input_, kWhole, [](Region& region) { region.is_gathered = true; });
  }
  /// Other ranks' shards are of other parameters than this one's.
  void gather_weights(const std::vector<Region>& gathered,
                      const std::vector<Checker::OfParameter>& weights) const {
    for (const Region& region : gathered) {
      if (region.parameter == nullptr) continue;
      const Type& declared = c_.declared_.at(region.parameter).type;
      for (int f = 0; f < c_.count(); ++f) {
        if (region.type[f] == declared[f] || region.type[f] == zero) continue;
        refuse(f, fmt::format("the gathered {} would be {}; it was {}", region.parameter->name,
                              words(region.type[f]), words(declared[f])));
      }
    }
    c_.write(output_, kWhole, all_of(zero), origin_);
    for (const auto& weight : weights) {
      c_.write(output_, weight, c_.declared_.at(weight.parameter).type, origin_, weight.parameter);
    }
  }

  void all_to_all() const {
    if (output_.numel() == 0) return;
    const bool of_experts = message_.group.starts_with("ep");
    const std::vector<Region> parts = input_as([&](const Region& region, int f) {
      const Kind kind = region.type[f], of_tokens = c_.kind_of_tokens();
      if (kind == of_tokens) return of_experts ? dispatched : columns;
      if (kind == dispatched || kind == columns) return of_tokens;
      if (kind == unknown) return unknown;
      refuse(f, "exchanges " + Checker::told(region, f));
    });
    if (parts.empty()) return c_.write(output_, kWhole, all_of(unknown), origin_);  // none leaves
    if (!put_columns(parts)) c_.write(output_, kWhole, parts[0].type, origin_);
  }

  /// Who gets it takes it as this type.
  void check_taken(const char* by, const Type& type, bool along_group) const {
    for (const Region& region : from_) {
      for (int f = 0; f < c_.count(); ++f) {
        const Kind kind = region.type[f];
        if (kind == type[f] || is_neutral(kind) || (along_[f] && !along_group)) continue;
        refuse(f, fmt::format("{} it as {}, and {} {}", by, words(type[f]),
                              along_group ? "gets" : "get", Checker::told(region, f)));
      }
    }
  }
  void send() const {
    if (is_along(MeshAxis::pp)) {
      ++c_.sent_[(*message_.members)[message_.peer]];
      return check_taken("the other stage takes", c_.setting_.boundary, /*along_group=*/true);
    }
    ++c_.in_ring_[message_.group_id];
    const int64_t period = c_.regions_.period(input_);
    c_.passed_on_[message_.group_id] = {c_.regions_.width(input_) == period ? period : 0, from_};
  }
  void receive() const {
    if (is_along(MeshAxis::pp)) {
      ++c_.received_[(*message_.members)[message_.peer]];
      return c_.write(output_, kWhole, c_.setting_.boundary, origin_);
    }
    // Every rank of a ring does the same: what comes is as what goes.
    --c_.in_ring_[message_.group_id];
    const auto& [columns, sent] = c_.passed_on_[message_.group_id];
    if (columns > 0) c_.regions_.divide_into_columns(output_, columns);
    for (const Region& region : sent) c_.add_to_link(region);
    if (!sent.empty() && c_.regions_.width(output_) < sent.back().end) {
      c_.write(output_, kWhole, sent[0].type, origin_);
    } else {
      put(sent);
    }
    // What the places before have added up, somebody has to read. Keys may go by unread.
    if (!message_.group.ends_with("gradients")) return;
    c_.regions_.change(output_, kWhole, [](Region& region) { region.is_unread_gradient = true; });
  }
  /// Broadcasts logits, from the stage that has the head. Who gets them takes them for a rank's
  /// columns.
  void broadcast() const {
    Type type = c_.setting_.boundary;
    for (int f = 0; f < c_.count(); ++f) {
      if (along_[f]) type[f] = replicated;
      if (c_.setting_.factors[f].axis == MeshAxis::tp) type[f] = columns;
    }
    check_taken("the others take", type, /*along_group=*/false);
    c_.write(from_.empty() ? output_ : input_, kWhole, type, origin_);
  }

  Checker& c_;
  const Recorder::Posted& message_;
  const std::string_view origin_;
  const Tensor &input_, &output_;
  std::array<bool, kFactors> along_{};
  std::vector<Region> from_;
};

void apply_message_rule(Checker& checker, const Recorder::Posted& message,
                        std::string_view origin) {
  MessageRules(checker, message, origin).apply();
}

}  // namespace usp::types
