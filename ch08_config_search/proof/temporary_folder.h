#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "base/check.h"

namespace usp {

/// A folder that is there while this lives.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "usp_prove_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) fail("no temporary directory {}", name);
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }  ///< of the folder

 private:
  std::filesystem::path path_;
};

}  // namespace usp
