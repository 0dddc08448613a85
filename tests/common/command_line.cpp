#include <nlohmann/json.hpp>

#include "base/args.h"
#include "files/run_dir.h"
#include "testing.h"

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

TEST_CASE("an unknown flag or a malformed value is a usage error that names it") {
  const auto parse = [](std::vector<const char*> words) { return [=] { Flags().parse(words); }; };
  check_throws<UsageError>(parse({"--cuont", "3"}), {"--cuont", "--help"});
  check_throws<UsageError>(parse({"--count", "three"}), {"count", "three"});
  check_throws<UsageError>(parse({"--count", "1.5"}), {"count", "1.5"});
  check_throws<UsageError>(parse({"--count"}), {"count"});
  check_throws<UsageError>(parse({"--mode", "fastest"}), {"mode", "fastest", "quick"});
  check_throws<UsageError>(parse({"stray"}), {"stray"});
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

TEST_CASE("a flag says whether a resumed run may give it another value") {
  int64_t steps = 1, seed = 2;
  std::string order = "a";
  Args args("A program.");
  args.bind("steps", steps, "may").may_differ_on_resume();
  args.bind("seed", seed, "may not");
  args.bind("order", order, {"a", "b"}, "may").may_differ_on_resume();
  REQUIRE(args.may_differ_on_resume() == std::set<std::string>{"order", "steps"});
}

TEST_CASE("a value outside its range is a usage error with flag, value and range") {
  check_range("lr", 0, 0, 1);
  check_range("lr", 1, 0, 1);
  check_throws<UsageError>([] { check_range("lr", 1.5, 0, 1); }, {"lr=1.5", "[0, 1]"});
  check_throws<UsageError>([] { check_range("lr", kNaN, 0, 1); }, {"lr=nan"});
  check_throws<UsageError>([] { check_range("steps", 0, 1, kInf); }, {"steps=0", "at least 1"});
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
  const RunDir again(path, /*overwrite=*/true);
  REQUIRE(!std::filesystem::exists(again.file("done")));
  REQUIRE(!std::filesystem::exists(again.file("metrics.jsonl")));
  REQUIRE(read_file(again.file("notes.txt")) == "the user's own");
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
