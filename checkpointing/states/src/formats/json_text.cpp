#include "formats/json_text.h"

#include <set>
#include <vector>

#include "cairn/core/error.h"
#include "formats/printable.h"

namespace cairn::checkpointing {

namespace {

/// What the parser itself does not check. A pass of its own: nlohmann's callbacks cost a look at
/// all members of an object for each of them.
template <class Json>
class StructureCheck final : public nlohmann::json_sax<Json> {
 public:
  StructureCheck(const char* where, const std::string& path, std::size_t most_keys)
      : where_(where), path_(path), most_keys_(most_keys) {}

  bool start_object(std::size_t /*size*/) override { return open(); }
  bool key(typename Json::string_t& name) override {
    std::set<std::string>& names = open_.back();
    if (!names.insert(name).second) {
      core::fail<core::DataError>(where_, "expected distinct names in '", path_, "', got '",
                                  printable(name), "' twice");
    }
    if (names.size() > most_keys_) {
      core::fail<core::DataError>(where_, "expected at most ", most_keys_,
                                  " names in one object of '", path_, "', got more");
    }
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*size*/) override { return open(); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t /*at*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    core::fail<core::DataError>(where_, "expected JSON in '", path_,
                                "', got text that is not: ", escaped(error.what()));
  }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(typename Json::number_integer_t) override { return true; }
  bool number_unsigned(typename Json::number_unsigned_t) override { return true; }
  bool number_float(typename Json::number_float_t, const typename Json::string_t&) override {
    return true;
  }
  bool string(typename Json::string_t&) override { return true; }
  bool binary(typename Json::binary_t&) override { return true; }

 private:
  bool open() {
    open_.emplace_back();
    if (open_.size() > kDeepestJson) {
      core::fail<core::DataError>(where_, "expected at most ", kDeepestJson, " levels in '", path_,
                                  "', got more");
    }
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const char* where_;
  const std::string& path_;
  std::size_t most_keys_;
  std::vector<std::set<std::string>> open_;  // keys of what is around the current place
};

template <class Json>
Json parse(const std::string& text, const char* where, const std::string& path,
           std::size_t most_keys) {
  // The parser takes it for the end, whatever follows.
  if (text.find('\0') != std::string::npos)
    core::fail<core::DataError>(where, "expected JSON in '", path, "', got text with a byte of 0");
  StructureCheck<Json> check(where, path, most_keys);
  Json::sax_parse(text, &check);
  return Json::parse(text);
}

}  // namespace

nlohmann::ordered_json parse_json(const std::string& text, const char* where,
                                  const std::string& path) {
  return parse<nlohmann::ordered_json>(text, where, path, kMostOrderedKeys);
}

nlohmann::json parse_large_json(const std::string& text, const char* where,
                                const std::string& path) {
  return parse<nlohmann::json>(text, where, path, text.size());
}

}  // namespace cairn::checkpointing
