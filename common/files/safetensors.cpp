#include "files/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "base/file_writer.h"
#include "base/json_reader.h"
#include "files/file_kind.h"

namespace usp {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kPieceOfDevice = 1 << 20;        // elements
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr const char* kMetadata = "__metadata__";

struct ElementInfo {
  ElementType type;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<ElementInfo, 15> kElements = {{{ElementType::F64, "F64", 8},
                                                    {ElementType::F32, "F32", 4},
                                                    {ElementType::F16, "F16", 2},
                                                    {ElementType::BF16, "BF16", 2},
                                                    {ElementType::F8_E5M2, "F8_E5M2", 1},
                                                    {ElementType::F8_E4M3, "F8_E4M3", 1},
                                                    {ElementType::I64, "I64", 8},
                                                    {ElementType::I32, "I32", 4},
                                                    {ElementType::I16, "I16", 2},
                                                    {ElementType::I8, "I8", 1},
                                                    {ElementType::U64, "U64", 8},
                                                    {ElementType::U32, "U32", 4},
                                                    {ElementType::U16, "U16", 2},
                                                    {ElementType::U8, "U8", 1},
                                                    {ElementType::BOOL, "BOOL", 1}}};

/// IEEE half precision.
struct Half {
  uint16_t bits;

  explicit operator double() const {
    const int exponent = bits >> 10 & 0x1F, mantissa = bits & 0x3FF;
    double magnitude = 0;
    if (exponent == 0x1F) {
      magnitude = mantissa == 0 ? HUGE_VAL : std::nan("");
    } else if (exponent == 0) {
      magnitude = std::ldexp(mantissa, -24);
    } else {
      magnitude = std::ldexp(mantissa + 0x400, exponent - 25);
    }
    return bits >> 15 ? -magnitude : magnitude;
  }
};

template <class T>
void convert(const std::byte* source, std::span<double> values) {
  for (double& value : values) {
    T element;
    std::memcpy(&element, source, sizeof(T));  // the file promises no alignment
    value = static_cast<double>(element);
    source += sizeof(T);
  }
}

/// Reads one tensor's entry of a header. Whatever is wrong is reported with the file, the tensor
/// and the byte of the header where its name ends.
class EntryReader {
 public:
  EntryReader(const std::string& file, const std::string& tensor, int64_t byte)
      : file_(file), tensor_(tensor), byte_(byte) {}

  /// `data`: all bytes behind the header, which begin at `data_offset` in the file.
  StoredTensor read(const Json& json, std::span<const std::byte> data, int64_t data_offset) const {
    if (!json.is_object()) refuse("its entry is no object");
    for (const auto& [key, value] : json.items()) {
      if (key != "dtype" && key != "shape" && key != "data_offsets") {
        refuse("unknown field {}; there are dtype, shape and data_offsets", in_quotes(key));
      }
    }
    StoredTensor tensor{tensor_, type_of(json), integers(json, "shape"), file_, 0, {}};
    const std::vector<int64_t> offsets = integers(json, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      refuse("data_offsets={} is no [begin, end] with begin <= end", json["data_offsets"].dump());
    }
    if (offsets[1] > std::ssize(data)) {
      refuse("data_offsets={} reach beyond the {} bytes of data that the file has",
             json["data_offsets"].dump(), data.size());
    }
    const int64_t expected = bytes_of_shape(tensor);
    if (offsets[1] - offsets[0] != expected) {
      refuse("{} {} takes {} bytes, but data_offsets={} span {}", name(tensor.type),
             tensor.shape_text(), expected, json["data_offsets"].dump(), offsets[1] - offsets[0]);
    }
    tensor.file_offset = data_offset + offsets[0];
    tensor.bytes = data.subspan(offsets[0], expected);
    return tensor;
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: tensor {} (header, byte {}): {}", file_, in_quotes(tensor_), byte_,
         fmt::format(format, std::forward<Args>(args)...));
  }

  ElementType type_of(const Json& json) const {
    const auto it = json.find("dtype");
    if (it == json.end() || !it->is_string()) refuse("dtype is missing, or no text");
    const std::string& text = it->get_ref<const std::string&>();
    const auto row = std::ranges::find(kElements, text, &ElementInfo::name);
    if (row == kElements.end()) {
      refuse("dtype {} is unknown; weights are F32, BF16, F16 or F64", in_quotes(text));
    }
    return row->type;
  }

  /// The non-negative integers of a field.
  std::vector<int64_t> integers(const Json& json, const char* field) const {
    const auto it = json.find(field);
    if (it == json.end() || !it->is_array()) refuse("{} is missing, or no array", field);
    if (it->size() > 64) refuse("{} has {} numbers", field, it->size());
    std::vector<int64_t> numbers;
    for (const Json& number : *it) {
      if (!number.is_number_unsigned() || number.get<uint64_t>() > uint64_t{INT64_MAX}) {
        refuse("{}: {} is no integer from 0 to 2^63-1", field, in_quotes(number.dump()));
      }
      numbers.push_back(number.get<int64_t>());
    }
    return numbers;
  }

  int64_t bytes_of_shape(const StoredTensor& tensor) const {
    int64_t bytes = bytes_of(tensor.type);
    // A size of 0 makes the product 0, however large the others are.
    if (std::ranges::find(tensor.shape, 0) != tensor.shape.end()) return 0;
    for (int64_t size : tensor.shape) {
      if (__builtin_mul_overflow(bytes, size, &bytes)) {
        refuse("shape {} has more bytes than 2^63-1", tensor.shape_text());
      }
    }
    return bytes;
  }

  const std::string& file_;
  const std::string& tensor_;
  int64_t byte_;
};

/// The tensors have to cover the data: each begins where the one before ends.
void check_cover(const std::string& file, const std::vector<StoredTensor>& tensors, int64_t begin,
                 int64_t end) {
  int64_t at = begin;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.file_offset != at) {
      fail("{}: tensor {} begins at byte {}, and the data before it ends at {}: {}", file,
           in_quotes(tensor.name), tensor.file_offset, at,
           tensor.file_offset < at ? "they overlap" : "what lies between belongs to no tensor");
    }
    at += std::ssize(tensor.bytes);
  }
  if (at != end) {
    fail("{}: the last tensor ends at byte {}, the file at {}: what follows belongs to no tensor",
         file, at, end);
  }
}

const StoredTensor& require(const StoredTensor* tensor, const std::string& path,
                            std::string_view name) {
  if (tensor == nullptr) fail("{} has no tensor {}", path, in_quotes(name));
  return *tensor;
}

}  // namespace

std::string_view name(ElementType type) { return kElements[static_cast<size_t>(type)].name; }
int64_t bytes_of(ElementType type) { return kElements[static_cast<size_t>(type)].bytes; }

ElementType element_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ElementType::F32;
    case DType::bf16:
      return ElementType::BF16;
    case DType::f64:
      return ElementType::F64;
    case DType::i32:
      return ElementType::I32;
  }
  fail("a dtype without a name in safetensors files");
}

std::string StoredTensor::shape_text() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

void StoredTensor::read(int64_t begin, std::span<double> values) const {
  USP_CHECK(begin >= 0 && begin <= numel() && std::ssize(values) <= numel() - begin,
            "elements [{}, +{}) of {} of {}", begin, values.size(), name, shape_text());
  const std::byte* source = bytes.data() + begin * bytes_of(type);
  switch (type) {
    case ElementType::F64:
      return convert<double>(source, values);
    case ElementType::F32:
      return convert<float>(source, values);
    case ElementType::F16:
      return convert<Half>(source, values);
    case ElementType::BF16:
      return convert<bf16>(source, values);
    case ElementType::I32:
      return convert<int32_t>(source, values);
    case ElementType::I16:
      return convert<int16_t>(source, values);
    case ElementType::I8:
      return convert<int8_t>(source, values);
    case ElementType::U32:
      return convert<uint32_t>(source, values);
    case ElementType::U16:
      return convert<uint16_t>(source, values);
    case ElementType::U8:
      return convert<uint8_t>(source, values);
    default:
      fail("{}: tensor {} (byte {}): {} cannot be read as numbers; convert it to F32 or BF16", file,
           in_quotes(name), file_offset, usp::name(type));
  }
}

void StoredTensor::check_finite() const {
  constexpr int64_t kChunk = 4096;
  std::array<double, kChunk> values;
  for (int64_t begin = 0; begin < numel(); begin += kChunk) {
    const std::span<double> part(values.data(), std::min(kChunk, numel() - begin));
    read(begin, part);
    for (size_t i = 0; i < part.size(); ++i) {
      if (std::isfinite(part[i])) continue;
      const int64_t element = begin + int64_t(i);
      fail("{}: tensor {}: element {} (byte {}) is {}, not a finite number", file, in_quotes(name),
           element, file_offset + element * bytes_of(type),
           std::isnan(part[i]) ? "NaN" : "infinite");
    }
  }
}

void StoredTensor::check_shape(const Shape& expected) const {
  if (std::ranges::equal(shape, expected)) return;
  fail("{}: tensor {} (byte {}) has shape {}, expected {}", file, in_quotes(name), file_offset,
       shape_text(), expected.to_string());
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), mapped_(std::make_unique<MappedFile>(path)) {
  parse(mapped_->bytes());
}

SafetensorsFile::SafetensorsFile(const std::string& name, std::span<const std::byte> bytes)
    : path_(name) {
  parse(bytes);
}

void SafetensorsFile::parse(std::span<const std::byte> bytes) {
  const std::string other = other_kind_than("safetensors", bytes, path_);
  if (!other.empty()) fail("{}", other);
  uint64_t length = 0;
  if (std::ssize(bytes) < kLengthBytes) {
    fail("{}: byte 0: {} bytes hold no header length, which takes 8", path_, bytes.size());
  }
  std::memcpy(&length, bytes.data(), sizeof(length));
  if (length > kMaxHeaderBytes) {
    fail("{}: byte 0: a header of {} bytes is longer than the format's limit of {}", path_, length,
         kMaxHeaderBytes);
  }
  if (length > bytes.size() - kLengthBytes) {
    fail("{}: byte 0: a header of {} bytes reaches beyond the end of the file at {}", path_, length,
         bytes.size());
  }
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  if (!header.starts_with('{')) fail("{}: byte 8: the header does not begin with {{", path_);
  KeyPositions positions;
  const Json json = parse_json(header, path_, kLengthBytes, &positions);
  const int64_t data_offset = kLengthBytes + int64_t(length);
  for (const auto& [name, entry] : json.items()) {
    if (name != kMetadata) {
      const EntryReader reader(path_, name, positions.at(name));
      tensors_.push_back(reader.read(entry, bytes.subspan(data_offset), data_offset));
      continue;
    }
    if (!entry.is_object()) fail("{}: {} is no object", path_, kMetadata);
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) {
        fail("{}: {} (header, byte {}): the value of {} is no text", path_, kMetadata,
             positions.at(name), in_quotes(key));
      }
      metadata_[key] = value;
    }
  }
  // Where they begin at the same byte, all but one are empty.
  std::ranges::stable_sort(tensors_, {}, [](const StoredTensor& tensor) {
    return std::pair(tensor.file_offset, tensor.bytes.size());
  });
  check_cover(path_, tensors_, data_offset, std::ssize(bytes));
  for (size_t i = 0; i < tensors_.size(); ++i) index_of_[tensors_[i].name] = i;
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_of_.find(name);
  return it == index_of_.end() ? nullptr : &tensors_[it->second];
}

const StoredTensor& SafetensorsFile::get(std::string_view name) const {
  return require(find(name), path_, name);
}

std::map<std::string, std::string> parse_safetensors_index(std::string_view text,
                                                           const std::string& path) {
  const std::string other = other_kind_than("JSON", std::as_bytes(std::span(text)), path);
  if (!other.empty()) fail("{}", other);
  const Json json = parse_json(text, path);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    fail("{}: there is no weight_map, an object from tensors to files", path);
  }
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : json["weight_map"].items()) {
    if (!file.is_string()) fail("{}: tensor {}: its file is no text", path, in_quotes(name));
    const std::string& text = file.get_ref<const std::string&>();
    // Nobody's index may lead out of its own directory.
    if (text.empty() || text.starts_with('.') ||
        text.find_first_of(std::string("/\\\0", 3)) != text.npos) {
      fail("{}: tensor {}: {} is not the name of a file beside the index", path, in_quotes(name),
           in_quotes(text));
    }
    files[name] = text;
  }
  return files;
}

TensorCollection::TensorCollection(const std::string& path) : path_(path) {
  namespace fs = std::filesystem;
  if (fs::is_directory(path)) {
    path_ = fs::path(path) / "model.safetensors";
    if (!fs::exists(path_)) path_ = fs::path(path) / "model.safetensors.index.json";
    if (!fs::exists(path_)) {
      fail("{} holds neither model.safetensors nor model.safetensors.index.json{}", path,
           found_instead(path));
    }
  }
  if (path_.ends_with(".json")) {
    open_index();
    return;
  }
  files_.push_back(std::make_unique<SafetensorsFile>(path_));
  for (const StoredTensor& tensor : files_[0]->tensors()) all_[tensor.name] = &tensor;
}

void TensorCollection::open_index() {
  std::map<std::string, const SafetensorsFile*> opened;
  const MappedFile index(path_);
  if (index.bytes().size() > kMaxHeaderBytes) {
    fail("{}: an index of {} bytes is longer than {}", path_, index.bytes().size(),
         kMaxHeaderBytes);
  }
  for (const auto& [name, file] : parse_safetensors_index(index.text(), path_)) {
    const SafetensorsFile*& shard = opened[file];
    if (shard == nullptr) {
      const std::string shard_path = std::filesystem::path(path_).parent_path() / file;
      if (!std::filesystem::exists(shard_path)) {
        fail("{}: tensor {} is to be in {}, which does not exist", path_, in_quotes(name),
             shard_path);
      }
      shard = files_.emplace_back(std::make_unique<SafetensorsFile>(shard_path)).get();
    }
    const StoredTensor* tensor = shard->find(name);
    if (tensor == nullptr) {
      fail("{}: tensor {} is to be in {}, which has no such tensor", path_, in_quotes(name),
           shard->path());
    }
    all_[name] = tensor;
  }
}

const StoredTensor* TensorCollection::find(std::string_view name) const {
  const auto it = all_.find(name);
  return it == all_.end() ? nullptr : it->second;
}

const StoredTensor& TensorCollection::get(std::string_view name) const {
  return require(find(name), path_, name);
}

int64_t TensorToStore::bytes() const {
  int64_t bytes = bytes_of(type);
  for (int64_t size : shape) bytes *= size;
  return bytes;
}

TensorToStore to_store(std::string name, const Tensor& tensor) {
  return to_store(std::move(name), tensor, {tensor.shape().begin(), tensor.shape().end()});
}

TensorToStore to_store(std::string name, const Tensor& tensor, std::vector<int64_t> shape) {
  USP_CHECK(tensor.device() != Device::meta, "{} has no data to write to a file", name);
  const auto produce = [tensor](const TensorToStore::Sink& sink) {
    const Tensor all = tensor.to_contiguous().view({tensor.numel()});
    // A device's tensor passes through memory of the host, which need not hold all of it.
    const int64_t piece =
        all.device() == Device::cpu ? all.numel() : std::min(all.numel(), kPieceOfDevice);
    for (int64_t begin = 0; begin < all.numel(); begin += piece) {
      const Tensor host = all.narrow(0, begin, std::min(piece, all.numel() - begin)).to_host();
      sink({static_cast<const std::byte*>(host.address()), static_cast<size_t>(host.bytes())});
    }
  };
  return {std::move(name), element_type(tensor.dtype()), std::move(shape), produce};
}

namespace {

/// The header as bytes of a file, its length before it. `tensors` in the order of their data.
std::string header_of(const std::vector<TensorToStore>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[kMetadata] = metadata;
  int64_t offset = 0;
  std::set<std::string_view> names = {kMetadata};
  for (const TensorToStore& tensor : tensors) {
    USP_CHECK(names.insert(tensor.name).second, "tensor {} is to be written twice", tensor.name);
    json[tensor.name] = {{"dtype", name(tensor.type)},
                         {"shape", tensor.shape},
                         {"data_offsets", {offset, offset + tensor.bytes()}}};
    offset += tensor.bytes();
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data begins at a multiple of 8
  const uint64_t length = text.size();
  char bytes[sizeof(length)];
  std::memcpy(bytes, &length, sizeof(length));
  return std::string(bytes, sizeof(length)) + text;
}

}  // namespace

void write_safetensors(const std::string& path, std::vector<TensorToStore> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::ranges::sort(tensors, [](const TensorToStore& a, const TensorToStore& b) {
    const int64_t width_a = bytes_of(a.type), width_b = bytes_of(b.type);
    return width_a != width_b ? width_a > width_b : a.name < b.name;
  });
  FileWriter file(path);
  file.write(header_of(tensors, metadata));
  for (const TensorToStore& tensor : tensors) {
    const int64_t begin = file.size();
    tensor.produce([&](std::span<const std::byte> bytes) { file.write(bytes); });
    USP_CHECK(file.size() - begin == tensor.bytes(), "{}: {} bytes were produced, {} announced",
              tensor.name, file.size() - begin, tensor.bytes());
  }
  file.finish();
}

}  // namespace usp
