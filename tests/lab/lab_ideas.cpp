#include <cstdio>
#include <cstdlib>
#include <vector>

#include "lab/ideas_case.h"
#include "lab/record.h"

/// The rungs of a file of ideas on the emulated GPU: lab_ideas NAME ROWS COLUMNS prints what each
/// asks for and does, one JSON object a line. What is zero for all of them is left out.
namespace usp::lab {
namespace {

using emulator::Counters;
using ideas::Counts;
using ideas::Ideas;
using ideas::Rung;
using ideas::Shape;

struct Ran {
  const Rung* rung;
  Counts predicted;
  Counters counted;
  int64_t launches;
  double error;
};

/// The largest difference, beside the largest number.
double relative_error(const std::vector<double>& found, const std::vector<double>& expected) {
  double error = 0, scale = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    scale = std::max(scale, std::abs(expected[i]));
    const double difference = std::abs(found[i] - expected[i]);
    if (!(difference <= error)) error = difference;
  }
  return error / scale;
}

/// False if the emulator has something to say of the rung, which is printed.
bool run_rung(const Ideas& file, const Rung& rung, Shape shape, std::vector<Ran>& all) {
  const IdeasCase x(shape);
  const auto& [report, launches] = count(rung, x.data);
  if (!report.problems.empty()) {
    std::fprintf(stderr, "error: %s: %s", rung.name, report.text().c_str());
    return false;
  }
  const std::vector<double> expected = x.expected(file.name, rung.name);
  all.push_back({&rung, rung.predict(shape), report.total, launches,
                 relative_error(x.y(expected.size()), expected)});
  return true;
}

/// Columns of those that count more than nothing anywhere, the predicted ones first.
void add_counts(nlohmann::ordered_json& record, const Ran& ran, const std::vector<Ran>& all) {
  const auto add = [&](const char* key, const auto& value, int64_t usual = 0) {
    if (std::any_of(all.begin(), all.end(), [&](const Ran& x) { return value(x) > usual; })) {
      record[key] = value(ran);
    }
  };
  const auto both = [&](const char* key, int64_t Counts::*predicted, int64_t Counters::*counted) {
    add((std::string("predicted_") + key).c_str(),
        [=](const Ran& x) { return x.predicted.*predicted; });
    add(key, [=](const Ran& x) { return x.counted.*counted; });
  };
  add("predicted_flops_per_byte", [](const Ran& x) {
    return static_cast<double>(x.predicted.flops) / static_cast<double>(x.predicted.bytes);
  });
  add("requests", [](const Ran& x) { return x.counted.load_requests + x.counted.store_requests; });
  add("sectors_per_load", [](const Ran& x) { return x.counted.sectors_per_load(); });
  add("sectors_per_store", [](const Ran& x) { return x.counted.sectors_per_store(); });
  add("shared_requests", [](const Ran& x) { return x.counted.shared_requests; });
  both("bank_conflicts", &Counts::bank_conflicts, &Counters::bank_conflicts);
  add("predicted_divergent_branches", [](const Ran& x) { return x.predicted.divergent_branches; });
  if (record.contains(
          "predicted_divergent_branches")) {  // nobody predicts those that depend on data
    record["divergent_branches"] = ran.counted.divergent_branches;
  }
  both("barriers", &Counts::barriers, &Counters::barriers);
  add("atomic_steps", [](const Ran& x) { return x.counted.atomic_steps; });
  add("predicted_blocks_held", [](const Ran& x) { return x.predicted.blocks_held; });
  add("predicted_warps_held", [](const Ran& x) { return x.predicted.warps_held; });
  add("predicted_bytes_in_flight", [](const Ran& x) { return x.predicted.bytes_in_flight; });
  add(
      "launches", [](const Ran& x) { return x.launches; }, 1);
}

int run(const Ideas& file, Shape shape) {
  emulator::options.counters = true;
  std::vector<Ran> all;
  for (const Rung& rung : file.rungs) {
    if (!run_rung(file, rung, shape, all)) return EXIT_FAILURE;
  }
  for (const Ran& ran : all) {
    nlohmann::ordered_json record =
        record_of(ran.rung->name, "f32", ran.predicted.bytes, ran.counted);
    add_counts(record, ran, all);
    record["error"] = ran.error;
    std::puts(record.dump().c_str());
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace usp::lab

int main(int argc, char** argv) {
  const usp::ideas::Shape shape{argc == 4 ? std::atoi(argv[2]) : 0,
                                argc == 4 ? std::atoi(argv[3]) : 0};
  for (const usp::ideas::Ideas* file : usp::ideas::all()) {
    if (shape.rows < 1 || shape.columns < 1 || std::string(argv[1]) != file->name) continue;
    return usp::lab::run(*file, shape);
  }
  std::fprintf(stderr,
               "error: NAME, ROWS and COLUMNS must be those of a lab, and at least 1; try "
               "lab_ideas banks 64 128\n");
  return 2;
}
