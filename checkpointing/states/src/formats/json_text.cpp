#include "formats/json_text.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "io/printable.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kUsualKeys = 5;  // of a tensor's entry

/// Builds the values, and checks what nlohmann's own builder does not: in one pass, as states of a
/// million entries are all names and numbers.
template <class Json>
class StrictBuilder final : public nlohmann::json_sax<Json> {
 public:
  StrictBuilder(const char* where, const std::string& path, std::size_t most_keys)
      : where_(where), path_(path), most_keys_(most_keys) {}

  Json take() { return std::move(root_); }

  bool start_object(std::size_t /*size*/) override { return open(Json::object()); }
  bool key(typename Json::string_t& name) override {
    auto& members = open_.back()->template get_ref<typename Json::object_t&>();
    if constexpr (requires { members.reserve(kUsualKeys); }) {
      if (members.size() == 1) members.reserve(kUsualKeys);  // growing copies the names
    }
    const auto [member, is_new] = members.emplace(name, Json());
    if (!is_new) {
      core::fail<core::DataError>(where_, "expected distinct names in '", path_, "', got '",
                                  printable(name), "' twice");
    }
    if (members.size() > most_keys_) {
      core::fail<core::DataError>(where_, "expected at most ", most_keys_,
                                  " names in one object of '", path_, "', got more");
    }
    member_ = &member->second;
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*size*/) override { return open(Json::array()); }
  bool end_array() override { return close(); }
  bool parse_error(std::size_t /*at*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    core::fail<core::DataError>(where_, "expected JSON in '", path_,
                                "', got text that is not: ", escaped(error.what()));
  }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(typename Json::number_integer_t value) override { return put(value); }
  bool number_unsigned(typename Json::number_unsigned_t value) override { return put(value); }
  bool number_float(typename Json::number_float_t value, const typename Json::string_t&) override {
    return put(value);
  }
  bool string(typename Json::string_t& value) override { return put(std::move(value)); }
  bool binary(typename Json::binary_t& value) override { return put(std::move(value)); }

 private:
  // Where the next value belongs. What is open stays in its place: only the innermost grows.
  Json& place() {
    if (open_.empty()) return root_;
    Json& around = *open_.back();
    if (around.is_array()) return around.template get_ref<typename Json::array_t&>().emplace_back();
    return *member_;
  }
  bool put(Json value) {
    place() = std::move(value);
    return true;
  }
  bool open(Json value) {
    if (open_.size() == kDeepestJson) {
      core::fail<core::DataError>(where_, "expected at most ", kDeepestJson, " levels in '", path_,
                                  "', got more");
    }
    Json& at = place();
    at = std::move(value);
    open_.push_back(&at);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const char* where_;
  const std::string& path_;
  std::size_t most_keys_;
  Json root_;
  std::vector<Json*> open_;  // what is around the current place
  Json* member_ = nullptr;   // of the innermost object: the one whose name came last
};

template <class Json>
Json parse(const std::string& text, const char* where, const std::string& path,
           std::size_t most_keys) {
  // The parser takes it for the end, whatever follows.
  if (text.find('\0') != std::string::npos)
    core::fail<core::DataError>(where, "expected JSON in '", path, "', got text with a byte of 0");
  StrictBuilder<Json> builder(where, path, most_keys);
  Json::sax_parse(text, &builder);
  return builder.take();
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

std::string json_string(const std::string& text, const char* where) {
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) {
    return c >= 0x20 && c < 0x7f && c != '"' && c != '\\';
  });
  if (plain) return '"' + text + '"';
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception& e) {
    core::fail(where, "expected names and text in UTF-8: ", e.what());
  }
}

std::string json_sizes(const core::Shape& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ',';
    text += std::to_string(size);
  }
  return text + ']';
}

std::string json_in_lines(const std::string& compact) {
  std::string out;
  out.reserve(2 * compact.size());
  std::size_t depth = 0;
  bool in_string = false;
  const auto line = [&] { out.append(1, '\n').append(depth, ' '); };
  for (std::size_t i = 0; i < compact.size(); ++i) {
    const char c = compact[i];
    const bool opens = !in_string && (c == '{' || c == '['),
               closes = !in_string && (c == '}' || c == ']');
    const bool empty = closes && (compact[i - 1] == '{' || compact[i - 1] == '[');
    if (closes) --depth;
    if (closes && !empty) line();
    out += c;
    if (c == '"') in_string = !in_string;
    if (in_string && c == '\\') out += compact[++i];
    if (opens) ++depth;
    const bool next_closes =
        i + 1 < compact.size() && (compact[i + 1] == '}' || compact[i + 1] == ']');
    if ((opens && !next_closes) || (!in_string && c == ',')) line();
    if (!in_string && c == ':') out += ' ';
  }
  return out;
}

}  // namespace cairn::checkpointing
