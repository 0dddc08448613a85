#include "tensor/ops.h"

#include "tensor/op_scope.h"

namespace usp::ops {

namespace {

/// `tensor` has this shape and dtype, and its last axis is contiguous.
void check_heads(const Tensor& tensor, const Shape& shape, DType dtype, std::string_view what) {
  check_shape(tensor, shape, what);
  check_dtype(tensor, dtype, what);
  USP_CHECK(tensor.size(-1) <= 1 || tensor.stride(-1) == 1, "{}: channels must be contiguous",
            what);
}

void check_matmul(const Tensor& c, const Tensor& a, const Tensor& b) {
  USP_CHECK(a.rank() == 2 && b.rank() == 2 && a.size(1) == b.size(0), "matmul of {} and {}",
            a.shape().to_string(), b.shape().to_string());
  check_shape(c, {a.size(0), b.size(1)}, "matmul: c");
  check_dtype(b, a.dtype(), "matmul: b");
  USP_CHECK(c.dtype() == a.dtype() || c.dtype() == accumulate_dtype(a.dtype()),
            "matmul of {} into {}", name(a.dtype()), name(c.dtype()));
  USP_CHECK(c.size(1) <= 1 || c.stride(1) == 1, "matmul: rows of c must be contiguous");
}

int64_t matmul_flops(const Tensor& c, const Tensor& a) { return 2 * c.numel() * a.size(1); }

struct AttentionSizes {
  int64_t B, S, N, D, K, G;
};

AttentionSizes check_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Positions& queries, const Positions& keys,
                               const Documents& documents) {
  USP_CHECK(q.rank() == 4 && k.rank() == 4, "attention of q {} and k {}", q.shape().to_string(),
            k.shape().to_string());
  const AttentionSizes s{q.size(0), q.size(1), q.size(2), q.size(3), k.size(1), k.size(2)};
  check_heads(q, {s.B, s.S, s.N, s.D}, q.dtype(), "attention: q");
  check_heads(k, {s.B, s.K, s.G, s.D}, q.dtype(), "attention: k");
  check_heads(v, {s.B, s.K, s.G, s.D}, q.dtype(), "attention: v");
  USP_CHECK(s.G > 0 && s.N % s.G == 0, "{} query heads over {} kv heads", s.N, s.G);
  USP_CHECK(queries.count() == s.S && keys.count() == s.K,
            "{} query and {} key positions for {} queries and {} keys", queries.count(),
            keys.count(), s.S, s.K);
  if (documents.defined()) {
    check_operand(documents.begins(), {s.B, s.S}, DType::i32, "attention: documents");
  }
  return s;
}

/// Operations of `matmuls` products of [S, D] by [D, K] shape per head, of what is seen only.
int64_t attention_flops(const AttentionSizes& s, int matmuls, const Positions& queries,
                        const Positions& keys, const Documents& documents) {
  const int64_t pairs = documents.defined() ? causal_pairs(queries, keys, documents.on_host())
                                            : s.B * causal_pairs(queries, keys);
  return 2 * matmuls * s.N * s.D * pairs;
}

/// What naive attention's backward pass needs besides its operands.
struct NaiveWorkspace {
  Shape dscores;  ///< [B, N, S, K]
  Shape dkv;      ///< [B, K, 2G, D] in acc dtype, or empty: dk and dv take the sums themselves
  DType dtype;    ///< of probs

  NaiveWorkspace(const Tensor& probs, const Tensor& dk)
      : dscores(probs.shape()), dkv({0}), dtype(probs.dtype()) {
    const bool are_sums = probs.size(1) > dk.size(2);
    if (are_sums && dk.dtype() != accumulate_dtype(dtype)) {
      dkv = {dk.size(0), dk.size(1), 2 * dk.size(2), dk.size(3)};
    }
  }
};

/// x = 0, whatever its strides.
void clear(OpScope& op, const Tensor& x) {
  if (x.numel() == 0) return;
  const Tensor zeros = Tensor::empty(x.shape(), x.dtype());
  op->fill(zeros, 0);
  op->copy(x, zeros);
}

}  // namespace

void fill(Tensor y, double value) {
  USP_CHECK(y.contiguous(), "fill: y must be contiguous");
  OpScope("fill", Flag{value == 0}, 0, y)->fill(y, value);
}

void copy(Tensor y, const Tensor& x) {
  check_shape(y, x.shape(), "copy: y");
  OpScope("copy", 0, y, x)->copy(y, x);
}

void add(Tensor y, const Tensor& a, const Tensor& b) {
  check_operand(a, a.shape(), a.dtype(), "add: a");
  check_operand(b, a.shape(), a.dtype(), "add: b");
  check_operand(y, a.shape(), a.dtype(), "add: y");
  OpScope("add", 0, y, a, b)->add(y, a, b);
}

void accumulate(Tensor sum, const Tensor& x) {
  check_operand(x, sum.shape(), x.dtype(), "accumulate: x");
  check_operand(sum, x.shape(), accumulate_dtype(x.dtype()), "accumulate: sum");
  OpScope("accumulate", 0, sum, sum, x)->accumulate(sum, x);
}

void dropout(Tensor y, const Tensor& x, double rate, const RandomStream& random,
             int64_t first_row) {
  USP_CHECK(x.rank() == 2 && rate >= 0 && rate < 1, "dropout: rate {} of {}", rate,
            x.shape().to_string());
  check_operand(x, x.shape(), x.dtype(), "dropout: x");
  check_operand(y, x.shape(), x.dtype(), "dropout: y");
  OpScope("drop_elements", 0, y, x)->dropout(y, x, rate, random, first_row);
}

void matmul(Tensor c, const Tensor& a, const Tensor& b, bool accumulate) {
  check_matmul(c, a, b);
  OpScope("matmul", Flag{accumulate}, matmul_flops(c, a), c, a, b)->matmul(c, a, b, accumulate);
}

void linear_forward(Tensor y, const Tensor& x, const Tensor& weight, const Tensor& residual) {
  const Tensor b = weight.transposed();
  check_matmul(y, x, b);
  if (residual.defined() && Runtime::current().backend().fused()) {
    check_operand(y, y.shape(), x.dtype(), "linear_forward: y");
    check_operand(residual, y.shape(), x.dtype(), "linear_forward: residual");
    OpScope("linear_forward_add", matmul_flops(y, x), y, x, weight, residual)
        ->matmul_add(y, x, b, residual);
    return;
  }
  OpScope("linear_forward", matmul_flops(y, x), y, x, weight)->matmul(y, x, b, false);
  if (residual.defined()) add(y, residual, y);
}

void linear_backward_input(Tensor dx, const Tensor& dy, const Tensor& weight) {
  check_matmul(dx, dy, weight);
  OpScope("linear_backward_input", matmul_flops(dx, dy), dx, dy, weight)
      ->matmul(dx, dy, weight, false);
}

void linear_backward_weight(Tensor dweight, const Tensor& dy, const Tensor& x, bool accumulate) {
  const Tensor a = dy.transposed();
  check_matmul(dweight, a, x);
  OpScope("linear_backward_weight", Flag{accumulate}, matmul_flops(dweight, a), dweight, dy, x)
      ->matmul(dweight, a, x, accumulate);
}

void embedding_forward(Tensor y, const Tensor& table, const Tensor& tokens, int64_t vocab_offset) {
  check_operand(table, {table.size(0), y.size(1)}, y.dtype(), "embedding_forward: table");
  check_operand(tokens, {y.size(0)}, DType::i32, "embedding_forward: tokens");
  check_operand(y, y.shape(), table.dtype(), "embedding_forward: y");
  OpScope("embedding_forward", 0, y, y, tokens, Uncounted{table})
      ->embedding_forward(y, table, tokens, vocab_offset);
}

void embedding_backward(Tensor dtable, const Tensor& dy, const Tensor& tokens, int64_t vocab_offset,
                        bool accumulate) {
  check_weight_gradient(dtable, {dtable.size(0), dy.size(1)}, dy.dtype(),
                        "embedding_backward: dtable");
  check_operand(tokens, {dy.size(0)}, DType::i32, "embedding_backward: tokens");
  check_operand(dy, dy.shape(), dy.dtype(), "embedding_backward: dy");
  OpScope("embedding_backward", Flag{accumulate}, 0, dtable, dy, tokens)
      ->embedding_backward(dtable, dy, tokens, vocab_offset, accumulate);
}

void rmsnorm_forward(Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps) {
  check_operand(x, {y.size(0), y.size(1)}, y.dtype(), "rmsnorm_forward: x");
  check_operand(y, x.shape(), x.dtype(), "rmsnorm_forward: y");
  check_operand(weight, {x.size(1)}, x.dtype(), "rmsnorm_forward: weight");
  check_operand(rstd, {x.size(0)}, accumulate_dtype(x.dtype()), "rmsnorm_forward: rstd");
  OpScope("rmsnorm_forward", 0, y, rstd, x, weight)->rmsnorm_forward(y, rstd, x, weight, eps);
}

void rmsnorm_backward_input(Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& weight,
                            const Tensor& rstd, const Tensor& dresidual) {
  check_operand(x, {dy.size(0), dy.size(1)}, dy.dtype(), "rmsnorm_backward_input: x");
  check_operand(dy, x.shape(), x.dtype(), "rmsnorm_backward_input: dy");
  check_operand(dx, x.shape(), x.dtype(), "rmsnorm_backward_input: dx");
  check_operand(weight, {x.size(1)}, x.dtype(), "rmsnorm_backward_input: weight");
  check_operand(rstd, {x.size(0)}, accumulate_dtype(x.dtype()), "rmsnorm_backward_input: rstd");
  if (dresidual.defined()) {
    check_operand(dresidual, x.shape(), x.dtype(), "rmsnorm_backward_input: dresidual");
  }
  OpScope("rmsnorm_backward_input", 0, dx, dy, x, dresidual, Uncounted{weight}, Uncounted{rstd})
      ->rmsnorm_backward_input(dx, dy, x, weight, rstd, dresidual);
}

void rmsnorm_backward_weight(Tensor dweight, const Tensor& dy, const Tensor& x, const Tensor& rstd,
                             bool accumulate) {
  const DType acc = accumulate_dtype(x.dtype());
  check_operand(x, {dy.size(0), dy.size(1)}, dy.dtype(), "rmsnorm_backward_weight: x");
  check_operand(dy, x.shape(), x.dtype(), "rmsnorm_backward_weight: dy");
  check_weight_gradient(dweight, {x.size(1)}, x.dtype(), "rmsnorm_backward_weight: dweight");
  check_operand(rstd, {x.size(0)}, acc, "rmsnorm_backward_weight: rstd");
  OpScope("rmsnorm_backward_weight", Flag{accumulate}, 0, dweight, dy, x, rstd)
      ->rmsnorm_backward_weight(dweight, dy, x, rstd, accumulate);
}

void rope(Tensor x, const Tensor& cos, const Tensor& sin, const Positions& positions,
          bool inverse) {
  USP_CHECK(x.rank() == 4 && x.size(3) % 2 == 0, "rope of shape {}", x.shape().to_string());
  check_heads(x, x.shape(), x.dtype(), "rope: x");
  check_operand(cos, {cos.size(0), x.size(3) / 2}, accumulate_dtype(x.dtype()), "rope: cos");
  check_operand(sin, cos.shape(), cos.dtype(), "rope: sin");
  USP_CHECK(positions.count() == x.size(1) && positions.end() <= cos.size(0),
            "rope: {} positions up to {} for {} rows and a table of {}", positions.count(),
            positions.end(), x.size(1), cos.size(0));
  OpScope("rope", 0, x, x, Uncounted{cos}, Uncounted{sin})->rope(x, cos, sin, positions, inverse);
}

void swiglu_forward(Tensor y, const Tensor& gate_up) {
  check_operand(y, y.shape(), y.dtype(), "swiglu_forward: y");
  check_operand(gate_up, {y.size(0), 2 * y.size(1)}, y.dtype(), "swiglu_forward: gate_up");
  OpScope("swiglu_forward", 0, y, gate_up)->swiglu_forward(y, gate_up);
}

void swiglu_backward(Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) {
  check_operand(dy, dy.shape(), dy.dtype(), "swiglu_backward: dy");
  check_operand(gate_up, {dy.size(0), 2 * dy.size(1)}, dy.dtype(), "swiglu_backward: gate_up");
  check_operand(dgate_up, gate_up.shape(), dy.dtype(), "swiglu_backward: dgate_up");
  OpScope("swiglu_backward", 0, dgate_up, dy, gate_up)->swiglu_backward(dgate_up, dy, gate_up);
}

void attention_forward(Tensor out, Tensor lse, Tensor probs, const Tensor& q, const Tensor& k,
                       const Tensor& v, double scale, const Positions& queries,
                       const Positions& keys, const Documents& documents) {
  const AttentionSizes s = check_attention(q, k, v, queries, keys, documents);
  check_sums_dtype(out, q.dtype(), "attention_forward: out");
  check_heads(out, q.shape(), out.dtype(), "attention_forward: out");
  check_operand(lse, {s.B, s.N, s.S}, accumulate_dtype(q.dtype()), "attention_forward: lse");
  const int64_t flops = attention_flops(s, 2, queries, keys, documents);
  const Tensor& begins = documents.begins();
  OpScope op("attention_forward", flops, out, lse, probs, q, k, v, Uncounted{begins});
  if (!probs.defined()) {
    op->attention_forward(out, lse, q, k, v, scale, queries, keys, begins);
    return;
  }
  check_operand(probs, {s.B, s.N, s.S, s.K}, q.dtype(), "attention_forward: probs");
  op->naive_attention_forward(out, lse, probs, q, k, v, scale, queries, keys, begins);
}

void attention_merge(Tensor out, Tensor lse, const Tensor& part_out, const Tensor& part_lse) {
  USP_CHECK(out.rank() == 4, "attention_merge: out {}", out.shape().to_string());
  const DType acc = accumulate_dtype(out.dtype());
  check_heads(out, out.shape(), acc, "attention_merge: out");
  check_heads(part_out, out.shape(), acc, "attention_merge: part_out");
  check_operand(lse, {out.size(0), out.size(2), out.size(1)}, acc, "attention_merge: lse");
  check_operand(part_lse, lse.shape(), acc, "attention_merge: part_lse");
  OpScope("attention_merge", 0, out, out, part_out, lse, lse, part_lse)
      ->attention_merge(out, lse, part_out, part_lse);
}

void attention_rescale(Tensor probs, const Tensor& part_lse, const Tensor& lse) {
  USP_CHECK(probs.rank() == 4, "attention_rescale: probs {}", probs.shape().to_string());
  const DType acc = accumulate_dtype(probs.dtype());
  check_operand(probs, probs.shape(), probs.dtype(), "attention_rescale: probs");
  check_operand(lse, {probs.size(0), probs.size(1), probs.size(2)}, acc, "attention_rescale: lse");
  check_operand(part_lse, lse.shape(), acc, "attention_rescale: part_lse");
  OpScope("attention_rescale", 0, probs, probs, part_lse, lse)
      ->attention_rescale(probs, part_lse, lse);
}

void attention_delta(Tensor delta, const Tensor& dout, const Tensor& out) {
  check_heads(dout, out.shape(), out.dtype(), "attention_delta: dout");
  check_operand(delta, {out.size(0), out.size(2), out.size(1)}, accumulate_dtype(out.dtype()),
                "attention_delta: delta");
  OpScope("attention_delta", 0, delta, dout, out)->attention_delta(delta, dout, out);
}

void attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout, const Tensor& probs,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
                        const Tensor& delta, double scale, const Positions& queries,
                        const Positions& keys, bool accumulate, const Documents& documents) {
  const AttentionSizes s = check_attention(q, k, v, queries, keys, documents);
  const DType acc = accumulate_dtype(q.dtype());
  check_heads(dout, q.shape(), q.dtype(), "attention_backward: dout");
  if (!accumulate) check_sums_dtype(dq, q.dtype(), "attention_backward: dq");
  const DType dtype = accumulate ? acc : dq.dtype();
  check_heads(dq, q.shape(), dtype, "attention_backward: dq");
  check_heads(dk, k.shape(), dtype, "attention_backward: dk");
  check_heads(dv, v.shape(), dtype, "attention_backward: dv");
  check_operand(lse, {s.B, s.N, s.S}, acc, "attention_backward: lse");
  check_operand(delta, lse.shape(), acc, "attention_backward: delta");
  // Blockwise attention multiplies q by k once more: it kept the row's lse, not the probabilities.
  const int64_t repeated = probs.defined() ? 0 : attention_flops(s, 1, queries, keys, documents);
  const int64_t flops = attention_flops(s, 4, queries, keys, documents) + repeated;
  const Tensor& begins = documents.begins();
  OpScope op("attention_backward", Flag{accumulate}, flops, dq, dk, dv, dout, probs, q, k, v,
             Uncounted{lse}, Uncounted{delta}, Uncounted{begins});
  op.repeats(repeated);
  if (q.numel() == 0 || k.numel() == 0) {  // nothing to add
    for (const Tensor& x : {dq, dk, dv}) {
      if (!accumulate) clear(op, x);
    }
    return;
  }
  if (!probs.defined()) {
    op->attention_backward(dq, dk, dv, dout, q, k, v, lse, delta, scale, queries, keys, accumulate,
                           begins);
    return;
  }
  check_operand(probs, {s.B, s.N, s.S, s.K}, q.dtype(), "attention_backward: probs");
  const NaiveWorkspace wanted(probs, dk);
  const Tensor dscores = Tensor::empty(wanted.dscores, wanted.dtype);
  const bool has_sums = wanted.dkv.numel() > 0;
  const Tensor sums = has_sums ? Tensor::empty(wanted.dkv, acc) : Tensor();
  const Tensor dk_sums = has_sums ? sums.narrow(2, 0, s.G) : dk;
  const Tensor dv_sums = has_sums ? sums.narrow(2, s.G, s.G) : dv;
  op->naive_attention_backward(dq, dk_sums, dv_sums, dscores, dout, probs, q, k, v, delta, scale,
                               accumulate);
  if (has_sums) {  // rounded once, however many heads share a key
    op->copy(dk, dk_sums);
    op->copy(dv, dv_sums);
  }
}

int64_t naive_attention_workspace(const Tensor& probs, const Tensor& dk) {
  const NaiveWorkspace wanted(probs, dk);
  return wanted.dscores.numel() * bytes_of(wanted.dtype) +
         wanted.dkv.numel() * bytes_of(accumulate_dtype(wanted.dtype));
}

void cross_entropy_forward(Tensor row_max, Tensor row_sum, Tensor target_logit,
                           const Tensor& logits, const Tensor& targets, int64_t vocab_offset) {
  const DType acc = accumulate_dtype(logits.dtype());
  check_operand(logits, {targets.numel(), logits.size(1)}, logits.dtype(),
                "cross_entropy_forward: logits");
  check_operand(targets, {targets.numel()}, DType::i32, "cross_entropy_forward: targets");
  check_operand(row_max, targets.shape(), acc, "cross_entropy_forward: row_max");
  check_operand(row_sum, targets.shape(), acc, "cross_entropy_forward: row_sum");
  check_operand(target_logit, targets.shape(), acc, "cross_entropy_forward: target_logit");
  OpScope("cross_entropy_forward", 0, row_max, row_sum, target_logit, logits, targets)
      ->cross_entropy_forward(row_max, row_sum, target_logit, logits, targets, vocab_offset);
}

void cross_entropy_rescale(Tensor row_sum, const Tensor& row_max, const Tensor& max) {
  check_operand(row_max, row_sum.shape(), row_sum.dtype(), "cross_entropy_rescale: row_max");
  check_operand(max, row_sum.shape(), row_sum.dtype(), "cross_entropy_rescale: max");
  OpScope("cross_entropy_rescale", 0, row_sum, row_sum, row_max, max)
      ->cross_entropy_rescale(row_sum, row_max, max);
}

void cross_entropy_loss(Tensor loss, Tensor lse, const Tensor& row_max, const Tensor& row_sum,
                        const Tensor& target_logit, double scale) {
  check_operand(loss, {1}, DType::f64, "cross_entropy_loss: loss");
  check_operand(row_max, lse.shape(), lse.dtype(), "cross_entropy_loss: row_max");
  check_operand(row_sum, lse.shape(), lse.dtype(), "cross_entropy_loss: row_sum");
  check_operand(target_logit, lse.shape(), lse.dtype(), "cross_entropy_loss: target_logit");
  OpScope("cross_entropy_loss", 0, Uncounted{loss}, lse, row_max, row_sum, target_logit)
      ->cross_entropy_loss(loss, lse, row_max, row_sum, target_logit, scale);
}

void cross_entropy_backward(Tensor dlogits, const Tensor& logits, const Tensor& targets,
                            const Tensor& lse, int64_t vocab_offset, double scale) {
  check_operand(logits, {targets.numel(), logits.size(1)}, logits.dtype(),
                "cross_entropy_backward: logits");
  check_operand(dlogits, logits.shape(), logits.dtype(), "cross_entropy_backward: dlogits");
  check_operand(targets, {targets.numel()}, DType::i32, "cross_entropy_backward: targets");
  check_operand(lse, targets.shape(), accumulate_dtype(logits.dtype()),
                "cross_entropy_backward: lse");
  OpScope("cross_entropy_backward", 0, dlogits, logits, targets, lse)
      ->cross_entropy_backward(dlogits, logits, targets, lse, vocab_offset, scale);
}

void sum_squares(Tensor sum, const Tensor& x, bool accumulate) {
  check_operand(sum, {1}, DType::f64, "sum_squares: sum");
  USP_CHECK(x.contiguous(), "sum_squares: x must be contiguous");
  OpScope("sum_squares", Flag{accumulate}, 0, x, Uncounted{sum})
      ->sum_squares(sum, {&x, 1}, accumulate);
}

void add_squares(const Tensor& sum, std::span<const Tensor> xs) {
  if (xs.empty() || !Runtime::current().backend().fused()) {
    for (const Tensor& x : xs) sum_squares(sum, x, /*accumulate=*/true);
    return;
  }
  check_operand(sum, {1}, DType::f64, "add_squares: sum");
  std::vector<const Tensor*> operands;
  int64_t bytes = 0;
  for (const Tensor& x : xs) {
    check_operand(x, x.shape(), xs[0].dtype(), "add_squares: x");
    operands.push_back(&x);
    bytes += x.bytes();
  }
  operands.push_back(&sum);
  OpScope("sum_squares", bytes, operands, Flag{true})->sum_squares(sum, xs, /*accumulate=*/true);
}

void clip_coefficient(Tensor coefficient, Tensor norm, const Tensor& sums, double max_norm) {
  check_operand(coefficient, {1}, DType::f64, "clip_coefficient: coefficient");
  check_operand(norm, {1}, DType::f64, "clip_coefficient: norm");
  check_operand(sums, {sums.numel()}, DType::f64, "clip_coefficient: sums");
  OpScope("clip_coefficient", 0, sums, Uncounted{coefficient}, Uncounted{norm})
      ->clip_coefficient(coefficient, norm, sums, max_norm);
}

void adamw(Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& grad,
           const Tensor& coefficient, const AdamWSettings& settings) {
  const AdamWRange range{std::move(value),     std::move(master), std::move(m), std::move(v), grad,
                         settings.weight_decay};
  adamw({&range, 1}, coefficient, settings);
}

void adamw(std::span<const AdamWRange> ranges, const Tensor& coefficient,
           const AdamWSettings& settings) {
  check_operand(coefficient, {1}, DType::f64, "adamw: coefficient");
  if (ranges.empty()) return;
  const DType dtype = ranges[0].value.dtype(), acc = accumulate_dtype(dtype);
  std::vector<const Tensor*> operands;
  int64_t bytes = 0;
  for (const auto& [value, master, m, v, grad, weight_decay] : ranges) {
    check_operand(value, value.shape(), dtype, "adamw: value");
    check_operand(master, value.shape(), acc, "adamw: master");
    check_operand(m, value.shape(), acc, "adamw: m");
    check_operand(v, value.shape(), acc, "adamw: v");
    check_weight_gradient(grad, value.shape(), dtype, "adamw: grad");
    check_dtype(grad, ranges[0].grad.dtype(), "adamw: grad");
    operands.insert(operands.end(), {&value, &master, &m, &v, &grad});
    bytes += value.bytes() + master.bytes() + 2 * m.bytes() + 2 * v.bytes() + grad.bytes();
  }
  operands.push_back(&coefficient);
  OpScope("adamw", bytes, operands)->adamw(ranges, coefficient, settings);
}

}  // namespace usp::ops
