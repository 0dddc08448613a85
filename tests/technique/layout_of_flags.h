#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "run/command_line.h"

/// Configurations as a command line makes them.
namespace usp::test {

inline std::vector<std::string> words_of_flags(const std::string& flags) {
  std::vector<std::string> words = {"program"};
  std::istringstream stream(flags);
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

/// The flags of `own`, behind those of `others`, each with a value, that it leaves out.
inline std::string with_flags(const std::string& own, const std::string& others) {
  std::istringstream stream(others);
  std::string flags, flag, value;
  while (stream >> flag >> value) {
    if (own.find(flag + " ") == std::string::npos) flags += flag + " " + value + " ";
  }
  return flags + own;
}

/// The configuration that a command line makes, on as many ranks as it asks for.
inline TrainConfig layout_of_flags(const std::string& flags) {
  TrainConfig config;
  Args args("");
  read_command_line(config, args, words_of_flags(flags), /*ranks=*/0);
  return config;
}

}  // namespace usp::test
