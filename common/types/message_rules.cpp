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
        output_(*message.output),
        along_(factors()) {}

  void apply() {
    from_ = c_.taken(origin_, "sends", input_, c_.regions_.of(input_));
    const Tensor& any = input_.defined() ? input_ : output_;
    const bool has_integers = any.defined() && any.dtype() == DType::i32;
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
  const Checker::Factors& factors() const {
    const auto [known, is_new] = c_.along_.try_emplace(message_.group_id);
    if (!is_new) return known->second;
    int64_t ranks = 1;
    for (int f = 0; f < c_.count(); ++f) {
      std::set<int64_t> places;
      for (int member : *message_.members) {
        places.insert(c_.setting_.factors[f].place(c_.setting_.mesh, member));
      }
      known->second[f] = places.size() > 1;
      ranks *= std::ssize(places);
    }
    if (ranks == members()) return known->second;
    refuse(-1, fmt::format("the {} ranks of this group are no product of factors of the mesh",
                           members()));
  }
  int64_t members() const { return std::ssize(*message_.members); }
  bool is_along(MeshAxis axis) const {
    for (int f = 0; f < c_.count(); ++f) {
      if (along_[f] && c_.axis(f) == axis) return true;
    }
    return false;
  }

  [[noreturn]] void refuse(int f, const std::string& what) const { c_.refuse(origin_, f, what); }

  // ---- what is sent, and what arrives

  /// What becomes of kinds along the group's factors.
  using Changes = std::vector<std::pair<Kind, Kind>>;
  /// What is sent, with these changes; zeros stay. Others are refused: this is done to no such
  /// kind.
  std::vector<Region> changed(const Changes& changes, std::string_view what) const {
    std::vector<Region> parts = from_;
    for (Region& region : parts) {
      for (int f = 0; f < c_.count(); ++f) {
        const Kind kind = region.type[f];
        if (!along_[f] || kind == zero) continue;
        const auto change = std::ranges::find(changes, kind, &Changes::value_type::first);
        if (change == changes.end())
          refuse(f, fmt::format("{} {}", what, Checker::told(region, f)));
        region.type[f] = change->second;
      }
    }
    return parts;
  }
  /// What a reduction makes of it: terms become this kind.
  std::vector<Region> reduced(Kind to) const {
    const auto [terms, what] = message_.takes_maximum
                                   ? std::pair{maximum, "takes the maximum of"}
                                   : std::pair{partial, "sums what is no term of a sum:"};
    return changed({{terms, to}, {unknown, to}}, what);
  }

  /// Parts of what is sent arrive as they lie there; if the output is divided otherwise, all of it
  /// as the first of them.
  void put(const std::vector<Region>& parts) const {
    if (parts.empty()) return;
    if (c_.regions_.width(output_) != parts.back().end) {
      return c_.write(output_, kWhole, parts.front().type, origin_);
    }
    for (const Region& region : parts) c_.write(output_, region, region.type, origin_);
  }
  /// The same where they lie in columns; returns whether they do.
  bool put_columns(const std::vector<Region>& parts) const {
    const int64_t period = c_.regions_.period(input_);
    if (period == 0 || output_.numel() % period != 0 || c_.regions_.width(input_) != period) {
      return false;
    }
    c_.regions_.divide_into_columns(output_, period);
    put(parts);
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
      if (region.parameter != nullptr) c_.set_unread(output_, part, true);
    }
  }

  void all_gather() const {
    Changes changes = {
        {rows, replicated}, {columns, replicated}, {dispatched, replicated}, {unknown, unknown}};
    if (c_.is_decoding_) changes.emplace_back(own_sums, replicated);  // which a merge makes one of
    const std::vector<Region> gathered = changed(changes, "gathers");
    const auto weights = c_.parameters_in(output_, &Parameter::value);
    if (!weights.empty()) return gather_weights(gathered, weights);
    if (!put_columns(gathered)) {
      for (int64_t slot = 0; slot < members(); ++slot) {
        for (const Region& part : gathered) {
          c_.write(output_, part + slot * input_.numel(), part.type, origin_);
        }
      }
    }
    if (!is_along(MeshAxis::cp)) return;
    c_.regions_.change(input_, kWhole, [](Region& region) { region.is_gathered = true; });
  }
  /// Other ranks' shards are of other parameters than this one's.
  void gather_weights(const std::vector<Region>& gathered,
                      const std::vector<Checker::OfParameter>& weights) const {
    for (const Region& region : gathered) {
      if (region.parameter) c_.check_declared(origin_, *region.parameter, region);
    }
    c_.write(output_, kWhole, all_of(zero), origin_);
    for (const auto& weight : weights) {
      c_.write(output_, weight, c_.declared_.at(weight.parameter).type, origin_, weight.parameter);
    }
  }

  void all_to_all() const {
    if (output_.numel() == 0) return;
    const Kind tokens = c_.kind_of_tokens(),
               sent = message_.group.starts_with("ep") ? dispatched : columns;
    const std::vector<Region> parts = changed(
        {{tokens, sent}, {dispatched, tokens}, {columns, tokens}, {unknown, unknown}}, "exchanges");
    if (parts.empty()) return c_.write(output_, kWhole, all_of(unknown), origin_);  // none leaves
    if (!put_columns(parts)) c_.write(output_, kWhole, parts[0].type, origin_);
  }

  /// Who gets it takes it as this type.
  void check_taken(const char* by, const Type& type) const {
    for (const Region& region : from_) {
      for (int f = 0; f < c_.count(); ++f) {
        const Kind kind = region.type[f];
        const bool is_to_all = along_[f] && message_.kind == CommKind::broadcast;
        if (kind == type[f] || is_neutral(kind) || is_to_all) continue;
        refuse(f, fmt::format("{} takes it as {}, and gets {}", by, words(type[f]),
                              Checker::told(region, f)));
      }
    }
  }
  void send() const {
    if (is_along(MeshAxis::pp)) {
      ++c_.sent_[(*message_.members)[message_.peer]];
      return check_taken("the other stage", c_.setting_.boundary);
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
    for (const Region& region : sent) c_.log_.note_read(region);
    put(sent);
    // What the places before have added up, somebody has to read. Keys may go by unread.
    if (message_.group.ends_with("gradients")) c_.set_unread(output_, kWhole, true);
  }
  /// Broadcasts logits, from the stage that has the head. Who gets them takes them for a rank's
  /// columns.
  void broadcast() const {
    Type type = c_.setting_.boundary;
    for (int f = 0; f < c_.count(); ++f) {
      if (along_[f]) type[f] = replicated;
      if (c_.axis(f) == MeshAxis::tp) type[f] = columns;
    }
    check_taken("every other stage", type);
    c_.write(from_.empty() ? output_ : input_, kWhole, type, origin_);
  }

  Checker& c_;
  const Recorder::Posted& message_;
  const std::string_view origin_;
  const Tensor &input_, &output_;
  const Checker::Factors& along_;
  std::vector<Region> from_;
};

void apply_message_rule(Checker& checker, const Recorder::Posted& message,
                        std::string_view origin) {
  MessageRules(checker, message, origin).apply();
}

}  // namespace usp::types
