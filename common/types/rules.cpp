#include "types/rules.h"

#include <algorithm>
#include <unordered_map>

#include "tensor/runtime.h"

namespace usp::types {

using enum Kind;

/// The rules of ops, on the operands of one.
class Rules {
 public:
  /// What all of an operand is.
  struct Value : Region {
    bool is_there = false;  ///< it has elements
  };

  explicit Rules(const OpInTypes& op) : c_(op.checker), op_(op) {}

  const Tensor& operand(int i) const { return *op_.operands[i]; }
  int operands() const { return static_cast<int>(op_.operands.size()); }
  bool flag() const { return op_.flag; }

  [[noreturn]] void refuse(int factor, const std::string& what) const {
    c_.refuse(op_.name, factor, what);
  }

  static std::string told(const Value& x, int f) { return Checker::told(x, f); }

  // ---- operands

  Value value_of(const Region& region) const {
    c_.check_arrived(op_.name, "reads", region);
    c_.add_to_link(region);
    return {region, true};
  }

  Value read(int i) const { return read(operand(i)); }
  Value read(const Tensor& x) const {
    Value value{};
    if (!x.defined() || x.numel() == 0) return value;
    const std::vector<Region> all = c_.as_read(x);
    if (x.dtype() == DType::i32 && (all.empty() || all.front().type == all_of(unwritten))) {
      value.type = all_of(unknown);
      value.is_there = true;
      return value;
    }
    c_.check_there(op_.name, "reads", x, all);
    value = value_of(all.front());
    for (const Region& region : std::span(all).subspan(1)) {
      const Value part = value_of(region);
      for (int f = 0; f < c_.count(); ++f) {
        const Kind both = types::beside(value.type[f], part.type[f]);
        if (both == kRefused) {
          refuse(f, fmt::format("one part of what it reads is {}, and another {}", told(value, f),
                                told(part, f)));
        }
        if (both != value.type[f]) value.origin = part.origin, value.block = part.block;
        value.type[f] = both;
      }
    }
    c_.note_read(x, all);
    return value;
  }

  std::vector<Region> pieces(int i) const { return c_.as_read(operand(i)); }
  int64_t width(int i) const { return c_.regions_.width(operand(i)); }

  // ---- results

  // `kind(f)` is the kind along factor f.

  template <class PerFactor>
  void put(int i, const PerFactor& kind) const {
    put(operand(i), 0, -1, kind);
  }
  template <class PerFactor>
  void put(const Tensor& y, int64_t begin, int64_t end, const PerFactor& kind) const {
    if (!y.defined() || y.numel() == 0) return;
    Type type{};
    for (int f = 0; f < c_.count(); ++f) type[f] = kind(f);
    c_.write(y, begin, end < 0 ? c_.regions_.width(y) : end, type, op_.name);
  }
  /// Adds to what is there, where the op does.
  template <class PerFactor>
  void add_to(int i, bool adds, const PerFactor& kind) const {
    add_to(operand(i), 0, -1, adds, kind);
  }
  template <class PerFactor>
  void add_to(const Tensor& y, int64_t begin, int64_t end, bool adds, const PerFactor& kind) const {
    if (!y.defined() || y.numel() == 0) return;
    if (end < 0) end = c_.regions_.width(y);
    std::vector<Region> before;
    if (adds) {
      int64_t covered = 0;
      for (const Region& region : c_.regions_.of(y)) {
        if (region.end <= begin || region.begin >= end) continue;
        before.push_back(region);
        covered += std::min(region.end, end) - std::max(region.begin, begin);
        value_of(region);
      }
      if (covered < end - begin) refuse(-1, "adds to what nothing has written");
      c_.note_read(y, before);
    }
    Value added{};
    added.origin = op_.name;
    added.block = Runtime::current().block();
    added.is_there = true;
    for (int f = 0; f < c_.count(); ++f) added.type[f] = kind(f);
    if (!adds) return put(y, begin, end, [&](int f) { return added.type[f]; });
    for (const Region& region : before) {
      const Value old = value_of(region);
      put(y, std::max(region.begin, begin), std::min(region.end, end),
          [&](int f) { return agree(f, "adds up", old, added); });
    }
  }
  /// The same of a weight's gradient, which somebody has to read before it is written over.
  template <class PerFactor>
  void add_gradient(const Tensor& y, int64_t begin, int64_t end, const PerFactor& kind) const {
    if (!y.defined() || y.numel() == 0) return;
    if (end < 0) end = c_.regions_.width(y);
    for (const Region& region : c_.regions_.of(y)) {
      const bool is_part = region.begin < end && region.end > begin;
      if (!flag() && is_part && region.is_unread_gradient) {
        refuse(-1,
               fmt::format("writes over a gradient that nothing has read, from {}", region.origin));
      }
    }
    add_to(y, begin, end, flag(), kind);
    c_.own_stage_enters(y);
    c_.regions_.change(y, begin, end, [](Region& r) { r.is_unread_gradient = true; });
  }

  // ---- schemas, with what an error says

  template <class What>
  Kind checked(Kind kind, int f, const What& what) const {
    if (kind == kRefused) refuse(f, what());
    return kind;
  }
  Kind agree(int f, const char* verb, const Value& x, const Value& y) const {
    if (!x.is_there) return y.type[f];
    if (!y.is_there) return x.type[f];
    return checked(same(x.type[f], y.type[f]), f,
                   [&] { return fmt::format("{} {} and {}", verb, told(x, f), told(y, f)); });
  }
  Kind whole(int f, const Value& x) const {
    return checked(nonlinear(x.type[f]), f,
                   [&] { return "is not linear, and reads " + told(x, f); });
  }
  Kind beside(int f, const Value& dy, const Value& x) const {
    if (!x.is_there) return dy.type[f];
    return checked(linear_in(dy.type[f], x.type[f]), f, [&] {
      return fmt::format("multiplies {} by what forward had: {}", told(dy, f), told(x, f));
    });
  }
  template <class Schema>
  Kind product(Schema schema, int f, const Value& x, const Value& y) const {
    return checked(schema(x.type[f], y.type[f]), f,
                   [&] { return fmt::format("multiplies {} by {}", told(x, f), told(y, f)); });
  }
  Kind number(int f, const Value& x) const {
    return checked(term(x.type[f], c_.is_first(f, x.parameter)), f,
                   [&] { return "is not linear, and reads " + told(x, f); });
  }
  void must_be_whole(int f, const char* what, const Value& x) const {
    if (x.is_there && x.type[f] == partial) {
      refuse(f, fmt::format("{} is not that of all ranks: {}", what, told(x, f)));
    }
  }

  // ---- ops; the comments name their operands

  void fill() const {  // y
    put(0, [&](int) { return flag() ? zero : replicated; });
  }
  void copy() const {  // y, x
    if (operand(1).numel() == 0) return;
    const std::vector<Region> from = pieces(1);
    if (from.empty() && operand(1).dtype() != DType::i32) read(1);
    for (const Region& region : from) value_of(region);
    c_.copy(operand(0), operand(1));
    c_.note_read(operand(1), from);
    if (c_.has_stage_copies_) c_.own_stage_enters(operand(0));
  }
  auto sum_of(const Value& x, const Value& y) const {
    return [=, this](int f) {
      // The last output of a block that is made again lacks its sum over ranks, and nothing reads
      // it.
      if (c_.phase().is_recomputing && (x.type[f] == partial) != (y.type[f] == partial)) {
        return unwritten;
      }
      return agree(f, "adds", x, y);
    };
  }
  void add() const {  // y, a, b; accumulate: y, y, x
    const std::vector<Region> one = pieces(1), two = pieces(2);
    if ((one.size() > 1 || two.size() > 1) && width(1) == width(2)) {  // part by part
      for (const Region& x : one) {
        for (const Region& y : two) {
          const int64_t begin = std::max(x.begin, y.begin), end = std::min(x.end, y.end);
          if (begin < end) put(operand(0), begin, end, sum_of(value_of(x), value_of(y)));
        }
      }
      c_.note_read(operand(1), one);
      c_.note_read(operand(2), two);
    } else if (c_.phase().sums_heads) {
      const Value before = read(1);
      Value x = read(2);
      std::ranges::replace(x.type, columns, partial);  // other heads on other ranks
      put(0, sum_of(before, x));
    } else {
      put(0, sum_of(read(1), read(2)));
    }
  }
  void same_as(int from) const {
    const Value x = read(from);
    put(0, [&](int f) { return x.type[f]; });
  }
  void nonlinear_of(int from) const {
    const Value x = read(from);
    put(0, [&](int f) { return whole(f, x); });
  }
  void linear_of(int dy_at, int x_at) const {
    const Value dy = read(dy_at), x = read(x_at);
    put(0, [&](int f) { return beside(f, dy, x); });
  }

  void linear_forward() const {  // y, x, weight: part by part of stacked weights
    const Value x = read(1);
    const int64_t I = operand(2).size(1), O = operand(2).size(0);
    const std::vector<Region> parts = pieces(2);
    const bool alike =
        std::ranges::all_of(parts, [&](const Region& r) { return r.type == parts[0].type; });
    if (!alike && operand(0).contiguous()) c_.regions_.divide_into_columns(operand(0), O);
    if (alike || width(0) != O) {
      const Value w = read(2);
      return put(0, [&](int f) { return product(times, f, x, w); });
    }
    c_.check_there(op_.name, "reads", operand(2), parts);
    for (const Region& part : parts) {
      const Value w = value_of(part);
      put(operand(0), part.begin / I, part.end / I, [&](int f) { return product(times, f, x, w); });
    }
  }
  void linear_forward_add() const {  // y, x, weight, residual
    const Value x = read(1), w = read(2), residual = read(3);
    put(0, [&](int f) {
      Value product_of{};
      product_of.is_there = true;
      product_of.origin = op_.name;
      product_of.type[f] = product(times, f, x, w);
      return agree(f, "adds", residual, product_of);
    });
  }
  void linear_backward_input() const {  // dx, dy, weight
    const int64_t I = operand(2).size(1), O = operand(2).size(0);
    const std::vector<Region> parts = pieces(2), of_dy = pieces(1);
    if (parts.size() <= 1 || width(1) != O) {
      const Value dy = read(1), w = read(2);
      return put(0, [&](int f) { return product(times_transposed, f, dy, w); });
    }
    Value sum{};
    for (const Region& part : parts) {
      const Value w = value_of(part);
      for (const Region& piece : of_dy) {
        if (piece.end <= part.begin / I || piece.begin >= part.end / I) continue;
        Value term = value_of(piece);
        const Value dy = term;
        for (int f = 0; f < c_.count(); ++f) {
          term.type[f] = product(times_transposed, f, dy, w);
          if (sum.is_there) sum.type[f] = agree(f, "adds", sum, term);
        }
        if (!sum.is_there) sum = term;
      }
    }
    put(0, [&](int f) { return sum.type[f]; });
  }
  void linear_backward_weight() const {  // dweight, dy, x
    const Value x = read(2);
    const std::vector<Region> parts = pieces(1);
    const int64_t I = operand(0).size(1), O = operand(0).size(0);
    if (parts.size() <= 1 || width(1) != O) {
      const Value dy = read(1);
      return add_gradient(operand(0), 0, -1, [&](int f) { return product(over_rows, f, dy, x); });
    }
    for (const Region& part : parts) {
      const Value dy = value_of(part);
      add_gradient(operand(0), part.begin * I, part.end * I,
                   [&](int f) { return product(over_rows, f, dy, x); });
    }
  }
  void gradient_over_rows() const {  // dweight, dy, x
    const Value dy = read(1), x = read(2);
    if (!x.is_there) {  // experts without rows
      for (const auto& part : c_.parts_of(operand(0), &Parameter::grad)) {
        c_.without_rows_.insert(part.parameter);
      }
      return put(0, [](int) { return zero; });
    }
    add_gradient(operand(0), 0, -1, [&](int f) { return product(over_rows, f, dy, x); });
  }
  void matmul() const {  // c, a, b
    const Value a = read(1), b = read(2);
    const bool has_heads_apart = c_.phase().has_heads_apart;  // of one head, with its own weight
    add_to(0, flag(), [&](int f) {
      if (has_heads_apart && a.type[f] == columns && b.type[f] == outputs) return columns;
      return product(times, f, a, b);
    });
  }
  void embedding_forward() const {  // y, y, tokens, table
    const Value tokens = read(2), table = read(3);
    put(0, [&](int f) {
      // Zeros for the words of other ranks.
      if (table.type[f] == outputs && tokens.type[f] == replicated) return partial;
      return product(times, f, tokens, table);
    });
  }
  void embedding_backward() const {  // dtable, dy, tokens
    const Value dy = read(1), tokens = read(2);
    const auto parts = c_.parts_of(operand(0), &Parameter::grad);
    add_gradient(operand(0), 0, -1, [&](int f) {
      const Kind kind = product(over_rows, f, dy, tokens);
      const bool of_own_words =
          !parts.empty() && c_.declared_.at(parts[0].parameter).type[f] == outputs;
      return of_own_words && kind == replicated ? outputs : kind;
    });
  }

  void rmsnorm_forward() const {  // y, rstd, x, weight
    const Value x = read(2), w = read(3);
    const auto norm = [&](int f) {
      if (x.type[f] == columns) refuse(f, "takes the mean over columns, and reads " + told(x, f));
      return whole(f, x);
    };
    put(0, [&](int f) {
      norm(f);
      return product(times, f, x, w);
    });
    put(1, norm);
  }
  void rmsnorm_backward_input() const {  // dx, dy, x, dresidual, weight, rstd
    const Value dy = read(1), x = read(2), residual = read(3), w = read(4);
    put(0, [&](int f) {
      if (w.type[f] != replicated && w.type[f] != layers) refuse(f, "multiplies by " + told(w, f));
      Value through = dy;
      through.type[f] = beside(f, dy, x);
      return agree(f, "adds", through, residual);
    });
  }
  void rope() const {  // x, x, cos, sin
    for (const Region& region : pieces(0)) {
      value_of(region);
      put(operand(0), region.begin, region.end, [&](int f) { return region.type[f]; });
    }
  }

  void attention_forward() const {  // out, lse, probs, q, k, v
    const Value q = read(3), k = read(4), v = read(5);
    const auto attends = [&](int f) {
      whole(f, q), whole(f, v);
      // Each rank has a share of the text before, perhaps none of it: a part of every row's sum.
      const bool is_share = c_.is_decoding_ && c_.setting_.factors[f].axis == MeshAxis::cp;
      if (is_share && q.type[f] == replicated && (!k.is_there || k.type[f] == rows))
        return own_sums;
      if (whole(f, k) == replicated && (q.type[f] == rows || q.type[f] == columns))
        return q.type[f];
      return agree(f, "attends with", q, k);
    };
    for (int i : {0, 1, 2}) put(i, attends);
  }
  void attention_merge() const {  // out, out, part_out, lse, lse, part_lse
    const Value out = read(1), part = read(2), lse = read(4), part_lse = read(5);
    put(0, [&](int f) { return agree(f, "merges", out, part); });
    put(3, [&](int f) { return agree(f, "merges", lse, part_lse); });
  }
  void attention_rescale() const {  // probs, probs, part_lse, lse
    const Value probs = read(1), lse = read(3);
    put(0, [&](int f) { return agree(f, "rescales", probs, lse); });
  }
  void attention_backward() const {  // dq, dk, dv, dout, probs, q, k, v, lse, delta
    const Value dout = read(3), q = read(5), k = read(6);
    add_to(0, flag(), [&](int f) { return beside(f, dout, q); });
    const auto of_keys = [&](int f) {
      const Kind d = dout.type[f];
      // Each rank has the gradient that its own queries send, of keys that all have.
      if (k.type[f] == replicated && (d == rows || d == columns)) return partial;
      return beside(f, dout, k);
    };
    for (int i : {1, 2}) add_to(i, flag(), of_keys);
  }

  void cross_entropy_forward() const {  // row_max, row_sum, target_logit, logits, targets
    const Value x = read(3), targets = read(4);
    const auto put_as = [&](int i, Kind of_own_words) {
      put(i, [&](int f) {
        if (x.type[f] == columns) return of_own_words;
        whole(f, x);
        return agree(f, "compares", x, targets);
      });
    };
    put_as(0, maximum);
    put_as(1, own_sums);
    put_as(2, partial);
  }
  void cross_entropy_rescale() const {  // row_sum, row_sum, row_max, max
    const Value sum = read(1), max = read(3);
    put(0, [&](int f) {
      if (sum.type[f] != own_sums) return agree(f, "rescales", sum, max);
      if (max.type[f] != replicated) refuse(f, "refers sums to " + told(max, f));
      return partial;
    });
  }
  void cross_entropy_loss() const {  // loss, lse, row_max, row_sum, target_logit
    const Value max = read(2), sum = read(3), target = read(4);
    put(1, [&](int f) {
      whole(f, max), whole(f, sum), whole(f, target);
      return agree(f, "takes the logarithm of", max, sum);
    });
    enter(0, read(1));
  }
  void cross_entropy_backward() const {  // dlogits, logits, targets, lse
    const Value x = read(1), lse = read(3);
    put(0, [&](int f) {
      whole(f, x), whole(f, lse);
      if (x.type[f] == columns && lse.type[f] == replicated) return columns;
      return agree(f, "subtracts", x, lse);
    });
  }

  /// A number that is summed over all ranks later on.
  void enter(int i, const Value& x) const {
    add_to(i, true, [&](int f) { return number(f, x); });
    const bool is_new = std::ranges::none_of(
        c_.terms_, [&](const Tensor& known) { return known.address() == operand(i).address(); });
    if (is_new && c_.regions_.is_older(operand(i), c_.lasts_)) c_.terms_.push_back(operand(i));
  }
  void sum_squares() const {  // each x, sum
    const int sum = operands() - 1;
    for (int i = 0; i < sum; ++i) {
      if (!operand(i).defined() || operand(i).numel() == 0) continue;
      const Value x = read(i);
      add_to(sum, flag() || i > 0, [&](int f) { return number(f, x); });
      c_.in_norm_.insert(operand(i).address());
    }
  }
  void clip_coefficient() const {  // sums, coefficient, norm
    c_.check_norm();
    const Value sums = read(0);
    const auto norm = [&](int f) {
      if (sums.type[f] == replicated || sums.type[f] == zero) return replicated;
      refuse(f, "the norm is not that of all gradients: " + told(sums, f));
    };
    for (int i : {1, 2}) put(i, norm);
  }
  void adamw() const {  // value, master, m, v, grad of each, coefficient
    const Value coefficient = read(operands() - 1);
    for (int f = 0; f < c_.count(); ++f) {  // zeros are what it was before there was a norm
      if (coefficient.type[f] != replicated) refuse(f, "scales by " + told(coefficient, f));
    }
    for (int i = 0; i + 4 < operands(); i += 5) {
      if (operand(i).numel() == 0) continue;
      const Value value = read(i), grad = read(i + 4);
      const Parameter* parameter = value.parameter;
      Type now{};
      for (int f = 0; f < c_.count(); ++f) {
        const bool unsaid = value.type[f] == zero && parameter != nullptr;
        const Kind k = unsaid ? c_.declared_.at(parameter).type[f] : value.type[f];
        const Kind g = grad.type[f];
        if (g == partial) refuse(f, "updates with a gradient that is not summed: " + told(grad, f));
        const bool own_shard = k == replicated && g == rows;
        const bool no_rows = g == zero && c_.without_rows_.contains(parameter);
        if (g != k && !own_shard && !no_rows && g != unknown) {
          refuse(f, fmt::format("updates {} with {}", told(value, f), told(grad, f)));
        }
        now[f] = own_shard ? rows : k;
      }
      for (int j = i; j < i + 4; ++j) put(j, [&](int f) { return now[f]; });
      // The next step may not read it again.
      c_.write(operand(i + 4), all_of(unwritten), "the update, which was the last to read it");
    }
    c_.is_updating_ = true;
  }

  void router_scores() const {  // scores, logits
    nonlinear_of(1);
    c_.scores_ = pieces(0).empty() ? c_.scores_ : pieces(0).front().type;
  }
  void gates_backward() const {  // dscores, dgates, gates, scores, choices
    const Value d = read(1), x = read(2);
    add_to(0, true, [&](int f) { return beside(f, d, x); });
  }
  void unpermute() const {  // y, rows, slots, gates
    const Value x = read(1);
    add_to(0, flag(), [&](int f) { return x.is_there ? x.type[f] : zero; });
  }
  void unpermute_backward() const {  // drows, dgates, dy, rows, slots, gates
    const Value dy = read(2), x = read(3);
    put(1, [&](int f) {
      if (!x.is_there) return dy.type[f];
      if (x.type[f] == partial && dy.type[f] == replicated) return partial;
      return beside(f, dy, x);
    });
    put(0, [&](int f) { return dy.type[f]; });
  }
  void grouped(Kind (*schema)(Kind, Kind)) const {  // y, x, weights; dx, dy, weights
    const Value x = read(1);
    if (!x.is_there) return;
    const Value w = read(2);
    put(0, [&](int f) { return product(schema, f, x, w); });
  }
  void router_loss(bool has_load) const {  // loss, x, load
    const Value x = read(1), load = has_load ? read(2) : Value{};
    for (int f = 0; f < c_.count(); ++f) must_be_whole(f, "the load", load);
    enter(0, x);
  }
  void router_loss_backward(bool has_load) const {  // dx, dx, x, load
    const Value before = read(1), x = read(2), load = has_load ? read(3) : Value{};
    put(0, [&](int f) {
      must_be_whole(f, "the load", load);
      if (before.type[f] == partial && x.type[f] == replicated) {
        if (c_.is_first(f, nullptr)) return partial;
        refuse(f, "every rank adds what it knows of all to a term of a sum");
      }
      return agree(f, "adds", before, x);
    });
  }
  void balance_bias() const {  // bias, load
    const Value load = read(1);
    for (int f = 0; f < c_.count(); ++f) must_be_whole(f, "the load", load);
    put(0, [&](int f) { return load.type[f]; });
  }

 private:
  Checker& c_;
  const OpInTypes& op_;
};

namespace {

using Rule = void (*)(const Rules&);

const std::unordered_map<std::string_view, Rule>& table() {
  static const std::unordered_map<std::string_view, Rule> rules = {
      {"fill", [](const Rules& r) { r.fill(); }},
      {"copy", [](const Rules& r) { r.copy(); }},
      {"add", [](const Rules& r) { r.add(); }},
      {"accumulate", [](const Rules& r) { r.add(); }},
      {"drop_elements", [](const Rules& r) { r.same_as(1); }},
      {"matmul", [](const Rules& r) { r.matmul(); }},
      {"linear_forward", [](const Rules& r) { r.linear_forward(); }},
      {"linear_forward_add", [](const Rules& r) { r.linear_forward_add(); }},
      {"linear_backward_input", [](const Rules& r) { r.linear_backward_input(); }},
      {"linear_backward_weight", [](const Rules& r) { r.linear_backward_weight(); }},
      {"embedding_forward", [](const Rules& r) { r.embedding_forward(); }},
      {"embedding_backward", [](const Rules& r) { r.embedding_backward(); }},
      {"rmsnorm_forward", [](const Rules& r) { r.rmsnorm_forward(); }},
      {"rmsnorm_backward_input", [](const Rules& r) { r.rmsnorm_backward_input(); }},
      {"rmsnorm_backward_weight", [](const Rules& r) { r.gradient_over_rows(); }},
      {"rope", [](const Rules& r) { r.rope(); }},
      {"swiglu_forward", [](const Rules& r) { r.nonlinear_of(1); }},
      {"swiglu_backward", [](const Rules& r) { r.linear_of(1, 2); }},
      {"attention_forward", [](const Rules& r) { r.attention_forward(); }},
      {"attention_merge", [](const Rules& r) { r.attention_merge(); }},
      {"attention_rescale", [](const Rules& r) { r.attention_rescale(); }},
      {"attention_delta", [](const Rules& r) { r.linear_of(1, 2); }},
      {"attention_backward", [](const Rules& r) { r.attention_backward(); }},
      {"cross_entropy_forward", [](const Rules& r) { r.cross_entropy_forward(); }},
      {"cross_entropy_rescale", [](const Rules& r) { r.cross_entropy_rescale(); }},
      {"cross_entropy_loss", [](const Rules& r) { r.cross_entropy_loss(); }},
      {"cross_entropy_backward", [](const Rules& r) { r.cross_entropy_backward(); }},
      {"sum_squares", [](const Rules& r) { r.sum_squares(); }},
      {"clip_coefficient", [](const Rules& r) { r.clip_coefficient(); }},
      {"adamw", [](const Rules& r) { r.adamw(); }},
      {"router_scores", [](const Rules& r) { r.router_scores(); }},
      {"router_scores_backward", [](const Rules& r) { r.linear_of(1, 2); }},
      {"choose_experts", [](const Rules& r) { r.nonlinear_of(1); }},
      {"count_choices", [](const Rules& r) { r.same_as(1); }},
      {"drop_choices", [](const Rules& r) { r.same_as(1); }},
      {"assign_slots", [](const Rules& r) { r.same_as(1); }},
      {"gates_forward", [](const Rules& r) { r.nonlinear_of(1); }},
      {"gates_backward", [](const Rules& r) { r.gates_backward(); }},
      {"permute", [](const Rules& r) { r.same_as(1); }},
      {"unpermute", [](const Rules& r) { r.unpermute(); }},
      {"unpermute_backward", [](const Rules& r) { r.unpermute_backward(); }},
      {"grouped_linear_forward", [](const Rules& r) { r.grouped(times); }},
      {"grouped_linear_backward_input", [](const Rules& r) { r.grouped(times_transposed); }},
      {"grouped_linear_backward_weight", [](const Rules& r) { r.gradient_over_rows(); }},
      {"balance_loss_forward", [](const Rules& r) { r.router_loss(/*has_load=*/true); }},
      {"balance_loss_backward", [](const Rules& r) { r.router_loss_backward(/*has_load=*/true); }},
      {"z_loss_forward", [](const Rules& r) { r.router_loss(/*has_load=*/false); }},
      {"z_loss_backward", [](const Rules& r) { r.router_loss_backward(/*has_load=*/false); }},
      {"router_entropy", [](const Rules& r) { r.router_loss(/*has_load=*/false); }},
      {"balance_bias", [](const Rules& r) { r.balance_bias(); }},
  };
  return rules;
}

}  // namespace

void apply_rule(const OpInTypes& op) {
  const auto found = table().find(op.name);
  if (found == table().end()) {
    throw TypeError(fmt::format("{}: there is no rule for the types of this op", op.name));
  }
  found->second(Rules(op));
}

Type type_for_host(const OpInTypes& op, const Tensor& tensor) {
  const Rules::Value value = Rules(op).read(tensor);
  return value.is_there ? value.type : all_of(unknown);
}

std::vector<std::string_view> ops_with_rules() {
  std::vector<std::string_view> names;
  for (const auto& [name, rule] : table()) names.push_back(name);
  std::ranges::sort(names);
  return names;
}

}  // namespace usp::types
