#include "files/token_format.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/check.h"
#include "base/json_reader.h"
#include "base/output.h"
#include "files/file_kind.h"

namespace usp {

namespace {

using Bytes = std::span<const std::byte>;

/// The little-endian number at a byte of the file, which has to hold it.
template <class T>
T number_at(Bytes bytes, size_t at) {
  T number;
  std::memcpy(&number, bytes.data() + at, sizeof(number));
  return number;
}

const char* dtype_name(int width) { return width == 2 ? "uint16" : "uint32"; }

/// What is short may look like anything.
constexpr size_t kEnoughBytes = 32;

/// Makes out what a file holds.
class FormatReader {
 public:
  FormatReader(std::string path, int token_bytes, bool given)
      : path_(std::move(path)), token_bytes_(token_bytes), given_(given) {}

  TokenFormat read() {
    open(path_);
    if (text_of(bytes_).starts_with(kIndexMagic)) open_tokens_of_index();
    const bool found = read_header() || read_numpy() || read_megatron();
    if (!found) {
      refuse_other_kinds();
      if (!read_json_lines()) read_plain();
    }
    if (found && given_ && format_.width != token_bytes_) {
      refuse(
          "holds tokens of {} bytes each, and --token_dtype {} says otherwise; leave that flag out",
          format_.width, dtype_name(token_bytes_));
    }
    return std::move(format_);
  }

 private:
  static constexpr std::string_view kIndexMagic{"MMIDIDX\0\0", 9};
  static constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // in UTF-8

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    usage_error("data={} {}", path_, fmt::format(format, std::forward<Args>(args)...));
  }

  void open(const std::string& path) {
    try {
      format_.file = std::make_unique<MappedFile>(path);
    } catch (const Error& error) {
      usage_error("data={}; give a text file or a .bin of tokens", error.what());
    }
    bytes_ = format_.file->bytes();
    if (bytes_.empty()) {
      usage_error("data={} is empty; give a text file or a .bin of tokens", path);
    }
  }

  void take(Bytes tokens, int width, bool is_signed) {
    format_.tokens = tokens;
    format_.width = width;
    format_.is_signed = is_signed;
  }

  /// A header of 256 int32, as llm.c and modded-nanogpt write it: a magic number, a version, the
  /// number of tokens, and zeros.
  bool read_header() {
    constexpr size_t kHeaderBytes = 1024;
    struct Known {
      int32_t magic, version;
      int width;
    };
    constexpr Known kKnown[] = {{20240520, 1, 2}, {20240801, 7, 4}};
    if (bytes_.size() < 12) return false;
    const auto magic = number_at<int32_t>(bytes_, 0), version = number_at<int32_t>(bytes_, 4);
    const auto row = std::ranges::find(kKnown, magic, &Known::magic);
    const bool known = row != std::end(kKnown);
    if (!known && !(is_date(magic) && bytes_.size() >= kHeaderBytes && zeros(64, kHeaderBytes))) {
      return false;
    }
    if (!known) {
      refuse(
          "has a header of 256 int32 with the magic number {}; known: 20240520 and 20240801, of "
          "tokens, so give a file of tokens",
          magic);
    }
    if (version != row->version) {
      refuse("has a header of version {} of llm.c's format {}; known: {}", version, magic,
             row->version);
    }
    const int64_t count = number_at<int32_t>(bytes_, 8);
    const int64_t expected = int64_t(kHeaderBytes) + count * row->width;
    if (count < 0 || expected != std::ssize(bytes_)) {
      refuse(
          "is damaged: its header announces {} tokens of {} bytes, which makes {} bytes, and it "
          "has {}; get the file again",
          count, row->width, expected, bytes_.size());
    }
    take(bytes_.subspan(kHeaderBytes), row->width, false);
    return true;
  }

  /// Such as 20240520.
  static bool is_date(int32_t number) {
    const int year = number / 10000, month = number / 100 % 100, day = number % 100;
    return year >= 2022 && year < 2040 && month >= 1 && month <= 12 && day >= 1 && day <= 31;
  }
  bool zeros(size_t begin, size_t end) const {
    return std::ranges::all_of(bytes_.subspan(begin, end - begin),
                               [](std::byte byte) { return byte == std::byte{0}; });
  }

  /// An array that numpy.save wrote: a magic number, the length of a header, and the header, which
  /// is a dictionary in Python's spelling.
  bool read_numpy() {
    if (!text_of(bytes_).starts_with("\x93NUMPY")) return false;
    if (bytes_.size() < 12) refuse("is damaged: its header of NumPy's is cut off");
    const bool wide = number_at<uint8_t>(bytes_, 6) > 1;
    const size_t begin = wide ? 12 : 10;
    const size_t length = wide ? number_at<uint32_t>(bytes_, 8) : number_at<uint16_t>(bytes_, 8);
    if (length > bytes_.size() - begin) refuse("is damaged: its header of NumPy's is cut off");
    const std::string_view header = text_of(bytes_).substr(begin, length);
    const std::string_view descr = behind(header, "'descr':");
    if (descr.size() < 5 || descr[0] != '\'' || descr[4] != '\'' ||
        std::string_view("iu").find(descr[2]) == std::string_view::npos ||
        std::string_view("1248").find(descr[3]) == std::string_view::npos) {
      refuse(
          "is an array of NumPy's whose dtype is {}; tokens are whole numbers: write them with "
          "`numpy.save(FILE, array.astype('uint32'))`",
          in_quotes(descr.substr(0, descr.find(','))));
    }
    if (descr[1] == '>') {
      refuse(
          "is an array of NumPy's in big-endian order; write it with `numpy.save(FILE, "
          "array.astype('<u4'))`");
    }
    int dimensions = 0;
    const std::optional<int64_t> count = elements(behind(header, "'shape':"), dimensions);
    const int width = descr[3] - '0';
    const Bytes data = bytes_.subspan(begin + length);
    if (!count || (*count > 0 && std::ssize(data) / *count != width) ||
        std::ssize(data) != *count * width) {
      refuse("is damaged: its header of NumPy's does not announce the {} bytes that follow",
             data.size());
    }
    if (dimensions > 1 && !behind(header, "'fortran_order':").starts_with("False")) {
      refuse(
          "is an array of NumPy's in the order of Fortran; write it with `numpy.save(FILE, "
          "numpy.ascontiguousarray(array))`");
    }
    take(data, width, descr[2] == 'i');
    return true;
  }

  static std::string_view behind(std::string_view text, std::string_view key) {
    const size_t at = text.find(key);
    if (at == text.npos) return "";
    text.remove_prefix(at + key.size());
    const size_t begin = text.find_first_not_of(' ');
    return begin == text.npos ? "" : text.substr(begin);
  }

  /// The product of a shape such as "(3, 4), }", and how many dimensions it has; nothing where it
  /// is none.
  static std::optional<int64_t> elements(std::string_view shape, int& dimensions) {
    if (!shape.starts_with('(')) return {};
    int64_t product = 1;
    for (shape.remove_prefix(1); !shape.empty() && shape[0] != ')';) {
      if (shape[0] == ' ' || shape[0] == ',') {
        shape.remove_prefix(1);
        continue;
      }
      int64_t size = 0;
      const auto [end, error] = std::from_chars(shape.data(), shape.data() + shape.size(), size);
      if (error != std::errc{} || size < 0 || __builtin_mul_overflow(product, size, &product)) {
        return {};
      }
      shape.remove_prefix(end - shape.data());
      ++dimensions;
    }
    return shape.empty() ? std::nullopt : std::optional(product);
  }

  /// Given the index, the tokens are those beside it.
  void open_tokens_of_index() {
    if (!path_.ends_with(".idx")) {
      refuse("is an index of Megatron's; call it NAME.idx, beside the tokens in NAME.bin");
    }
    path_ = path_.substr(0, path_.size() - 4) + ".bin";
    open(path_);
  }

  /// Tokens of Megatron's, if an index lies beside them.
  bool read_megatron() {
    if (!path_.ends_with(".bin")) return false;
    const std::string path = path_.substr(0, path_.size() - 4) + ".idx";
    try {
      format_.index = std::make_unique<MappedFile>(path);
    } catch (const Error&) {
      return false;
    }
    read_index(path, format_.index->bytes());
    return true;
  }

  /// A version, a dtype, the numbers of sequences and of bounds of documents; then of each sequence
  /// the length and the first byte, and of each document the first sequence.
  void read_index(const std::string& path, Bytes index) {
    if (!text_of(index).starts_with(kIndexMagic)) {
      const std::optional<FileKind> kind = recognize(index, path);
      refuse("has beside it {}, which is {}; {}", path,
             kind ? kind->what : "no index of Megatron's",
             kind ? kind->remedy : "move it elsewhere if it does not belong to these tokens");
    }
    constexpr size_t kFixed = 9 + 8 + 1 + 8 + 8;
    const auto damaged = [&](const std::string& why) {
      refuse("has an index that is damaged or of other tokens: {}: {}; get both again", path, why);
    };
    if (index.size() < kFixed) damaged("its header is cut off");
    const auto version = number_at<uint64_t>(index, 9);
    if (version != 1) damaged(fmt::format("its version is {}, and 1 is known", version));
    struct Code {
      int code, width;
      bool is_signed;
    };
    constexpr Code kCodes[] = {{1, 1, false}, {2, 1, true}, {3, 2, true},
                               {4, 4, true},  {5, 8, true}, {8, 2, false}};
    const int number = number_at<uint8_t>(index, 17);
    const auto code = std::ranges::find(kCodes, number, &Code::code);
    if (code == std::end(kCodes)) {
      damaged(fmt::format("its dtype has the number {}, which is none of whole numbers", number));
    }
    const auto sequences = number_at<uint64_t>(index, 18), bounds = number_at<uint64_t>(index, 26);
    const uint64_t most = index.size();
    if (sequences > most || bounds > most || bounds == 0 ||
        index.size() < kFixed + 12 * sequences + 8 * bounds) {
      damaged(fmt::format("{} sequences and {} bounds of documents do not fit into {} bytes",
                          sequences, bounds, index.size()));
    }
    std::vector<int64_t> first(sequences + 1);  // token of each sequence
    for (uint64_t i = 0; i < sequences; ++i) {
      const auto length = number_at<int32_t>(index, kFixed + 4 * i);
      const auto byte = number_at<int64_t>(index, kFixed + 4 * sequences + 8 * i);
      if (length < 0 || byte != first[i] * code->width) {
        damaged(fmt::format("sequence {} begins at byte {}, and those before it end at {}", i, byte,
                            first[i] * code->width));
      }
      first[i + 1] = first[i] + length;
    }
    if (first.back() * code->width != std::ssize(bytes_)) {
      damaged(fmt::format("it is of {} tokens of {} bytes, and the tokens have {} bytes",
                          first.back(), code->width, bytes_.size()));
    }
    take(bytes_, code->width, code->is_signed);
    read_documents(index.subspan(kFixed + 12 * sequences), bounds, first, damaged);
  }

  template <class Damaged>
  void read_documents(Bytes index, uint64_t bounds, const std::vector<int64_t>& first,
                      const Damaged& damaged) {
    int64_t before = 0;
    for (uint64_t i = 0; i < bounds; ++i) {
      const auto sequence = number_at<int64_t>(index, 8 * i);
      if (sequence < before || sequence >= std::ssize(first) || (i == 0 && sequence != 0)) {
        damaged(fmt::format("document {} begins with sequence {}", i, sequence));
      }
      before = sequence;
      const int64_t start = first[sequence];
      std::vector<int64_t>& starts = format_.document_starts;
      if (start < first.back() && (starts.empty() || starts.back() != start)) {
        starts.push_back(start);
      }
    }
    if (before != std::ssize(first) - 1) damaged("its last document ends before the last sequence");
  }

  void refuse_other_kinds() const {
    const std::optional<FileKind> kind = recognize(bytes_, path_);
    if (!kind) return;
    const bool page =
        path_.ends_with(".html") || path_.ends_with(".htm") || path_.ends_with(".xml");
    if (page && is_utf8_text(bytes_)) return;  // text, and meant so
    refuse("is {}; {}", kind->what, kind->remedy);
  }

  bool is_called(std::initializer_list<const char*> endings) const {
    return std::ranges::any_of(endings,
                               [&](const char* ending) { return path_.ends_with(ending); });
  }

  /// Lines of JSON with a text in each. The first line says whether they are.
  bool read_json_lines() {
    std::string_view text = text_of(bytes_);
    if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
    const bool called = is_called({".jsonl", ".ndjson"});
    const size_t begin = text.find_first_not_of(" \t\r\n");
    if (begin == text.npos) return false;
    if (text[begin] != '{' || !is_object(line_of(text, begin))) {
      refuse_document(text, begin);
      if (called || (is_called({".json"}) && nlohmann::json::accept(line_of(text, begin)))) {
        refuse(
            "is called lines of JSON, but its first line is no JSON object; give a line such as "
            "{{\"text\": \"...\"}} for each text");
      }
      return false;
    }
    format_.decoded = std::make_unique<std::string>();
    int64_t number = 0;
    for (size_t at = 0; at < text.size(); ++number) {
      const std::string_view line = line_of(text, at);
      at += line.size() + 1;
      if (line.find_first_not_of(" \t\r") == line.npos) continue;
      format_.document_starts.push_back(std::ssize(*format_.decoded));
      *format_.decoded += text_in(line, number + 1);
      format_.decoded->push_back('\0');
    }
    refuse_given();
    format_.is_text = true;
    take(std::as_bytes(std::span(*format_.decoded)), 1, false);
    return true;
  }

  static std::string_view line_of(std::string_view text, size_t at) {
    return text.substr(at, std::min(text.find('\n', at), text.size()) - at);
  }

  static bool is_object(std::string_view line) {
    try {
      return parse_json(line, "").is_object();
    } catch (const Error&) {
      return false;
    }
  }

  std::string text_in(std::string_view line, int64_t number) const {
    nlohmann::json json;
    try {
      json = parse_json(line, "");
    } catch (const Error& error) {
      refuse("is lines of JSON, but line {} is none{}", number, error.what());
    }
    if (json.is_object() && json.contains("text") && json["text"].is_string()) return json["text"];
    std::vector<std::string> keys;
    for (const auto& [key, value] : json.items()) keys.push_back(in_quotes(key));
    refuse(
        "is lines of JSON, but line {} has no string as its \"text\"; its keys are {}; choose what "
        "is to "
        "be trained on, such as with `jq -c '{{text: .KEY}}' {} > texts.jsonl`",
        number, json.is_object() ? fmt::format("{}", fmt::join(keys, ", ")) : "no keys",
        shell_quoted(path_));
  }

  /// One JSON document is no text, nor are several over many lines, as jq writes them: their braces
  /// and names would be trained on.
  void refuse_document(std::string_view text, size_t begin) const {
    const size_t last = text.find_last_not_of(" \t\r\n");
    const bool list = text[begin] == '[' && text[last] == ']';
    if (!list && !(text[begin] == '{' && text[last] == '}')) return;
    const bool one = nlohmann::json::accept(text);
    if (!one && (list || !begins_with_object(text.substr(begin)))) return;
    refuse(
        "is {}; give a line of JSON with a \"text\" for each text, such as with "
        "`jq -c '{}' {} > texts.jsonl`",
        one ? "one JSON document" : "JSON objects that take several lines each", list ? ".[]" : ".",
        shell_quoted(path_));
  }

  /// Whether an object that is not empty ends within so many bytes.
  static bool begins_with_object(std::string_view text) {
    constexpr size_t kMost = 1 << 20;
    std::istringstream stream(std::string(text.substr(0, kMost)));
    try {
      nlohmann::json json;
      stream >> json;
      return json.is_object() && !json.empty();
    } catch (const nlohmann::json::exception&) {
      return false;
    }
  }

  void refuse_given() const {
    if (!given_) return;
    refuse("is text, and --token_dtype {} is for files of tokens; leave that flag out",
           dtype_name(token_bytes_));
  }

  void read_plain() {
    const bool enough = bytes_.size() >= kEnoughBytes, text = enough && is_utf8_text(bytes_);
    if (text) refuse_given();
    if (text || !(given_ || path_.ends_with(".bin"))) {
      const std::string why = enough ? why_no_text(bytes_, path_) : "";
      if (!why.empty()) refuse("{}", why);
      format_.note = note();
      format_.is_text = true;
      take(bytes_, 1, false);
      return;
    }
    if (bytes_.size() % token_bytes_ != 0) {
      usage_error("data={}: {} bytes are no whole number of {}-byte tokens; see --token_dtype",
                  path_, bytes_.size(), token_bytes_);
    }
    take(bytes_, token_bytes_, false);
    format_.is_raw = true;
    format_.width_is_given = given_;
  }

  /// What a reader may not expect of how a text is read.
  std::string note() const {
    const std::string command = command_of_column(text_of(bytes_), path_);
    if (!command.empty()) {
      return fmt::format(
          "{} is a table, and is read as text, separators included; to train on one column alone, "
          "write its texts with `{}`, and give --data texts.jsonl",
          path_, command);
    }
    const std::optional<size_t> other = first_not_utf8(bytes_);
    if (!other) return "";
    return fmt::format(
        "{} is text, but not in UTF-8: byte {} is {:#04x}; its bytes are read as they are. If you "
        "know its encoding, `iconv -f ENCODING -t UTF-8 {} > utf8.txt` converts it",
        path_, *other, std::to_integer<int>(bytes_[*other]), shell_quoted(path_));
  }

  std::string path_;
  int token_bytes_;
  bool given_;
  TokenFormat format_;
  Bytes bytes_;
};

}  // namespace

TokenFormat read_token_format(const std::string& path, int token_bytes, bool given) {
  return FormatReader(path, token_bytes, given).read();
}

}  // namespace usp
