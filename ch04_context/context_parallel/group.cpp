#include "context_parallel/group.h"

#include "base/rules.h"
#include "config.h"

namespace usp {

void ContextParallelConfig::bind(Args& args) {
  args.group("Context parallelism");
  args.bind("cp_size", cp_size, "ranks that shard the tokens of every sample")
      .may_differ_on_resume();
  args.bind("cp_layout", cp_layout, {"zigzag", "contiguous"},
            "a rank has one early and one late piece of a sample, or one piece")
      .may_differ_on_resume();
  args.bind("cp_method", cp_method, {"ring", "all_gather", "ulysses", "ring_ulysses"},
            "keys travel around a ring, or to all at once; tokens are exchanged for heads; or both")
      .may_differ_on_resume();
  args.bind("ulysses_size", ulysses_size,
            "under ring_ulysses: ranks that exchange tokens for heads; a ring joins such groups")
      .may_differ_on_resume();
  args.bind("cp_overlap", cp_overlap, {"none", "compute"},
            "whether a rank computes while keys, values and their gradients travel")
      .may_differ_on_resume();
  args.bind("cp_recompute", cp_recompute, {"exchange", "keep"},
            "under --recompute full: run attention's exchanges again, or keep what it returned")
      .may_differ_on_resume();
  args.bind("document_mask", document_mask, "tokens attend within their document alone");
  args.bind("document_separator", document_separator,
            "the token that ends a document, where the data name none");
}

void ContextParallelConfig::validate(const Args&) const {
  check_range("cp_size", double(cp_size), 1, 1 << 16);
  check_range("ulysses_size", double(ulysses_size), 1, 1 << 16);
}

void ContextParallelConfig::check(const TrainConfig& run) const {
  const TensorParallelConfig& tensor = run.tensor_parallel;
  const ContextParallelConfig unset;
  const auto needs = [](const std::string& what, const char* flag, bool is_set) {
    if (!is_set) return;
    refuse_silent("flag_of_cp", {fmt::format("leave out --{}", flag)}, "{} is for {}", flag, what);
  };
  const bool alone = cp_size == 1;
  needs("cp_size above 1", "cp_layout", alone && cp_layout != unset.cp_layout);
  needs("cp_size above 1", "cp_method", alone && cp_method != unset.cp_method);
  needs("cp_size above 1", "cp_overlap", alone && !overlaps());
  needs("cp_size above 1", "cp_recompute", alone && cp_recompute != unset.cp_recompute);
  needs("keys that travel, not for cp_method=ulysses", "cp_overlap",
        cp_method == "ulysses" && !overlaps());
  needs("cp_method=ring_ulysses, not " + cp_method, "ulysses_size",
        ulysses_size > 1 && cp_method != "ring_ulysses");
  needs("document_mask", "document_separator", document_separator != 0 && !document_mask);
  if (cp_size % ulysses_size != 0) {
    refuse("ulysses_in_cp", divisors_of("ulysses_size", cp_size),
           "ulysses_size={} must divide cp_size={}", ulysses_size, cp_size);
  }
  const int64_t pieces = cp_layout == "zigzag" ? 2 * cp_size : cp_size;
  if (cp_size > 1 && run.seq_len % pieces != 0) {
    const int64_t below = run.seq_len / pieces * pieces;
    refuse(
        "cp_of_tokens",
        below > 0 ? values_of("seq_len", {below, below + pieces}) : values_of("seq_len", {pieces}),
        "seq_len={} must divide into the {} pieces of cp_size={}, cp_layout={}", run.seq_len,
        pieces, cp_size, cp_layout);
  }
  const int64_t rows = run.seq_len / cp_size;
  if (rows % tensor.row_shares() != 0) {
    refuse("tp_of_rows", divisors_of("tp_size", rows),
           "tp_size={} must divide the seq_len/cp_size={} tokens of a rank", tensor.tp_size, rows);
  }
  const int64_t u = head_ranks(), t = tensor.tp_size;
  const int64_t N = std::max<int64_t>(1, run.model.num_heads / t);
  const int64_t G = std::max<int64_t>(1, run.model.num_kv_heads / t);
  const char* flag = cp_method == "ring_ulysses" ? "ulysses_size" : "cp_size";
  if (N % u != 0) {
    refuse("ulysses_of_heads", divisors_of(flag, N),
           "{}={} must divide the {} heads of a rank, to exchange tokens for heads", flag, u, N);
  }
  if (G % u != 0 && u % G != 0) {
    refuse("ulysses_of_kv_heads", divisors_of(flag, G),
           "{}={} must divide the {} kv heads of a rank, or be a multiple of them", flag, u, G);
  }
  if (cp_recompute == "keep" && run.recompute != "full") {
    refuse_silent("keep_of_full_recompute", {"leave out --cp_recompute"},
                  "cp_recompute=keep is for recompute=full with attention=blockwise");
  }
  if (cp_recompute == "keep" && run.attention != "blockwise") {
    refuse("keep_of_blockwise", {"leave out --cp_recompute", "--attention blockwise"},
           "cp_recompute=keep is for recompute=full with attention=blockwise");
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
  Pairs neighbors;
  for (int place = 0; config.by_ring() && place < ring_->size(); ++place) {
    if (ring_->size() > 1) neighbors.emplace_back(place, (place + 1) % ring_->size());
  }
  ring_->connect_pairs(neighbors);
  ring_gradients_->connect_pairs(neighbors);
}

void ContextGroup::take_rows(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                             Pass& pass, std::vector<int32_t> begins) const {
  const int64_t S = pass.seq_len;
  pass.positions = positions(S);
  const Shape shape{pass.num_samples * pass.positions.count()};
  pass.tokens = Tensor::from_host(take_positions(tokens, S, pass.positions), shape, "tokens");
  pass.targets = Tensor::from_host(take_positions(targets, S, pass.positions), shape, "targets");
  if (!config_.document_mask) return;
  if (begins.empty()) begins = document_begins(tokens, S, config_.document_separator);
  // Of the rows that meet in this rank's attention: its own, or its group's.
  pass.documents =
      Documents(take_positions(begins, S, attended(S)), {pass.num_samples, attended(S).count()});
}

std::vector<int32_t> take_positions(std::span<const int32_t> samples, int64_t S,
                                    const Positions& positions) {
  std::vector<int32_t> taken;
  taken.reserve(std::ssize(samples) / S * positions.count());
  for (int64_t begin = 0; begin < std::ssize(samples); begin += S) {
    for (int64_t row = 0; row < positions.count(); row += positions.run_from(row)) {
      const auto from = samples.begin() + begin + positions[row];
      taken.insert(taken.end(), from, from + positions.run_from(row));
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
