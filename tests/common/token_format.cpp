#include "files/token_format.h"

#include <functional>
#include <map>

#include "files/data.h"
#include "files/hf_config.h"
#include "files/safetensors.h"
#include "testing.h"
#include "train/model_config.h"

/// Files of tokens and of text as other programs write them, byte by byte; and what is neither.
namespace usp::test {
namespace {

/// A number's little-endian bytes.
std::string little(int64_t number, int width) {
  std::string bytes;
  for (int i = 0; i < width; ++i) bytes += static_cast<char>(uint64_t(number) >> (8 * i));
  return bytes;
}

std::string swapped(std::string bytes, int width) {
  for (size_t i = 0; i < bytes.size(); i += width) {
    std::reverse(bytes.begin() + int64_t(i), bytes.begin() + int64_t(i) + width);
  }
  return bytes;
}

std::string numbers(const std::vector<int64_t>& values, int width) {
  std::string bytes;
  for (int64_t value : values) bytes += little(value, width);
  return bytes;
}

/// Ids of which none is small, and the last ones need more than 16 bits if `wide`.
std::vector<int64_t> some_ids(bool wide = false) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 40; ++i) ids.push_back(300 + 37 * i);
  if (wide) ids.insert(ids.end(), {65536, 128255, 100000});
  return ids;
}

std::string header(int64_t magic, int64_t version, int64_t count) {
  std::string bytes = little(magic, 4) + little(version, 4) + little(count, 4);
  bytes.resize(1024, '\0');
  return bytes;
}

std::string numpy(const std::string& descr, const std::string& shape, const std::string& data,
                  int version = 1, const char* fortran_order = "False") {
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}", descr,
                                 fortran_order, shape);
  const size_t before = version == 1 ? 10 : 12;
  text.resize((before + text.size() + 64) / 64 * 64 - before, ' ');
  text.back() = '\n';
  return "\x93NUMPY" + little(version, 1) + little(0, 1) +
         little(int64_t(text.size()), version == 1 ? 2 : 4) + text + data;
}

/// Megatron's index of sequences of these lengths; documents begin with these sequences.
std::string megatron(int code, int width, const std::vector<int64_t>& lengths,
                     const std::vector<int64_t>& documents) {
  std::string bytes("MMIDIDX\0\0", 9);
  bytes += little(1, 8) + little(code, 1) + little(int64_t(lengths.size()), 8) +
           little(int64_t(documents.size()), 8) + numbers(lengths, 4);
  int64_t at = 0;
  for (int64_t length : lengths) {
    bytes += little(at, 8);
    at += length * width;
  }
  return bytes + numbers(documents, 8);
}

std::vector<int64_t> tokens_of(const TokenFile& file) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < file.size(); ++i) tokens.push_back(file[i]);
  return tokens;
}

constexpr int64_t kVocab = 200000;

void refused(const std::string& path, const std::vector<std::string>& parts, int token_bytes = 2,
             bool given = false, int64_t vocab_size = kVocab) {
  CAPTURE(path);
  check_throws<UsageError>([&] { TokenFile(path, token_bytes, vocab_size, given); }, {path});
  check_throws<UsageError>([&] { TokenFile(path, token_bytes, vocab_size, given); }, parts);
}

TEST_CASE(
    "tokens: headers of llm.c and modded-nanogpt say where tokens begin and how wide they are") {
  const TempDir dir;
  for (const char* name : {"a.bin", "a.tokens"}) {  // content decides
    const std::vector<int64_t> narrow = some_ids(), wide = some_ids(true);
    const auto write = [&](const std::string& bytes) { return dir.write(name, bytes); };
    const std::string two = header(20240520, 1, 40) + numbers(narrow, 2);
    const std::string four = header(20240801, 7, 43) + numbers(wide, 4);
    for (int token_bytes : {2, 4}) {
      REQUIRE(tokens_of(TokenFile(write(two), token_bytes, kVocab)) == narrow);
      REQUIRE(tokens_of(TokenFile(write(four), token_bytes, kVocab)) == wide);
    }
    REQUIRE(tokens_of(TokenFile(write(two), 2, kVocab, true)) == narrow);
    refused(write(two), {"2 bytes each", "--token_dtype uint32 says otherwise"}, 4, true);
    refused(write(four), {"4 bytes each", "--token_dtype uint16 says otherwise"}, 2, true);
    refused(write(four), {"token 128255 at position 41", "try --vocab_size 128256"}, 4, false,
            128255);
    refused(write(two + "ab"), {"damaged", "40 tokens of 2 bytes", "1104", "1106"});
    refused(write(two.substr(0, two.size() - 2)), {"damaged"});
    refused(write(two.substr(0, 600)), {"damaged"});
    refused(write(header(20240520, 1, -1)), {"damaged"});
    refused(write(header(20240520, 1, 0)), {"holds no token"});
    refused(write(header(20240520, 2, 40) + numbers(narrow, 2)), {"version 2", "known: 1"});
    refused(write(header(20240326, 3, 0) + numbers(wide, 4)), {"magic number 20240326"});
    refused(write(header(20250211, 1, 40) + numbers(narrow, 2)), {"magic number 20250211"});
  }
}

TEST_CASE("tokens: an array of NumPy's, of whole numbers of any width") {
  const TempDir dir;
  const auto write = [&](const std::string& bytes) { return dir.write("a.npy", bytes); };
  const std::vector<int64_t> ids = some_ids(), wide = some_ids(true), bytes = {0, 7, 127, 3};
  for (const auto& [descr, width] : std::map<std::string, int>{{"<u2", 2},
                                                               {"<i2", 2},
                                                               {"<u4", 4},
                                                               {"<i4", 4},
                                                               {"<u8", 8},
                                                               {"<i8", 8},
                                                               {"|u1", 1},
                                                               {"|i1", 1}}) {
    CAPTURE(descr);
    const std::vector<int64_t>& values = width == 1 ? bytes : width == 2 ? ids : wide;
    const std::string data = numbers(values, width), shape = fmt::format("({},)", values.size());
    for (int version : {1, 2}) {
      const TokenFile file(write(numpy(descr, shape, data, version)), 2, kVocab);
      REQUIRE(tokens_of(file) == values);
      REQUIRE(!file.is_text());
      REQUIRE(!file.has_documents());
    }
    refused(write(numpy(descr, "(7,)", data)), {"damaged"});
    refused(write(numpy(descr, "(-1,)", data)), {"damaged"});
    refused(write(numpy(descr, "(4611686018427387904, 4)", data)), {"damaged"});
    refused(write(numpy(descr, shape, data).substr(0, 40)), {"damaged"});
    if (descr[1] != 'i') continue;
    refused(write(numpy(descr, "(2,)", numbers({5, -3}, width))),
            {"token -3 at position 1 must be at least 0; give ids below"});
  }
  REQUIRE(tokens_of(TokenFile(write(numpy("<u2", "(4, 10)", numbers(ids, 2))), 2, kVocab)) == ids);
  REQUIRE(tokens_of(TokenFile(write(numpy("<u2", "(40,)", numbers(ids, 2), 1, "True")), 2,
                              kVocab)) == ids);
  for (const char* shape : {"(4, 10)", "(4,10)", "(4 ,10,)"}) {
    refused(write(numpy("<u2", shape, numbers(ids, 2), 1, "True")), {"order of Fortran"});
    REQUIRE(tokens_of(TokenFile(write(numpy("<u2", shape, numbers(ids, 2))), 2, kVocab)) == ids);
  }
  refused(write(numpy(">u2", "(40,)", swapped(numbers(ids, 2), 2))),
          {"big-endian", "astype('<u4')"});
  refused(write(numpy("<f4", "(20,)", numbers(ids, 2))), {"<f4", "whole numbers"});
  refused(write(numpy("|O", "(40,)", numbers(ids, 2))), {"whole numbers"});
  refused(write(numpy("<i8", "(1,)", little(int64_t{1} << 40, 8))), {"token 1099511627776"});
}

TEST_CASE("tokens: Megatron's index says what the tokens are and where documents begin") {
  const TempDir dir;
  const std::vector<int64_t> ids = some_ids();
  const std::vector<int64_t> lengths = {10, 0, 5, 25}, documents = {0, 3, 3, 4};
  for (const auto& [code, width] : std::map<int, int>{{8, 2}, {3, 2}, {4, 4}, {5, 8}}) {
    CAPTURE(code);
    const std::string bin = dir.write("m.bin", numbers(ids, width));
    const std::string idx = dir.write("m.idx", megatron(code, width, lengths, documents));
    for (const std::string& path : {bin, idx}) {
      const TokenFile file(path, 2, kVocab);
      REQUIRE(tokens_of(file) == ids);
      REQUIRE(file.has_documents());
      std::vector<int64_t> begins;
      for (int64_t i = 0; i < file.size(); ++i) {
        if (file.begins_document(i)) begins.push_back(i);
      }
      REQUIRE(begins == std::vector<int64_t>{0, 15});
    }
  }
  const std::string bin = dir.write("m.bin", numbers(ids, 2));
  const TokenFile with(bin, 2, kVocab);
  const auto index = [&](const std::string& bytes) {
    dir.write("m.idx", bytes);
    return bin;
  };
  const std::string good = megatron(8, 2, lengths, documents);
  for (size_t cut = 0; cut < good.size(); ++cut) refused(index(good.substr(0, cut)), {"m.idx"});
  refused(index(megatron(8, 2, {10, 0, 5, 24}, documents)),
          {"damaged or of other tokens", "39 tokens"});
  refused(index(megatron(4, 4, lengths, documents)), {"40 tokens of 4 bytes", "80 bytes"});
  refused(index(megatron(7, 4, lengths, documents)), {"dtype has the number 7"});
  refused(index(megatron(8, 4, lengths, documents)), {"sequence 1 begins at byte 40"});
  refused(index(megatron(8, 2, lengths, {0, 5})), {"document 1 begins with sequence 5"});
  refused(index(megatron(8, 2, lengths, {0, 3, 1, 4})), {"document 2"});
  refused(index(megatron(8, 2, lengths, {0, 3})), {"last document ends"});
  refused(index(megatron(8, 2, {50, -10}, {0, 2})), {"sequence 1"});
  refused(index("TNTIDX\0\0 of the first release"), {"no index of Megatron's"});
  refused(index("version https://git-lfs.github.com/spec/v1\n"),
          {"Git LFS pointer", "git lfs pull"});
  index(good);
  refused(bin, {"2 bytes each"}, 4, true);
  dir.write("m.idx", megatron(8, 2, {40}, {0, 1}));
  REQUIRE(TokenFile(bin, 2, kVocab).sha256() != with.sha256());
}

TEST_CASE(
    "tokens: a sample's documents begin where the file says, at its start, and where the data "
    "wrap") {
  const TempDir dir;
  const std::string bin = dir.write("m.bin", numbers(some_ids(), 2));
  dir.write("m.idx", megatron(8, 2, {10, 5, 25}, {0, 1, 2, 3}));
  const TokenFile file(bin, 2, kVocab);
  const Dataset dataset(file, 8, 0.4, DataOrder::sequential, 1);  // 24 for training, 16 not
  REQUIRE(dataset.document_begins(Split::train, 0, 2) ==
          std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 7});
  REQUIRE(dataset.document_begins(Split::validation, 0, 1) == std::vector<int32_t>(8, 0));
  const Dataset shifted(file, 9, 0.4, DataOrder::sequential, 1);
  // Tokens 18 to 23, then 0 again.
  REQUIRE(shifted.document_begins(Split::train, 2, 1) ==
          std::vector<int32_t>{0, 0, 0, 0, 0, 0, 6, 6, 6});
  const TokenFile text(dir.write("text", "no documents that the file itself would know"), 2, 256);
  REQUIRE(
      Dataset(text, 8, 0, DataOrder::sequential, 1).document_begins(Split::train, 0, 2).empty());
}

TEST_CASE("text: of lines of JSON the texts are taken, each ended by a byte of 0") {
  const TempDir dir;
  const std::string lines =
      "{\"text\": \"One \\u00e9\\n\", \"id\": 7}\r\n\n  {\"meta\": {\"text\": 3}, \"text\": "
      "\"two\"}\n"
      "{\"text\": \"\"}";
  const std::string expected("One \xC3\xA9\n\0two\0\0", 13);
  for (const char* name : {"a.jsonl", "a.json", "a.txt", "a.bin"}) {
    const TokenFile file(dir.write(name, lines), 2, 256);
    std::string text;
    for (int64_t token : tokens_of(file)) text += static_cast<char>(token);
    REQUIRE(text == expected);
    REQUIRE(file.is_text());
    REQUIRE(file.begins_document(8));
    REQUIRE(!file.begins_document(7));
  }
  const TokenFile marked(dir.write("a.txt", "\xEF\xBB\xBF" + lines), 2, 256);  // as Windows writes
  REQUIRE(tokens_of(marked) == tokens_of(TokenFile(dir.write("b.txt", lines), 2, 256)));
  const auto write = [&](const std::string& text) { return dir.write("a b.jsonl", text); };
  const std::string no_text = "line 5 has no string as its \"text\"";
  refused(write(lines + "\n{\"content\": \"x\", \"id\": 2}"),
          {no_text, "\"content\", \"id\"", "jq -c '{text: .KEY}' '", "a b.jsonl'"});
  refused(write(lines + "\n{\"text\": 3}"), {no_text});
  refused(write("{\"text\": \"x\"}\n[1]"), {"line 2", "no keys"});
  refused(write("{\"text\": \"x\"}\n{\"text\": \"y\""), {"line 2 is none"});
  refused(write("{\"text\": \"\\ud800\"}"), {"first line is no JSON object"});
  refused(write("text and no JSON"), {"called lines of JSON", "{\"text\": \"...\"}"});
  for (const char* line : {"[\"x\", 1]\n", "\"x\"\n"}) {
    refused(dir.write("a.json", std::string(line) + line), {"called lines of JSON"});
    REQUIRE(TokenFile(dir.write("a.txt", std::string(line) + line), 2, 256).is_text());
  }
  refused(write(lines), {"is text", "--token_dtype uint16", "leave that flag out"}, 2, true);
  for (const char* name : {"a.json", "a.txt"}) {
    refused(dir.write(name, "[\n{\"text\": \"x\"},\n{\"text\": \"y\"}\n]\n"),
            {"one JSON document", "jq -c '.[]'"});
    refused(dir.write(name, "{\n\"text\": \"x\"\n}\n"), {"one JSON document"});
    refused(dir.write(name, "{\n\"text\": \"x\"\n}\n{\n\"text\": \"y\"\n}\n"),
            {"JSON objects that take several lines each", "jq -c '.'"});
    REQUIRE(TokenFile(dir.write(name, "{ not JSON }\n"), 2, 256).is_text());
    REQUIRE(TokenFile(dir.write(name, "{} is an empty set {}"), 2, 256).is_text());
    REQUIRE(TokenFile(dir.write(name, "[A stage direction.]\n"), 2, 256).is_text());
  }
}

TEST_CASE("tokens without a header: the name says so, or --token_dtype; another width shows") {
  const TempDir dir;
  const std::vector<int64_t> ids = some_ids();
  for (const char* name : {"a.bin", "a.dat", "a"}) {
    const bool named = std::string(name) == "a.bin";
    const auto write = [&](const std::string& bytes) { return dir.write(name, bytes); };
    for (bool given : {!named, true}) {
      REQUIRE(tokens_of(TokenFile(write(numbers(ids, 2)), 2, kVocab, given)) == ids);
      REQUIRE(tokens_of(TokenFile(write(numbers(some_ids(true), 4)), 4, kVocab, given)) ==
              some_ids(true));
      refused(write(numbers(ids, 4)), {"every second number", "32 bits", "--token_dtype uint32"}, 2,
              given);
      refused(write(numbers(some_ids(true), 4)), {"32 bits", "--token_dtype uint32"}, 2, given);
      refused(write(numbers(ids, 8)), {"64 bits", "numpy.fromfile", "'<i8'"}, 2, given);
      refused(write(numbers(ids, 8)), {"64 bits", "numpy.fromfile", "'<i8'"}, 4, given);
      refused(write(numbers(ids, 2)), {"--token_dtype uint16"}, 4, given);
      refused(write(swapped(numbers(ids, 4), 4)), {"big-endian", "'>u4'"}, 2, given);
      std::vector<int64_t> small;
      for (int64_t i = 0; i < 40; ++i) small.push_back(1 + 5 * i);
      refused(write(swapped(numbers(small, 2), 2)), {"big-endian", "'>u2'"}, 2, given);
      for (int64_t i = 0; i < 40; ++i) small.push_back(300 + 37 * i);
      refused(write(swapped(numbers(small, 2), 2)),
              {"when their bytes are swapped", "big-endian", "'>u2'"}, 2, given, 2000);
      refused(write(numbers(small, 2)), {"--vocab_size 1744"}, 2, given, 1500);
    }
    refused(write(std::string(40, 'x')), {"is text", "--token_dtype uint16"}, 2, true);
    refused(write(std::string(4000, '\0')), {"its ids are all 0", "get the file again"}, 2, true);
  }
  // Ids that begin as a text in UTF-16 would, and go on as none.
  const std::string marked = numbers({0xFEFF, 5, 700, 0xDC00, 800, 31, 900, 1000}, 2);
  REQUIRE(TokenFile(dir.write("a.bin", marked + marked + marked), 2, kVocab).size() == 24);
  // Text, whatever its name; what is short may be anything.
  REQUIRE(TokenFile(dir.write("a.bin", "A text of more than thirty-two bytes."), 2, 256).is_text());
  REQUIRE(TokenFile(dir.write("a.bin", "abcd"), 2, kVocab).size() == 2);
  REQUIRE(TokenFile(dir.write("old", "caf\xE9, " + std::string(600, 'x')), 2, 256).is_text());
  std::string many;
  for (int i = 0; i < 1000; ++i) many += little(40000 + 13 * i, 2);
  refused(dir.write("a.tokens", many), {"neither text", "--token_dtype uint16 or uint32"});
  std::string of_bytes;  // ids
  for (int i = 0; i < 300; ++i) of_bytes += std::string(1, static_cast<char>('a' + i % 26)) + '\0';
  REQUIRE(TokenFile(dir.write("a.bin", of_bytes), 2, kVocab).size() == 300);
}

/// So many bytes, each of any value.
std::string random_bytes(int64_t count, int64_t lowest = 0, int64_t highest = 255) {
  Random random(5);
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) bytes += static_cast<char>(random.integer(lowest, highest));
  return bytes;
}

/// In UTF-16, each character of the Basic Multilingual Plane.
std::string utf16(const std::vector<int>& units, bool little_endian) {
  std::string bytes;
  for (int unit : units) {
    const char low = static_cast<char>(unit), high = static_cast<char>(unit >> 8);
    bytes += little_endian ? std::string{low, high} : std::string{high, low};
  }
  return bytes;
}

std::string repeated(const std::string& text, int times) {
  std::string bytes;
  for (int i = 0; i < times; ++i) bytes += text;
  return bytes;
}

TEST_CASE("what has more control characters than text is refused as text, wherever they are") {
  const TempDir dir;
  const auto none = [&](const std::string& bytes, const std::string& said) {
    refused(dir.write("a file.txt", bytes), {said});
  };
  for (int64_t size : {64, 400, 5000}) none(random_bytes(size), "neither text");
  none(random_bytes(400, 0, 64), "neither text");  // ids of characters, which are also UTF-8
  const std::string words = repeated("A text that goes on, word by word.\n", 6000);
  none(words + std::string(words.size(), '\0'),
       ": bytes 165410 to 230945 are not text; give text, or --token_dtype");  // the rest has not
                                                                               // arrived
  none(words + random_bytes(100000), "neither text");
  // Chinese, with its full stop and ends of lines; Russian; English.
  const std::vector<int> chinese = {0x6211, 0x4EEC, 0x8BAD, 0x7EC3, 0x6A21, 0x578B, 0xFF0C, 0x8FD9,
                                    0x662F, 0x6587, 0x672C, 0x3002, 0x5B83, 0x5F88, 0x957F, 0x000A};
  const std::vector<int> russian = {0x0422, 0x0435, 0x043A, 0x0441, 0x0442, 0x0020, 0x043E, 0x043D};
  const std::vector<int> english = {'T', 'e', 'x', 't', ' ', 'i', 't', ' ', 'i', 's', ' '};
  for (const auto& units : {chinese, russian, english}) {
    for (const bool little : {true, false}) {
      const std::string text = repeated(utf16(units, little), 12);
      none(text,
           fmt::format("is text in UTF-16 without a byte order mark; convert it with `iconv -f "
                       "UTF-16{} -t UTF-8 '{}' > utf8.txt`",
                       little ? "LE" : "BE", dir.file("a file.txt")));
    }
  }
}

TEST_CASE(
    "text of any language and encoding is text, and its encoding is said if it is not UTF-8") {
  const TempDir dir;
  const auto note = [&](const std::string& bytes) {
    const TokenFile file(dir.write("a file.txt", bytes), 2, 256);
    REQUIRE(file.is_text());
    REQUIRE(file.size() == std::ssize(bytes));
    return file.note();
  };
  for (const char* text :
       {"\xE6\x88\x91\xE4\xBB\xAC\xE8\xAE\xAD\xE7\xBB\x83\xE3\x80\x82\n",  // Chinese
        "\xD0\xA2\xD0\xB5\xD0\xBA\xD1\x81\xD1\x82 ",                       // Russian
        "\xF0\x9F\x98\x80 ", "\tif (a) {\r\n\t\treturn \"b\";\f\n", "\x1B[31mred\x1B[0m\n",
        "ISO-2022: \x1B$B4A;z\x1B(B\n", "Word by word, and a bell: \a\n"}) {
    CAPTURE(text);
    REQUIRE(note(repeated(text, 40)).empty());
  }
  REQUIRE(note(repeated("A few words of a document.", 9) + '\0' + "Another").empty());
  REQUIRE(note(repeated("A text of DOS.\r\n", 9) + '\x1A').empty());
  const std::string latin = note(repeated("Le petit caf\xE9 d'\xE9t\xE9.\n", 40));
  for (const std::string& part :
       {std::string("not in UTF-8: byte 12 is 0xe9;"),
        "`iconv -f ENCODING -t UTF-8 '" + dir.file("a file.txt") + "' > utf8.txt`"}) {
    CAPTURE(latin);
    REQUIRE(latin.find(part) != latin.npos);
  }
  for (const char* text : {"\xCE\xD2\xC3\xC7\xD1\xB5\xC1\xB7\xA1\xA3",           // GB18030
                           "\x8A\xBF\x8E\x9A\x82\xCC\x95\xB6\x81\x42\n",         // Shift-JIS
                           "\xF4\xC5\xCB\xD3\xD4 ", "\xD2\xE5\xEA\xF1\xF2 "}) {  // KOI8-R, 1251
    REQUIRE(note(repeated(text, 40)).find("not in UTF-8") != std::string::npos);
  }
}

TEST_CASE("a table is text, and the command for one column of it is said") {
  const TempDir dir;
  const auto note = [&](const char* name, const std::string& bytes) {
    return TokenFile(dir.write(name, bytes), 2, 256).note();
  };
  const std::string rows = "id,text\n1,\"A word, and\nanother\"\n2,Some more words of it\n";
  REQUIRE(note("a.csv", rows).find("is a table, and is read as text") != std::string::npos);
  REQUIRE(note("a.csv", rows)
              .find("pandas.read_csv(sys.argv[1], dtype=str, keep_default_na=False).iloc[:, 1]") !=
          std::string::npos);
  REQUIRE(note("a.csv", "id;text\n1;\"A word; and\nanother, too\"\n2;Some more words of it\n")
              .find("pandas.read_csv(sys.argv[1], sep=';', dtype=str, keep_default_na=False)"
                    ".iloc[:, 1]") != std::string::npos);
  REQUIRE(note("a.c",
               "for (i = 0; i < 9; ++i) {\nfor (j = 0; j < 9; ++j) {\nfor (k = 0; k < 9; "
               "++k) {\nfor (l = 0; l < 9; ++l) {\n}}}}\n")
              .empty());
  REQUIRE(note("a.txt", rows).empty());  // two columns may be lines that have a comma each
  const std::string tabs = "text\tn\tm\nlonger words\t1\t2\nand more\t3\t4\nof it\t5\t6\nx\t7\t8\n";
  REQUIRE(
      note("a.txt", tabs)
          .find("pandas.read_table(sys.argv[1], dtype=str, keep_default_na=False).iloc[:, 0]") !=
      std::string::npos);
  REQUIRE(
      note("a.txt", "Words, and more words, of prose.\nThey go on.\n\nAnd on, and on.\n").empty());
}

TEST_CASE("ids of 8 bits in a file that its name alone calls ids are not read as ids of 16") {
  const TempDir dir;
  const auto write = [&](const std::string& bytes) { return dir.write("a.bin", bytes); };
  for (const std::string& bytes :
       {random_bytes(400), random_bytes(100000), random_bytes(2000, 0, 64), random_bytes(600, 0, 3),
        random_bytes(3000, 100, 250)}) {
    refused(write(bytes),
            {"distributed alike", "its ids have 8 bits", "'u1'", "--token_dtype uint16"});
    REQUIRE(TokenFile(write(bytes), 2, kVocab, /*given=*/true).size() == std::ssize(bytes) / 2);
  }
  Random random(7);
  for (const int64_t vocab_size : {8, 256, 300, 5000, 32000, 50257, 65536}) {
    for (const int64_t count : {100, 192, 400, 20000}) {
      std::vector<int64_t> ids;  // a few are frequent, as in any text
      for (int64_t i = 0; i < count; ++i) {
        const double share = double(random.integer(1, 1 << 20)) / double(1 << 20);
        ids.push_back(int64_t(double(vocab_size - 1) * share * share * share));
      }
      CAPTURE(vocab_size, count);
      REQUIRE(TokenFile(write(numbers(ids, 2)), 2, kVocab).size() == count);
    }
  }
}

TEST_CASE("ids of 16 bits in big-endian order show under a vocabulary that has them all") {
  constexpr int64_t kAll = 65536;
  const TempDir dir;
  Random random(11);
  for (const int64_t vocab_size : {int64_t{3000}, int64_t{50257}, kAll}) {
    for (const int64_t count : {400, 20000}) {
      std::string little, big, uniform;
      for (int64_t i = 0; i < count; ++i) {
        const double share = double(random.integer(1, 1 << 20)) / double(1 << 20);
        const auto id = int64_t(double(vocab_size - 1) * share * share * share);
        little += {char(id), char(id >> 8)};
        big += {char(id >> 8), char(id)};
        const int64_t any = random.integer(0, vocab_size - 1);
        uniform += {char(any), char(any >> 8)};
      }
      CAPTURE(vocab_size, count);
      const std::string path = dir.write("big.bin", big);
      check_throws<UsageError>(
          [&] { TokenFile(path, 2, kAll); },
          {path, "upper bytes", "big-endian", "'>u2'", "or give --token_dtype uint16"});
      REQUIRE(TokenFile(path, 2, kAll, /*given=*/true).size() == count);
      REQUIRE(TokenFile(dir.write("little.bin", little), 2, kAll).size() == count);
      if (vocab_size == kAll) continue;  // whose bytes are alike
      REQUIRE(TokenFile(dir.write("uniform.bin", uniform), 2, kAll).size() == count);
    }
  }
}

/// An archive of one file, as the first tar wrote it.
std::string old_tar() {
  std::string bytes = "a.txt";
  bytes.resize(512, '\0');
  const auto set = [&](size_t at, const std::string& text) {
    bytes.replace(at, text.size(), text);
  };
  set(100, "0000644");
  set(124, "00000000007");
  set(148, "        ");
  int sum = 0;
  for (char c : bytes) sum += c;
  set(148, fmt::format("{:06o}", sum) + '\0');
  return bytes + std::string(8000, 'x');
}

/// The beginning of a file of each kind that is no data, and a part of what is said of it.
const std::map<std::string, std::pair<std::string, std::string>>& other_kinds() {
  using namespace std::string_literals;
  static const std::string tar = std::string(257, 'x') + "ustar\0"s;
  static const std::map<std::string, std::pair<std::string, std::string>> kinds = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
       {"Git LFS pointer", "git lfs pull --include="}},
      {"\xEF\xBB\xBFversion https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
       {"Git LFS pointer", "git lfs pull --include="}},
      {"# xet version 0\nfilesize = 5\nhash = '0'\n", {"Xet pointer", "git xet materialize"}},
      {"outs:\n- md5: 0123456789abcdef0123456789abcdef\n  size: 5\n  path: a.txt\n",
       {"DVC pointer", "dvc pull"}},
      {"md5: 0123456789abcdef0123456789abcdef\nouts:\n- path: a.txt\n",
       {"DVC pointer", "dvc pull"}},
      {"/annex/objects/SHA256-s5--0\n", {"git-annex", "git annex get"}},
      {"<!DOCTYPE html>\n<html>", {"web page", "/resolve/"}},
      {" \n<HTML lang=en>", {"web page", "/resolve/"}},
      {"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>",
       {"web page", "/resolve/"}},
      {"<?xml version=\"1.0\"?>\n<!DOCTYPE html PUBLIC>\n<html>", {"web page", "/resolve/"}},
      {"<!-- saved -->\n<!-- twice -->\n<html>", {"web page", "/resolve/"}},
      {"<head><title>404</title></head>", {"web page", "/resolve/"}},
      {"\x1F\x8B\x08\0\0\0"s, {"gzip", "gunzip -k"}},
      {"BZh91AY&SY", {"bzip2", "bunzip2 -k"}},
      {"\xFD\x37zXZ\0\0"s, {"xz", "unxz -k"}},
      {"\x28\xB5\x2F\xFD\4", {"zstd", "zstd -d"}},
      {"\x04\x22\x4D\x18\4", {"lz4", "lz4 -d"}},
      {"7z\xBC\xAF\x27\x1C", {"7z", "7z x"}},
      {"Rar!\x1A\x07\1", {"RAR", "unrar x"}},
      {tar, {"tar archive", "tar xf"}},
      {old_tar(), {"tar archive", "tar xf"}},
      {"070701" + std::string(88, '0') + "00000006" + std::string(8, '0') + "a.txt\0"s + "A text.",
       {"cpio", "cpio -id <"}},
      {"!<arch>\na.txt/", {"an archive of ar", "ar x"}},
      {"\x1E{\"text\": \"a\"}\n", {"sequence of JSON texts", "tr -d '\\036' <"}},
      {"PK\3\4........words.txt", {"zip archive", "unzip"}},
      {"PK\3\4........archive/data.pkl", {"PyTorch", "safetensors"}},
      {"PK\3\4........ids.npy", {"NumPy archive", "numpy.save('tokens.npy'"}},
      {"PK\3\4........[Content_Types].xml", {"office", "libreoffice"}},
      {"PAR1\x15\x04", {"Parquet", "pandas.read_parquet"}},
      {"ARROW1\0\0"s, {"Arrow", "read_feather"}},
      {"\xFF\xFF\xFF\xFF\x08\0\0\0xxxxxxxxxxxx"s,
       {"stream of Arrow", "datasets.Dataset.from_file"}},
      {"ORC\1", {"ORC", "read_orc"}},
      {"Obj\1\4", {"Avro", "avro-tools"}},
      {"\x89HDF\r\n\x1A\n", {"HDF5", "h5py"}},
      {"SQLite format 3\0"s, {"SQLite", "sqlite3"}},
      {"GGUF\3\0\0\0"s, {"llama.cpp", "safetensors"}},
      {"\x80\x04\x95\x10]\x94.", {"pickle", "numpy.save"}},
      {"\x80\x02}q\1.", {"pickle", "numpy.save"}},
      {"(lp0\nI1\naI2\na.", {"pickle", "numpy.save"}},
      {"(dp0\nVtext\np1\nS'a b'\np2\nsVn\np3\nF1.5\nsVm\np4\nL12L\ns.\n", {"pickle", "numpy.save"}},
      {"cnumpy.core.multiarray\n_reconstruct\np0\n(cnumpy\nndarray\np1\n(I0\ntp2\nS'b'"
       "\np3\ntp4\nRp5\n.",
       {"pickle", "numpy.save"}},
      {"\x80\x02\x8A\x0Al\xFC\x9C\x46\xF9\x20\x6A\xA8\x50\x19.",
       {"old file of PyTorch", "safetensors"}},
      {"%PDF-1.7\n", {"PDF", "pdftotext"}},
      {"\x89PNG\r\n\x1A\n", {"picture", "give text"}},
      {"GIF89a\x10\0\x10\0"s, {"picture", "give text"}},
      {"RIFF\x24\x08\0\0WAVEfmt \x10\0\0\0"s, {"recording", "give text"}},
      {"OggS\0\2"s, {"recording", "give text"}},
      {"fLaC\0\0\0\x22"s, {"recording", "give text"}},
      {"ID3\3\0\0\0\0\1"s, {"recording", "give text"}},
      {"\0\0\0\x18"
       "ftypmp42"s,
       {"film", "give text"}},
      {"FEA1\0\0\0\0"s, {"Feather", "read_feather"}},
      {"\x7F"
       "ELF\2",
       {"program", "give text"}},
      {"\xFF\xFE"
       "a\0b\0c\0d\0e\0f\0"s,
       {"UTF-16", "iconv -f UTF-16 -t UTF-8"}},
      {"\xFE\xFF\0a\0b\0c\0d\0e\0f"s, {"UTF-16", "iconv -f UTF-16 -t UTF-8"}},
      {"\xFF\xFE\x2D\x4E\x87\x65\n\0"s, {"UTF-16", "iconv -f UTF-16 -t UTF-8"}},
      {"\xFE\xFF\x4E\x2D\x65\x87\xD8\x3D\xDE\0"s, {"UTF-16", "iconv -f UTF-16 -t UTF-8"}},
      {"\3\0\0\0\0\0\0\0crc.abccrc."s, {"TensorFlow's records", "TFRecordDataset"}},
      {"\xFF\xFE\0\0a\0\0\0"s, {"UTF-32", "iconv -f UTF-32"}},
      {"\x10\0\0\0\0\0\0\0{\"a\":0}         xx"s, {"weights in safetensors", "--model"}},
  };
  return kinds;
}

TEST_CASE("data of another kind are refused by what they are, with the command that helps") {
  const TempDir dir;
  for (const auto& [bytes, said] : other_kinds()) {
    for (const char* name : {"a.txt", "a.bin", "a file", "a.jsonl"}) {
      CAPTURE(name, said.first);
      refused(dir.write(name, bytes), {said.first, said.second});
      refused(dir.write(name, bytes), {said.first}, 2, /*given=*/true);
    }
  }
  const std::string path = dir.write("it's a file.gz", "\x1F\x8B\x08 and more");
  refused(path, {"gunzip -k '" + dir.file("it'\"'\"'s a file.gz") + "'"});
  REQUIRE(TokenFile(dir.write("a.html", "<!DOCTYPE html>\n<html>is text here</html>"), 2, 256)
              .is_text());
  for (const char* text :
       {"<!-- A comment -->\n# A page of Markdown that speaks of <html> and <head>.\n",
        "<?xml version=\"1.0\"?>\n<book><head>A book of words</head></book>\n",
        "<header>that is none of a page</header> and goes on\n",
        "<!-- a comment without its end\n",
        "070701 is a number, and so are 070702 and those that follow it, as everyone can see who "
        "reads "
        "on for more than one line of this.\n",
        "outs:\n- path: a.txt, as md5: says\n",
        "md5: of this text is not in it\nouts: of it\n",
        "# xet versions of the past\n",
        "!<arch> is what it begins with\n",
        "ORC is a format\n",
        "ID3 tags name a song\n",
        "RIFF and RIFX\n",
        "GIF89a is older than GIF87b\n",
        "PAR1 of 18 holes\n",
        "OggS and eggs\n",
        "fLaC, spelled so\n",
        "GGUF files\n",
        "BZh, of bzip2\n",
        "ARROW1 of two\n",
        "One ftyp in it\n",
        "ORC caf\xE9 in Latin-1\n"}) {
    CAPTURE(text);
    REQUIRE(TokenFile(dir.write("a.txt", text + std::string(600, 'x')), 2, 256).is_text());
  }
}

TEST_CASE("model files of another kind are refused by what they are, with the command that helps") {
  for (const auto& [bytes, said] : other_kinds()) {
    if (said.first == "weights in safetensors") continue;
    CAPTURE(said.first);
    const TempDir dir;
    const std::string path = dir.write("model.safetensors", bytes);
    const std::vector<std::string> parts = {path, said.first, "not safetensors", said.second};
    check_throws<Error>([&] { SafetensorsFile{path}; }, parts);
    check_throws<UsageError>([&, text = bytes] { parse_hf_config(text, "DIR/config.json"); },
                             {"DIR/config.json is", said.first, "not JSON", said.second});
    check_throws<Error>([&, text = bytes] { parse_safetensors_index(text, "DIR/index"); },
                        {"DIR/index is", said.first, "not JSON"});
    std::filesystem::remove(path);
    dir.write("pytorch_model.bin", bytes);
    dir.write("README.md", "A text beside it.");
    check_throws<Error>([&] { TensorCollection(dir.file("")); },
                        {"holds neither", "pytorch_model.bin is", said.first, said.second});
    check_throws<UsageError>([&] { read_hf_config(dir.file("")); },
                             {"no config.json", "pytorch_model.bin is", said.first});
    ModelConfig model;
    model.model = dir.file("pytorch_model.bin");
    const Args args("A test.");
    check_throws<UsageError>([&] { model.validate(args); },
                             {"model=" + model.model, said.first, "not a model's directory"});
  }
  const TempDir dir;
  const std::string weights("\x10\0\0\0\0\0\0\0{\"a\":0}         xx", 26);
  dir.write("model-00001-of-00002.safetensors", weights);
  check_throws<Error>([&] { TensorCollection(dir.file("")); },
                      {"model-00001-of-00002.safetensors holds weights", "get the index too"});
  dir.write("adapter_model.safetensors", weights);
  check_throws<UsageError>([&] { read_hf_config(dir.file("")); }, {"adapter", "merge_and_unload"});
  dir.write("config.json", "{}");
  dir.write("adapter_config.json", "{}");
  check_throws<UsageError>([&] { read_hf_config(dir.file("")); },
                           {"adapter_config.json", "changes the weights", "merge_and_unload"});
  const std::string path = dir.write("model.safetensors", "{\"error\": \"Repository not found\"}");
  check_throws<Error>([&] { SafetensorsFile{path}; }, {"is text", "Repository not found"});
  ModelConfig model;
  model.model = path;
  check_throws<UsageError>([&] { model.validate(Args("A test.")); },
                           {"is a file; give the directory", "config.json"});
}

}  // namespace
}  // namespace usp::test
