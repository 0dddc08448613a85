#include "types/rules.h"

#include <algorithm>
#include <unordered_map>

#include "tensor/runtime.h"

namespace usp::types {

using enum Kind;

/// The rules of ops, on the operands of one. Comments name these, outputs first.
class Rules {
 public:
  /// What all of an operand is, or of what an op makes.
  struct Value : Region {
    bool is_there = false;  ///< it has elements
  };
  using Rule = void (Rules::*)() const;

  Rules(Checker& checker, std::string_view name, std::span<const Tensor* const> operands, bool flag)
      : c_(checker), name_(name), operands_(operands), flag_(flag) {}

  static const std::unordered_map<std::string_view, Rule>& all();

  Value read(const Tensor& x) const {
    if (!x.defined() || x.numel() == 0) return {};
    const std::vector<Region> all = parts_of(x);
    if (x.dtype() == DType::i32 && (all.empty() || all.front().type == all_of(unwritten))) {
      return {{{}, all_of(unknown), ""}, true};
    }
    c_.check_there(name_, "reads", x, all);
    return {c_.as_one(name_, all), true};
  }

 private:
  const Tensor& operand(int i) const { return *operands_[i]; }
  int operands() const { return static_cast<int>(operands_.size()); }
  [[noreturn]] void refuse(int factor, const std::string& what) const {
    c_.refuse(name_, factor, what);
  }
  static std::string told(const Region& x, int f) { return Checker::told(x, f); }

  // ---- operands and results

  Value read(int i) const { return read(operand(i)); }
  /// What an operand consists of, which is read with this.
  std::vector<Region> parts_of(const Tensor& x) const {
    std::vector<Region> all = c_.as_read(x);
    for (const Region& region : all) note(region);
    c_.note_read(x, all);
    return all;
  }
  std::vector<Region> parts(int i) const { return parts_of(operand(i)); }
  void note(const Region& region) const {
    c_.check_arrived(name_, "reads", region);
    c_.add_to_link(region);
  }
  int64_t width(int i) const { return c_.regions_.width(operand(i)); }

  /// Writes a result, or adds it to what is there.
  void put(int i, const Value& y, bool adds = false) const { put(operand(i), kWhole, y, adds); }
  void put(const Tensor& y, Part part, const Value& value, bool adds = false) const {
    if (!y.defined() || y.numel() == 0) return;
    if (!adds) return c_.write(y, part, value.type, name_);
    const std::vector<Region> before = c_.regions_.of(y, part);
    c_.check_covered(name_, "adds to", y, part, before);
    for (const Region& old : before) {
      note(old);
      c_.write(y, old, agree("adds up", {old, true}, value).type, name_);
    }
    c_.note_read(y, before);
  }
  /// The same of a weight's gradient, which somebody has to read before it is written over.
  void put_gradient(const Value& gradient, Part part = kWhole) const {
    const Tensor& y = operand(0);
    if (!flag_) c_.check_read(name_, c_.regions_.of(y, part));
    put(y, part, gradient, flag_);
    c_.own_stage_enters(y);
    c_.regions_.change(y, part, [](Region& r) { r.is_unread_gradient = true; });
  }

  // ---- schemas, with what an error says

  /// The kind that `kind(f)` gives along each factor.
  template <class PerFactor>
  Value made(const PerFactor& kind) const {
    Value value{{{}, {}, name_, Runtime::current().block()}, true};
    for (int f = 0; f < c_.count(); ++f) value.type[f] = kind(f);
    return value;
  }
  template <class What>
  Kind checked(Kind kind, int f, const What& what) const {
    if (kind == kRefused) refuse(f, what());
    return kind;
  }
  Kind agree(int f, const char* verb, const Value& x, const Value& y) const {
    if (!x.is_there || !y.is_there) return x.is_there ? x.type[f] : y.type[f];
    return checked(same(x.type[f], y.type[f]), f,
                   [&] { return fmt::format("{} {} and {}", verb, told(x, f), told(y, f)); });
  }
  Value agree(const char* verb, const Value& x, const Value& y) const {
    return made([&](int f) { return agree(f, verb, x, y); });
  }
  Value sum(const Value& x, const Value& y) const {
    return made([&](int f) {
      // The last output of a block that is made again lacks its sum over ranks, and nothing reads
      // it.
      const bool is_last = c_.is_in("recompute");
      if (is_last && (x.type[f] == partial) != (y.type[f] == partial)) return unwritten;
      return agree(f, "adds", x, y);
    });
  }
  Value whole(Value x) const {
    for (int f = 0; f < c_.count(); ++f) {
      checked(nonlinear(x.type[f]), f, [&] { return "is not linear, and reads " + told(x, f); });
    }
    return x;
  }
  Value beside(Value dy, const Value& x) const {
    for (int f = 0; x.is_there && f < c_.count(); ++f) {
      dy.type[f] = checked(linear_in(dy.type[f], x.type[f]), f, [&] {
        return fmt::format("multiplies {} by what forward had: {}", told(dy, f), told(x, f));
      });
    }
    return dy;
  }
  Value product(Kind (*schema)(Kind, Kind), const Value& x, const Value& y) const {
    return made([&](int f) {
      return checked(schema(x.type[f], y.type[f]), f,
                     [&] { return fmt::format("multiplies {} by {}", told(x, f), told(y, f)); });
    });
  }
  // The same of operands, which are read in this order: a history shows it.
  Value agree(const char* verb, int x, int y) const {
    const Value first = read(x);
    return agree(verb, first, read(y));
  }
  Value beside(int dy, int x) const {
    const Value first = read(dy);
    return beside(first, read(x));
  }
  Value product(Kind (*schema)(Kind, Kind), int x, int y) const {
    const Value first = read(x);
    return product(schema, first, read(y));
  }
  Value number(const Value& x) const {
    return made([&](int f) {
      return checked(term(x.type[f], c_.is_first(f, x.parameter)), f,
                     [&] { return "is not linear, and reads " + told(x, f); });
    });
  }

  // ---- ops that a schema serves

  void moved() const { put(0, read(1)); }                // y, x
  void nonlinear_of() const { put(0, whole(read(1))); }  // y, x
  void linear_of() const { put(0, beside(1, 2)); }       // dx, dy, x
  void add() const {                                     // y, a, b; accumulate: y, y, x
    const std::vector<Region> one = parts(1), two = parts(2);
    if ((one.size() <= 1 && two.size() <= 1) || width(1) != width(2)) {
      Value x = read(2);
      if (c_.is_in("sums over heads"))
        std::ranges::replace(x.type, columns, partial);  // of other ranks
      return put(0, sum(read(1), x));
    }
    for (const Region& x : one) {
      for (const Region& y : two) {
        if (!x.within(y).empty()) put(operand(0), x.within(y), sum({x, true}, {y, true}));
      }
    }
  }
  void linear_forward() const {  // y, x, weight: part by part of stacked weights
    const Value x = read(1);
    const int64_t I = operand(2).size(1), O = operand(2).size(0);
    const std::vector<Region> stacked = parts(2);
    const bool is_one = std::ranges::all_of(
        stacked, [&](const Region& part) { return part.type == stacked[0].type; });
    if (!is_one && operand(0).contiguous()) c_.regions_.divide_into_columns(operand(0), O);
    if (is_one || width(0) != O) return put(0, product(times, x, read(2)));
    c_.check_there(name_, "reads", operand(2), stacked);
    for (const Region& part : stacked) {
      put(operand(0), {part.begin / I, part.end / I}, product(times, x, {part, true}));
    }
  }
  void linear_forward_add() const {  // y, x, weight, residual
    const Value added = product(times, 1, 2);
    put(0, agree("adds", read(3), added));
  }
  void linear_backward_input() const {  // dx, dy, weight
    const int64_t I = operand(2).size(1), O = operand(2).size(0);
    const std::vector<Region> stacked = parts(2), of_dy = parts(1);
    if (stacked.size() <= 1 || width(1) != O) {
      return put(0, product(times_transposed, 1, 2));
    }
    Value sum{};
    for (const Region& part : stacked) {
      for (const Region& dy : of_dy) {
        if (dy.within({part.begin / I, part.end / I}).empty()) continue;
        sum = agree("adds", sum, product(times_transposed, {dy, true}, {part, true}));
      }
    }
    put(0, sum);
  }
  void linear_backward_weight() const {  // dweight, dy, x
    const Value x = read(2);
    const std::vector<Region> stacked = parts(1);
    const int64_t I = operand(0).size(1), O = operand(0).size(0);
    if (stacked.size() <= 1 || width(1) != O) {
      return put_gradient(product(over_rows, read(1), x));
    }
    for (const Region& dy : stacked) {
      put_gradient(product(over_rows, {dy, true}, x), {dy.begin * I, dy.end * I});
    }
  }
  void gradient_over_rows() const {  // dweight, dy, x
    const Value dy = read(1), x = read(2);
    if (x.is_there) return put_gradient(product(over_rows, dy, x));
    for (const auto& weight : c_.parameters_in(operand(0), &Parameter::grad)) {
      c_.without_rows_.insert(weight.parameter);  // of experts
    }
    put(0, made([](int) { return zero; }));
  }
  void matmul() const {  // c, a, b
    Value a = read(1);
    const Value b = read(2);
    for (int f = 0; c_.is_in("heads apart") && f < c_.count(); ++f) {
      // Each rank has other heads, with their own weights: to this product it is a head.
      if (a.type[f] == columns && b.type[f] == outputs) a.type[f] = replicated;
    }
    put(0, product(times, a, b), flag_);
  }
  void grouped_linear() const {  // y, x, weights; dx, dy, weights
    const Value x = read(1);
    const bool is_forward = name_.ends_with("forward");
    if (x.is_there) put(0, product(is_forward ? times : times_transposed, x, read(2)));
  }
  void gates_backward() const { put(0, beside(1, 2), true); }  // dscores, dgates, gates
  void unpermute() const {                                     // y, rows, slots, gates
    const Value x = read(1);
    put(0, x.is_there ? x : made([](int) { return zero; }), flag_);
  }

  // ---- others, which combine schemas

  void fill() const {  // y
    put(0, made([&](int) { return flag_ ? zero : replicated; }));
  }
  void copy() const {  // y, x
    const Tensor& x = operand(1);
    if (x.numel() == 0) return;
    if (parts(1).empty() && x.dtype() != DType::i32) read(1);
    c_.copy(operand(0), x);
    if (c_.has_stage_copies_) c_.own_stage_enters(operand(0));
  }
  void embedding_forward() const {  // y, y, tokens, table
    Value y = product(times, 2, 3);
    std::ranges::replace(y.type, columns, partial);  // zeros for the words of other ranks
    put(0, y);
  }
  void embedding_backward() const {  // dtable, dy, tokens
    Value gradient = product(over_rows, 1, 2);
    const auto tables = c_.parameters_in(operand(0), &Parameter::grad);
    for (int f = 0; !tables.empty() && f < c_.count(); ++f) {
      const bool has_own_words = c_.declared_.at(tables[0].parameter).type[f] == outputs;
      if (has_own_words && gradient.type[f] == replicated) gradient.type[f] = outputs;
    }
    put_gradient(gradient);
  }

  void rmsnorm_forward() const {  // y, rstd, x, weight
    const Value x = whole(read(2));
    for (int f = 0; f < c_.count(); ++f) {
      if (x.type[f] == columns) refuse(f, "takes the mean over columns, and reads " + told(x, f));
    }
    put(0, product(times, x, read(3)));
    put(1, x);
  }
  void rmsnorm_backward_input() const {  // dx, dy, x, dresidual, weight, rstd
    const Value through = beside(1, 2), residual = read(3), w = read(4);
    for (int f = 0; f < c_.count(); ++f) {
      if (w.type[f] != replicated && w.type[f] != layers) refuse(f, "multiplies by " + told(w, f));
    }
    put(0, agree("adds", through, residual));
  }
  void rope() const {  // x, x, cos, sin
    for (const Region& part : parts(0)) put(operand(0), part, {part, true});
  }

  void attention_forward() const {  // out, lse, probs, q, k, v
    const Value q = whole(read(3)), k = whole(read(4));
    whole(read(5));
    const Value out = made([&](int f) {
      // Each rank has a share of the text before, perhaps none of it: a part of every row's sum.
      const bool is_share = c_.is_decoding_ && c_.setting_.factors[f].axis == MeshAxis::cp;
      if (is_share && q.type[f] == replicated && (!k.is_there || k.type[f] == rows))
        return own_sums;
      const bool of_own = q.type[f] == rows || q.type[f] == columns;
      if (k.type[f] == replicated && of_own) return q.type[f];
      return agree(f, "attends with", q, k);
    });
    for (int i : {0, 1, 2}) put(i, out);
  }
  void attention_merge() const {  // out, out, part_out, lse, lse, part_lse
    put(0, agree("merges", 1, 2));
    put(3, agree("merges", 4, 5));
  }
  void attention_rescale() const {  // probs, probs, part_lse, lse
    put(0, agree("rescales", 1, 3));
  }
  void attention_backward() const {  // dq, dk, dv, dout, probs, q, k, v, lse, delta
    const Value dout = read(3), k = read(6);
    put(0, beside(dout, read(5)), flag_);
    Value sent = dout;
    for (int f = 0; f < c_.count(); ++f) {
      // Each rank has the gradient that its own queries send, of keys that all have.
      const bool of_own = dout.type[f] == rows || dout.type[f] == columns;
      if (k.type[f] == replicated && of_own) sent.type[f] = partial;
    }
    for (int i : {1, 2}) put(i, beside(sent, k), flag_);
  }

  void cross_entropy_forward() const {  // row_max, row_sum, target_logit, logits, targets
    const Value x = whole(read(3)), targets = read(4);
    const std::array of_own_words = {maximum, own_sums, partial};
    for (int i : {0, 1, 2}) {
      put(i, made([&](int f) {
            return x.type[f] == columns ? of_own_words[i] : agree(f, "compares", x, targets);
          }));
    }
  }
  void cross_entropy_rescale() const {  // row_sum, row_sum, row_max, max
    const Value sum = read(1), max = read(3);
    put(0, made([&](int f) {
          if (sum.type[f] != own_sums) return agree(f, "rescales", sum, max);
          if (max.type[f] != replicated) refuse(f, "refers sums to " + told(max, f));
          return partial;
        }));
  }
  void cross_entropy_loss() const {  // loss, lse, row_max, row_sum, target_logit
    const Value max = whole(read(2)), sum = whole(read(3));
    whole(read(4));
    put(1, agree("takes the logarithm of", max, sum));
    enter(read(1));
  }
  void cross_entropy_backward() const {  // dlogits, logits, targets, lse
    const Value x = whole(read(1)), lse = whole(read(3));
    put(0, made([&](int f) {
          if (x.type[f] == columns && lse.type[f] == replicated) return columns;
          return agree(f, "subtracts", x, lse);
        }));
  }

  /// The first operand is a number that is summed over all ranks later on.
  void enter(const Value& x) const { put(0, number(x), true); }
  void sum_squares() const {  // each x, sum
    const int sum = operands() - 1;
    for (int i = 0; i < sum; ++i) {
      if (!operand(i).defined() || operand(i).numel() == 0) continue;
      put(sum, number(read(i)), flag_ || i > 0);
      c_.in_norm_.insert(operand(i).address());
    }
  }
  void clip_coefficient() const {  // sums, coefficient, norm
    c_.check_norm();
    const Value sums = read(0);
    for (int f = 0; f < c_.count(); ++f) {
      if (sums.type[f] == replicated || sums.type[f] == zero) continue;
      refuse(f, "the norm is not that of all gradients: " + told(sums, f));
    }
    for (int i : {1, 2}) put(i, made([](int) { return replicated; }));
  }
  void adamw() const {  // value, master, m, v, grad of each, coefficient
    const Value coefficient = read(operands() - 1);
    for (int f = 0; f < c_.count(); ++f) {  // zeros are what it was before there was a norm
      if (coefficient.type[f] != replicated) refuse(f, "scales by " + told(coefficient, f));
    }
    for (int i = 0; i + 4 < operands(); i += 5) {
      if (operand(i).numel() == 0) continue;
      const Value value = read(i), grad = read(i + 4);
      const Value now = made([&](int f) { return updated(f, value, grad); });
      for (int j = i; j < i + 4; ++j) put(j, now);
      // The next step may not read it again.
      c_.write(operand(i + 4), kWhole, all_of(unwritten),
               "the update, which was the last to read it");
    }
    c_.is_updating_ = true;
  }
  Kind updated(int f, const Value& value, const Value& grad) const {
    const Parameter* parameter = value.parameter;
    const bool unsaid = value.type[f] == zero && parameter != nullptr;
    const Kind k = unsaid ? c_.declared_.at(parameter).type[f] : value.type[f], g = grad.type[f];
    if (g == partial) refuse(f, "updates with a gradient that is not summed: " + told(grad, f));
    if (k == replicated && g == rows) return rows;  // its own shard
    const bool no_rows = g == zero && c_.without_rows_.contains(parameter);
    if (g == k || no_rows || g == unknown) return k;
    refuse(f, fmt::format("updates {} with {}", told(value, f), told(grad, f)));
  }

  void router_scores() const {  // scores, logits
    const Value scores = whole(read(1));
    put(0, scores);
    if (scores.is_there) c_.scores_ = scores.type;
  }
  void unpermute_backward() const {  // drows, dgates, dy, rows, slots, gates
    const Value dy = read(2);
    Value d = dy, x = read(3);
    for (int f = 0; f < c_.count(); ++f) {  // linear in the rows as well
      if (x.type[f] == partial && d.type[f] == replicated) std::swap(d.type[f], x.type[f]);
    }
    put(1, beside(d, x));
    put(0, dy);
  }
  Value load(int i) const {
    const Value x = i < operands() ? read(i) : Value{};
    for (int f = 0; x.is_there && f < c_.count(); ++f) {
      if (x.type[f] == partial) refuse(f, "the load is not that of all ranks: " + told(x, f));
    }
    return x;
  }
  void router_loss() const {  // loss, x, perhaps load
    load(2);
    enter(read(1));
  }
  void router_entropy() const {  // sums of each layer, scores
    Value sum = number(read(1));
    for (int f = 0; f < c_.count(); ++f) {
      if (c_.is_of_own_layers(f)) sum.type[f] = layers;
    }
    put(0, sum, true);
  }
  void router_loss_backward() const {  // dx, dx, x, perhaps load
    load(3);
    const Value before = read(1), x = read(2);
    put(0, made([&](int f) {
          if (before.type[f] != partial || x.type[f] != replicated) {
            return agree(f, "adds", before, x);
          }
          if (c_.is_first(f, nullptr)) return partial;
          refuse(f, "every rank adds what it knows of all to a term of a sum");
        }));
  }
  void balance_bias() const { put(0, load(1)); }  // bias, load

  Checker& c_;
  const std::string_view name_;
  const std::span<const Tensor* const> operands_;
  const bool flag_;
};

const std::unordered_map<std::string_view, Rules::Rule>& Rules::all() {
  static const std::unordered_map<std::string_view, Rule> rules = {
      {"fill", &Rules::fill},
      {"copy", &Rules::copy},
      {"add", &Rules::add},
      {"accumulate", &Rules::add},
      {"drop_elements", &Rules::moved},
      {"matmul", &Rules::matmul},
      {"linear_forward", &Rules::linear_forward},
      {"linear_forward_add", &Rules::linear_forward_add},
      {"linear_backward_input", &Rules::linear_backward_input},
      {"linear_backward_weight", &Rules::linear_backward_weight},
      {"embedding_forward", &Rules::embedding_forward},
      {"embedding_backward", &Rules::embedding_backward},
      {"rmsnorm_forward", &Rules::rmsnorm_forward},
      {"rmsnorm_backward_input", &Rules::rmsnorm_backward_input},
      {"rmsnorm_backward_weight", &Rules::gradient_over_rows},
      {"rope", &Rules::rope},
      {"swiglu_forward", &Rules::nonlinear_of},
      {"swiglu_backward", &Rules::linear_of},
      {"attention_forward", &Rules::attention_forward},
      {"attention_merge", &Rules::attention_merge},
      {"attention_rescale", &Rules::attention_rescale},
      {"attention_delta", &Rules::linear_of},
      {"attention_backward", &Rules::attention_backward},
      {"cross_entropy_forward", &Rules::cross_entropy_forward},
      {"cross_entropy_rescale", &Rules::cross_entropy_rescale},
      {"cross_entropy_loss", &Rules::cross_entropy_loss},
      {"cross_entropy_backward", &Rules::cross_entropy_backward},
      {"sum_squares", &Rules::sum_squares},
      {"clip_coefficient", &Rules::clip_coefficient},
      {"adamw", &Rules::adamw},
      {"router_scores", &Rules::router_scores},
      {"router_scores_backward", &Rules::linear_of},
      {"choose_experts", &Rules::nonlinear_of},
      {"count_choices", &Rules::moved},
      {"drop_choices", &Rules::moved},
      {"assign_slots", &Rules::moved},
      {"gates_forward", &Rules::nonlinear_of},
      {"gates_backward", &Rules::gates_backward},
      {"permute", &Rules::moved},
      {"unpermute", &Rules::unpermute},
      {"unpermute_backward", &Rules::unpermute_backward},
      {"grouped_linear_forward", &Rules::grouped_linear},
      {"grouped_linear_backward_input", &Rules::grouped_linear},
      {"grouped_linear_backward_weight", &Rules::gradient_over_rows},
      {"balance_loss_forward", &Rules::router_loss},
      {"balance_loss_backward", &Rules::router_loss_backward},
      {"z_loss_forward", &Rules::router_loss},
      {"z_loss_backward", &Rules::router_loss_backward},
      {"router_entropy", &Rules::router_entropy},
      {"balance_bias", &Rules::balance_bias},
  };
  return rules;
}

void apply_rule(Checker& checker, std::string_view op, std::span<const Tensor* const> operands,
                bool flag) {
  const auto found = Rules::all().find(op);
  if (found == Rules::all().end()) {
    throw TypeError(fmt::format("{}: there is no rule for the types of this op", op));
  }
  const Rules rules(checker, op, operands, flag);
  (rules.*found->second)();
}

Type type_for_host(Checker& checker, const Tensor& tensor) {
  const Rules::Value value = Rules(checker, "the host", {}, false).read(tensor);
  return value.is_there ? value.type : all_of(unknown);
}

std::vector<std::string_view> ops_with_rules() {
  std::vector<std::string_view> names;
  for (const auto& [name, rule] : Rules::all()) names.push_back(name);
  std::ranges::sort(names);
  return names;
}

}  // namespace usp::types
