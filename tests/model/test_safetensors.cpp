// SPDX-License-Identifier: Apache-2.0
// The reader of safetensors: what it reads, and one sentence for each way in which a file can lie.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include "model/mapped_file.hpp"
#include "model/safetensors.hpp"
#include "model_files.hpp"
#include "refusals.hpp"
#include "temp_folder.hpp"

using fw::model::MappedFile;
using fw::model::Safetensors;

namespace {

std::string file_of(const std::string &header, const std::string &data) {
  const uint64_t length = header.size();
  std::string out(8, '\0');
  memcpy(out.data(), &length, 8);
  return out + header + data;
}

Safetensors parse(const std::string &file) {
  return Safetensors::parse({reinterpret_cast<const uint8_t *>(file.data()), file.size()}, "f");
}

std::string refused(const std::string &file) {
  const std::string text = refusal([&] { parse(file); });
  EXPECT_TRUE(text.empty() || is_one_sentence(text)) << text;
  return text;
}

std::string entry(const std::string &dtype, const std::string &shape, const std::string &offsets) {
  return "{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

}  // namespace

TEST(Safetensors, ReadsNamesTypesShapesAndBytes) {
  const std::string header = "{\"__metadata__\":{\"any\":\"thing\"},\"b\":" + entry("BF16", "[2,3]", "[4,16]") +
                             ",\"a\":" + entry("F32", "[]", "[0,4]") +
                             ",\"none\":" + entry("I64", "[0,5]", "[16,16]") + "}  ";
  const std::string data = "0123456789abcdef", file = file_of(header, data);
  const Safetensors stored = parse(file);
  ASSERT_EQ(stored.tensors().size(), 3u);
  ASSERT_NE(stored.find("b"), nullptr);
  EXPECT_EQ(stored.find("b")->dtype, "BF16");
  EXPECT_EQ(stored.find("b")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::string(stored.find("b")->bytes.begin(), stored.find("b")->bytes.end()), "456789abcdef");
  EXPECT_EQ(std::string(stored.find("a")->bytes.begin(), stored.find("a")->bytes.end()), "0123");
  EXPECT_TRUE(stored.find("none")->bytes.empty());
  EXPECT_EQ(stored.find("c"), nullptr);
}

TEST(Safetensors, RefusesWhatIsTooShort) {
  EXPECT_EQ(refused(""), "f: has 0 bytes, a safetensors file starts with 8 bytes of length");
  EXPECT_EQ(refused("1234567"), "f: has 7 bytes, a safetensors file starts with 8 bytes of length");
  EXPECT_EQ(refused(std::string("\x09\0\0\0\0\0\0\0{}", 10)),
            "f: header length is 9, but only 2 bytes follow (truncated?)");
  EXPECT_EQ(refused(std::string(8, '\0')), "f: the header does not start with {");
  EXPECT_EQ(refused(std::string(8, '\xff') + "{}"),
            "f: header length is 18446744073709551615, allowed at most 100000000 (not a safetensors file?)");
  EXPECT_EQ(refused(std::string("\xf8\xff\xff\xff\xff\xff\xff\xff{}", 10)),
            "f: header length is 18446744073709551608, allowed at most 100000000 (not a safetensors file?)");
}

TEST(Safetensors, RefusesWhatIsNoHeader) {
  EXPECT_EQ(refused(file_of("[]", "")), "f: the header does not start with {");
  EXPECT_EQ(refused(file_of("{\"a\":}", "")), "f: header: not valid JSON at byte 6 of 6");
  EXPECT_EQ(refused(file_of("{\"a\":1}{}", "")), "f: header: not valid JSON at byte 8 of 9");
  EXPECT_EQ(refused(file_of("{\"\xff\":{}}", "")), "f: header: not UTF-8 at byte 2, expected JSON text");
  EXPECT_EQ(refused(file_of("{\"\xed\xa0\x80\":{}}", "")), "f: header: not UTF-8 at byte 2, expected JSON text");
  EXPECT_EQ(refused(file_of("{\"\xc0\x80\":{}}", "")), "f: header: not UTF-8 at byte 2, expected JSON text");
  EXPECT_EQ(refused(file_of("{\"a\":1e999}", "")), "f: header: not valid JSON, a number is out of range");
  EXPECT_EQ(refused(file_of("{\"a\":" + std::string(100000, '[') + "}", "")),
            "f: header: nested deeper than 16 levels");
  EXPECT_EQ(refused(file_of("{\"a\":7}", "")), "f: tensor \"a\" is 7, expected an object");
  EXPECT_EQ(refused(file_of("{\"a\":" + entry("F32", "[1]", "[0,4]") + ",\"a\":" + entry("F32", "[1]", "[4,8]") + "}",
                            "12345678")),
            "f: header: the name \"a\" occurs twice");
}

TEST(Safetensors, RefusesFieldsThatAreWrong) {
  const auto one = [](const std::string &value, const std::string &data = "1234") {
    return refused(file_of("{\"a\":" + value + "}", data));
  };
  EXPECT_EQ(one("{}"), "f: tensor \"a\": no \"dtype\"");
  EXPECT_EQ(one("{\"dtype\":4}"), "f: tensor \"a\": dtype is 4, expected a string");
  EXPECT_EQ(one(entry("F31", "[1]", "[0,4]")), "f: tensor \"a\": dtype \"F31\" is not one of the format");
  EXPECT_EQ(one("{\"dtype\":\"F32\"}"), "f: tensor \"a\": no \"shape\"");
  EXPECT_EQ(one(entry("F32", "1", "[0,4]")), "f: tensor \"a\": shape is not a list of at most 8 sizes");
  EXPECT_EQ(one(entry("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]")),
            "f: tensor \"a\": shape is not a list of at most 8 sizes");
  EXPECT_EQ(one(entry("F32", "[-1]", "[0,4]")),
            "f: tensor \"a\": a size in shape is -1, expected a whole number of at least 0");
  EXPECT_EQ(one(entry("F32", "[1.0]", "[0,4]")),
            "f: tensor \"a\": a size in shape is 1.0, expected a whole number of at least 0");
  EXPECT_EQ(one(entry("F32", "[\"1\"]", "[0,4]")),
            "f: tensor \"a\": a size in shape is \"1\", expected a whole number of at least 0");
  EXPECT_EQ(one(entry("F32", "[4611686018427387904,4]", "[0,4]")),
            "f: tensor \"a\": shape has more bytes than a file can hold");
  EXPECT_EQ(one(entry("U8", "[18446744073709551615]", "[0,4]")),
            "f: tensor \"a\": shape has more bytes than a file can hold");
  EXPECT_EQ(one("{\"dtype\":\"F32\",\"shape\":[1]}"), "f: tensor \"a\": no \"data_offsets\"");
  EXPECT_EQ(one(entry("F32", "[1]", "[0,4,8]")), "f: tensor \"a\": data_offsets is not a list of two");
  EXPECT_EQ(one(entry("F32", "[1]", "[null,4]")),
            "f: tensor \"a\": data_offsets[0] is null, expected a whole number of at least 0");
  EXPECT_EQ(one(entry("F32", "[1]", "[4,0]")),
            "f: tensor \"a\": data_offsets [4, 0] do not lie in the 4 bytes of data (truncated?)");
  EXPECT_EQ(one(entry("F32", "[2]", "[0,8]")),
            "f: tensor \"a\": data_offsets [0, 8] do not lie in the 4 bytes of data (truncated?)");
  EXPECT_EQ(one(entry("F32", "[2]", "[0,4]")),
            "f: tensor \"a\": data_offsets span 4 bytes, but F32 of shape [2] has 8");
  EXPECT_EQ(one(entry("BF16", "[1]", "[0,4]")),
            "f: tensor \"a\": data_offsets span 4 bytes, but BF16 of shape [1] has 2");
}

TEST(Safetensors, RefusesOverlapHoleAndRest) {
  const auto two = [](const std::string &first, const std::string &second, const std::string &data) {
    return refused(file_of("{\"a\":" + first + ",\"b\":" + second + "}", data));
  };
  EXPECT_EQ(two(entry("F32", "[1]", "[0,4]"), entry("F32", "[1]", "[2,6]"), "123456"),
            "f: tensor \"b\" overlaps the one before it");
  EXPECT_EQ(two(entry("F32", "[1]", "[0,4]"), entry("F32", "[1]", "[0,4]"), "1234"),
            "f: tensor \"b\" overlaps the one before it");
  EXPECT_EQ(two(entry("F32", "[1]", "[0,4]"), entry("F32", "[1]", "[6,10]"), "1234567890"),
            "f: 2 bytes before tensor \"b\" belong to no tensor");
  EXPECT_EQ(two(entry("F32", "[1]", "[0,4]"), entry("F32", "[1]", "[4,8]"), "123456789"),
            "f: 1 bytes after the last tensor belong to no tensor");
  EXPECT_EQ(refused(file_of("{}", "x")), "f: 1 bytes after the last tensor belong to no tensor");
}

TEST(Safetensors, QuotesStrangeNames) {
  EXPECT_EQ(refused(file_of("{\"a\\n\\u001b[1m\":7}", "")), "f: tensor \"a\\x0a\\x1b[1m\" is 7, expected an object");
  EXPECT_EQ(refused(file_of("{\"" + std::string(5000, 'n') + "\":7}", "")),
            "f: tensor \"" + std::string(64, 'n') + "...\" is 7, expected an object");
}

TEST(MappedFile, RefusesWhatIsNoRegularFile) {
  TempFolder folder;
  EXPECT_EQ(refusal([&] { MappedFile(folder / "absent"); }),
            "cannot open \"" + folder / "absent" + "\": No such file or directory");
  EXPECT_EQ(refusal([&] { MappedFile(folder.path.string()); }),
            "\"" + folder.path.string() + "\" is a folder, expected a file");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(refusal([&] { MappedFile(folder / "pipe"); }), "\"" + folder / "pipe" + "\" is not a regular file");
  model_files::write_file(folder / "empty", "");
  EXPECT_TRUE(MappedFile(folder / "empty").bytes().empty());
}
