#include "files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/json_reader.h"
#include "testing.h"
#include "train/pretrained.h"

/// Reads what Hugging Face's library wrote, writes the same bytes, and refuses what is damaged.
namespace usp::test {
namespace {

const std::string kFixtures = USP_TEST_FIXTURES "/safetensors/";

/// A file of this header and these data bytes, the length before them.
std::string file_of(const std::string& header, const std::string& data = "") {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + data;
}

/// A header entry.
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

void check_refused(const std::string& bytes, const std::vector<std::string>& parts) {
  const TempDir dir;
  const std::string path = dir.write("bad.safetensors", bytes);
  check_throws<Error>([&] { SafetensorsFile{path}; }, {path});
  check_throws<Error>([&] { SafetensorsFile{path}; }, parts);
}

Values read_all(const StoredTensor& tensor) {
  Values values(tensor.numel());
  tensor.read(0, values);
  return values;
}

TEST_CASE("safetensors: what Hugging Face's library wrote is read, every dtype") {
  const SafetensorsFile file(kFixtures + "every_dtype.safetensors");
  REQUIRE(file.tensors().size() == 12);
  REQUIRE(file.metadata().at("format") == "pt");
  for (const StoredTensor& tensor : file.tensors()) {
    INFO(tensor.name);
    REQUIRE(tensor.shape == std::vector<int64_t>{3, 5});
    REQUIRE(std::ssize(tensor.bytes) == 15 * bytes_of(tensor.type));
    if (tensor.name == "bool.weight" || tensor.name == "int64.weight") {
      check_throws<Error>([&] { read_all(tensor); }, {tensor.name, "cannot be read as numbers"});
      continue;
    }
    const bool floating = tensor.name.find("float") != std::string::npos;
    const bool is_unsigned = tensor.name.starts_with("u");
    Values expected(15);
    for (int i = 0; i < 15; ++i) expected[i] = is_unsigned ? i : floating ? (i - 3) / 4.0 : i - 3;
    REQUIRE(read_all(tensor) == expected);
    Values part(4);
    tensor.read(6, part);
    REQUIRE(part == Values(expected.begin() + 6, expected.begin() + 10));
    check_throws<Error>([&] { tensor.read(12, part); }, {"elements [12, +4)"});
  }
}

TEST_CASE("safetensors: half precision, all kinds of values") {
  const std::vector<std::pair<uint16_t, double>> cases = {
      {0x0000, 0},    {0x0001, 0x1p-24},      {0x03FF, 1023 * 0x1p-24}, {0x0400, 0x1p-14},
      {0x3C00, 1},    {0x3C01, 1.0009765625}, {0x7BFF, 65504},          {0xC000, -2},
      {0x7C00, kInf}, {0xFC00, -kInf}};
  std::string data;
  for (const auto& [bits, value] : cases) data.append(reinterpret_cast<const char*>(&bits), 2);
  const std::string bytes = file_of("{" + entry("h", "F16", "[10]", "[0,20]") + "}", data);
  const SafetensorsFile file("memory", std::as_bytes(std::span(bytes)));
  const Values values = read_all(file.get("h"));
  for (size_t i = 0; i < cases.size(); ++i) REQUIRE(values[i] == cases[i].second);
}

TEST_CASE("safetensors: files written here have the bytes that Hugging Face's library writes") {
  const OnDevice cpu;
  const TempDir dir;
  const auto counted = [](const Shape& shape, DType dtype) {
    Values values(shape.numel());
    for (size_t i = 0; i < values.size(); ++i) values[i] = (double(i) - 3) / 4;
    return Tensor::from_host(values, shape, dtype);
  };
  std::vector<TensorToStore> tensors;
  tensors.push_back(to_store("odd.bytes", counted({1}, DType::bf16)));
  tensors.push_back(to_store("model.norm.weight", counted({7}, DType::f32)));
  tensors.push_back(to_store("caf\u00e9", counted({5}, DType::bf16)));
  tensors.push_back(to_store("lm_head.weight", counted({6}, DType::f32), {2, 3}));
  tensors.push_back(to_store("empty", counted({0, 4}, DType::f32)));
  tensors.push_back(to_store("a.scalar", counted({}, DType::f64)));
  write_safetensors(dir.file("written"), tensors, {{"format", "pt"}});
  REQUIRE(read_file(dir.file("written")) == read_file(kFixtures + "written.safetensors"));
  write_safetensors(dir.file("nothing"), {});
  REQUIRE(read_file(dir.file("nothing")) == read_file(kFixtures + "nothing.safetensors"));
}

TEST_CASE("safetensors: what is written in pieces, or strided, is read again") {
  const OnDevice cpu;
  const TempDir dir;
  Random random(1);
  const Tensor large = random.tensor({1000, 700}), strided = random.tensor({4, 6}).narrow(1, 1, 3);
  const auto pieces = [&](const TensorToStore::Sink& sink) {
    const auto* bytes = static_cast<const std::byte*>(large.address());
    for (int64_t at = 0; at < large.bytes();) {
      const int64_t size = std::min<int64_t>(random.integer(1, 300'000), large.bytes() - at);
      sink({bytes + at, static_cast<size_t>(size)});
      at += size;
    }
  };
  write_safetensors(dir.file("f"), {{"large", ElementType::F64, {1000, 700}, pieces},
                                    to_store("strided", strided)});
  const SafetensorsFile file(dir.file("f"));
  REQUIRE(read_all(file.get("large")) == large.items());
  REQUIRE(read_all(file.get("strided")) == strided.items());
  REQUIRE(file.find("another") == nullptr);
  check_throws<Error>([&] { file.get("another"); }, {dir.file("f"), "has no tensor \"another\""});
}

TEST_CASE("safetensors: a writer refuses what no reader would take") {
  const OnDevice cpu;
  const TempDir dir;
  const Tensor x = Tensor::zeros({2}, DType::f32);
  const auto write = [&](std::vector<TensorToStore> tensors) {
    return [=, &dir] { write_safetensors(dir.file("f"), tensors); };
  };
  check_throws<Error>(write({to_store("x", x), to_store("x", x)}), {"x", "twice"});
  check_throws<Error>(write({to_store("__metadata__", x)}), {"__metadata__"});
  check_throws<Error>(write({to_store("x", x, {3})}), {"8 bytes were produced, 12 announced"});
  check_throws<Error>([&] { write_safetensors(dir.file("no/f"), {}); }, {"no/f", "No such file"});
}

TEST_CASE("safetensors: header lengths and headers that cannot be") {
  const std::string good = file_of("{" + entry("a", "F32", "[2]", "[0,8]") + "}", "12345678");
  REQUIRE(SafetensorsFile("good", std::as_bytes(std::span(good))).tensors().size() == 1);
  check_refused("", {"byte 0", "0 bytes"});
  check_refused("1234567", {"7 bytes"});
  check_refused(std::string(8, '\0'), {"byte 8", "does not begin"});
  check_refused(std::string("\x09\0\0\0\0\0\0\0{}", 10), {"9 bytes", "beyond the end", "at 10"});
  check_refused(std::string(8, '\xFF'), {"18446744073709551615", "limit"});
  check_refused(std::string("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F{}", 10), {"limit of 100000000"});
  check_refused(file_of("[]"), {"byte 8"});
  check_refused(file_of(" {}"), {"byte 8"});
  check_refused(file_of("{\"a\":}"), {"byte 13", "no JSON"});
  check_refused(file_of("{} x"), {"byte 11", "no JSON"});
  check_refused(file_of("{\"a\":NaN}"), {"no JSON"});
  check_refused(file_of("{\"\xFF\":1}"), {"no JSON"});
  check_refused(file_of("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}"),
                {"nested more than 32"});
  check_refused(file_of("{\"a\":" + std::string(1'000'000, '[')), {"nested more than 32"});
}

TEST_CASE("safetensors: a header of more values than anyone has", "[not_sanitized]") {
  std::string many = "{\"a\":[0";
  for (int i = 0; i < 4'000'001; ++i) many += ",0";
  check_refused(file_of(many + "]}"), {"more than 4000000 JSON values"});
}

TEST_CASE("safetensors: a name that stands twice is refused, not overwritten") {
  const std::string a = entry("a", "U8", "[1]", "[0,1]"), b = entry("b", "U8", "[1]", "[1,2]");
  check_refused(file_of("{" + a + "," + b + "," + a + "}", "12"), {"\"a\" stands twice", "byte "});
  check_refused(file_of("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],"
                        "\"data_offsets\":[0,1]}}",
                        "1"),
                {"\"dtype\" stands twice"});
  check_refused(file_of("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}"), {"\"k\" stands twice"});
  check_refused(file_of("{\"\\u0061\":{},\"a\":{}}"), {"\"a\" stands twice", "byte 24"});
}

TEST_CASE("safetensors: entries that contradict themselves or the file") {
  const auto refused = [](const std::string& dtype, const std::string& shape,
                          const std::string& offsets, const std::vector<std::string>& parts) {
    check_refused(file_of("{" + entry("t\\n", dtype, shape, offsets) + "}", "12345678"),
                  {"tensor \"t\\n\" (header, byte 14)"});
    check_refused(file_of("{" + entry("t\\n", dtype, shape, offsets) + "}", "12345678"), parts);
  };
  refused("F4", "[2]", "[0,8]", {"dtype \"F4\" is unknown"});
  refused("F32", "[3]", "[0,8]", {"F32 [3] takes 12 bytes", "[0,8] span 8"});
  refused("F32", "[]", "[0,8]", {"takes 4 bytes"});
  refused("F32", "[2]", "[0,12]", {"[0,12] reach beyond the 8 bytes"});
  refused("F32", "[2]", "[8,0]", {"begin <= end"});
  refused("F32", "[2]", "[0,8,16]", {"begin <= end"});
  refused("F32", "[2]", "[-8,0]", {"data_offsets", "-8"});
  refused("F32", "[2]", "[0,18446744073709551615]", {"18446744073709551615"});
  refused("F32", "[2]", "[0,99999999999999999999]", {"data_offsets", "no integer"});
  refused("F32", "[-2]", "[0,8]", {"shape", "-2"});
  refused("F32", "[2.0]", "[0,8]", {"shape", "2.0"});
  refused("F32", "[\"2\"]", "[0,8]", {"shape"});
  refused("F32", "2", "[0,8]", {"shape is missing"});
  refused("F32", "[4294967296,4294967296]", "[0,8]", {"more bytes than 2^63-1"});
  refused("F32", "[9223372036854775807,2]", "[0,8]", {"more bytes than 2^63-1"});
  refused("F32", "[4611686018427387904]", "[0,8]", {"more bytes than 2^63-1"});
  refused("F32", "[0,9223372036854775807,9]", "[0,8]", {"takes 0 bytes"});
  refused("F32", "[" + std::string(200, '1') + "]", "[0,8]", {"shape"});
  check_refused(file_of("{\"t\":7}"), {"its entry is no object"});
  check_refused(file_of("{\"t\":{}}"), {"dtype is missing"});
  check_refused(file_of("{\"t\":{\"dtype\":\"U8\",\"shape\":[0]}}"), {"data_offsets is missing"});
  check_refused(file_of("{\"t\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"x\":1}}"),
                {"unknown field \"x\""});
  check_refused(file_of("{\"__metadata__\":{\"k\":1}}"), {"value of \"k\" is no text"});
  check_refused(file_of("{\"__metadata__\":[]}"), {"__metadata__ is no object"});
}

TEST_CASE("safetensors: the tensors cover the data, without overlap or hole") {
  const auto two = [](const std::string& first, const std::string& second) {
    return "{" + entry("a", "U8", "[4]", first) + "," + entry("b", "U8", "[4]", second) + "}";
  };
  const std::string header = two("[4,8]", "[0,4]");  // any order in the header
  const std::string good = file_of(header, "bbbbaaaa");
  const SafetensorsFile file("good", std::as_bytes(std::span(good)));
  REQUIRE(file.tensors()[0].name == "b");
  REQUIRE(read_all(file.get("a")) == Values(4, 'a'));
  const int64_t data = 8 + std::ssize(header);
  REQUIRE(file.get("a").file_offset == data + 4);
  check_refused(file_of(two("[0,4]", "[2,6]"), "123456"),
                {fmt::format("\"b\" begins at byte {}", data + 2), "they overlap"});
  check_refused(file_of(two("[0,4]", "[0,4]"), "1234"), {"they overlap"});
  check_refused(file_of(two("[0,4]", "[6,10]"), "1234567890"),
                {fmt::format("ends at {}", data + 5), "belongs to no tensor"});
  check_refused(file_of(two("[1,5]", "[5,9]"), "123456789"), {"\"a\" begins at byte"});
  check_refused(file_of(two("[0,4]", "[4,8]"), "123456789"), {"the last tensor ends at byte"});
  check_refused(good.substr(0, good.size() - 1), {"reach beyond the 7 bytes"});
}

TEST_CASE("safetensors: a file that loses bytes at any place is refused") {
  const std::string bytes = read_file(kFixtures + "every_dtype.safetensors");
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::string part = bytes.substr(0, size);
    check_throws<Error>([&] { SafetensorsFile("f", std::as_bytes(std::span(part))); }, {"f: "});
  }
}

TEST_CASE("safetensors: values and shapes that a model cannot have are named") {
  const float values[] = {1, 2, float(kInf), 4, float(kNaN)};
  const std::string header = "{" + entry("w", "F32", "[5]", "[0,20]") + "}";
  const std::string bytes =
      file_of(header, {reinterpret_cast<const char*>(values), sizeof(values)});
  const SafetensorsFile file("f", std::as_bytes(std::span(bytes)));
  const StoredTensor& w = file.get("w");
  check_throws<Error>(
      [&] { w.check_finite(); },
      {"f: tensor \"w\": element 2", fmt::format("byte {}", 8 + header.size() + 8), "infinite"});
  w.check_shape({5});
  check_throws<Error>([&] { w.check_shape({5, 1}); }, {"\"w\"", "shape [5], expected [5, 1]"});
  check_throws<Error>([&] { w.check_shape({4}); }, {"shape [5], expected [4]"});
}

TEST_CASE("safetensors: a sharded model is one collection") {
  for (const std::string& path : {kFixtures, kFixtures + "model.safetensors.index.json"}) {
    const TensorCollection all(path);
    REQUIRE(all.tensors().size() == 3);
    REQUIRE(read_all(all.get("second")) == Values{-0.75, -0.5, -0.25, 0});
    REQUIRE(all.get("third").file.ends_with("model-00002-of-00002.safetensors"));
    check_throws<Error>([&] { all.get("fourth"); }, {"index.json has no tensor \"fourth\""});
  }
  const TensorCollection single(kFixtures + "written.safetensors");
  REQUIRE(single.tensors().size() == 6);
  const TempDir dir;
  check_throws<Error>([&] { TensorCollection(dir.file("")); }, {"neither", "index.json"});
  check_throws<Error>([&] { TensorCollection(dir.file("x")); }, {"No such file"});
  dir.write("model.safetensors", file_of("{" + entry("a", "U8", "[0]", "[0,0]") + "}"));
  REQUIRE(TensorCollection(dir.file("")).find("a") != nullptr);
}

TEST_CASE("safetensors: an index that points nowhere is refused") {
  const TempDir dir;
  dir.write("shard", file_of("{" + entry("a", "U8", "[1]", "[0,1]") + "}", "x"));
  const auto refused = [&](const std::string& json, const std::vector<std::string>& parts) {
    const std::string path = dir.write("model.safetensors.index.json", json);
    check_throws<Error>([&] { TensorCollection(dir.file("")); }, {path});
    check_throws<Error>([&] { TensorCollection(dir.file("")); }, parts);
  };
  refused("", {"byte 0", "no JSON"});
  refused("[]", {"no weight_map"});
  refused("{\"weight_map\": []}", {"no weight_map"});
  refused("{\"weight_map\": {\"a\": 1}}", {"\"a\"", "no text"});
  refused("{\"weight_map\": {\"a\": \"missing\"}}", {"\"a\"", "missing", "does not exist"});
  refused("{\"weight_map\": {\"b\": \"shard\"}}", {"\"b\"", "shard", "has no such tensor"});
  refused("{\"weight_map\": {\"a\": \"shard\", \"a\": \"shard\"}}", {"\"a\" stands twice"});
  for (const char* name : {"", "..", "../shard", "/etc/passwd", "a/b", ".", "a\\\\b", "a\\u0000"}) {
    refused(fmt::format("{{\"weight_map\": {{\"a\": \"{}\"}}}}", name), {"not the name of a file"});
  }
}

/// A Llama of one layer, whose weights of zeros are F32 but for one.
class TinyLlama {
 public:
  TinyLlama(const std::string& changed, const std::string& dtype, int64_t element_bytes) {
    std::string header = "{", data;
    for (const auto& [name, shape] : shapes()) {
      const bool other = name == changed;
      int64_t bytes = other ? element_bytes : 4;
      for (int64_t size : shape) bytes *= size;
      header += (header.size() > 1 ? "," : "") +
                entry(name, other ? dtype : "F32", fmt::format("[{}]", fmt::join(shape, ",")),
                      fmt::format("[{},{}]", data.size(), data.size() + bytes));
      data += std::string(bytes, '\0');
    }
    dir_.write("model.safetensors", file_of(header + "}", data));
  }

  static std::map<std::string, std::vector<int64_t>> shapes() {
    const std::string layer = "model.layers.0.";
    return {{"model.embed_tokens.weight", {6, 4}},
            {"lm_head.weight", {6, 4}},
            {"model.norm.weight", {4}},
            {layer + "input_layernorm.weight", {4}},
            {layer + "post_attention_layernorm.weight", {4}},
            {layer + "self_attn.q_proj.weight", {4, 4}},
            {layer + "self_attn.k_proj.weight", {4, 4}},
            {layer + "self_attn.v_proj.weight", {4, 4}},
            {layer + "self_attn.o_proj.weight", {4, 4}},
            {layer + "mlp.gate_proj.weight", {8, 4}},
            {layer + "mlp.up_proj.weight", {8, 4}},
            {layer + "mlp.down_proj.weight", {4, 8}}};
  }
  void check(bool tied = false) const {
    HfConfig config;
    config.hidden_size = 4;
    config.num_layers = 1;
    config.num_heads = config.num_kv_heads = 2;
    config.head_dim = 2;
    config.ffn_hidden_size = 8;
    config.vocab_size = 6;
    config.tie_word_embeddings = tied;
    check_pretrained(dir_.file(""), config);
  }

 private:
  TempDir dir_;
};

TEST_CASE("a model's weights are F32, BF16, F16 or F64, and no other dtype of the format") {
  const std::map<std::string, int64_t> all = {
      {"F64", 8},         {"F32", 4},        {"F16", 2},     {"BF16", 2},    {"F8_E5M2", 1},
      {"F8_E4M3", 1},     {"I64", 8},        {"I32", 4},     {"I16", 2},     {"I8", 1},
      {"U64", 8},         {"U32", 4},        {"U16", 2},     {"U8", 1},      {"BOOL", 1},
      {"F8_E8M0", 1},     {"F4", 1},         {"F6_E2M3", 1}, {"F6_E3M2", 1}, {"C64", 8},
      {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}};
  for (const auto& [dtype, bytes] : all) {
    const bool weight = dtype == "F64" || dtype == "F32" || dtype == "F16" || dtype == "BF16";
    for (const auto& [name, shape] : TinyLlama::shapes()) {
      CAPTURE(dtype, name);
      const TinyLlama model(name, dtype, bytes);
      for (bool tied : {false, true}) {  // then lm_head.weight is there besides
        if (weight) {
          model.check(tied);
        } else {
          check_throws<UsageError>([&] { model.check(tied); },
                                   {"model.safetensors", name, dtype, "F32, BF16"});
        }
      }
    }
  }
}

TEST_CASE("a name from a file is shown on one line and not at any length") {
  REQUIRE(in_quotes("a\nb\x1B") == "\"a\\nb\\u001b\"");
  REQUIRE(in_quotes("\xFF").size() < 10);
  REQUIRE(in_quotes(std::string(1'000'000, 'x')).size() < 210);
}

}  // namespace
}  // namespace usp::test
