#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/args.h"
#include "base/file_writer.h"
#include "files/run_dir.h"
#include "testing.h"
#include "train/model_config.h"

namespace usp::test {
namespace {

/// One field of each kind.
struct Flags {
  Flags() : args("A test.") {
    args.group("Group");
    args.bind("count", count, "an integer");
    args.bind("rate", rate, "a number");
    args.bind("name", name, "a word");
    args.bind("fast", fast, "a switch");
    args.bind("mode", mode, {"slow", "quick"}, "a choice");
  }
  bool parse(std::vector<const char*> words) {
    words.insert(words.begin(), "program");
    return args.parse(static_cast<int>(words.size()), words.data());
  }

  int64_t count = 3;
  double rate = 0.5;
  std::string name = "none", mode = "slow";
  bool fast = false;
  Args args;
};

TEST_CASE("flags fill their fields, the others keep their defaults") {
  Flags flags;
  REQUIRE(flags.parse({"--count", "-70000000000", "--fast", "--mode", "quick", "--rate", "1e-3"}));
  REQUIRE(flags.count == -70000000000);
  REQUIRE(flags.fast);
  REQUIRE(flags.mode == "quick");
  REQUIRE(flags.rate == 1e-3);
  REQUIRE(flags.name == "none");
  REQUIRE(flags.args.given("count"));
  REQUIRE(!flags.args.given("name"));
}

TEST_CASE("--help shows one default of a flag, in words where its number stands for them") {
  Flags flags;
  int64_t share = 1;
  flags.args.bind("share", share, "ranks of a batch; default: all");
  std::ostringstream shown;
  std::streambuf* const before = std::cout.rdbuf(shown.rdbuf());
  const bool goes_on = flags.parse({"--help"});
  std::cout.rdbuf(before);
  REQUIRE(!goes_on);
  const std::string text = shown.str();
  REQUIRE((text.find("INT=all") != text.npos || text.find("INT [all]") != text.npos));
  REQUIRE(text.find("ranks of a batch\n") != std::string::npos);
  REQUIRE((text.find("INT=3") != text.npos || text.find("INT [3]") != text.npos));
  REQUIRE(share == 1);
}

TEST_CASE("an unknown flag or a malformed value is a usage error that names it") {
  const auto parse = [](std::vector<const char*> words) { return [=] { Flags().parse(words); }; };
  check_throws<UsageError>(parse({"--cuont", "3"}), {"--cuont", "--help"});
  check_throws<UsageError>(parse({"--count", "three"}), {"count", "three"});
  check_throws<UsageError>(parse({"--count", "1.5"}), {"count", "1.5"});
  check_throws<UsageError>(parse({"--count"}), {"count"});
  for (const char* rate : {"fast", "1,5", "1_000", "0x10", "1e", "--count"}) {
    check_throws<UsageError>(parse({"--rate", rate}), {"--rate", rate, "is no number; try"});
  }
  check_throws<UsageError>(parse({"--mode", "fastest"}), {"mode", "fastest", "quick"});
  check_throws<UsageError>(parse({"stray"}), {"stray"});
}

TEST_CASE("settings of another type of RoPE are refused, since they would have no effect") {
  const auto validate = [](std::vector<const char*> words) {
    ModelConfig model;
    Args args("A test.");
    model.bind(args);
    words.insert(words.begin(), "program");
    args.parse(static_cast<int>(words.size()), words.data());
    model.validate(args);
  };
  for (const auto& [flag, types] : std::map<std::string, std::set<std::string>>{
           {"--rope_factor", {"linear", "llama3", "yarn"}},
           {"--rope_low_freq_factor", {"llama3"}},
           {"--rope_beta_slow", {"yarn"}},
           {"--rope_mscale", {"yarn"}},
           {"--rope_original_max_position_embeddings", {"llama3", "yarn"}}}) {
    for (const char* type : {"default", "linear", "llama3", "yarn"}) {
      CAPTURE(flag, type);
      const std::vector<const char*> words = {"--rope_type", type, flag.c_str(), "2"};
      if (types.contains(type)) {
        REQUIRE_NOTHROW(validate(words));
      } else {
        check_throws<UsageError>([&] { validate(words); },
                                 {flag.substr(2), type, "has no effect", "leave it out"});
      }
    }
  }
}

TEST_CASE("an empty value is a usage error, and not the default") {
  const auto parse = [](std::vector<const char*> words) { return [=] { Flags().parse(words); }; };
  for (const char* flag : {"--count", "--rate", "--name", "--mode"}) {
    const std::string equals = std::string(flag) + "=";
    check_throws<UsageError>(parse({flag, "", "--fast"}), {flag + 2});
    check_throws<UsageError>(parse({equals.c_str()}), {flag + 2});
  }
  check_throws<UsageError>(parse({"--name", ""}), {"name is empty; give it a value, or leave"});
}

TEST_CASE("a flag that is given twice is refused with both of its values") {
  const auto parse = [](std::vector<const char*> words) { return [=] { Flags().parse(words); }; };
  check_throws<UsageError>(parse({"--count", "3", "--fast", "--count", "4"}),
                           {"count is given twice, as 3 and as 4; leave one of them out"});
  check_throws<UsageError>(parse({"--name=a b", "--name", "--count"}),
                           {"name is given twice, as a b and as --count"});
  check_throws<UsageError>(parse({"--mode", "slow", "--mode=slow"}), {"as slow and as slow"});
  Flags flags;
  std::vector<std::string> list;
  flags.args.bind("list", list, "a list");
  REQUIRE(flags.parse({"--list", "a", "--fast", "--list", "b", "--fast"}));
  REQUIRE(list == std::vector<std::string>{"a", "b"});
}

TEST_CASE("an unknown flag that is one's slip of the pen names that one") {
  const auto parse = [](std::vector<const char*> words) { return [=] { Flags().parse(words); }; };
  check_throws<UsageError>(parse({"--cuont", "3"}), {"--cuont 3; did you mean --count? --help"});
  check_throws<UsageError>(parse({"--raet=3"}), {"did you mean --rate?"});
  check_throws<UsageError>(parse({"--fast", "count"}), {"did you mean --count?"});
  check_throws<UsageError>(parse({"--na", "x"}), {"did you mean --name?"});
  check_throws<UsageError>(parse({"--zeppelin"}), {"unknown flag --zeppelin; --help lists"});
}

TEST_CASE("the configuration's record is a JSON object of every flag") {
  Flags flags;
  flags.parse({"--name", "a \"quoted\"\nname", "--fast"});
  const auto json = nlohmann::json::parse(flags.args.to_json());
  REQUIRE(json.size() == 5);
  REQUIRE(json.at("count") == 3);
  REQUIRE(json.at("rate") == 0.5);
  REQUIRE(json.at("name") == "a \"quoted\"\nname");
  REQUIRE(json.at("fast") == true);
  REQUIRE(json.at("mode") == "slow");
}

TEST_CASE("a value that is not UTF-8 stands in the record with U+FFFD for what is none") {
  Flags flags;
  flags.parse({"--name", "a\xFFz"});
  REQUIRE(flags.name == "a\xFFz");
  REQUIRE(nlohmann::json::parse(flags.args.to_json()).at("name") == "a\uFFFDz");
}

TEST_CASE("a flag says whether a resumed run may give it another value") {
  int64_t steps = 1, seed = 2;
  std::string order = "a";
  Args args("A program.");
  args.bind("steps", steps, "may").may_differ_on_resume();
  args.bind("seed", seed, "may not");
  args.bind("order", order, {"a", "b"}, "may").may_differ_on_resume();
  REQUIRE(args.may_differ_on_resume() == std::set<std::string>{"order", "steps"});
  REQUIRE(args.decisive().empty());
  args.decide_result([&] {
    return std::vector<std::string>{order, "seed"};
  });  // as it is when asked for
  args.decide_result([] { return std::vector<std::string>{"parts"}; });
  order = "later";
  REQUIRE(args.decisive() == std::vector<std::string>{"later", "seed", "parts"});
}

TEST_CASE("a question is asked where its flag has another value than without it, or as it says") {
  const auto asked = [](std::vector<const char*> words) {
    int64_t plan = 0, prove = 0;
    bool estimate = false;
    std::string show, of = "all";
    Args args("A program.");
    args.group("Questions");
    args.bind("plan", plan, "a question").is_question();
    args.bind("prove", prove, "a question").is_question([&] { return prove > 0 && of == "all"; });
    args.bind("estimate", estimate, "a question").is_question();
    args.bind("show", show, {"", "table"}, "a question").is_question();
    args.bind("of", of, "no question");
    words.insert(words.begin(), "program");
    args.parse(static_cast<int>(words.size()), words.data());
    REQUIRE(args.may_differ_on_resume() ==
            std::set<std::string>{"estimate", "plan", "prove", "show"});
    return args.questions();
  };
  REQUIRE(asked({}).empty());
  REQUIRE(asked({"--plan", "0", "--prove", "0", "--of", "one"}).empty());
  REQUIRE(asked({"--prove", "4", "--of", "one"}).empty());
  REQUIRE(asked({"--show=table", "--prove", "4", "--estimate", "--plan=3", "--estimate"}) ==
          std::vector<std::string>{"show", "prove", "estimate", "plan"});
}

TEST_CASE("experts and latents decide a result, though another program has no such flags") {
  ModelConfig model;
  model.offers_experts = model.offers_latents = true;
  Args args("A program.");
  model.bind(args);
  REQUIRE(args.decisive().empty());
  model.experts.num_experts = 4;
  REQUIRE(args.decisive() == std::vector<std::string>{"num_experts"});
  model.mla.attention_kind = "mla";
  REQUIRE(args.decisive() == std::vector<std::string>{"attention_kind", "num_experts"});
}

TEST_CASE("a value outside its range is a usage error with flag, value and range") {
  check_range("lr", 0, 0, 1);
  check_range("lr", 1, 0, 1);
  check_throws<UsageError>([] { check_range("lr", 1.5, 0, 1); }, {"lr=1.5", "[0, 1]"});
  check_throws<UsageError>([] { check_range("lr", kNaN, 0, 1); }, {"lr=nan"});
  check_throws<UsageError>([] { check_range("steps", 0, 1, kInf); }, {"steps=0", "at least 1"});
  check_throws<UsageError>([] { check_range("lr", kInf, 0, kInf); }, {"lr=inf", "finite", "try 0"});
}

TEST_CASE("divisors are listed for an error message up to a limit") {
  REQUIRE(list_divisors(16) == "1, 2, 4, 8 or 16");
  REQUIRE(list_divisors(12, 4) == "1, 2, 3 or 4");
  REQUIRE(list_divisors(7, 3) == "1");
}

TEST_CASE("main's exit code is 2 for a usage error, 1 for another, its own otherwise") {
  REQUIRE(run_main([](int argc, char**) { return argc; }, 5, nullptr) == 5);
  const auto usage = [](int, char**) -> int { usage_error("a usage error, as the test wants"); };
  const auto failure = [](int, char**) -> int { fail("a failure, as the test wants"); };
  REQUIRE(run_main(usage, 0, nullptr) == 2);
  REQUIRE(run_main(failure, 0, nullptr) == 1);
}

TEST_CASE("a directory that holds a run is refused unless it may be overwritten") {
  const TempDir dir;
  const std::string path = dir.file("runs/first");
  {
    const RunDir run(path, /*overwrite=*/false);
    run.write("run.json", "{}");
    run.write("metrics.jsonl", "old");
    run.write("notes.txt", "the user's own");
    run.finish("finished");
  }
  check_throws<UsageError>([&] { RunDir(path, false); }, {path, "--overwrite"});
  REQUIRE(read_file(path + "/metrics.jsonl") == "old");
  REQUIRE(read_file(path + "/done") == "finished\n");
  { const RunDir refused(path, /*overwrite=*/true); }
  {
    RunDir without_a_step(path, /*overwrite=*/true);
    without_a_step.begin();
    REQUIRE(!std::filesystem::exists(without_a_step.file("metrics.jsonl")));
    without_a_step.write("metrics.jsonl", "new");
    without_a_step.write("report.md", "new");
  }
  REQUIRE(read_file(path + "/metrics.jsonl") == "old");
  REQUIRE(read_file(path + "/done") == "finished\n");
  REQUIRE(!std::filesystem::exists(path + "/report.md"));
  RunDir again(path, /*overwrite=*/true);
  again.begin();
  again.first_step_is_done();
  REQUIRE(!std::filesystem::exists(again.file("previous")));
  REQUIRE(!std::filesystem::exists(again.file("done")));
  REQUIRE(!std::filesystem::exists(again.file("metrics.jsonl")));
  REQUIRE(read_file(again.file("notes.txt")) == "the user's own");
}

TEST_CASE("a directory in which a run is at work is refused to any other, by pid and host") {
  const TempDir dir;
  const std::string path = dir.file("run");
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  const std::vector<std::string> words = {path, "in use by process " + std::to_string(getpid()),
                                          host, "give another directory"};
  {
    const RunDir run(path, false);
    run.write("run.json", "{}");
    check_throws<UsageError>([&] { RunDir(path, false); }, words);
    check_throws<UsageError>([&] { RunDir(path, /*overwrite=*/true); }, words);
    check_throws<UsageError>([&] { RunDir(path, false, /*resume=*/true); }, words);
    REQUIRE(read_file(run.file("run.json")) == "{}");
  }
  REQUIRE(!std::filesystem::exists(path + "/lock"));
  check_throws<UsageError>([&] { RunDir(path, false); }, {"holds a run"});
  REQUIRE(!std::filesystem::exists(path + "/lock"));  // a refused run leaves none
  const RunDir again(path, false, /*resume=*/true);
}

TEST_CASE("the lock of a dead process is taken over, one of another machine is not") {
  const TempDir dir;
  std::string machine;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> machine;
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  const std::string dead = "999999999 ";
  dir.write("lock", dead + host + " of-an-earlier-boot\n");
  { const RunDir run(dir.file("."), false); }
  dir.write("lock", dead + "another-container " + machine + "\n");
  { const RunDir run(dir.file("."), false); }
  dir.write("lock", "");  // killed before it could write
  { const RunDir run(dir.file("."), false); }
  dir.write("lock", "17 elsewhere another-machine\n");
  check_throws<UsageError>([&] { RunDir(dir.file("."), false); },
                           {"process 17 on elsewhere", "remove " + dir.file("./lock")});
  REQUIRE(read_file(dir.file("lock")) == "17 elsewhere another-machine\n");
}

TEST_CASE("a lock that is a pipe or a folder is refused, and nobody waits") {
  const TempDir dir;
  const std::string path = dir.file("lock");
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  alarm(20);  // ends the test where it would wait
  check_throws<UsageError>([&] { RunDir(dir.file(""), false); }, {"called lock", "remove " + path});
  alarm(0);
  REQUIRE(std::filesystem::is_fifo(path));
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  check_throws<UsageError>([&] { RunDir(dir.file(""), false); }, {"Is a directory"});
}

TEST_CASE("a name that is too long for the file system is a usage error") {
  const TempDir dir;
  const std::string path = dir.file(std::string(300, 'x'));
  check_throws<UsageError>([&] { RunDir(path, false); }, {path, "File name too long"});
  check_throws<UsageError>([&] { RunDir(path, true); }, {path, "File name too long"});
  check_throws<UsageError>([&] { RunDir(path, false, true); }, {path, "holds no run"});
}

TEST_CASE("only what bears the name of a checkpoint is one") {
  for (const char* name : {"step-00000001", "step-123456789012345678"}) {
    CAPTURE(name);
    const std::string checkpoint = name;
    REQUIRE(is_checkpoint_name(checkpoint));
    REQUIRE(!is_unfinished_checkpoint_name(checkpoint));
    REQUIRE(is_unfinished_checkpoint_name(checkpoint + ".tmp"));
    REQUIRE(is_unfinished_checkpoint_name(checkpoint + ".old.tmp"));
    REQUIRE(!is_checkpoint_name(checkpoint + ".tmp"));
  }
  for (const char* name : {"step-1", "step-0000000x", "Step-00000001", "notes", ""}) {
    CAPTURE(name);
    REQUIRE(!is_checkpoint_name(name));
    REQUIRE(!is_unfinished_checkpoint_name(std::string(name) + ".tmp"));
  }
}

TEST_CASE("a file is replaced by one that is whole, or not at all") {
  const auto read = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const TempDir dir;
  const std::string path = dir.write("table.csv", "old"), link = dir.file("link.csv");
  std::filesystem::create_symlink("table.csv", link);
  write_file(link, "new");
  REQUIRE(read(path) == "new");
  REQUIRE(std::filesystem::is_symlink(link));
  write_file("/dev/null", "whatever");
  check_throws<Error>([&] { write_file(dir.file("missing/table.csv"), "x"); }, {"missing/table"});

  rlimit before{};  // on the size of files, as a full disk is
  getrlimit(RLIMIT_FSIZE, &before);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  check_throws<Error>([&] { write_file(path, "more than fits"); }, {"table.csv", "at byte 4"});
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  REQUIRE(read(path) == "new");
  REQUIRE(std::distance(std::filesystem::directory_iterator(dir.file("")), {}) == 2);
}

TEST_CASE("a directory that cannot be made or a file that cannot be written is an error") {
  const TempDir dir;
  dir.write("file", "x");
  check_throws<UsageError>([&] { RunDir(dir.file("file/run"), false); }, {"cannot be created"});
  const RunDir run(dir.file("run"), false);
  check_throws<Error>([&] { run.write("missing/run.json", "{}"); }, {"missing/run.json"});
}

}  // namespace
}  // namespace usp::test
