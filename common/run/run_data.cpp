#include "run/run_data.h"

#include <filesystem>

#include "run/command_line.h"
#include "run/corpus.h"

namespace usp {

namespace {

std::string path_of(const RunConfig& config) {
  return config.data.empty() ? corpus_path() : config.data;
}

TokenFile open_tokens(const RunConfig& config, bool token_dtype_given) {
  const std::string path = path_of(config);
  TokenFormat format =
      read_token_format(path, config.token_dtype == "uint16" ? 2 : 4, token_dtype_given);
  if (format.is_text) config.validate_text();
  return TokenFile(path, std::move(format), config.model.vocab_size);
}

}  // namespace

RunData::RunData(const RunConfig& config, bool token_dtype_given)
    : file(open_tokens(config, token_dtype_given)),
      dataset(file, config.seq_len, config.val_fraction,
              config.data_order == "shuffled" ? DataOrder::shuffled : DataOrder::sequential,
              config.seed) {}

std::unique_ptr<RunData> open_data(const RunConfig& config, const Args& args,
                                   const std::vector<std::string>& words, int64_t ranks) {
  const auto open = [](const RunConfig& of, const Args& by) {
    return std::make_unique<RunData>(of, by.given("token_dtype"));
  };
  try {
    return open(config, args);
  } catch (const Refusal& refusal) {
    const Refusal advised = with_accepted(config, words, ranks, refusal, open);
    if (!advised.remedies().empty()) throw advised;
    usage_error("{}; give other data", advised.what());
  }
}

void check_data(const RunConfig& config, const Args& args) {
  constexpr uint64_t kLong = 1 << 24;
  std::error_code error;
  const bool is_long = std::filesystem::file_size(path_of(config), error) > kLong;
  if (!args.questions().empty() || (is_long && !error)) return;
  RunData(config, args.given("token_dtype"));
}

}  // namespace usp
