#include "accounting/plan.h"

#include "technique/tiny_llama.h"

namespace usp::test {
namespace {

/// The book's example: a billion parameters, 4M tokens a step in sequences of 4k.
TrainConfig books_example(int64_t ranks) {
  const char* words[] = {"program", "--model",   "1B",   "--dtype",
                         "bf16",    "--seq_len", "4096", "--micro_batch_size",
                         "2"};
  TrainConfig config;
  Args args("A test.");
  config.bind(args);
  REQUIRE(args.parse(9, words));
  config.validate(args);
  config.data_parallel.dp_size = ranks;
  config.planning.plan = 4 << 20;
  return config;
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("the book's recipe: 1,024 samples, accumulated 4 times on 128 ranks, once on 512") {
  const std::string few = plan_batch(books_example(128));
  CAPTURE(few);
  REQUIRE(holds(few, "4096 tokens: 1024 samples"));
  REQUIRE(holds(few, "1024 / (2 x 128 ranks) = 4\n"));
  REQUIRE(holds(few, "--dp_size 128 --micro_batch_size 2 --grad_acc_steps 4"));
  const std::string many = plan_batch(books_example(512));
  CAPTURE(many);
  REQUIRE(holds(many, "1024 / (2 x 512 ranks) = 1\n"));
}

TEST_CASE("a plan that does not come out even says what would") {
  const std::string idle = plan_batch(books_example(768));
  CAPTURE(idle);
  REQUIRE(holds(idle, "1024 samples are fewer than the 1536 that 768 ranks take at once"));
  REQUIRE(holds(idle, "dp_size=512"));
  const std::string odd = plan_batch(books_example(100));
  CAPTURE(odd);
  REQUIRE(holds(odd, "1024 samples are no multiple of 200: try a batch of 1000 samples"));
}

TEST_CASE(
    "a plan takes the nearest whole number of samples, and proposes the nearest that divides") {
  TrainConfig config = books_example(100);
  for (const auto& [tokens, samples, proposed] :
       {std::array<int64_t, 3>{1124 * 4096 + 2047, 1124, 1200},
        {1123 * 4096 + 2049, 1124, 1200},
        {1099 * 4096, 1099, 1000},
        {1100 * 4096, 1100, 1200}}) {
    config.planning.plan = tokens;
    const std::string text = plan_batch(config);
    CAPTURE(tokens, text);
    REQUIRE(holds(text, fmt::format("4096 tokens: {} samples", samples)));
    const std::string says = fmt::format("samples, of {} tokens: the nearest", samples * 4096);
    REQUIRE(holds(text, says) == (tokens % 4096 != 0));
    REQUIRE(holds(text, fmt::format("try a batch of {} samples", proposed)));
  }
}

TEST_CASE("what is said to make a plan come out even does") {
  struct Case {
    int64_t samples, micro_batch, ranks;
    bool idle, smaller;
  };
  for (const auto& [samples, micro_batch, ranks, idle, smaller] :
       {Case{4, 8, 1, false, true}, Case{7, 2, 8, false, false}, Case{6, 2, 8, true, false},
        Case{6, 4, 2, false, true}, Case{12, 6, 4, true, true}}) {
    CAPTURE(samples, micro_batch, ranks);
    TrainConfig config = books_example(ranks);
    config.micro_batch_size = micro_batch;
    config.planning.plan = samples * config.seq_len;
    const std::string text = plan_batch(config);
    CAPTURE(text);
    REQUIRE(holds(text, "leave ranks idle") == idle);
    REQUIRE(holds(text, "smaller micro-batches") == smaller);
    const auto comes_out = [](const TrainConfig& changed) {
      return holds(plan_batch(changed), "--grad_acc_steps ");
    };
    const auto number_after = [&](const std::string& words) {
      return std::stoll(text.substr(text.find(words) + words.size()));
    };
    TrainConfig larger = config, few = config, small = config;
    larger.planning.plan = number_after("enlarge the batch to ") * config.seq_len;
    REQUIRE(comes_out(larger));
    if (idle) few.data_parallel.dp_size = number_after("(dp_size=");
    REQUIRE(comes_out(few) == idle);
    if (smaller) small.micro_batch_size = number_after("(micro_batch_size=");
    REQUIRE(comes_out(small) == smaller);
  }
}

TEST_CASE("the micro-batch is the largest that fits, by what a step on meta allocates") {
  TrainConfig config = books_example(8);
  config.planning.micro_batch_given = false;
  const auto bytes = [&](int64_t micro_batch_size) {
    TrainConfig other = config;
    other.micro_batch_size = micro_batch_size;
    return double(simulate<Trainer>(other).peak);
  };
  constexpr double kGiB = 1 << 30;
  const int64_t parameters = 1'498'482'688;  // lm_head is not tied
  REQUIRE(bytes(1) > 18.0 * double(parameters));
  REQUIRE(bytes(2) > bytes(1));
  config.device_memory = bytes(4) / kGiB;
  REQUIRE(holds(plan_batch(config), "3. micro-batch       4 samples, the largest"));
  config.device_memory = bytes(4) / kGiB - 0.001;
  REQUIRE(holds(plan_batch(config), "3. micro-batch       2 samples, the largest"));
  config.planning.plan = 64 * 4096;  // of which every rank gets 8 samples
  config.device_memory = 1000;
  REQUIRE(holds(plan_batch(config), "3. micro-batch       8 samples, the largest"));
  config.device_memory = 20;
  REQUIRE(holds(plan_batch(config), "not even 1 sample fits"));
}

}  // namespace
}  // namespace usp::test
