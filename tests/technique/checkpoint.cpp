#include "train/checkpoint.h"

#include <nlohmann/json.hpp>

#include "files/safetensors.h"
#include "technique/tiny_llama.h"
#include "tensor/ops.h"

/// A run that is continued from a checkpoint computes what the uninterrupted one does, bit for bit;
/// a checkpoint that is not what was written is refused.
namespace usp::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const RunIdentity kIdentity{R"({"lr": 0.01, "seed": 1, "steps": 20, "prompt": "The "})",
                            6,
                            "c0ffee",
                            {"steps", "prompt", "checkpoint_interval"}};

/// Losses and gradient norms of steps [begin, end).
Values train_from(Trainer& trainer, int64_t begin, int64_t end) {
  Values values;
  for (int64_t step = begin; step < end; ++step) {
    trainer.train_step(step);
    const StepMetrics metrics = trainer.report(step, 0);
    values.insert(values.end(), {metrics.loss, metrics.grad_norm, double(metrics.tokens)});
  }
  return values;
}

/// The bits of everything that a step changes.
std::vector<std::vector<char>> bits_of_state(Trainer& trainer) {
  const TrainState state = trainer.state();
  std::vector<std::vector<char>> bits = {bits_of(state.parameters.flat_values()),
                                         bits_of(state.parameters.flat_masters())};
  for (const OptimizerState& moment : state.optimizer) bits.push_back(bits_of(moment.values));
  return bits;
}

TEST_CASE("a resumed run has the bits of one that was never interrupted") {
  const OnDevice cpu;
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    for (const bool tied : {false, true}) {
      INFO(dtype << (tied ? ", tied" : ""));
      const TempDir dir;
      TrainConfig config = tiny_training();
      config.dtype = dtype;
      config.grad_acc_steps = 3;
      config.model.tie_word_embeddings = tied;
      const RandomText text(config, 300);
      SoloTrainer whole(config, &text.dataset), first(config, &text.dataset);
      train_from(whole, 0, 4);
      train_from(first, 0, 4);
      write_checkpoint(dir.file(""), 4, first.state(), kIdentity);
      SoloTrainer second(config, &text.dataset);
      REQUIRE(load_checkpoint(newest_checkpoint(dir.file("")), second.state(), kIdentity) == 4);
      REQUIRE(bits_of_state(second) == bits_of_state(whole));
      REQUIRE(train_from(second, 4, 9) == train_from(whole, 4, 9));
      REQUIRE(bits_of_state(second) == bits_of_state(whole));
    }
  }
}

TEST_CASE("before the first update a bf16 weight may differ from its rounded master") {
  // It was rounded from f64 at once. A checkpoint therefore has both.
  const OnDevice cpu;
  const TempDir dir;
  TrainConfig config = tiny_training();
  config.dtype = "bf16";
  const RandomText text(config, 300);
  SoloTrainer trainer(config, &text.dataset), other(config, &text.dataset);
  trainer.model().parameters()[0].shard.value.narrow(0, 3, 1).assign(Values{1});
  trainer.model().parameters()[0].shard.master.narrow(0, 3, 1).assign(Values{1.0001});
  write_checkpoint(dir.file(""), 1, trainer.state(), kIdentity);
  load_checkpoint(newest_checkpoint(dir.file("")), other.state(), kIdentity);
  REQUIRE(bits_of_state(other) == bits_of_state(trainer));
}

TEST_CASE(
    "a checkpoint's tensors bear the parameters' names, and what the optimizer has beside them") {
  const OnDevice cpu;
  const TempDir dir;
  TrainConfig config = tiny_training();
  config.dtype = "bf16";
  const RandomText text(config, 300);
  SoloTrainer trainer(config, &text.dataset);
  train_from(trainer, 0, 1);
  write_checkpoint(dir.file(""), 1, trainer.state(), kIdentity);
  const SafetensorsFile file(newest_checkpoint(dir.file("")) + "/state.safetensors");
  ParameterList& parameters = trainer.model().parameters();
  REQUIRE(file.tensors().size() == 4 * parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const StoredTensor& value = file.get(parameter.name);
    value.check_shape(parameter.global_shape);
    REQUIRE(value.type == ElementType::BF16);
    Values values(value.numel());
    value.read(0, values);
    REQUIRE(values == parameter.value.items());
    for (const char* name : {"/master", "/first_moment", "/second_moment"}) {
      REQUIRE(file.get(parameter.name + name).type == ElementType::F32);
    }
  }
  const Json layout = Json::parse(file.metadata().at("parameters")).at("model.norm.weight");
  REQUIRE(layout == Json::parse(R"({"global_shape": [12], "slices": [], "range": [0, 12]})"));
}

/// One parameter of 400,000 elements in f64, with one moment: about 6 MiB.
struct Large {
  Large() : moment{Tensor::zeros({400'000}, DType::f64)} {
    Parameter& parameter = parameters.add("w", {400, 1000}, 0.02);
    parameters.allocate(DType::f64, 1);
    parameter.shard.grad.assign(Random(5).normals(400'000));
    moment = Random(6).tensor({400'000});
  }
  TrainState state() { return {parameters, {{"moment", moment}}, tokens}; }

  ParameterList parameters;
  Tensor moment;
  int64_t tokens = 77;
};

TEST_CASE(
    "an altered or shortened checkpoint is refused by file and bytes, and nothing is changed") {
  const OnDevice cpu;
  const TempDir dir;
  Large saved, loaded;
  loaded.moment = Random(8).tensor({400'000});
  loaded.tokens = 3;
  const Tensor before = clone(loaded.moment);
  const auto refused = [&](const std::vector<std::string>& parts) {
    check_throws<Error>(
        [&] { load_checkpoint(newest_checkpoint(dir.file("")), loaded.state(), kIdentity); },
        parts);
    REQUIRE(same_bits(loaded.moment, before));
    REQUIRE(loaded.tokens == 3);
  };
  const auto write = [&] { write_checkpoint(dir.file(""), 12, saved.state(), kIdentity); };
  write();
  const std::string state = newest_checkpoint(dir.file("")) + "/state.safetensors";
  const std::string record = newest_checkpoint(dir.file("")) + "/checkpoint.json";
  const int64_t size = fs::file_size(state);
  for (int64_t at : {int64_t{0}, int64_t{300}, int64_t{1} << 20, int64_t{3'000'000}, size - 1}) {
    flip_byte(state, at);
    const int64_t begin = at >> 20 << 20, end = std::min(begin + (1 << 20), size) - 1;
    refused({fmt::format("{}: bytes {} to {} are not as they were written", state, begin, end)});
    flip_byte(state, at);
  }
  fs::resize_file(state, size - 1);
  refused({fmt::format("{} ends at byte {}, and {} bytes were written", state, size - 1, size)});
  fs::resize_file(state, 0);
  refused({"ends at byte 0"});
  fs::remove(state);
  refused({state, "No such file"});
  write();
  fs::remove(record);
  refused({record, "No such file"});
  write();
  REQUIRE(load_checkpoint(newest_checkpoint(dir.file("")), loaded.state(), kIdentity) == 12);
  REQUIRE(same_bits(loaded.moment, saved.moment));
  REQUIRE(loaded.tokens == 77);
}

TEST_CASE("checkpoint.json is refused whichever of its bytes is altered, or where it ends") {
  const OnDevice cpu;
  const TempDir dir;
  ParameterList parameters;
  parameters.add("w", {3}, 0);
  parameters.allocate(DType::f32, 1);
  int64_t tokens = 5;
  const TrainState state{parameters, {}, tokens};
  write_checkpoint(dir.file(""), 9, state, kIdentity);
  const std::string path = newest_checkpoint(dir.file(""));
  const std::string text = read_file(path + "/checkpoint.json");
  const auto refused = [&](const std::string& altered) {
    std::ofstream(path + "/checkpoint.json", std::ios::binary) << altered;
    check_throws<Error>([&] { load_checkpoint(path, state, kIdentity); },
                        {path + "/checkpoint.json"});
  };
  for (size_t i = 0; i < text.size(); ++i) {
    std::string altered = text;
    altered[i] ^= 1;
    refused(altered);
    refused(text.substr(0, i));
  }
  refused(text + " ");
}

TEST_CASE("a checkpoint of another run is refused with both values") {
  const OnDevice cpu;
  const TempDir dir;
  Large saved;
  write_checkpoint(dir.file(""), 2, saved.state(), kIdentity);
  const auto load = [&](RunIdentity identity) {
    return [&, identity] {
      load_checkpoint(newest_checkpoint(dir.file("")), saved.state(), identity);
    };
  };
  RunIdentity other = kIdentity;
  other.config_json = R"({"lr": 0.02, "seed": 1, "steps": 20, "prompt": "The "})";
  check_throws<UsageError>(load(other), {"step-00000002", "lr=0.01", "this run has lr=0.02"});
  other = kIdentity;
  other.global_batch_size = 8;
  check_throws<UsageError>(load(other), {"global_batch_size=6", "global_batch_size=8"});
  other = kIdentity;
  other.data_sha256 = "decaf";
  check_throws<UsageError>(load(other), {"data_sha256=\"c0ffee\"", "data_sha256=\"decaf\""});
  // More steps, another prompt; a flag that one of the two programs does not have.
  other.data_sha256 = kIdentity.data_sha256;
  other.config_json = R"({"lr": 0.01, "steps": 90, "prompt": "A", "bucket_mb": 3})";
  load(other)();
}

TEST_CASE("flags that decide one run's result must agree, whichever of the two runs says so") {
  const OnDevice cpu;
  const TempDir dir;
  Large saved;
  const auto identity = [](const char* flags, const std::vector<std::string>& decisive) {
    return RunIdentity{flags, 6, "c0ffee", {"order", "parts"}, decisive};
  };
  const char *late = R"({"order": "late", "parts": 4})",
             *plain = R"({"order": "plain", "parts": 4})";
  const std::vector<std::string> both = {"order", "parts"};
  const auto load = [&](const RunIdentity& own) {
    return [&, own] { load_checkpoint(newest_checkpoint(dir.file("")), saved.state(), own); };
  };
  write_checkpoint(dir.file(""), 2, saved.state(), identity(late, both));
  load(identity(late, both))();
  check_throws<UsageError>(load(identity(plain, {})),
                           {R"(order="late", and this run has order="plain";)"});
  check_throws<UsageError>(load(identity(R"({"order": "late", "parts": 2})", both)),
                           {"parts=4, and this run has parts=2"});
  check_throws<UsageError>(load(identity("{}", {})),
                           {R"(order="late", and this run has no order)"});
  write_checkpoint(dir.file(""), 3, saved.state(), identity(plain, {}));
  load(identity(R"({"order": "other", "parts": 2})", {}))();
  check_throws<UsageError>(load(identity(late, both)),
                           {R"(order="plain", and this run has order="late";)"});
  write_checkpoint(dir.file(""), 4, saved.state(), identity("{}", {}));
  check_throws<UsageError>(load(identity(late, both)),
                           {R"(with no order, and this run has order="late";)"});
}

TEST_CASE("the newest checkpoints are kept, and what was not finished is none") {
  const OnDevice cpu;
  const TempDir dir;
  dir.write("run.json", "{}");
  const RunDir run_dir(dir.file(""), /*overwrite=*/false, /*resume=*/true);
  ParameterList parameters;
  parameters.add("w", {3}, 0);
  parameters.allocate(DType::f32, 1);
  int64_t tokens = 5;
  const TrainState state{parameters, {}, tokens};
  const auto names = [&] {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir.file("checkpoints"))) {
      names.push_back(entry.path().filename());
    }
    std::ranges::sort(names);
    return names;
  };
  const auto make = [&](int64_t interval) {
    return Checkpoints(run_dir, {interval, /*keep_checkpoints=*/2, true}, kIdentity);
  };
  check_throws<UsageError>([&] { make(3).resume(state, /*steps=*/20); },
                           {"holds no checkpoint", "--overwrite"});
  Checkpoints checkpoints = make(3);
  for (int64_t step = 1; step <= 10; ++step) checkpoints.after_step(step, state);
  REQUIRE(names() == std::vector<std::string>{"step-00000006", "step-00000009"});
  checkpoints.at_end(10, state);
  REQUIRE(names() == std::vector<std::string>{"step-00000009", "step-00000010"});
  make(0).at_end(11, state);  // none are wanted
  fs::create_directories(dir.file("checkpoints/step-00000012.tmp"));
  fs::create_directories(dir.file("checkpoints/step-13"));
  dir.write("checkpoints/step-00000014", "a file");
  REQUIRE(make(3).resume(state, /*steps=*/20) == 10);
  REQUIRE(!fs::exists(dir.file("checkpoints/step-00000012.tmp")));
  check_throws<UsageError>([&] { make(3).resume(state, /*steps=*/9); },
                           {"steps=9", "at least the 10", "try 20"});
  // A damaged one, and what is left then.
  const auto resume = [&] { make(3).resume(state, /*steps=*/20); };
  flip_byte(dir.file("checkpoints/step-00000010/state.safetensors"), 20);
  check_throws<UsageError>(resume, {"step-00000010/state.safetensors: bytes 0 to",
                                    "step-00000009 is whole, remove step-00000010"});
  fs::remove(dir.file("checkpoints/step-00000009/checkpoint.json"));
  check_throws<UsageError>(resume, {"step-00000010/state.safetensors", "there is no older one"});
}

TEST_CASE("a chain of resumed runs goes on saving at the first one's interval") {
  const OnDevice cpu;
  const TempDir dir;
  dir.write("run.json", "{}");
  ParameterList parameters;
  parameters.add("w", {3}, 0);
  parameters.allocate(DType::f32, 1);
  int64_t tokens = 5;
  const TrainState state{parameters, {}, tokens};
  RunIdentity identity = kIdentity;
  const auto run = [&](int64_t given_interval, int64_t begin, int64_t end) {
    const bool resume = begin > 0;
    const RunDir run_dir(dir.file(""), /*overwrite=*/false, /*resume=*/true);
    identity.config_json = fmt::format(R"({{"checkpoint_interval": {}}})", given_interval);
    Checkpoints checkpoints(run_dir, {given_interval, /*keep_checkpoints=*/9, resume}, identity);
    if (resume) REQUIRE(checkpoints.resume(state, /*steps=*/99) == begin);
    for (int64_t step = begin + 1; step <= end; ++step) checkpoints.after_step(step, state);
    checkpoints.at_end(end, state);
  };
  run(2, 0, 4);
  run(0, 4, 8);
  run(0, 8, 12);
  REQUIRE(fs::exists(dir.file("checkpoints/step-00000010")));
  run(0, 12, 13);
  run(5, 13, 15);
  run(0, 15, 20);
  REQUIRE(fs::exists(dir.file("checkpoints/step-00000020")));
  REQUIRE(!fs::exists(dir.file("checkpoints/step-00000018")));
}

TEST_CASE("a resumed run's metrics begin with the lines of the steps before") {
  const OnDevice cpu;
  const TempDir dir;
  const auto write = [&](MetricsWriter& file, int64_t begin, int64_t end) {
    for (int64_t step = begin + 1; step <= end; ++step) {
      StepMetrics metrics;
      metrics.step = step;
      metrics.loss = step == 2 ? kNaN : 5.0 - double(step);
      metrics.grad_norm = step == 1 || step == 4 ? kInf : 1;
      metrics.tokens = 10 * step;
      metrics.has_val_loss = step == 2;
      metrics.val_loss = 0.25;
      file.write(metrics, Runtime::current());
    }
  };
  const std::string path = dir.file("metrics.jsonl");
  {
    MetricsWriter file(path, DType::f64);
    write(file, 0, 5);
  }
  const std::string text = read_file(path);
  std::ofstream(path, std::ios::app) << "{\"step\": 6, \"lo";  // what a kill leaves
  for (int64_t kept : {5, 2}) {
    const MetricsWriter file(path, DType::f64, kept);
    REQUIRE(file.last().step == kept);
    REQUIRE(file.last().tokens == 10 * kept);
    REQUIRE(file.last().has_val_loss);
    REQUIRE(file.last().val_loss == 0.25);
    REQUIRE((kept == 2 ? std::isnan(file.last().loss) : file.last().loss == 0));
    REQUIRE(file.skipped().text(kept) ==
            (kept == 2 ? "1 of 2, the gradient was not finite: step 1"
                       : "2 of 5, the gradient was not finite: steps 1 and 4"));
    REQUIRE(text.starts_with(read_file(path)));
    REQUIRE(std::ranges::count(read_file(path), '\n') == kept);
  }
  {
    MetricsWriter file(path, DType::f64, 2);
    write(file, 2, 5);
  }
  REQUIRE(read_file(path) == text);
}

}  // namespace
}  // namespace usp::test
