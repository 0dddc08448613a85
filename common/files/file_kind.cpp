#include "files/file_kind.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
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
constexpr size_t kHead = 1 << 16;  // bytes of the beginning, and of a place farther on

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
    {"\xEF\xBB\xBF"
     "version https://git-lfs.github.com/spec/"sv,
     "a Git LFS pointer, not the file itself", "fetch the file with `{}`",
     "git lfs pull --include={}"},
    {"# xet version "sv, "a Xet pointer, not the file itself", "fetch the file with `{}`",
     "git xet materialize {}"},
    {"/annex/objects/"sv, "a git-annex pointer, not the file itself", "fetch the file with `{}`",
     "git annex get {}"},
    {"\x1F\x8B\x08"sv, "compressed by gzip", kUnpack, "gunzip -k {}"},
    {"\x1F\x9D"sv, "compressed by compress", kUnpack, "uncompress -k {}"},
    {"1AY&SY"sv, "compressed by bzip2", kUnpack, "bunzip2 -k {}", 4},
    {"\xFD\x37zXZ\0"sv, "compressed by xz", kUnpack, "unxz -k {}"},
    {"\x28\xB5\x2F\xFD"sv, "compressed by zstd", kUnpack, "zstd -d {}"},
    {"\x04\x22\x4D\x18"sv, "compressed by lz4", kUnpack, "lz4 -d {}"},
    {"LZIP\1"sv, "compressed by lzip", kUnpack, "lzip -dk {}"},
    {"\xFF\x06\0\0sNaPpY"sv, "compressed by snappy", kUnpack, "snzip -dk {}"},
    {"7z\xBC\xAF\x27\x1C"sv, "a 7z archive", kUnpack, "7z x {}"},
    {"Rar!\x1A\x07"sv, "a RAR archive", kUnpack, "unrar x {}"},
    {"!<arch>\n"sv, "an archive of ar", kUnpack, "ar x {}"},
    {"\x1E{"sv, "a sequence of JSON texts", "write it as lines of JSON, such as with `{}`",
     "tr -d '\\036' < {} > texts.jsonl"},
    {"ARROW1\0\0"sv, "an Arrow file", kToText, "feather"},
    {"Obj\1"sv, "an Avro file", "write its texts as lines of JSON, such as with `{}`",
     "avro-tools tojson {}"},
    {"\x89HDF\r\n\x1A\n"sv, "an HDF5 file",
     "write the texts or tokens in it to a file of their own, such as with h5py and `numpy.save`"},
    {"SQLite format 3\0"sv, "an SQLite database", "write its texts as text, such as with `{}`",
     "sqlite3 {} 'select text from TABLE' > texts.txt"},
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
    {"\xFF\xFE\0\0"sv, "text in UTF-32", "convert it with `{}`",
     "iconv -f UTF-32 -t UTF-8 {} > utf8.txt"},
    {"\0\0\xFE\xFF"sv, "text in UTF-32", "convert it with `{}`",
     "iconv -f UTF-32 -t UTF-8 {} > utf8.txt"},
};

/// Magic numbers that are words: a text may begin with one, too.
constexpr Magic kWords[] = {
    {"ustar"sv, "a tar archive", kUnpack, "tar xf {}", 257},
    {"PAR1"sv, "a Parquet file", kToText, "parquet"},
    {"FEA1"sv, "a Feather file", kToText, "feather"},
    {"ORC"sv, "an ORC file", kToText, "orc"},
    {"GGUF"sv, "a model in GGUF, the format of llama.cpp",
     "get the model's directory with config.json and safetensors"},
    {"lmgg"sv, "a model in the old format of ggml",
     "get the model's directory with config.json and safetensors"},
    {"tjgg"sv, "a model in the old format of ggml",
     "get the model's directory with config.json and safetensors"},
    {"GIF8"sv, "a picture", kNoText},
    {"RIFF"sv, "a recording or picture", kNoText},
    {"OggS"sv, "a recording", kNoText},
    {"fLaC"sv, "a recording", kNoText},
    {"ID3"sv, "a recording", kNoText},
    {"ftyp"sv, "a film", kNoText, "", 4},
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
  std::string low(text.substr(std::min(first, text.size()), 4096));
  for (char& c : low) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return low;
}

/// A web page, behind what may stand before it: XML's declaration and comments.
bool is_web_page(std::string_view low) {
  if (low.starts_with("<?xml") && low.substr(0, 256).find("<error>") != low.npos) return true;
  for (const auto& [open, close] : {std::pair{"<?xml"sv, "?>"sv}, std::pair{"<!--"sv, "-->"sv}}) {
    while (low.starts_with(open)) {
      low.remove_prefix(std::min(low.find(close), low.size()));
      low.remove_prefix(std::min(low.find_first_not_of(" \t\r\n", close.size()), low.size()));
    }
  }
  return low.starts_with("<!doctype html") || low.starts_with("<html") || low.starts_with("<head>");
}

/// What DVC keeps in the place of a file: its digest, below `outs:`.
bool is_dvc_pointer(std::string_view low) {
  constexpr std::string_view kKey = "md5: ", kHex = "0123456789abcdef";
  constexpr size_t kDigest = 32;
  const size_t at = low.find(kKey);
  return (low.starts_with("outs:") || (at == 0 && low.find("\nouts:") != low.npos)) &&
         at != low.npos && low.size() >= at + kKey.size() + kDigest &&
         low.find_first_not_of(kHex, at + kKey.size()) >= at + kKey.size() + kDigest;
}

/// A number of text, blanks around it; nothing where it is none.
std::optional<int64_t> number_in(std::string_view text, int base) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return error == std::errc{} ? std::optional(number) : std::nullopt;
}

/// An archive of the first tar, which has no mark: the bytes of a header add up to what it says.
bool is_old_tar(std::string_view text) {
  constexpr size_t kHeader = 512, kAt = 148, kDigits = 8;
  if (text.size() < kHeader || text[0] == '\0') return false;
  int64_t sum = kDigits * ' ';
  for (size_t i = 0; i < kHeader; ++i) {
    if (i < kAt || i >= kAt + kDigits) sum += static_cast<uint8_t>(text[i]);
  }
  return number_in(text.substr(kAt, kDigits), 8) == sum;
}

/// An archive of cpio in its new form: a header of digits, and a name that ends with a 0.
bool is_cpio(std::string_view text) {
  constexpr size_t kHeader = 110, kNameLength = 94, kDigits = 8;
  if (text.size() <= kHeader || !(text.starts_with("070701") || text.starts_with("070702"))) {
    return false;
  }
  const std::optional<int64_t> length = number_in(text.substr(kNameLength, kDigits), 16);
  return length && *length > 0 && kHeader + *length <= text.size() &&
         text[kHeader + *length - 1] == '\0';
}

/// Protocol 0 of pickle is text: a letter for each operation, some with one or two lines of their
/// own, an object that is put into the memo, and a full stop.
bool is_pickle_of_text(std::string_view text) {
  constexpr std::string_view kAlone = "(012NRadblostu]}e)", kOneLine = "FILSVgpP", kTwoLines = "ci";
  constexpr std::string_view kNumbers = "FILgp", kDigits = "0123456789+-.eELinfan";
  constexpr int kEnough = 20;
  int operations = 0, puts = 0;
  const auto line = [&]() -> std::optional<std::string_view> {
    const size_t end = text.find('\n');
    if (end == text.npos) return {};
    const std::string_view found = text.substr(0, end);
    text.remove_prefix(end + 1);
    return found;
  };
  while (!text.empty() && operations < kEnough) {
    const char code = text[0];
    text.remove_prefix(1);
    if (code == '.') return puts > 0 && text.find_first_not_of("\r\n") == text.npos;
    ++operations;
    if (kAlone.find(code) != kAlone.npos) continue;
    const bool two = kTwoLines.find(code) != kTwoLines.npos;
    if (!two && kOneLine.find(code) == kOneLine.npos) return false;
    const std::optional<std::string_view> first = line();
    if (!first || (code != 'V' && first->empty()) || (two && !line())) return false;
    const bool number = kNumbers.find(code) != kNumbers.npos;
    if (number && first->find_first_not_of(kDigits) != first->npos) return false;
    if (code == 'S' && (*first)[0] != '\'' && (*first)[0] != '"') return false;
    puts += code == 'p';
  }
  return puts > 1 && operations == kEnough;
}

bool is_pickle(std::string_view text) {
  if (is_pickle_of_text(text.substr(0, kHead))) return true;
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
  for (size_t i = 0; i + 1 < std::min(text.size(), kHead); i += 2) {
    const auto first = static_cast<uint8_t>(text[i]), second = static_cast<uint8_t>(text[i + 1]);
    const int unit = little_endian ? second << 8 | first : first << 8 | second;
    const bool low = unit >= 0xDC00 && unit < 0xE000;
    if (low != inside_pair) return false;
    inside_pair = unit >= 0xD800 && unit < 0xDC00;
    if (unit >= 0xFFFE || (unit < ' ' && (unit < 7 || unit > 13))) return false;
  }
  return text.size() % 2 == 0;
}

/// What iconv calls text in UTF-16 that does not begin with its mark: nearly all units are of
/// scripts that people write. Empty for anything else.
const char* unmarked_utf16(std::string_view text) {
  const auto is_written = [](int unit) {
    constexpr std::pair<int, int> kWritten[] = {{0x09, 0x0D},     {0x20, 0x24FF},
                                                {0x3000, 0x30FF}, {0x4E00, 0x9FFF},
                                                {0xAC00, 0xDFFF}, {0xFF00, 0xFFEF}};
    return std::ranges::any_of(
        kWritten, [&](const auto& range) { return unit >= range.first && unit <= range.second; });
  };
  const char* found = "";
  int64_t most = 0;
  for (const bool little_endian : {true, false}) {
    if (!is_utf16_text(text, little_endian)) continue;
    int64_t written = 0, alphabetic = 0;  // alphabets, swapped, are Chinese characters
    for (size_t i = 0; i + 1 < text.size(); i += 2) {
      const auto first = static_cast<uint8_t>(text[i]), second = static_cast<uint8_t>(text[i + 1]);
      const int unit = little_endian ? second << 8 | first : first << 8 | second;
      written += is_written(unit);
      alphabetic += unit < 0x0800;
    }
    if (20 * written < 9 * std::ssize(text) || written + alphabetic <= most) continue;
    most = written + alphabetic;
    found = little_endian ? "UTF-16LE" : "UTF-16BE";
  }
  return found;
}

/// Whether a byte controls a terminal; those that move the cursor, ring or color stand in texts.
bool is_control(char character) {
  const auto byte = static_cast<uint8_t>(character);
  return (byte > 0 && byte < ' ' && (byte < 7 || byte > 13) && byte != 0x1B) || byte == 0x7F;
}

/// The first of these that the file begins with.
const Magic* begun_with(std::span<const Magic> magics, std::string_view text) {
  const auto found = std::ranges::find_if(magics, [&](const Magic& row) {
    return text.size() >= row.offset && text.substr(row.offset).starts_with(row.magic);
  });
  return found == magics.end() ? nullptr : &*found;
}

/// A word counts where a byte follows that is in no text.
const Magic* magic_of(std::string_view text) {
  if (const Magic* magic = begun_with(kMagics, text)) return magic;
  const std::string_view head = text.substr(0, kHead);
  const bool may_be_text = head.find('\0') == head.npos && std::ranges::none_of(head, is_control);
  return may_be_text ? nullptr : begun_with(kWords, text);
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
  if (const Magic* magic = magic_of(text)) {
    const std::string command = fmt::format(fmt::runtime(magic->command), file);
    return FileKind{magic->what, fmt::format(fmt::runtime(magic->remedy), command, file)};
  }
  if (text.starts_with("PK\3\4")) return zip_kind(text, file);
  if (is_old_tar(text)) {
    return FileKind{"a tar archive",
                    fmt::format(fmt::runtime(kUnpack), fmt::format("tar xf {}", file))};
  }
  if (is_cpio(text)) {
    return FileKind{"an archive of cpio",
                    fmt::format(fmt::runtime(kUnpack), fmt::format("cpio -id < {}", file))};
  }
  if (is_dvc_pointer(low)) {
    return FileKind{"a DVC pointer, not the file itself",
                    fmt::format("fetch the file with `dvc pull {}` and give that", file)};
  }
  if (is_web_page(low)) {
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
  const std::string_view text = text_of(bytes).substr(0, kHead);
  return !text.empty() && !first_not_utf8(bytes) && text.find('\0') == text.npos &&
         std::ranges::none_of(text, is_control);
}

std::optional<size_t> first_not_utf8(std::span<const std::byte> bytes) {
  const std::string_view text = text_of(bytes).substr(0, kHead);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) continue;
    if (byte < 0xC2 || byte >= 0xF5) return i;
    const size_t more = byte >= 0xF0 ? 3 : byte >= 0xE0 ? 2 : 1;
    for (size_t j = 1; j <= more && i + j < text.size(); ++j) {
      if ((static_cast<unsigned char>(text[i + j]) & 0xC0) != 0x80) return i;
    }
    i += more;
  }
  return {};
}

std::string why_no_text(std::span<const std::byte> bytes, const std::string& path) {
  constexpr size_t kPlaces = 16;
  constexpr int64_t kFewZeros = 8;  // one in so many may end a text of a few words
  const std::string_view text = text_of(bytes);
  const bool utf8 = !first_not_utf8(bytes);
  const size_t places = text.size() > kHead ? kPlaces : 1;
  for (size_t place = 0; place < places; ++place) {
    const size_t begin = place == 0 ? 0 : (text.size() - kHead) / (places - 1) * place;
    const std::string_view here = text.substr(begin, kHead);
    const int64_t size = std::ssize(here), zeros = std::ranges::count(here, '\0');
    const int64_t controls = std::ranges::count_if(here, is_control) + (utf8 ? 0 : zeros);
    const bool no_text = controls > 1 + size / 50 || (utf8 && kFewZeros * zeros >= size);
    // Half of the bytes of Chinese in UTF-16 are of any value, so some of them control something,
    // and many are no letters of ASCII, as nearly all are in a text of one byte a letter.
    const int64_t foreign = std::ranges::count_if(
        here, [](char c) { return (c < ' ' || c > '~') && (c < '\t' || c > '\r'); });
    const char* utf16 = place == 0 && text.size() % 2 == 0 ? unmarked_utf16(here) : "";
    if (*utf16 != '\0' && (no_text || (controls > 0 && 8 * foreign > size))) {
      return fmt::format(
          "is text in UTF-16 without a byte order mark; convert it with `iconv -f {} -t UTF-8 "
          "{} > utf8.txt`, or give --token_dtype uint16 if these are ids",
          utf16, shell_quoted(path));
    }
    if (!no_text) continue;
    return fmt::format(
        "is neither text nor a known kind of file{}; give text, or --token_dtype uint16 or uint32 "
        "if it holds token ids of 16 or 32 bits",
        begin == 0 ? "" : fmt::format(": bytes {} to {} are not text", begin, begin + size - 1));
  }
  return "";
}

std::string command_of_column(std::string_view text, const std::string& path) {
  constexpr size_t kRows = 8;
  for (const char separator : {',', '\t', ';'}) {
    const bool called = path.ends_with(separator == '\t' ? ".tsv" : ".csv");
    // In lines of code there are semicolons too.
    if (separator == ';' && !called) continue;
    std::vector<size_t> widths;  // of each column, over the rows
    size_t rows = 0, column = 0;
    bool quoted = false, even = true;
    for (size_t i = 0; i < std::min<size_t>(text.size(), kHead) && rows < kRows && even; ++i) {
      if (text[i] == '"') quoted = !quoted;
      if (rows == 0 && column == widths.size()) widths.push_back(0);
      const bool ends = !quoted && text[i] == '\n';
      if (!quoted && text[i] == separator) {
        ++column;
        even = rows == 0 || column < widths.size();
      } else if (ends) {
        even = column + 1 == widths.size();
        column = 0;
        ++rows;
      } else if (rows > 0) {
        ++widths[column];
      }
    }
    if (!even || rows < (called ? 2 : 4) || widths.size() < (called ? 2 : 3)) continue;
    const auto longest = std::ranges::max_element(widths) - widths.begin();
    return fmt::format(
        "python3 -c \"import pandas, sys; pandas.read_{}(sys.argv[1], {}dtype=str, "
        "keep_default_na=False).iloc[:, {}].to_frame('text')"
        ".to_json(sys.argv[2], orient='records', lines=True)\" {} texts.jsonl",
        separator == '\t' ? "table" : "csv", separator == ';' ? "sep=';', " : "", longest,
        shell_quoted(path));
  }
  return "";
}

}  // namespace usp
