#include "planner/rows.h"

#include <algorithm>
#include <cmath>

#include "base/file_writer.h"
#include "planner/candidates.h"

namespace usp {

namespace {

constexpr int64_t kGptVocabulary = 51200;
constexpr int64_t kLogitBytes = 6;  ///< of a framework: bf16, and f32 for the loss
constexpr int64_t kOptimizerBytes = 12;

int64_t rounded_up(double value, int64_t step) {
  return int64_t(std::ceil(value / double(step))) * step;
}

/// An MLP of a GPT has two matrices, that of a Llama three: as many weights.
int64_t ffn_of(const TableRow& row, int64_t hidden) {
  const std::string activation = row.text("activation");
  const bool gated = row.has("ffn") && activation != "gelu" && activation != "relu";
  const int64_t ffn = row.whole("ffn", 4 * hidden);
  return gated ? ffn : rounded_up(2.0 / 3 * double(ffn), 8);
}

bool flag_of(const TableRow& row, const char* column, bool missing) {
  const std::string value = row.text(column);
  if (value.empty()) return missing;
  if (value == "1" || value == "yes" || value == "true") return true;
  if (value == "0" || value == "no" || value == "false") return false;
  usage_error("{}: {}={} must be 0 or 1; try 1", row.where(), column, value);
}

std::string recompute_of(const TableRow& row, const std::string& missing) {
  const std::string value = row.text("recompute");
  if (value.empty()) return missing;
  if (value == "none" || value == "selective" || value == "full") return value;
  return flag_of(row, "recompute", false) ? "full" : "none";
}

void read_model(const TableRow& row, ModelConfig& model) {
  model.model = "row";
  model.hidden_size = row.whole("hidden");
  model.num_layers = row.whole("layers");
  model.num_heads = model.num_kv_heads = row.whole("heads");
  model.ffn_hidden_size = ffn_of(row, model.hidden_size);
  model.vocab_size = row.whole("vocab", kGptVocabulary);
  model.tie_word_embeddings = flag_of(row, "tied_embeddings", !row.has("ffn"));
  if (model.hidden_size % (2 * model.num_heads) != 0) {
    usage_error("{}: heads={} must divide hidden={} into even parts; try {}", row.where(),
                model.num_heads, model.hidden_size, list_divisors(model.hidden_size / 2, 16));
  }
}

// [accumulation]
/// Steps of accumulation, of a batch that they make exactly.
int64_t accumulation_of(const TableRow& row, int64_t at_once) {
  int64_t steps = row.whole("grad_accum", 0);
  for (const char* column : {"global_batch", "batch_seqs"}) {
    if (!row.has(column)) continue;
    const int64_t samples = row.whole(column);
    if (steps == 0) steps = std::max<int64_t>(1, (samples + at_once / 2) / at_once);
    if (steps * at_once != samples) {
      usage_error("{}: {}={} must be dp x micro_batch = {} times {}; try {}", row.where(), column,
                  samples, at_once,
                  row.has("grad_accum") ? fmt::format("grad_accum={}", steps) : "a whole number",
                  steps * at_once);
    }
  }
  return std::max<int64_t>(1, steps);
}
// [accumulation]

void read_layout(const TableRow& row, TrainConfig& config) {
  config.data_parallel.dp_size = row.whole("dp");
  config.tensor_parallel.tp_size = row.whole("tp");
  config.pipeline.pp_size = row.whole("pp");
  config.pipeline.pp_chunks = row.whole("interleave", 1);
  if (config.pipeline.pp_chunks > 1) config.pipeline.pp_schedule = "interleaved";
  config.data_parallel.zero_stage = row.whole("zero_stage", 0, 0);
  config.micro_batch_size = row.whole("micro_batch");
  const int64_t dp = config.data_parallel.dp_size, at_once = dp * config.micro_batch_size;
  config.grad_acc_steps = accumulation_of(row, at_once);
  const int64_t ranks = config.mesh().ranks();
  const int64_t gpus = row.whole("gpus", ranks);
  if (gpus != ranks) {
    usage_error("{}: gpus={} must be dp x tp x pp; try {}", row.where(), gpus, ranks);
  }
  if (config.data_parallel.zero_stage > 3) {
    usage_error("{}: zero_stage={} must be 0 to 3; try 1", row.where(),
                config.data_parallel.zero_stage);
  }
}

Cluster without_framework(Cluster cluster) {
  cluster.framework.reset();
  return cluster;
}

void check_row(const TableRow& row, const TrainConfig& config, int64_t ranks_per_node) {
  const int64_t ranks = config.mesh().ranks();
  const int64_t nodes = (ranks + ranks_per_node - 1) / ranks_per_node;
  if (row.whole("nodes", nodes) != nodes) {
    usage_error("{}: nodes={} must hold {} ranks, {} a node; try {}", row.where(),
                row.whole("nodes"), ranks, ranks_per_node, nodes);
  }
  const int64_t tp = config.tensor_parallel.tp_size;
  if (config.model.num_heads % tp != 0) {
    usage_error("{}: tp={} must divide heads={}; try {}", row.where(), tp, config.model.num_heads,
                list_divisors(config.model.num_heads, 8));
  }
}

}  // namespace

const std::vector<std::string>& row_columns() {
  static const std::vector<std::string> columns = {
      "model",        "params_B",    "framework",    "layers",      "hidden",
      "heads",        "ffn",         "activation",   "vocab",       "tied_embeddings",
      "seq_len",      "nodes",       "gpus",         "dp",          "tp",
      "pp",           "interleave",  "zero_stage",   "micro_batch", "grad_accum",
      "global_batch", "batch_seqs",  "recompute",    "status",      "sequence_parallel",
      "tokens_per_s", "step_time_s", "step_time_ms", "mem_GB",      "mfu_pct"};
  return columns;
}

// [read_row]
RunRow read_row(const TableRow& row, const TrainConfig& base, const Cluster& cluster) {
  RunRow run{.config = base};
  TrainConfig& config = run.config;
  const auto& framework = cluster.framework;
  const std::string name = row.text("framework");
  run.by_framework = framework && (name.empty() || name == framework->name);
  read_model(row, config.model);
  config.seq_len = row.whole("seq_len");
  config.dtype = "bf16";
  config.attention = run.by_framework ? framework->attention : "blockwise";
  config.recompute = recompute_of(row, run.by_framework ? framework->recompute : "none");
  read_layout(row, config);
  config.tensor_parallel.sequence_parallel =
      config.tensor_parallel.tp_size > 1 &&
      flag_of(row, "sequence_parallel", run.by_framework && framework->sequence_parallel);
  check_row(row, config, static_cast<int64_t>(cluster.ranks_per_node.value));
  config.communication->ranks = config.mesh().ranks();
  config.communication->node_size =
      std::min(config.communication->ranks, int64_t(cluster.ranks_per_node.value));
  run.step_s =
      row.has("step_time_ms") ? row.number("step_time_ms") * 1e-3 : row.number("step_time_s");
  run.mem_gb = row.number("mem_GB");
  run.failed = row.text("status") == "failed";
  return run;
}
// [read_row]

std::vector<RunRow> read_rows(const Table& table, const TrainConfig& base, const Cluster& cluster) {
  std::vector<RunRow> rows;
  for (size_t i = 0; i < table.rows.size(); ++i) {
    rows.push_back(read_row(TableRow(table, i), base, cluster));
  }
  return rows;
}

const LayerClass& RowPredictor::layer_class(const RunRow& row) {
  const std::string key = layer_class_key(row.config);
  const auto found = classes_.find(key);
  if (found != classes_.end()) return found->second;
  return classes_.emplace(key, record_layer_class(row.config)).first->second;
}

RowPrediction RowPredictor::predict(const RunRow& row, const Cluster& cluster) {
  const Cluster used = row.by_framework ? as_used(cluster) : without_framework(cluster);
  Cost cost(used);
  RowPrediction prediction;
  const PartSeconds parts = part_seconds(layer_class(row), cost);
  prediction.step_s = step_of_parts(row.config, parts, cost).step();
  prediction.gib = gib_of_row(row, cluster);
  prediction.fits = prediction.gib <= cluster.memory_gib.value;
  return prediction;
}

// [gib]
/// GiB that the first or the last stage needs, whichever needs more.
double gib_of_row(const RunRow& row, const Cluster& cluster) {
  const TrainConfig& config = row.config;
  if (!row.by_framework) return double(fullest_of(config).needed()) / kBytesOfGiB;
  const Framework& framework = *cluster.framework;
  const ModelConfig& model = config.model;
  const int64_t p = config.pipeline.pp_size, stage = config.data_parallel.zero_stage;
  const auto tp = double(config.tensor_parallel.tp_size), dp = double(config.data_parallel.dp_size);
  const auto layers = double((model.num_layers + p - 1) / p);
  const auto tokens = double(config.micro_batch_size * config.seq_len);
  const double table = double(model.vocab_size) * double(model.hidden_size);
  const double kept =
      config.recompute == "full"
          ? double(bytes_of(DType::bf16) * model.hidden_size)
          : framework.kept_bytes.value * double(model.hidden_size + model.ffn_hidden_size) / tp;
  double fullest = 0;
  for (int64_t at : {int64_t{0}, p - 1}) {
    const bool head = at == p - 1;
    const double ends = table * (p == 1 && !model.tie_word_embeddings ? 2 : 1);
    const double own = (layers * double(model.layer_weights(0, false)) + ends) / tp;
    const double states = own * (double(bytes_of(DType::bf16)) / (stage == 3 ? dp : 1) +
                                 framework.gradient_bytes.value / (stage >= 2 ? dp : 1) +
                                 double(kOptimizerBytes) / (stage >= 1 ? dp : 1));
    const auto in_flight = double(std::min(config.grad_acc_steps, p - at));
    const double logits = head ? kLogitBytes * tokens * double(model.vocab_size) / tp : 0;
    fullest = std::max(fullest, states + tokens * layers * kept * in_flight + logits);
  }
  return fullest / kBytesOfGiB + framework.constant_gib.value;
}
// [gib]

namespace {

/// Mean and middle of what predictions are off, over the rows that were measured.
std::string errors_of(std::vector<double> errors, const char* what) {
  if (errors.empty()) return "";
  std::ranges::sort(errors);
  double sum = 0;
  for (double error : errors) sum += error;
  return fmt::format(
      "   {} of {} measured rows: off by {:.2f} % in the mean, {:.2f} % in the "
      "middle, {:.1f} % at most\n",
      what, errors.size(), 100 * sum / double(errors.size()), 100 * errors[errors.size() / 2],
      100 * errors.back());
}

}  // namespace

std::string predict_rows(const TrainConfig& config) {
  const Cluster cluster = read_cluster(config.search.cluster);
  Table table = read_table(config.search.plan_rows, row_columns());
  const std::vector<RunRow> rows = read_rows(table, config, cluster);
  RowPredictor predictor;
  std::vector<std::string> steps, memory, fits;
  std::vector<double> off_time, off_memory;
  for (const RunRow& row : rows) {
    const RowPrediction found = predictor.predict(row, cluster);
    steps.push_back(fmt::format("{:.6g}", found.step_s));
    memory.push_back(fmt::format("{:.2f}", found.gib));
    fits.push_back(found.fits ? "yes" : "no");
    if (row.step_s > 0) off_time.push_back(std::abs(found.step_s / row.step_s - 1));
    if (row.mem_gb > 0) off_memory.push_back(std::abs(found.gib / row.mem_gb - 1));
  }
  table.add("predicted_step_time_s", steps);
  table.add("predicted_mem_GB", memory);
  table.add("predicted_fits", fits);
  if (!config.search.plan_out.empty()) write_file(config.search.plan_out, table.text());
  return fmt::format("{} rows of {} layer classes on {}\n{}{}", rows.size(), predictor.classes(),
                     cluster.name, errors_of(off_time, "steps"), errors_of(off_memory, "memory"));
}

}  // namespace usp
