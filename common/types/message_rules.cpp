#include <algorithm>

#include "tensor/runtime.h"
#include "types/rules.h"

namespace usp::types {

using enum Kind;

/// The rules of messages, on one that begins.
class MessageRules {
 public:
  explicit MessageRules(const MessageInTypes& message)
      : c_(message.checker),
        operation_(message.operation),
        origin_(message.origin),
        input_(*message.operation.input),
        output_(*message.operation.output) {
    find_factors();
  }

  void apply() {
    read_input();
    if (has_integers()) return c_.write(output_, all_of(unknown), origin_);
    switch (operation_.kind) {
      case CommKind::all_reduce:
        return all_reduce();
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
    const auto [known, is_new] = c_.along_.try_emplace(operation_.group_id);
    if (!is_new) {
      along_ = known->second;
      return;
    }
    const std::vector<int>& members = *operation_.members;
    const MeshSizes& mesh = c_.setting_.mesh;
    int64_t ranks = 1;
    for (int f = 0; f < c_.count(); ++f) {
      const Factor& factor = c_.setting_.factors[f];
      std::set<int64_t> places;
      for (int member : members) places.insert(factor.place(mesh, member));
      along_[f] = places.size() > 1;
      ranks *= std::ssize(places);
    }
    if (ranks != std::ssize(members)) {
      refuse(-1, fmt::format("the {} ranks of this group are no product of factors of the mesh",
                             members.size()));
    }
    known->second = along_;
  }

  bool has_integers() const {
    const Tensor& any = input_.defined() ? input_ : output_;
    return any.defined() && any.dtype() == DType::i32;
  }
  bool along_pp() const {
    return c_.count() > 0 && c_.is_pp(c_.count() - 1) && along_[c_.count() - 1];
  }

  [[noreturn]] void refuse(int f, const std::string& what) const { c_.refuse(origin_, f, what); }

  void read_input() {
    if (!input_.defined() || input_.numel() == 0) return;
    from_ = c_.regions_.of(input_);
    for (const Region& region : from_) {
      c_.add_to_link(region);
      c_.check_arrived(origin_, "sends", region);
    }
    if (!has_integers()) c_.check_there(origin_, "sends", input_, from_);
    c_.note_read(input_, from_);
  }

  /// The input with what `kind(region, f)` makes of each kind along the group's factors; zeros
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

  /// What a reduction makes of the input: terms of a sum become this kind.
  std::vector<Region> reduced(Kind to) const {
    return input_as([&](const Region& region, int f) {
      const Kind kind = region.type[f];
      if (kind == unknown) return to;
      if (operation_.takes_maximum && kind == maximum) return replicated;
      if (!operation_.takes_maximum && kind == partial) return to;
      refuse(f, (operation_.takes_maximum ? "takes the maximum of "
                                          : "sums what is no term of a sum: ") +
                    Checker::told(region, f));
    });
  }

  void all_reduce() const {
    for (const Region& region : reduced(replicated)) {
      c_.write(output_, region.begin, region.end, region.type, origin_);
    }
  }

  void reduce_scatter() const {
    const std::vector<Region> parts = reduced(rows);
    if (has_columns()) return put_columns(parts);
    const int64_t length = c_.regions_.width(input_) / std::ssize(*operation_.members);
    const int64_t first = length * operation_.rank;
    for (const Region& region : c_.regions_.of(output_)) {
      if (region.is_unread_gradient && region.parameter != nullptr && !is_inside()) {
        refuse(-1,
               fmt::format("writes over a gradient that nothing has read, from {}", region.origin));
      }
    }
    for (const Region& region : parts) {
      const int64_t begin = std::max(region.begin, first) - first;
      const int64_t end = std::min(region.end, first + length) - first;
      if (begin >= end) continue;
      c_.write(output_, begin, end, region.type, origin_, region.parameter);
      if (region.parameter == nullptr) continue;
      c_.regions_.change(output_, begin, end, [](Region& r) { r.is_unread_gradient = true; });
    }
  }
  /// Whether the output is a part of the input.
  bool is_inside() const {
    const auto* at = static_cast<const char*>(output_.address());
    const auto* begin = static_cast<const char*>(input_.address());
    return at >= begin && at < begin + input_.bytes();
  }

  void all_gather() const {
    const std::vector<Region> gathered = input_as([&](const Region& region, int f) {
      const Kind kind = region.type[f];
      const bool is_list = c_.is_decoding_ && kind == own_sums;  // which a merge makes one of
      if (kind == rows || kind == columns || kind == dispatched || is_list) return replicated;
      if (kind == unknown) return unknown;
      refuse(f, "gathers " + Checker::told(region, f));
    });
    const auto weights = c_.parts_of(output_, &Parameter::value);
    if (!weights.empty()) return gather_weights(gathered, weights);
    if (has_columns()) {
      put_columns(gathered);
    } else {
      const int64_t length = input_.numel();
      for (int64_t slot = 0; slot < std::ssize(*operation_.members); ++slot) {
        for (const Region& region : gathered) {
          c_.write(output_, slot * length + region.begin, slot * length + region.end, region.type,
                   origin_);
        }
      }
    }
    const bool along_cp = std::ranges::any_of(c_.setting_.factors, [&](const Factor& factor) {
      return factor.axis == MeshAxis::cp && along_[&factor - c_.setting_.factors.data()];
    });
    if (along_cp) c_.regions_.change(input_, [](Region& region) { region.is_gathered = true; });
  }
  /// Other ranks' shards are of other parameters than this one's.
  void gather_weights(const std::vector<Region>& gathered,
                      const std::vector<Checker::Part>& weights) const {
    for (const Region& region : gathered) {
      if (region.parameter == nullptr) continue;
      const Type& declared = c_.declared_.at(region.parameter).type;
      for (int f = 0; f < c_.count(); ++f) {
        if (region.type[f] == declared[f] || region.type[f] == zero) continue;
        refuse(f, fmt::format("the gathered {} would be {}; it was {}", region.parameter->name,
                              words(region.type[f]), words(declared[f])));
      }
    }
    c_.write(output_, all_of(zero), origin_);
    for (const auto& [parameter, begin, end] : weights) {
      c_.write(output_, begin, end, c_.declared_.at(parameter).type, origin_, parameter);
    }
  }

  void all_to_all() const {
    if (output_.numel() == 0) return;
    const bool of_experts = operation_.group.starts_with("ep");
    if (from_.empty()) return c_.write(output_, all_of(unknown), origin_);  // no row leaves here
    const std::vector<Region> parts = input_as([&](const Region& region, int f) {
      const Kind kind = region.type[f], of_tokens = c_.kind_of_tokens();
      if (kind == of_tokens) return of_experts ? dispatched : columns;
      if (kind == dispatched || kind == columns) return of_tokens;
      if (kind == unknown) return unknown;
      refuse(f, "exchanges " + Checker::told(region, f));
    });
    if (has_columns()) return put_columns(parts);
    c_.write(output_, parts[0].type, origin_);
  }

  /// Whether what is sent lies in columns, whose types differ.
  bool has_columns() const {
    const int64_t period = c_.regions_.period(input_);
    return period > 0 && output_.numel() % period == 0 && c_.regions_.width(input_) == period;
  }
  void put_columns(const std::vector<Region>& columns) const {
    const int64_t period = c_.regions_.period(input_);
    c_.regions_.divide_into_columns(output_, period);
    const bool fits = c_.regions_.width(output_) == period;
    for (const Region& region : columns) {
      if (!fits) return c_.write(output_, region.type, origin_);
      c_.write(output_, region.begin, region.end, region.type, origin_);
    }
  }

  void send() const {
    if (!along_pp()) {
      ++c_.in_ring_[operation_.group_id];
      const bool by_columns = c_.regions_.width(input_) == c_.regions_.period(input_);
      c_.passed_on_[operation_.group_id] = {by_columns ? c_.regions_.period(input_) : 0, from_};
      return;
    }
    ++c_.sent_[(*operation_.members)[operation_.peer]];
    for (const Region& region : from_) {
      for (int f = 0; f < c_.count(); ++f) {
        const Kind kind = region.type[f], expected = c_.setting_.boundary[f];
        if (kind == expected || is_neutral(kind)) continue;
        refuse(f, fmt::format("the other stage takes it as {}, and gets {}", words(expected),
                              Checker::told(region, f)));
      }
    }
  }
  void receive() const {
    if (along_pp()) {
      ++c_.received_[(*operation_.members)[operation_.peer]];
      return c_.write(output_, c_.setting_.boundary, origin_);
    }
    // Every rank of a ring does the same: what comes is as what goes.
    --c_.in_ring_[operation_.group_id];
    const auto& [columns, sent] = c_.passed_on_[operation_.group_id];
    if (columns > 0) c_.regions_.divide_into_columns(output_, columns);
    for (const Region& region : sent) {
      c_.add_to_link(region);
      if (c_.regions_.width(output_) < region.end) {
        c_.write(output_, sent[0].type, origin_);
        break;
      }
      c_.write(output_, region.begin, region.end, region.type, origin_);
    }
    // What the places before have added up, somebody has to read. Keys may go by unread.
    if (!operation_.group.ends_with("gradients")) return;
    c_.regions_.change(output_, [](Region& region) { region.is_unread_gradient = true; });
  }
  /// Broadcasts logits, from the stage that has the head. Who gets them takes them for a rank's
  /// columns.
  void broadcast() const {
    Type type = c_.setting_.boundary;
    for (int f = 0; f < c_.count(); ++f) {
      if (along_[f]) type[f] = replicated;
      if (c_.setting_.factors[f].axis == MeshAxis::tp) type[f] = columns;
      for (const Region& region : from_) {
        const Kind kind = region.type[f];
        if (along_[f] || kind == type[f] || is_neutral(kind)) continue;
        refuse(f, fmt::format("the others take it as {}, and get {}", words(type[f]),
                              Checker::told(region, f)));
      }
    }
    c_.write(from_.empty() ? output_ : input_, type, origin_);
  }

  Checker& c_;
  const Recorder::Posted& operation_;
  const std::string_view origin_;
  const Tensor &input_, &output_;
  std::array<bool, kFactors> along_{};
  std::vector<Region> from_;
};

void apply_message_rule(const MessageInTypes& message) { MessageRules(message).apply(); }

}  // namespace usp::types
