#include "context_parallel/ulysses.h"

#include "context_parallel/ring_attention.h"

namespace usp {

UlyssesAttention::UlyssesAttention(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                   Probabilities probabilities, const ContextGroup& group)
    : ContextAttention(num_heads, num_kv_heads, head_dim, probabilities, group) {
  const int64_t u = members(), N = num_heads / u, G = std::max<int64_t>(1, num_kv_heads / u);
  if (group.config().ring_size() == 1) {
    inner_ = std::make_unique<CoreAttention>(N, G, head_dim, probabilities);
  } else {
    inner_ = std::make_unique<RingAttention>(N, G, head_dim, probabilities, group);
  }
}

// [ulysses]
Tensor UlyssesAttention::forward_rows(Tensor qkv, Saved& saved, const Pass& pass) const {
  Tensor by_head = to_heads(qkv, &UlyssesAttention::heads_of_qkv, "qkv");
  qkv = {};
  if (saved.out.defined()) {  // kept while the rest of the block is recomputed
    saved.qkv = std::move(by_head);
  } else {
    inner_->forward(std::move(by_head), saved, of_group(pass));
  }
  return to_rows(saved.out, &UlyssesAttention::heads_of_out, num_heads());
}

Tensor UlyssesAttention::backward(const Tensor& dout, Saved& saved, const Pass& pass,
                                  DType dtype) const {
  const Tensor by_head = to_heads(dout, &UlyssesAttention::heads_of_out, {});
  // Of a head that several have, the gradients are still to be added.
  const DType sent = copies() == 1 ? dtype : accumulate_dtype(dtype);
  Tensor dqkv = inner_->backward(by_head, saved, of_group(pass), sent);
  dqkv = to_rows(dqkv, &UlyssesAttention::heads_of_qkv, num_heads() + 2 * num_kv_heads());
  return in_dtype(dqkv, dtype);
}
// [ulysses]

Pass UlyssesAttention::of_group(const Pass& pass) const {
  Pass whole = pass;
  whole.positions = group().attended(pass.positions.count() * group().size());
  return whole;
}

std::vector<Stretch> UlyssesAttention::heads_of_out(int64_t member) const {
  return {cut(num_heads(), member, members())};
}

std::vector<Stretch> UlyssesAttention::heads_of_qkv(int64_t member) const {
  const int64_t N = num_heads(), G = num_kv_heads();
  const Stretch kv = copies() == 1 ? cut(G, member, members()) : Stretch{member / copies(), 1};
  return {cut(N, member, members()), {N + kv.begin, kv.count}, {N + G + kv.begin, kv.count}};
}

namespace {

int64_t count(const std::vector<Stretch>& stretches) {
  int64_t heads = 0;
  for (const Stretch& stretch : stretches) heads += stretch.count;
  return heads;
}

}  // namespace

// [to_heads]
Tensor UlyssesAttention::to_heads(const Tensor& x, HeadsOf heads, std::string_view name) const {
  const int64_t B = x.size(0), rows = x.size(1), D = x.size(3), u = members();
  const int64_t own_heads = count((this->*heads)(0));
  Tensor parts = Tensor::empty({u * B, rows, own_heads, D}, x.dtype());  // one for each member
  for (int64_t member = 0; member < u; ++member) {
    int64_t head = 0;
    for (const Stretch& stretch : (this->*heads)(member)) {
      ops::copy(parts.narrow(0, member * B, B).narrow(2, head, stretch.count),
                x.narrow(2, stretch.begin, stretch.count));
      head += stretch.count;
    }
  }
  const Tensor arrived = Tensor::empty(parts.shape(), x.dtype());  // one from each member
  group().heads().all_to_all(arrived, parts);
  parts = {};
  Tensor y = Tensor::empty({B, u * rows, own_heads, D}, x.dtype(), name);
  for (int64_t member = 0; member < u; ++member) {
    for (const Run& run : runs(rows, member)) {
      ops::copy(y.narrow(1, run.in_group, run.count),
                arrived.narrow(0, member * B, B).narrow(1, run.in_member, run.count));
    }
  }
  return y;
}
// [to_heads]

Tensor UlyssesAttention::to_rows(const Tensor& y, HeadsOf heads, int64_t all_heads) const {
  const int64_t B = y.size(0), u = members(), rows = y.size(1) / u, D = y.size(3);
  Tensor parts = Tensor::empty({u * B, rows, y.size(2), D}, y.dtype());
  for (int64_t member = 0; member < u; ++member) {
    for (const Run& run : runs(rows, member)) {
      ops::copy(parts.narrow(0, member * B, B).narrow(1, run.in_member, run.count),
                y.narrow(1, run.in_group, run.count));
    }
  }
  const Tensor arrived = Tensor::empty(parts.shape(), y.dtype());
  group().heads().all_to_all(arrived, parts);
  parts = {};
  Tensor x = Tensor::empty({B, rows, all_heads, D}, y.dtype(), "attention");
  for (int64_t member = 0; member < u; ++member) {
    int64_t head = 0;
    for (const Stretch& stretch : (this->*heads)(member)) {
      const Tensor part = arrived.narrow(0, member * B, B).narrow(2, head, stretch.count);
      const Tensor place = x.narrow(2, stretch.begin, stretch.count);
      head += stretch.count;
      // Members in a row have copies of a kv head, each with the gradient of its own query heads.
      const bool further_copy = stretch.begin >= num_heads() && member % copies() > 0;
      if (!further_copy) {
        ops::copy(place, part);
        continue;
      }
      const Tensor sum = place.to_contiguous(), share = part.to_contiguous();
      ops::add(sum, sum, share);
      ops::copy(place, sum);
    }
  }
  return x;
}

std::vector<UlyssesAttention::Run> UlyssesAttention::runs(int64_t rows, int64_t member) const {
  if (group().config().cp_layout == "contiguous") return {{0, member * rows, rows}};
  const int64_t half = rows / 2;  // of an early piece, and of a late one
  return {{0, member * half, half}, {half, (members() + member) * half, half}};
}

Footprint UlyssesAttention::footprint(const PassShape& shape) const {
  PassShape by_head = shape;
  by_head.seq_len = members() * shape.seq_len;
  const int64_t N = inner_->num_heads(), T = by_head.tokens();
  const int64_t out = T * N * head_dim() * shape.own();
  Footprint result{.kept = inner_->footprint(by_head).kept};
  if (keeps_through_recompute()) {
    result.kept_through_recompute = {{"attention", out}, {"lse", T * N * shape.acc()}};
  }
  result.kept.push_back({"attention", out});  // of the own rows, for the projection that follows
  return result;
}

}  // namespace usp
