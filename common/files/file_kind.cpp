#include "files/file_kind.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/mapped_file.h"
#include "base/output.h"

namespace usp {

namespace {

using namespace std::string_view_literals;

constexpr const char* kWebPage =
    "get the file itself: on Hugging Face its address has /resolve/ where the page's has /blob/";
constexpr const char* kUnpack = "unpack it with `{}` and give what is in it";
constexpr const char* kToText =
    "write its texts as lines of JSON, such as with `python3 -c \"import pandas, sys; "
    "pandas.read_{}(sys.argv[1])[['text']].to_json(sys.argv[2], orient='records', lines=True)\" {} "
    "texts.jsonl`";
constexpr const char* kToWeights =
    "convert it to safetensors: `save_pretrained` of transformers writes these, or "
    "`safetensors.torch.save_file(torch.load(FILE, weights_only=True), \"model.safetensors\")`";
constexpr const char* kNoText = "give text, or a file of tokens";

/// A file that begins with `magic`, `offset` bytes from its start.
struct Magic {
  std::string_view magic;
  const char* what;
  const char* remedy;        ///< {} is the command, if there is one
  const char* command = "";  ///< {} is the file
  size_t offset = 0;
};

constexpr Magic kMagics[] = {
    {"version https://git-lfs.github.com/spec/"sv, "a Git LFS pointer, not the file itself",
     "fetch the file with `{}`", "git lfs pull --include={}"},
    {"/annex/objects/"sv, "a git-annex pointer, not the file itself", "fetch the file with `{}`",
     "git annex get {}"},
    {"\x1F\x8B\x08"sv, "compressed by gzip", kUnpack, "gunzip -k {}"},
    {"\x1F\x9D"sv, "compressed by compress", kUnpack, "uncompress -k {}"},
    {"BZh"sv, "compressed by bzip2", kUnpack, "bunzip2 -k {}"},
    {"\xFD\x37zXZ\0"sv, "compressed by xz", kUnpack, "unxz -k {}"},
    {"\x28\xB5\x2F\xFD"sv, "compressed by zstd", kUnpack, "zstd -d {}"},
    {"\x04\x22\x4D\x18"sv, "compressed by lz4", kUnpack, "lz4 -d {}"},
    {"LZIP\1"sv, "compressed by lzip", kUnpack, "lzip -dk {}"},
    {"\xFF\x06\0\0sNaPpY"sv, "compressed by snappy", kUnpack, "snzip -dk {}"},
    {"7z\xBC\xAF\x27\x1C"sv, "a 7z archive", kUnpack, "7z x {}"},
    {"Rar!\x1A\x07"sv, "a RAR archive", kUnpack, "unrar x {}"},
    {"ustar"sv, "a tar archive", kUnpack, "tar xf {}", 257},
    {"PAR1"sv, "a Parquet file", kToText, "parquet"},
    {"ARROW1"sv, "an Arrow file", kToText, "feather"},
    {"FEA1"sv, "a Feather file", kToText, "feather"},
    {"ORC"sv, "an ORC file", kToText, "orc"},
    {"Obj\1"sv, "an Avro file", "write its texts as lines of JSON, such as with `{}`",
     "avro-tools tojson {}"},
    {"\x89HDF\r\n\x1A\n"sv, "an HDF5 file",
     "write the texts or tokens in it to a file of their own, such as with h5py and `numpy.save`"},
    {"SQLite format 3\0"sv, "an SQLite database", "write its texts as text, such as with `{}`",
     "sqlite3 {} 'select text from TABLE' > texts.txt"},
    {"GGUF"sv, "a model in GGUF, the format of llama.cpp",
     "get the model's directory with config.json and safetensors"},
    {"lmgg"sv, "a model in the old format of ggml",
     "get the model's directory with config.json and safetensors"},
    {"tjgg"sv, "a model in the old format of ggml",
     "get the model's directory with config.json and safetensors"},
    {"\x80\x02\x8A\x0Al\xFC\x9C\x46\xF9\x20\x6A\xA8\x50\x19."sv, "an old file of PyTorch's",
     kToWeights},
    {"%PDF-"sv, "a PDF document", "make text of it with `{}`", "pdftotext {}"},
    {"{\\rtf"sv, "an RTF document", "make text of it with `{}`", "unrtf --text {} > text.txt"},
    {"\xD0\xCF\x11\xE0\xA1\xB1\x1A\xE1"sv, "an old document of Microsoft Office",
     "make text of it with `{}`", "libreoffice --convert-to txt {}"},
    {"\x7F"
     "ELF"sv,
     "a program", kNoText},
    {"\x89PNG\r\n\x1A\n"sv, "a picture", kNoText},
    {"\xFF\xD8\xFF"sv, "a picture", kNoText},
    {"GIF8"sv, "a picture", kNoText},
    {"RIFF"sv, "a recording or picture", kNoText},
    {"OggS"sv, "a recording", kNoText},
    {"fLaC"sv, "a recording", kNoText},
    {"ID3"sv, "a recording", kNoText},
    {"ftyp"sv, "a film", kNoText, "", 4},
    {"\xFF\xFE\0\0"sv, "text in UTF-32", "convert it with `{}`",
     "iconv -f UTF-32 -t UTF-8 {} > utf8.txt"},
    {"\0\0\xFE\xFF"sv, "text in UTF-32", "convert it with `{}`",
     "iconv -f UTF-32 -t UTF-8 {} > utf8.txt"},
};

/// A zip archive is what the name of its first file says.
FileKind zip_kind(std::string_view text, const std::string& file) {
  const std::string_view head = text.substr(0, 4096);
  const auto names = [&](std::string_view part) { return head.find(part) != head.npos; };
  if (names("/data.pkl") || names("/byteorder")) {
    return {"a file of PyTorch's, which is a pickle in a zip archive", kToWeights};
  }
  if (names(".npy")) {
    return {"a NumPy archive of several arrays",
            fmt::format("write one of them with `python3 -c \"import numpy, sys; a = "
                        "numpy.load(sys.argv[1]); numpy.save('tokens.npy', a[a.files[0]])\" {}`",
                        file)};
  }
  if (names("[Content_Types].xml") || names("application/vnd.oasis")) {
    return {"a document of an office program",
            fmt::format("make text of it with `libreoffice --convert-to txt {}`", file)};
  }
  if (names("application/epub")) {
    return {"an e-book",
            fmt::format("make text of it with `pandoc -t plain {} -o book.txt`", file)};
  }
  return {"a zip archive", fmt::format(fmt::runtime(kUnpack), fmt::format("unzip {}", file))};
}

/// The beginning in lower case, without what a text may begin with.
std::string beginning(std::string_view text) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  const size_t first = text.find_first_not_of(" \t\r\n");
  std::string low(text.substr(std::min(first, text.size()), 256));
  for (char& c : low) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return low;
}

bool is_pickle(std::string_view text) {
  constexpr std::string_view kOpcodes = "\x95\x8A\x8C}])(cXJKMU\x88\x89N"sv;
  return text.size() > 3 && text[0] == '\x80' && text[1] >= 2 && text[1] <= 5 &&
         kOpcodes.find(text[2]) != kOpcodes.npos && text.back() == '.';
}

/// A stream of Arrow's, as `datasets` of Hugging Face writes it: a mark, the length of the schema.
bool is_arrow_stream(std::string_view text) {
  int32_t words[2];
  if (text.size() < sizeof(words)) return false;
  std::memcpy(words, text.data(), sizeof(words));
  return words[0] == -1 && words[1] > 0 && words[1] % 8 == 0 && words[1] < (1 << 24) &&
         std::ssize(text) > words[1];
}

bool is_safetensors(std::string_view text) {
  uint64_t length = 0;
  if (text.size() <= sizeof(length)) return false;
  std::memcpy(&length, text.data(), sizeof(length));
  return length >= 2 && length <= text.size() - sizeof(length) && text[8] == '{';
}

/// Whether nearly all bytes in one place of pairs of bytes are 0, and few in the other.
bool zeros_alternate(std::string_view text) {
  int64_t zeros[2] = {};
  const size_t pairs = std::min<size_t>(text.size(), 4096) / 2;
  for (size_t i = 0; i < 2 * pairs; ++i) zeros[i % 2] += text[i] == '\0';
  const auto [few, many] = std::minmax(zeros[0], zeros[1]);
  return pairs > 0 && many * 2 > int64_t(pairs) && few * 10 < int64_t(pairs);
}

/// Whether these are units of 16 bits that make text: no half of a pair alone, no controls but
/// those that part lines and words. Ids of tokens hardly are.
bool is_utf16_text(std::string_view text, bool little_endian) {
  bool inside_pair = false;
  for (size_t i = 0; i + 1 < std::min<size_t>(text.size(), 1 << 16); i += 2) {
    const auto first = static_cast<uint8_t>(text[i]), second = static_cast<uint8_t>(text[i + 1]);
    const int unit = little_endian ? second << 8 | first : first << 8 | second;
    const bool low = unit >= 0xDC00 && unit < 0xE000;
    if (low != inside_pair) return false;
    inside_pair = unit >= 0xD800 && unit < 0xDC00;
    if (unit >= 0xFFFE || (unit < ' ' && (unit < 7 || unit > 13))) return false;
  }
  return text.size() % 2 == 0;
}

/// Records of TensorFlow's: the length of each, 4 bytes, the record, 4 bytes.
bool is_tfrecord(std::string_view text) {
  constexpr uint64_t kAround = 16;
  size_t at = 0;
  for (int records = 0; records < 3 && at != text.size(); ++records) {
    uint64_t length = 0;
    if (text.size() - at < kAround) return false;
    std::memcpy(&length, text.data() + at, sizeof(length));
    if (length == 0 || length > text.size() - at - kAround) return false;
    at += kAround + length;
  }
  return at > 0;
}

}  // namespace

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::optional<FileKind> recognize(std::span<const std::byte> bytes, const std::string& path) {
  const std::string_view text = text_of(bytes);
  const std::string file = shell_quoted(path), low = beginning(text);
  // First: the length of the header may begin like anything.
  if (is_safetensors(text)) {
    return FileKind{"a file of weights in safetensors", "give its directory as --model", true};
  }
  for (const Magic& row : kMagics) {
    if (text.size() < row.offset || !text.substr(row.offset).starts_with(row.magic)) continue;
    const std::string command = fmt::format(fmt::runtime(row.command), file);
    return FileKind{row.what, fmt::format(fmt::runtime(row.remedy), command, file)};
  }
  if (text.starts_with("PK\3\4")) return zip_kind(text, file);
  if (low.starts_with("<!doctype html") || low.starts_with("<html") ||
      (low.starts_with("<?xml") && low.find("<error>") != low.npos)) {
    return FileKind{"a web page, as a server sends it in the place of a file", kWebPage};
  }
  if (is_pickle(text)) {
    return FileKind{
        "a pickle of Python's",
        "write what is in it as text, as an array with `numpy.save`, or as weights with "
        "`safetensors.torch.save_file`"};
  }
  if (is_arrow_stream(text)) {
    return FileKind{
        "a stream of Arrow's",
        fmt::format("write its texts as lines of JSON, such as with `python3 -c \"import datasets, "
                    "sys; datasets.Dataset.from_file(sys.argv[1]).to_json('texts.jsonl')\" {}`",
                    file)};
  }
  if (is_tfrecord(text)) {
    return FileKind{"a file of TensorFlow's records",
                    "write its texts as lines of JSON, with `tensorflow.data.TFRecordDataset`"};
  }
  const bool marked = text.starts_with("\xFF\xFE") || text.starts_with("\xFE\xFF");
  if (marked &&
      (zeros_alternate(text.substr(2)) || is_utf16_text(text.substr(2), text[0] == '\xFF'))) {
    return FileKind{"text in UTF-16", fmt::format("convert it with `iconv -f UTF-16 -t UTF-8 {} > "
                                                  "utf8.txt`",
                                                  file)};
  }
  if (text.starts_with("\x93NUMPY")) {
    return FileKind{"an array of NumPy's", "give it as --data if it holds tokens"};
  }
  return std::nullopt;
}

std::string other_kind_than(std::string_view wanted, std::span<const std::byte> bytes,
                            const std::string& path) {
  const std::optional<FileKind> kind = recognize(bytes, path);
  const bool weights = wanted == "safetensors";
  if (kind && !(weights && kind->is_safetensors)) {
    return fmt::format("{} is {}, not {}; {}", path, kind->what, wanted, kind->remedy);
  }
  constexpr size_t kEnough = 16;  // of what is shorter a part may be missing
  if (kind || !weights || bytes.size() < kEnough || !is_utf8_text(bytes)) return "";
  constexpr size_t kShown = 60;
  std::string shown(text_of(bytes).substr(0, kShown));
  for (char& c : shown) c = c < ' ' || c > '~' ? ' ' : c;
  return fmt::format("{} is text, not safetensors, and begins with \"{}\"; get the file itself",
                     path, shown);
}

std::string found_instead(const std::string& directory) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    if (entry.is_regular_file(error)) paths.push_back(entry.path().string());
  }
  std::ranges::sort(paths);
  for (const std::string& path : paths) {
    const std::string name = std::filesystem::path(path).filename().string();
    if (name.starts_with("adapter_model.")) {
      return fmt::format(
          "; {} is an adapter of another model: merge the two with "
          "`merge_and_unload` of peft, and save what comes out",
          name);
    }
    std::optional<FileKind> kind;
    try {
      kind = recognize(MappedFile(path).bytes(), path);
    } catch (const Error&) {  // it cannot be read
    }
    if (!kind) continue;
    if (!kind->is_safetensors) return fmt::format("; {} is {}: {}", name, kind->what, kind->remedy);
    if (name != "model.safetensors") {
      return fmt::format(
          "; {} holds weights: if they are all of the model's, call it "
          "model.safetensors, otherwise get the index too",
          name);
    }
  }
  return "";
}

bool is_utf8_text(std::span<const std::byte> bytes) {
  const std::string_view text = text_of(bytes.first(std::min<size_t>(bytes.size(), 1 << 16)));
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool control = byte < 0x20 && (byte < 7 || byte > 13) && byte != 0x1B;
    if (control || byte == 0x7F || byte == 0xFF || byte == 0xFE) return false;
    if (byte < 0x80) continue;
    const size_t more = byte >= 0xF0 ? 3 : byte >= 0xE0 ? 2 : byte >= 0xC2 ? 1 : 0;
    if (more == 0) return false;
    for (size_t j = 1; j <= more && i + j < text.size(); ++j) {
      if ((static_cast<unsigned char>(text[i + j]) & 0xC0) != 0x80) return false;
    }
    i += more;
  }
  return !text.empty();
}

}  // namespace usp
