#include "types/rules.h"

#include <algorithm>
#include <unordered_map>

#include "tensor/runtime.h"

namespace usp::types {

using enum Kind;

namespace {

/// What comes of the kinds of two operands, and how an error tells of them.
struct Schema {
  Kind (*kind)(Kind, Kind);
  const char *verb, *between = "and";

  /// The same with another verb.
  constexpr Schema operator()(const char* other) const { return {kind, other, between}; }
};

constexpr Schema kAdds = {same, "adds"};
constexpr Schema kBeside = {linear_in, "multiplies", "by what forward had:"};
constexpr Schema kTimes = {times, "multiplies", "by"};
constexpr Schema kTransposed = {times_transposed, "multiplies", "by"};
constexpr Schema kOverRows = {over_rows, "multiplies", "by"};

/// The last output of a block that is made again lacks its sum over ranks, and nothing reads it.
constexpr Schema kAddsAgain = {
    [](Kind x, Kind y) { return (x == partial) != (y == partial) ? unwritten : same(x, y); },
    "adds"};

constexpr bool is_own(Kind kind) { return kind == rows || kind == columns; }

/// A rank's own queries or heads attend with keys that all ranks have, and send them a term.
constexpr Schema kAttends = {
    [](Kind q, Kind k) { return k == replicated && is_own(q) ? q : same(q, k); }, "attends with"};
constexpr Schema kSends = {
    [](Kind d, Kind k) { return linear_in(k == replicated && is_own(d) ? partial : d, k); },
    kBeside.verb, kBeside.between};

/// A rank's own words, less what all words have.
constexpr Schema kSubtracts = {
    [](Kind x, Kind lse) { return x == columns && lse == replicated ? x : same(x, lse); },
    "subtracts"};

/// Sums that refer to each rank's own maximum are terms once they refer to that of all.
Kind rescaled(Kind sum, Kind max) {
  if (sum != own_sums) return same(sum, max);
  return max == replicated ? partial : kRefused;
}

/// A rank updates a weight that all have, or its own shard of that.
Kind updated(Kind weight, Kind gradient) {
  if (weight == replicated && gradient == rows) return rows;
  const bool fits = gradient == weight && gradient != partial;
  return fits || gradient == unknown ? weight : kRefused;
}

}  // namespace

/// The rules of ops, on the operands of one. Comments name these, outputs first.
class Rules {
 public:
  using Rule = void (Rules::*)() const;
  /// A rule, and the ops that have it.
  struct Row {
    Rule rule;
    std::vector<std::string_view> ops;
  };

  Rules(Checker& checker, std::string_view name, std::span<const Tensor* const> operands, bool flag)
      : c_(checker), name_(name), operands_(operands), flag_(flag) {}

  static const std::unordered_map<std::string_view, Rule>& by_op();

 private:
  const Tensor& operand(int i) const { return *operands_[i]; }
  int operands() const { return static_cast<int>(operands_.size()); }
  bool is_there(int i) const { return operand(i).defined() && operand(i).numel() > 0; }
  int64_t width(int i) const { return c_.regions_.width(operand(i)); }

  // ---- operands and results

  /// What all of an operand is; of no type where it is not there.
  Region read(int i) const { return c_.as_one(name_, parts(i)); }
  std::vector<Region> parts(int i) const {
    return c_.taken(name_, "reads", operand(i), c_.as_read(operand(i)));
  }
  /// Writes a result, or adds it to what is there.
  void put(int i, const Region& y, bool adds = false) const { put(i, kWhole, y, adds); }
  void put(int i, Part part, const Region& value, bool adds = false) const {
    if (!is_there(i)) return;
    const Tensor& y = operand(i);
    if (!adds) return c_.write(y, part, value.type, name_);
    const std::vector<Region> before = c_.regions_.of(y, part);
    for (const Region& old : before) c_.check_written(name_, "adds to", old);
    for (const Region& old : c_.taken(name_, "reads", y, before)) {
      c_.write(y, old, both(kAdds("adds up"), old, value).type, name_);
    }
  }
  /// The same of a weight's gradient, which somebody has to read before it is written over.
  void put_gradient(const Region& gradient, Part part = kWhole) const {
    const Tensor& y = operand(0);
    if (!flag_) c_.check_read(name_, c_.regions_.of(y, part));
    put(0, part, gradient, flag_);
    c_.own_stage_enters(y);
    c_.set_unread(y, part, true);
  }

  // ---- schemas, with what an error says

  /// The kind that `kind(f)` gives along each factor.
  template <class PerFactor>
  Region made(const PerFactor& kind) const {
    Region result{{}, {}, name_, Runtime::current().block()};
    for (int f = 0; f < c_.count(); ++f) result.type[f] = kind(f);
    return result;
  }
  Region all(Kind kind) const {
    return made([=](int) { return kind; });
  }
  Region both(const Schema& schema, const Region& x, const Region& y) const {
    return made([&](int f) {
      const Kind kind = schema.kind(x.type[f], y.type[f]);
      if (kind == kRefused) {
        c_.refuse(name_, f,
                  fmt::format("{} {} {} {}", schema.verb, Checker::told(x, f), schema.between,
                              Checker::told(y, f)));
      }
      return kind;
    });
  }
  /// The same of operands, which are read in this order: a history shows it.
  Region both(const Schema& schema, int x, int y) const {
    const Region first = read(x);
    return both(schema, first, read(y));
  }
  Region need(const char* what, const Region& x, bool (*fits)(Kind)) const {
    c_.need(name_, what, x, fits);
    return x;
  }
  Region whole(const Region& x) const {
    return need("is not linear, and reads", x, [](Kind k) { return nonlinear(k) != kRefused; });
  }
  Region number(const Region& x) const {
    whole(x);
    return made([&](int f) { return term(x.type[f], c_.is_first(f, x.parameter)); });
  }
  Region load(int i) const {
    return need("the load is not that of all ranks:", i < operands() ? read(i) : Region{},
                [](Kind kind) { return kind != partial; });
  }

  // ---- ops that a schema serves

  void moved() const { put(0, read(1)); }                    // y, x
  void nonlinear_of() const { put(0, whole(read(1))); }      // y, x
  void linear_of() const { put(0, both(kBeside, 1, 2)); }    // dx, dy, x
  void gates() const { put(0, both(kBeside, 1, 2), true); }  // dscores, dgates, gates
  void add() const {                                         // y, a, b; accumulate: y, y, x
    const std::vector<Region> one = parts(1), two = parts(2);
    const Schema& schema = c_.is_in("recompute") ? kAddsAgain : kAdds;
    if ((one.size() <= 1 && two.size() <= 1) || width(1) != width(2)) {
      Region x = c_.as_one(name_, two);
      if (c_.is_in("sums over heads")) std::ranges::replace(x.type, columns, partial);  // of others
      return put(0, both(schema, c_.as_one(name_, one), x));
    }
    for (const Region& x : one) {
      for (const Region& y : two) {
        if (!x.within(y).empty()) put(0, x.within(y), both(schema, x, y));
      }
    }
  }
  void linear_forward() const {  // y, x, weight: part by part of stacked weights
    const Region x = read(1);
    const int64_t I = operand(2).size(1), O = operand(2).size(0);
    const std::vector<Region> stacked = parts(2);
    const bool is_one = std::ranges::all_of(
        stacked, [&](const Region& part) { return part.type == stacked[0].type; });
    if (!is_one && operand(0).contiguous()) c_.regions_.divide_into_columns(operand(0), O);
    if (is_one || width(0) != O) return put(0, both(kTimes, x, c_.as_one(name_, stacked)));
    for (const Region& part : stacked) {
      put(0, {part.begin / I, part.end / I}, both(kTimes, x, part));
    }
  }
  void linear_forward_add() const {  // y, x, weight, residual
    const Region added = both(kTimes, 1, 2);
    put(0, both(kAdds, read(3), added));
  }
  void linear_backward_input() const {  // dx, dy, weight
    const int64_t I = operand(2).size(1), O = operand(2).size(0);
    const std::vector<Region> stacked = parts(2), of_dy = parts(1);
    if (stacked.size() <= 1 || width(1) != O) {
      return put(0, both(kTransposed, c_.as_one(name_, of_dy), c_.as_one(name_, stacked)));
    }
    Region sum{};
    for (const Region& part : stacked) {
      for (const Region& dy : of_dy) {
        if (dy.within({part.begin / I, part.end / I}).empty()) continue;
        sum = both(kAdds, sum, both(kTransposed, dy, part));
      }
    }
    put(0, sum);
  }
  void linear_backward_weight() const {  // dweight, dy, x
    const Region x = read(2);
    const std::vector<Region> stacked = parts(1);
    const int64_t I = operand(0).size(1), O = operand(0).size(0);
    if (stacked.size() <= 1 || width(1) != O) {
      return put_gradient(both(kOverRows, c_.as_one(name_, stacked), x));
    }
    for (const Region& dy : stacked) {
      put_gradient(both(kOverRows, dy, x), {dy.begin * I, dy.end * I});
    }
  }
  void gradient_over_rows() const {  // dweight, dy, x
    if (is_there(2)) return put_gradient(both(kOverRows, 1, 2));
    for (const auto& weight : c_.parameters_in(operand(0), &Parameter::grad)) {
      c_.without_rows_.insert(weight.parameter);  // of experts
    }
    put(0, all(zero));
  }
  void matmul() const {  // c, a, b
    Region a = read(1);
    const Region b = read(2);
    for (int f = 0; c_.is_in("heads apart") && f < c_.count(); ++f) {
      // Each rank has other heads, with their own weights: to this product it is a head.
      if (a.type[f] == columns && b.type[f] == outputs) a.type[f] = replicated;
    }
    put(0, both(kTimes, a, b), flag_);
  }
  void grouped_linear() const {  // y, x, weights; dx, dy, weights
    const bool is_forward = name_.ends_with("forward");
    if (is_there(1)) put(0, both(is_forward ? kTimes : kTransposed, 1, 2));
  }
  void unpermute() const {  // y, rows, slots, gates
    put(0, is_there(1) ? read(1) : all(zero), flag_);
  }
  void unpermute_add() const {  // y, residual, rows, slots, gates
    put(0, is_there(2) ? both(kAdds, 1, 2) : read(1));
  }

  // ---- others, which combine schemas

  void fill() const { put(0, all(flag_ ? zero : replicated)); }  // y
  void copy() const {                                            // y, x
    c_.copy(operand(0), operand(1), parts(1));
    if (c_.has_stage_copies_) c_.own_stage_enters(operand(0));
  }
  void embedding_forward() const {  // y, y, tokens, table
    Region y = both(kTimes, 2, 3);
    std::ranges::replace(y.type, columns, partial);  // zeros for the words of other ranks
    put(0, y);
  }
  void embedding_backward() const {  // dtable, dy, tokens
    Region gradient = both(kOverRows, 1, 2);
    const auto tables = c_.parameters_in(operand(0), &Parameter::grad);
    for (int f = 0; !tables.empty() && f < c_.count(); ++f) {
      const bool has_own_words = c_.declared_.at(tables[0].parameter).type[f] == outputs;
      if (has_own_words && gradient.type[f] == replicated) gradient.type[f] = outputs;
    }
    put_gradient(gradient);
  }

  void rmsnorm_forward() const {  // y, rstd, x, weight
    const Region x = need("takes the mean over columns, and reads", whole(read(2)),
                          [](Kind kind) { return kind != columns; });
    put(0, both(kTimes, x, read(3)));
    put(1, x);
  }
  void rmsnorm_backward_input() const {  // dx, dy, x, dresidual, weight, rstd
    Region through = read(1);
    through.type = both(kBeside, through, read(2)).type;
    const Region residual = read(3);
    need("multiplies by", read(4), [](Kind k) { return k == replicated || k == layers; });
    put(0, both(kAdds, through, residual));
  }
  void rope() const {  // x, x, cos, sin
    for (const Region& part : parts(0)) put(0, part, part);
  }

  void attention_forward() const {  // out, lse, probs, q, k, v
    Region q = whole(read(3)), k = whole(read(4));
    whole(read(5));
    for (int f = 0; c_.is_decoding_ && f < c_.count(); ++f) {
      // Each rank has a share of the text before, perhaps none of it: a part of every row's sum.
      const bool is_share = c_.axis(f) == MeshAxis::cp && q.type[f] == replicated;
      if (is_share && (!is_there(4) || k.type[f] == rows)) q.type[f] = k.type[f] = own_sums;
    }
    for (int i : {0, 1, 2}) put(i, both(kAttends, q, k));
  }
  void attention_merge() const {  // out, out, part_out, lse, lse, part_lse
    put(0, both(kAdds("merges"), 1, 2));
    put(3, both(kAdds("merges"), 4, 5));
  }
  void attention_rescale() const {  // probs, probs, part_lse, lse
    put(0, both(kAdds("rescales"), 1, 3));
  }
  void attention_backward() const {  // dq, dk, dv, dout, probs, q, k, v, lse, delta
    const Region dout = read(3), k = read(6);
    put(0, both(kBeside, dout, read(5)), flag_);
    for (int i : {1, 2}) put(i, both(kSends, dout, k), flag_);
  }

  void cross_entropy_forward() const {  // row_max, row_sum, target_logit, logits, targets
    const Region x = whole(read(3)), targets = read(4);
    const Kind of_own_words[] = {maximum, own_sums, partial};
    for (int i : {0, 1, 2}) {
      Region of_rank = both(kSubtracts("compares"), x, targets);
      std::ranges::replace(of_rank.type, columns, of_own_words[i]);
      put(i, of_rank);
    }
  }
  void cross_entropy_rescale() const {  // row_sum, row_sum, row_max, max
    put(0, both({rescaled, "rescales"}, 1, 3));
  }
  void cross_entropy_loss() const {  // loss, lse, row_max, row_sum, target_logit
    const Region max = whole(read(2)), sum = whole(read(3));
    whole(read(4));
    put(1, both(kAdds("takes the logarithm of"), max, sum));
    enter(read(1));
  }
  void cross_entropy_backward() const {  // dlogits, logits, targets, lse
    const Region x = whole(read(1));
    put(0, both(kSubtracts, x, whole(read(3))));
  }

  /// The first operand is a number that is summed over all ranks later on.
  void enter(const Region& x) const { put(0, number(x), true); }
  void sum_squares() const {  // each x, sum
    const int sum = operands() - 1;
    for (int i = 0; i < sum; ++i) {
      if (!is_there(i)) continue;
      put(sum, number(read(i)), flag_ || i > 0);
      c_.in_norm_.insert(operand(i).address());
    }
  }
  void clip_coefficient() const {  // sums, coefficient, norm
    c_.check_norm();
    need("the norm is not that of all gradients:", read(0),
         [](Kind kind) { return kind == replicated || kind == zero; });
    for (int i : {1, 2}) put(i, all(replicated));
  }
  void adamw() const {  // value, master, m, v, grad of each, coefficient
    // Zeros are what the coefficient was before there was a norm.
    need("scales by", read(operands() - 1), [](Kind kind) { return kind == replicated; });
    for (int i = 0; i + 4 < operands(); i += 5) {
      if (!is_there(i)) continue;
      Region value = read(i), grad = read(i + 4);
      for (int f = 0; value.parameter && f < c_.count(); ++f) {
        const Kind declared = c_.declared_.at(value.parameter).type[f];
        if (value.type[f] == zero) value.type[f] = declared;  // nothing has said so before
        const bool has_no_rows = c_.without_rows_.contains(value.parameter);
        if (grad.type[f] == zero && has_no_rows) grad.type[f] = value.type[f];
      }
      const Region now = both({updated, "updates", "with"}, value, grad);
      for (int j = i; j < i + 4; ++j) put(j, now);
      // The next step may not read it again.
      c_.write(operand(i + 4), kWhole, all_of(unwritten),
               "the update, which was the last to read it");
    }
    c_.is_updating_ = true;
  }

  void router_scores() const {  // scores, logits
    const Region scores = whole(read(1));
    put(0, scores);
    if (is_there(1)) c_.scores_ = scores.type;
  }
  void unpermute_backward() const {  // drows, dgates, dy, rows, slots, gates
    const Region dy = read(2);
    Region d = dy, x = read(3);
    for (int f = 0; f < c_.count(); ++f) {  // linear in the rows as well
      if (x.type[f] == partial && d.type[f] == replicated) std::swap(d.type[f], x.type[f]);
    }
    put(1, both(kBeside, d, x));
    put(0, dy);
  }
  void router_loss() const {  // loss, x, perhaps load
    load(2);
    enter(read(1));
  }
  void router_entropy() const {  // sums of each layer, scores
    Region sum = number(read(1));
    for (int f = 0; f < c_.count(); ++f) {
      if (c_.is_of_own_layers(f)) sum.type[f] = layers;
    }
    put(0, sum, true);
  }
  void router_loss_backward() const {  // dx, dx, x, perhaps load
    load(3);
    const Region before = read(1);
    Region x = read(2);
    for (int f = 0; f < c_.count(); ++f) {  // what all know, the first enters into a term
      const bool enters = before.type[f] == partial && c_.is_first(f, nullptr);
      if (enters && x.type[f] == replicated) x.type[f] = partial;
    }
    put(0, both(kAdds, before, x));
  }
  void balance_bias() const { put(0, load(1)); }  // bias, load

  Checker& c_;
  const std::string_view name_;
  const std::span<const Tensor* const> operands_;
  const bool flag_;
};

const std::unordered_map<std::string_view, Rules::Rule>& Rules::by_op() {
  static const std::vector<Row> rows = {
      {&Rules::moved,
       {"drop_elements", "count_choices", "drop_choices", "assign_slots", "permute"}},
      {&Rules::nonlinear_of, {"swiglu_forward", "choose_experts", "gates_forward"}},
      {&Rules::linear_of, {"swiglu_backward", "attention_delta", "router_scores_backward"}},
      {&Rules::gates, {"gates_backward"}},
      {&Rules::add, {"add", "accumulate"}},
      {&Rules::matmul, {"matmul"}},
      {&Rules::linear_forward, {"linear_forward"}},
      {&Rules::linear_forward_add, {"linear_forward_add"}},
      {&Rules::linear_backward_input, {"linear_backward_input"}},
      {&Rules::linear_backward_weight, {"linear_backward_weight"}},
      {&Rules::gradient_over_rows, {"rmsnorm_backward_weight", "grouped_linear_backward_weight"}},
      {&Rules::grouped_linear, {"grouped_linear_forward", "grouped_linear_backward_input"}},
      {&Rules::unpermute, {"unpermute"}},
      {&Rules::unpermute_add, {"unpermute_add"}},
      {&Rules::unpermute_backward, {"unpermute_backward"}},
      {&Rules::fill, {"fill"}},
      {&Rules::copy, {"copy"}},
      {&Rules::embedding_forward, {"embedding_forward"}},
      {&Rules::embedding_backward, {"embedding_backward"}},
      {&Rules::rmsnorm_forward, {"rmsnorm_forward"}},
      {&Rules::rmsnorm_backward_input, {"rmsnorm_backward_input"}},
      {&Rules::rope, {"rope"}},
      {&Rules::attention_forward, {"attention_forward"}},
      {&Rules::attention_merge, {"attention_merge"}},
      {&Rules::attention_rescale, {"attention_rescale"}},
      {&Rules::attention_backward, {"attention_backward"}},
      {&Rules::cross_entropy_forward, {"cross_entropy_forward"}},
      {&Rules::cross_entropy_rescale, {"cross_entropy_rescale"}},
      {&Rules::cross_entropy_loss, {"cross_entropy_loss"}},
      {&Rules::cross_entropy_backward, {"cross_entropy_backward"}},
      {&Rules::sum_squares, {"sum_squares"}},
      {&Rules::clip_coefficient, {"clip_coefficient"}},
      {&Rules::adamw, {"adamw"}},
      {&Rules::router_scores, {"router_scores"}},
      {&Rules::router_loss, {"balance_loss_forward", "z_loss_forward"}},
      {&Rules::router_loss_backward, {"balance_loss_backward", "z_loss_backward"}},
      {&Rules::router_entropy, {"router_entropy"}},
      {&Rules::balance_bias, {"balance_bias"}},
  };
  static const auto rules = [] {
    std::unordered_map<std::string_view, Rule> each;
    for (const auto& [rule, ops] : rows) {
      for (std::string_view op : ops) each[op] = rule;
    }
    return each;
  }();
  return rules;
}

void apply_rule(Checker& checker, std::string_view op, std::span<const Tensor* const> operands,
                bool flag) {
  const auto found = Rules::by_op().find(op);
  if (found == Rules::by_op().end()) {
    throw TypeError(fmt::format("{}: there is no rule for the types of this op", op));
  }
  const Rules rules(checker, op, operands, flag);
  (rules.*found->second)();
}

std::vector<std::string_view> ops_with_rules() {
  std::vector<std::string_view> names;
  for (const auto& [name, rule] : Rules::by_op()) names.push_back(name);
  std::ranges::sort(names);
  return names;
}

}  // namespace usp::types
