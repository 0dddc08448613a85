#include "planner/rows.h"

#include <fstream>

#include "accounting/distinct_ranks.h"
#include "planner/fit.h"
#include "planner/timed.h"
#include "technique/planner/layouts.h"

/// Tables of runs, what is predicted of their rows, and what is fitted to them.
namespace usp::test {
namespace {

Table table_of(const std::string& text) {
  const TempDir dir;
  const std::string file = dir.file("runs.csv");
  std::ofstream(file) << text;
  return read_table(file, row_columns());
}

/// A cluster of round numbers on which a framework was measured.
Cluster framework_cluster() {
  const auto is = [](double value) { return Sourced{value, Origin::fitted, "a test"}; };
  Cluster cluster = round_cluster(8);
  cluster.framework = Framework{.name = "other",
                                .attention = "naive",
                                .recompute = "full",
                                .sequence_parallel = true,
                                .matmul = is(0.5),
                                .attention_share = is(0.25),
                                .half = is(8),
                                .launch_us = is(1),
                                .net_latency_us = is(20),
                                .net_gbs = is(2),
                                .per_doubling = is(0.5),
                                .all_reduce = is(3),
                                .exposed = is(0.5),
                                .overlap = is(0.25),
                                .step_ms = is(4),
                                .logit_bytes = is(10),
                                .gradient_bytes = is(2),
                                .kept_bytes = is(10),
                                .constant_gib = is(3)};
  return cluster;
}

RunRow row_of(const std::string& columns, const std::string& values, const Cluster& cluster) {
  const Table table = table_of(columns + "\n" + values + "\n");
  return read_row(TableRow(table, 0), TrainConfig(), cluster);
}

constexpr const char* kColumns = "hidden,heads,layers,seq_len,tp,dp,pp,micro_batch,global_batch";

TEST_CASE("a table's unknown column, short line and bad number are refused by name") {
  const auto refused = [](const std::string& text, const std::vector<std::string>& parts) {
    check_throws<UsageError>(
        [&] {
          const Table table = table_of(text);
          read_row(TableRow(table, 0), TrainConfig(), round_cluster(8));
        },
        parts);
  };
  const std::string columns = kColumns;
  refused(columns + ",colour\n64,4,2,8,1,1,1,1,4,7\n",
          {"runs.csv", "colour", "try one of", "hidden"});
  refused(columns + "\n64,4\n", {"runs.csv", "line 2", "2 values for 9 columns"});
  refused(columns + "\n64,4,2,8,two,1,1,1,4\n", {"row 1", "tp=\"two\"", "try 1"});
  refused(columns + "\n64,4,2,8,0,1,1,1,4\n", {"row 1", "tp=\"0\"", "try 1"});
  refused(columns + "\n64,5,2,8,1,1,1,1,4\n", {"row 1", "heads=5", "hidden=64"});
  refused(columns + "\n64,4,2,8,8,1,1,1,4\n", {"row 1", "tp=8", "heads=4", "1, 2 or 4"});
  refused(columns + ",gpus\n64,4,2,8,2,1,1,1,4,8\n", {"row 1", "gpus=8", "try 2"});
  refused("hidden\n64\n", {"row 1", "layers is missing"});
  refused("hidden\n", {"there is no row", "1 values"});
  refused(columns + ",tp\n64,4,2,8,2,1,1,1,4,4\n", {"the column tp is there twice"});
  refused(columns + ",nodes\n64,4,2,8,2,1,1,1,4,2\n", {"row 1", "nodes=2", "2 ranks", "try 1"});
  for (const char* none : {"inf", "nan", "1e999", "0"}) {
    refused(columns + ",step_time_s\n64,4,2,8,1,1,1,1,4," + none + "\n",
            {"row 1", fmt::format("step_time_s=\"{}\"", none), "leave it empty"});
  }
}

TEST_CASE("a table may begin with the byte order mark that a spreadsheet writes") {
  const Table table = table_of("\xEF\xBB\xBF" + std::string(kColumns) + "\n64,4,2,8,1,1,1,1,4\n");
  CHECK(TableRow(table, 0).whole("hidden") == 64);
}

TEST_CASE("a row's batch is made exactly, or refused with one that is") {
  const auto refused = [](const std::string& more, const std::string& values,
                          const std::vector<std::string>& parts) {
    const std::string columns = "hidden,heads,layers,seq_len,tp,dp,pp,micro_batch" + more;
    check_throws<UsageError>(
        [&] { row_of(columns, "64,4,2,8,1,2,1,2" + values, round_cluster(8)); }, parts);
  };
  refused(",global_batch", ",13", {"row 1", "global_batch=13", "dp x micro_batch = 4", "try 12"});
  refused(",global_batch", ",14", {"global_batch=14", "try 16"});
  refused(",batch_seqs", ",1", {"batch_seqs=1", "try 4"});
  refused(",grad_accum,global_batch", ",3,16", {"global_batch=16", "grad_accum=3", "try 12"});
  refused(",global_batch,batch_seqs", ",16,12", {"batch_seqs=12", "try 16"});
}

TEST_CASE("a row of a GPT becomes a Llama with as many weights, one of a Llama stays") {
  const Cluster cluster = framework_cluster();
  const RunRow gpt = row_of(kColumns, "1024,16,24,2048,2,4,2,2,64", cluster);
  CHECK(gpt.by_framework);
  CHECK(gpt.config.model.ffn_hidden_size == 2736);  // 8 / 3 of 1024, up to a multiple of 8
  CHECK(gpt.config.model.vocab_size == 51200);
  CHECK(gpt.config.model.tie_word_embeddings);
  CHECK(gpt.config.grad_acc_steps == 8);
  CHECK(gpt.config.attention == "naive");
  CHECK(gpt.config.recompute == "full");
  CHECK(gpt.config.tensor_parallel.sequence_parallel);
  const std::string more =
      std::string(kColumns) + ",ffn,vocab,recompute,sequence_parallel,activation,framework";
  const RunRow llama =
      row_of(more, "1024,16,24,2048,2,4,2,2,64,3000,999,none,0,swiglu,mine", cluster);
  CHECK(!llama.by_framework);
  CHECK(llama.config.model.ffn_hidden_size == 3000);
  CHECK(llama.config.model.vocab_size == 999);
  CHECK(!llama.config.model.tie_word_embeddings);
  CHECK(llama.config.attention == "blockwise");
  CHECK(llama.config.recompute == "none");
  CHECK(!llama.config.tensor_parallel.sequence_parallel);
  const RunRow gelu =
      row_of(more, "1024,16,24,2048,2,4,2,2,64,3000,999,none,1,gelu,other", cluster);
  CHECK(gelu.config.model.ffn_hidden_size == 2000);
  CHECK(gelu.by_framework);
}

TEST_CASE("where nothing overlaps, the parts of a model take what its replay takes") {
  Cluster cluster = round_cluster(8);
  cluster.half_width.value = 20;
  for (const char* flags :
       {"--grad_acc_steps 3", "--grad_acc_steps 1 --recompute full --num_layers 6",
        "--grad_acc_steps 2 --tp_size 2 --tp_overlap none",
        "--grad_acc_steps 2 --tp_size 2 --tp_overlap none --recompute full"}) {
    CAPTURE(flags);
    const TrainConfig config = layout_of_flags(instead(kSmall, flags));
    Cost cost(cluster);
    const PartSeconds parts = part_seconds(record_layer_class(config), cost);
    const StepOfParts step = step_of_parts(config, parts, cost);
    const Timed timed = time_step({config, 0, 0, "", 0}, cluster, /*all=*/true);
    CHECK(step.stages == Approx(timed.replayed.gradients).epsilon(2e-3));
    CHECK(step.step() == Approx(timed.replayed.step).epsilon(0.02));
    CHECK(step.bubble == Approx(0).margin(1e-12));
  }
}

TEST_CASE("a step of parts adds the bubble, the messages, the gradients and the update") {
  const Cluster cluster = as_used(framework_cluster());
  RunRow row = row_of(kColumns, "64,4,8,16,1,2,4,2,40", framework_cluster());
  const PartSeconds parts{0.1, 0.2, 1, 2, 0.3, 0.5, 1e-6};
  Cost cost(cluster);
  const StepOfParts step = step_of_parts(row.config, parts, cost);
  const double slowest = 2 * 3 + 0.8;  // two layers and the head
  CHECK(row.config.grad_acc_steps == 10);
  CHECK(step.stages == Approx(10 * slowest));
  CHECK(step.bubble == Approx(0.3 + 8 * 3 + 0.8 - slowest));
  // 2 x 16 x 64 values of bf16 within a node at 1 GB/s, 13 times each way.
  CHECK(step.messages == Approx(26 * (1e-6 + 4096e-9)));
  CHECK(step.gradients == 0);
  const double own = 2 * double(row.config.model.layer_weights(0, false)) + 51200 * 64;
  CHECK(step.update == Approx(own * 1e-6));
  CHECK(step.constant == Approx(4e-3));
  row.config.data_parallel.zero_stage = 1;
  CHECK(step_of_parts(row.config, parts, cost).update == Approx(own / 2 * 1e-6));
  // Ten layers over four stages: the fullest has three.
  const RunRow uneven = row_of(kColumns, "64,4,10,16,1,2,4,2,40", framework_cluster());
  const StepOfParts fullest = step_of_parts(uneven.config, parts, cost);
  CHECK(fullest.stages == Approx(10 * (3 * 3 + 0.8)));
  CHECK(fullest.bubble == Approx(0.3 + 10 * 3 + 0.8 - (3 * 3 + 0.8)));
  // With nothing to hide it: half of the bytes twice, or once for gradients and once for weights.
  const PartSeconds none{};
  CHECK(step_of_parts(row.config, none, cost).gradients == Approx(2e-6 + own * 2e-9).epsilon(1e-6));
}

TEST_CASE("a framework's network shrinks with the nodes, and favours sums") {
  const Cluster cluster = as_used(framework_cluster());
  Cost cost(cluster);
  const auto seconds = [&](CommKind kind, std::vector<int> members) {
    const ProgramGroup group{"group", 0, 0,
                             std::make_shared<const std::vector<int>>(std::move(members))};
    return cost.of({.kind = kind, .payload_bytes = 4000000}, group).busy;
  };
  // A rank has an eighth of a NIC of 2 GB/s; with four nodes half of that.
  CHECK(seconds(CommKind::all_gather, {0, 8}) == Approx(20e-6 + 0.5 * 16e-3));
  CHECK(seconds(CommKind::all_gather, {0, 8, 16, 24}) == Approx(60e-6 + 0.75 * 32e-3));
  CHECK(seconds(CommKind::all_reduce, {0, 8}) == Approx(40e-6 + 16e-3 / 3));
}

TEST_CASE("the memory of a row is its framework's, or this trainer's to the byte") {
  const Cluster cluster = framework_cluster();
  RunRow row = row_of(kColumns, "64,4,8,16,2,2,4,2,40", cluster);
  row.config.recompute = "none";
  const ModelConfig& model = row.config.model;
  const double own = (2 * double(model.layer_weights(0, false)) + 51200 * 64) / 2;
  const double tokens = 2 * 16, kept = 10 * double(64 + model.ffn_hidden_size) / 2;
  const double first = own * 16 + tokens * 2 * kept * 4;
  const double last = own * 16 + tokens * 2 * kept + 6 * tokens * 51200 / 2;
  CHECK(gib_of_row(row, cluster) == Approx(3 + std::max(first, last) / (1 << 30)));
  // With few words the first stage is the fullest: it keeps a micro-batch for each stage.
  RunRow narrow = row_of(std::string(kColumns) + ",vocab", "64,4,8,16,2,2,4,2,40,8", cluster);
  narrow.config.recompute = "none";
  const double few = (2 * double(model.layer_weights(0, false)) + 8 * 64) / 2;
  CHECK((gib_of_row(narrow, cluster) - 3) * (1 << 30) == Approx(few * 16 + tokens * 2 * kept * 4));
  row.config.recompute = "full";
  row.config.data_parallel.zero_stage = 1;
  const double full = own * 10 + tokens * 2 * 2 * 64 + 6 * tokens * 51200 / 2;
  CHECK(gib_of_row(row, cluster) == Approx(3 + full / (1 << 30)));
  // Nine layers over four stages: the fullest has three, with one and without states of its own.
  row = row_of(kColumns, "64,4,9,16,2,2,4,2,40", cluster);
  const double three = (3 * double(model.layer_weights(0, false)) + 51200 * 64) / 2;
  const double uneven = three * 16 + tokens * 3 * 2 * 64 + 6 * tokens * 51200 / 2;
  CHECK(gib_of_row(row, cluster) == Approx(3 + uneven / (1 << 30)));
  row.by_framework = false;
  CHECK(gib_of_row(row, cluster) == double(predict_fullest(row.config).needed()) / (1 << 30));
}

TEST_CASE("a fit finds the numbers that steps were made with") {
  const Cluster truth = framework_cluster();
  std::vector<RunRow> rows;
  RowPredictor predictor;
  for (const char* values : {"64,4,8,16,1,1,1,1,4", "64,4,8,32,1,2,1,4,64", "128,4,4,16,2,1,1,2,4",
                             "256,4,4,64,1,1,1,4,8", "128,4,16,64,1,4,2,4,64"}) {
    rows.push_back(row_of(kColumns, values, truth));
    rows.back().step_s = predictor.predict(rows.back(), truth).step_s;
  }
  Cluster start = truth;
  start.framework->matmul.value = 0.2;
  start.framework->launch_us.value = 30;
  start.framework->step_ms.value = 20;
  std::vector<Knob> knobs = step_knobs(/*gathers=*/false);
  std::erase_if(knobs, [](const Knob& knob) {
    return knob.name != "matmul" && knob.name != "launch_us" && knob.name != "step_ms";
  });
  const Cluster found = fit(start, knobs, [&](const Cluster& tried) {
    double sum = 0;
    for (const RunRow& row : rows) {
      sum += std::abs(std::log(predictor.predict(row, tried).step_s / row.step_s));
    }
    return sum;
  });
  CHECK(predictor.classes() == 5);
  for (const RunRow& row : rows) {
    CHECK(predictor.predict(row, found).step_s == Approx(row.step_s).epsilon(0.02));
  }
}

TEST_CASE("rows to fit are chosen by a name that is known and a number") {
  const TempDir dir;
  std::ofstream(dir.file("runs.csv"))
      << kColumns << ",step_time_ms\n1024,16,4,128,2,2,2,2,16,900\n";
  TrainConfig config;
  config.search.cluster = "a100";
  config.search.plan_rows = dir.file("runs.csv");
  for (const char* wrong : {"pp", "pp<=", "pp<=x", "pp<=1x", "cp<=1"}) {
    config.search.plan_fit = wrong;
    check_throws<UsageError>([&] { fit_rows(config); },
                             {std::string("plan_fit=") + wrong, "try \"pp<=1\""});
  }
  // Nine ranks lie on two nodes of eight, eight ranks on one.
  std::ofstream(dir.file("runs.csv")) << kColumns << ",step_time_ms\n"
                                      << "1152,9,4,128,9,1,1,2,16,900\n"
                                      << "1024,8,4,128,8,1,1,2,16,900\n";
  for (const auto& [condition, number] : {std::pair("nodes<=1", 1), {"nodes<=2", 2}}) {
    config.search.plan_fit = condition;
    check_throws<UsageError>([&] { fit_rows(config); },
                             {condition, fmt::format("has {} such rows", number)});
  }
}

TEST_CASE("a table is written as it was read, with three columns more") {
  const TempDir dir;
  const std::string text = std::string(kColumns) + ",step_time_ms\n";
  const std::string row = "1024,16,4,128,2,2,2,2,16,900";
  std::ofstream(dir.file("runs.csv")) << text << row << "\n";
  TrainConfig config;
  config.search.cluster = "a100";
  config.search.plan_rows = dir.file("runs.csv");
  config.search.plan_out = dir.file("out.csv");
  const std::string said = predict_rows(config);
  CHECK(said.find("1 rows of 1 layer classes on a100") != std::string::npos);
  const Table out = read_table(dir.file("out.csv"), [] {
    std::vector<std::string> known = row_columns();
    known.insert(known.end(), {"predicted_step_time_s", "predicted_mem_GB", "predicted_fits"});
    return known;
  }());
  REQUIRE(out.rows.size() == 1);
  CHECK(out.text().starts_with(std::string(kColumns) + ",step_time_ms,predicted_step_time_s,"));
  const RunRow read = row_of(kColumns, "1024,16,4,128,2,2,2,2,16", read_cluster("a100"));
  const RowPrediction found = RowPredictor().predict(read, read_cluster("a100"));
  const TableRow back(out, 0);
  CHECK(back.number("predicted_step_time_s") == Approx(found.step_s).epsilon(1e-4));
  CHECK(back.number("predicted_mem_GB") == Approx(found.gib).epsilon(0.01));
  CHECK(back.text("predicted_fits") == "yes");
}

}  // namespace
}  // namespace usp::test
