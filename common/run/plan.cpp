#include "run/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace usp {

namespace {

constexpr double kGiB = 1 << 30;

// [fits]
/// The largest power of two whose step fits, and of which the batch has one for every rank; 0 where
/// not even one sample fits.
int64_t largest_micro_batch(RunConfig& run, int64_t samples, const std::function<int64_t()>& peak) {
  int64_t fits = 0;
  for (int64_t size = 1; size == 1 || size * run.mesh().dp <= samples; size *= 2) {
    if (size * run.seq_len > RunConfig::kMaxTokensAtOnce) break;
    run.micro_batch_size = size;
    if (double(peak()) > run.device_memory * kGiB) break;
    fits = size;
  }
  return fits;
}
// [fits]

int64_t largest_divisor(int64_t n, int64_t limit) {
  int64_t divisor = std::min(n, limit);
  while (n % divisor != 0) --divisor;
  return divisor;
}

/// What to do where the samples do not divide into whole micro-batches of all ranks. Everything it
/// names makes them divide.
std::string remedy(int64_t samples, int64_t micro_batch, int64_t ranks, const PlanWords& words) {
  const int64_t together = micro_batch * ranks;
  if (samples >= together) {
    return fmt::format("{} samples are no multiple of {}: try a batch of {} samples", samples,
                       together, (samples + together / 2) / together * together);
  }
  std::string text = fmt::format(
      "{} samples are fewer than the {} that {} rank{} at once:\n   enlarge the batch to {} "
      "samples",
      samples, together, ranks, ranks == 1 ? " takes" : "s take", together);
  if (samples % micro_batch == 0) {
    text += fmt::format(", leave ranks idle ({}={})", words.ranks,
                        largest_divisor(samples / micro_batch, ranks));
  }
  if (samples % ranks == 0) {
    text += fmt::format(", take smaller micro-batches (micro_batch_size={})",
                        largest_divisor(samples / ranks, micro_batch));
  }
  return text;
}

}  // namespace

void PlanConfig::bind(Args& args) {
  args.group("Planning");
  args.bind("plan", plan, "plan a global batch of this many tokens instead of training; 0: train")
      .is_question();
}

void PlanConfig::validate(const Args& args) {
  micro_batch_given = args.given("micro_batch_size");
  check_range("plan", double(plan), 0, double(int64_t{1} << 53));
}

// [plan]
std::string plan_batch(RunConfig& run, const PlanConfig& planning, const PlanWords& words,
                       const std::function<int64_t()>& peak) {
  const int64_t tokens = planning.plan, ranks = run.mesh().dp;
  const int64_t samples = std::max<int64_t>(1, std::llround(double(tokens) / run.seq_len));
  // Stages 2 and 3 need a buffer more where there are several micro-batches, however many.
  run.grad_acc_steps = 2;
  const int64_t micro_batch =
      planning.micro_batch_given ? run.micro_batch_size : largest_micro_batch(run, samples, peak);
  const int64_t reached = samples * run.seq_len;
  std::string text = fmt::format(
      "1. global batch      {} tokens\n"
      "2. sequence length   {} tokens: {} samples{}\n",
      tokens, run.seq_len, samples,
      reached == tokens ? "" : fmt::format(", of {} tokens: the nearest whole number", reached));
  run.micro_batch_size = std::max<int64_t>(1, micro_batch);
  const double gib = double(peak()) / kGiB;
  if (micro_batch == 0) {
    return text +
           fmt::format("3. micro-batch       not even 1 sample fits: {:.1f} of {:g} GiB\n   {}\n",
                       gib, run.device_memory, words.no_room);
  }
  text += fmt::format(
      "3. micro-batch       {} samples, {}; {:.1f} of {:g} GiB\n", micro_batch,
      planning.micro_batch_given ? "as asked for" : "the largest power of two that fits", gib,
      run.device_memory);
  const double accumulation = double(samples) / double(micro_batch * ranks);
  text += fmt::format("4. grad_acc_steps    {} / ({} x {} ranks) = {:g}\n", samples, micro_batch,
                      ranks, accumulation);
  if (samples % (micro_batch * ranks) != 0)
    return text + "   " + remedy(samples, micro_batch, ranks, words) + "\n";
  return text + fmt::format("   --{} {} --micro_batch_size {} --grad_acc_steps {}\n", words.ranks,
                            ranks, micro_batch, samples / (micro_batch * ranks));
}
// [plan]

}  // namespace usp
