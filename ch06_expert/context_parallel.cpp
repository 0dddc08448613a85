#include "context_parallel.h"

namespace usp {

void ContextParallelConfig::bind(Args& args) {
  args.group("Context parallelism");
  args.bind("cp_size", cp_size, "ranks that share out the tokens of every sample")
      .may_differ_on_resume();
  args.bind("cp_layout", cp_layout, {"zigzag", "contiguous"},
            "a rank has one early and one late piece of a sample, or one piece")
      .may_differ_on_resume();
  args.bind("cp_method", cp_method, {"ring", "all_gather", "ulysses", "ring_ulysses"},
            "keys go round, or to all at once; tokens are exchanged for heads; or both")
      .may_differ_on_resume();
  args.bind("ulysses_size", ulysses_size,
            "under ring_ulysses: ranks that exchange tokens for heads; a ring joins such groups")
      .may_differ_on_resume();
  args.bind("cp_overlap", cp_overlap, {"none", "compute"},
            "what is done while keys, values and their gradients travel")
      .may_differ_on_resume();
  args.bind("cp_recompute", cp_recompute, {"exchange", "keep"},
            "under --recompute full: run attention's exchanges again, or keep what it returned")
      .may_differ_on_resume();
  args.bind("document_mask", document_mask, "tokens attend within their document alone");
  args.bind("document_separator", document_separator, "the token that ends a document");
}

void ContextParallelConfig::validate(const Args& args) const {
  check_range("cp_size", double(cp_size), 1, 1 << 16);
  check_range("ulysses_size", double(ulysses_size), 1, double(cp_size));
  for (const char* flag : {"cp_layout", "cp_method", "cp_overlap", "cp_recompute"}) {
    if (cp_size > 1 || !args.given(flag)) continue;
    usage_error("{} is for cp_size above 1; leave it out", flag);
  }
  if (args.given("cp_overlap") && cp_method == "ulysses") {
    usage_error("cp_overlap is for keys that travel, not for cp_method=ulysses; leave it out");
  }
  if (args.given("ulysses_size") && cp_method != "ring_ulysses") {
    usage_error("ulysses_size is for cp_method=ring_ulysses, not {}; leave it out", cp_method);
  }
  if (cp_size % ulysses_size != 0) {
    usage_error("ulysses_size={} must divide cp_size={}; try {}", ulysses_size, cp_size,
                list_divisors(cp_size));
  }
  if (args.given("document_separator") && !document_mask) {
    usage_error("document_separator is for document_mask; leave it out");
  }
}

void ContextParallelConfig::check(const RunConfig& run, const TensorParallelConfig& tensor,
                                  bool recompute_full, bool blockwise) const {
  const int64_t pieces = cp_layout == "zigzag" ? 2 * cp_size : cp_size;
  if (cp_size > 1 && run.seq_len % pieces != 0) {
    const int64_t below = run.seq_len / pieces * pieces;
    usage_error(
        "seq_len={} must divide into the {} pieces of cp_size={}, cp_layout={}; try {}",
        run.seq_len, pieces, cp_size, cp_layout,
        below > 0 ? fmt::format("{} or {}", below, below + pieces) : fmt::format("{}", pieces));
  }
  const int64_t rows = run.seq_len / cp_size;
  if (tensor.row_shares() > 1 && rows % tensor.row_shares() != 0) {
    usage_error("tp_size={} must divide the seq_len/cp_size={} tokens of a rank; try {}",
                tensor.tp_size, rows, list_divisors(rows));
  }
  const int64_t u = head_ranks(), t = tensor.tp_size;
  const int64_t N = std::max<int64_t>(1, run.model.num_heads / t);
  const int64_t G = std::max<int64_t>(1, run.model.num_kv_heads / t);
  const char* flag = cp_method == "ring_ulysses" ? "ulysses_size" : "cp_size";
  if (N % u != 0) {
    usage_error("{}={} must divide the {} heads of a rank, to exchange tokens for heads; try {}",
                flag, u, N, list_divisors(N));
  }
  if (G % u != 0 && u % G != 0) {
    usage_error("{}={} must divide the {} kv heads of a rank, or be a multiple of them; try {}",
                flag, u, G, list_divisors(G));
  }
  if (cp_recompute == "keep" && !(recompute_full && blockwise)) {
    usage_error("cp_recompute=keep is for recompute=full with attention=blockwise; leave it out");
  }
  if (document_mask && tensor.halves() > 1) {
    usage_error("tp_overlap=batch_halves knows no document_mask; try --tp_overlap chunks");
  }
}

int64_t ContextParallelConfig::head_ranks() const {
  if (cp_method == "ulysses") return cp_size;
  return cp_method == "ring_ulysses" ? ulysses_size : 1;
}

// [positions]
Positions ContextParallelConfig::of_ring_place(int64_t S, int64_t place) const {
  const int64_t n = ring_size();
  if (n == 1) return {0, S};
  if (cp_layout == "contiguous") return {place * S / n, S / n};
  const int64_t piece = S / (2 * n);  // one from the front, and its mirror image from the back
  return {place * piece, piece, (2 * n - 1 - place) * piece, piece};
}

Positions ContextParallelConfig::of_rank(int64_t S, int64_t rank) const {
  const int64_t u = head_ranks(), member = rank % u;
  const Positions whole = of_ring_place(S, rank / u);
  if (u == 1) return whole;
  if (cp_layout == "contiguous") return {whole[0] + member * (S / cp_size), S / cp_size};
  const int64_t rows = S / (2 * cp_size);
  return {whole[0] + member * rows, rows, whole[u * rows] + member * rows, rows};
}
// [positions]

ContextGroup::ContextGroup(const ContextParallelConfig& config, const Communicator& cp)
    : config_(config), cp_(cp) {
  const int u = static_cast<int>(config.head_ranks());
  heads_ = cp.split("cp_heads", [u](int rank) { return rank / u; });
  ring_ = cp.split("cp_ring", [u](int rank) { return rank % u; });
  ring_gradients_ = cp.split("cp_ring_gradients", [u](int rank) { return rank % u; });
}

// [take_rows]
void ContextGroup::take_rows(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                             Pass& pass) const {
  const int64_t S = pass.seq_len;
  pass.positions = positions(S);
  const Shape shape{pass.num_samples * pass.positions.count()};
  pass.tokens = Tensor::from_host(take_positions(tokens, S, pass.positions), shape, "tokens");
  pass.targets = Tensor::from_host(take_positions(targets, S, pass.positions), shape, "targets");
  if (!config_.document_mask) return;
  const auto begins = document_begins(tokens, S, config_.document_separator);
  // Of the rows that meet in this rank's attention: its own, or its group's.
  pass.documents =
      Documents(take_positions(begins, S, attended(S)), {pass.num_samples, attended(S).count()});
}
// [take_rows]

std::vector<int32_t> take_positions(std::span<const int32_t> samples, int64_t S,
                                    const Positions& positions) {
  std::vector<int32_t> taken;
  for (int64_t begin = 0; begin < std::ssize(samples); begin += S) {
    for (int64_t row = 0; row < positions.count(); ++row) {
      taken.push_back(samples[begin + positions[row]]);
    }
  }
  return taken;
}

// [documents]
std::vector<int32_t> document_begins(std::span<const int32_t> samples, int64_t S,
                                     int64_t separator) {
  std::vector<int32_t> begins(samples.size());
  for (int64_t i = 0; i < std::ssize(samples); ++i) {
    const int64_t position = i % S;
    const bool first = position == 0;
    const bool behind_separator = !first && samples[i - 1] == separator;
    begins[i] = first ? 0 : behind_separator ? static_cast<int32_t>(position) : begins[i - 1];
  }
  return begins;
}
// [documents]

}  // namespace usp
