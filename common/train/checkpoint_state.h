#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "files/safetensors.h"
#include "train/checkpoint.h"

/// The files of a checkpoint that hold its tensors, as write_checkpoint() describes them. For
/// checkpoint.cpp, and for whoever follows a program without files.
namespace usp {

/// Calls visit(parameter, name, tensor [elements of the shard]) for all that a rank has of a state
/// which may go to a checkpoint.
void each_stored(
    const TrainState& state,
    const std::function<void(const Parameter&, const std::string&, const Tensor&)>& visit);
/// Whether a checkpoint has the parameter's elements from this rank.
bool is_stored(const Parameter& parameter);
/// Counts all parameters and buffers as changed: weights that were gathered before are stale.
void note_loaded(const TrainState& state);

/// Whether a rank with this state has anything to save.
bool writes_any(const TrainState& state);
/// Writes a rank's file; throws Error.
void write_state(const std::string& path, const TrainState& state);

/// The state as the files of a checkpoint hold it together, whichever rank has written what. The
/// files are mapped: what is copied is read, the rest not.
class StoredState {
 public:
  /// `files`: an object with their names. Throws Error.
  StoredState(const std::filesystem::path& directory, const nlohmann::json& files);

  /// Throws Error unless every element of the parameters and buffers of `state`, and of all that
  /// the files name, is there once.
  void check_cover(const TrainState& state) const;
  /// Looks up all that `state` needs, which may be other parts of the weights than those in the
  /// files. Throws Error with the elements that are not there, or not in this dtype.
  void find(const TrainState& state);
  /// Sets the tensors of the state that find() was given.
  void copy() const;

 private:
  struct File {
    explicit File(const std::string& path);

    SafetensorsFile tensors;
    nlohmann::json layouts;  ///< of its parameters' parts, by name
  };
  /// Elements that lie side by side in a file and in the whole weight.
  struct Source {
    const File* file;
    int64_t global;  ///< row-major index of the first in the whole weight
    int64_t local;   ///< its position in the file's tensor
    int64_t length;
  };
  /// Elements that lie side by side in a file and in what is to be set.
  struct Transfer {
    const File* file;
    int64_t source, target;  ///< position of the first in the file's tensor, in what is to be set
    int64_t length;
  };
  struct Copy {
    Tensor target;
    std::span<const std::byte> source;
  };

  std::vector<Source> sources_of(const Parameter& parameter) const;
  std::vector<Transfer> transfers(const Parameter& parameter) const;
  [[noreturn]] void fail_missing(const Parameter& parameter, int64_t begin, int64_t end) const;
  void find(const std::string& name, const Tensor& target, const std::vector<Transfer>& transfers);

  std::filesystem::path directory_;
  std::vector<File> files_;
  std::vector<Copy> copies_;
};

}  // namespace usp
