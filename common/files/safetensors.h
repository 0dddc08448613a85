#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "tensor/tensor.h"

/// The file format of Hugging Face's models, and of this project's checkpoints: 8 bytes with the
/// length of a header, the header (JSON: each tensor's dtype, shape and place), the tensors.
namespace usp {

/// What an element is, as the format names it.
enum class ElementType : uint8_t {
  F64,
  F32,
  F16,
  BF16,
  F8_E5M2,
  F8_E4M3,
  I64,
  I32,
  I16,
  I8,
  U64,
  U32,
  U16,
  U8,
  BOOL
};
std::string_view name(ElementType type);  ///< such as "BF16"
int64_t bytes_of(ElementType type);       ///< of one element
ElementType element_type(DType dtype);    ///< that stores it exactly

/// A tensor in a file. Lives as long as the SafetensorsFile or TensorCollection it comes from.
struct StoredTensor {
  std::string name;
  ElementType type;
  std::vector<int64_t> shape;
  std::string file;
  int64_t file_offset;               ///< of its first byte in the file
  std::span<const std::byte> bytes;  ///< row-major, little-endian; at any alignment

  int64_t numel() const { return std::ssize(bytes) / bytes_of(type); }
  std::string shape_text() const;  ///< "[2, 3]"

  /// Elements [begin, begin + values.size()) in row-major order. Exact for F64, F32, F16, BF16 and
  /// integers of up to 32 bits; throws Error for the 8-bit floating-point types, 64-bit integers
  /// and BOOL.
  void read(int64_t begin, std::span<double> values) const;
  /// Throws Error, with the element and its byte, if a value is NaN or infinite.
  void check_finite() const;
  /// Throws Error, with file, name and both shapes, unless it has this one.
  void check_shape(const Shape& expected) const;
};

/// One file. All that its header says is checked before any of it is used. Data is read from the
/// mapped file when it is asked for. Whatever is wrong throws an Error that names the file, the
/// tensor and the byte.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  /// The same for bytes in memory, which must outlive the object. `name` is for messages.
  SafetensorsFile(const std::string& name, std::span<const std::byte> bytes);

  /// In the order of their data.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  /// nullptr if there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  const StoredTensor& get(std::string_view name) const;  ///< throws Error if there is none
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }

 private:
  void parse(std::span<const std::byte> bytes);

  std::string path_;
  std::unique_ptr<MappedFile> mapped_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, size_t, std::less<>> index_of_;
  std::map<std::string, std::string> metadata_;
};

/// The `weight_map` of an index file: which file beside it holds which tensor. Throws Error.
std::map<std::string, std::string> parse_safetensors_index(std::string_view text,
                                                           const std::string& path);

/// The tensors of a model, in one file or in several.
class TensorCollection {
 public:
  /// `path`: a .safetensors file, an index (.json), or a directory with model.safetensors or
  /// model.safetensors.index.json. Throws Error, also where the index names a file that is not
  /// there or a tensor that its file lacks.
  explicit TensorCollection(const std::string& path);

  /// By name.
  const std::map<std::string, const StoredTensor*, std::less<>>& tensors() const { return all_; }
  /// nullptr if there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  const StoredTensor& get(std::string_view name) const;  ///< throws Error if there is none
  const std::string& path() const { return path_; }      ///< of the file, or of the index

 private:
  void open_index();

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const StoredTensor*, std::less<>> all_;
};

/// A tensor to be written. write_safetensors() asks for its bytes when their turn has come.
struct TensorToStore {
  /// Takes the next bytes of a tensor.
  using Sink = std::function<void(std::span<const std::byte>)>;

  std::string name;
  ElementType type;
  std::vector<int64_t> shape;
  std::function<void(const Sink&)> produce;  ///< hands all bytes to the sink, in any pieces

  int64_t bytes() const;  ///< of all elements
};

/// The tensor as it is.
TensorToStore to_store(std::string name, const Tensor& tensor);
/// The tensor under another shape of as many elements.
TensorToStore to_store(std::string name, const Tensor& tensor, std::vector<int64_t> shape);

/// Writes a file and brings it to the disk. Tensors go in the order of Hugging Face's own library:
/// wide dtypes first, then by name. Throws Error if a name stands twice, if a producer's bytes are
/// not those of its shape, or if writing fails.
void write_safetensors(const std::string& path, std::vector<TensorToStore> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace usp
