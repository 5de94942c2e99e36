// Values made by another library and kept in tests/golden/*.safetensors, beside the scripts that
// made them. Reads the F32, F64 and I64 tensors of a small file whole.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "cairn/core/tensor.h"
#include "support/test_folder.h"

namespace cairn::test {

class Golden {
 public:
  /// tests/golden/name.safetensors
  explicit Golden(const std::string& name) {
    std::ifstream file(golden_file(name + ".safetensors"), std::ios::binary);
    if (!file) throw std::runtime_error("no golden file " + name);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof(header));
    const auto json = nlohmann::json::parse(bytes.substr(sizeof(header), header));
    for (const auto& [key, entry] : json.items()) {
      if (key == "__metadata__") continue;
      const std::uint64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
      const std::string_view data =
          std::string_view(bytes).substr(sizeof(header) + header + begin, end - begin);
      entries_[key] = {entry["shape"], decode(entry["dtype"], data)};
    }
  }

  /// Of all values, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, entry] : entries_) all.push_back(name);
    return all;
  }
  bool contains(const std::string& name) const { return entries_.count(name) > 0; }
  const std::vector<double>& values(const std::string& name) const { return at(name).values; }
  Shape shape(const std::string& name) const {
    const auto& sizes = at(name).shape;
    return Shape(sizes.begin(), sizes.end());
  }
  Tensor tensor(const std::string& name, DType dtype = DType::f32,
                Device device = core::default_device()) const {
    return Tensor::from(values(name), shape(name), dtype, device);
  }

 private:
  struct Entry {
    std::vector<std::int64_t> shape;
    std::vector<double> values;
  };
  const Entry& at(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) throw std::runtime_error("no golden value " + name);
    return found->second;
  }
  template <class T>
  static std::vector<double> decode_as(std::string_view data) {
    std::vector<T> typed(data.size() / sizeof(T));
    std::memcpy(typed.data(), data.data(), data.size());
    return {typed.begin(), typed.end()};
  }
  static std::vector<double> decode(const std::string& dtype, std::string_view data) {
    if (dtype == "F32") return decode_as<float>(data);
    if (dtype == "F64") return decode_as<double>(data);
    if (dtype == "I64") return decode_as<std::int64_t>(data);
    throw std::runtime_error("golden values of " + dtype);
  }

  std::map<std::string, Entry> entries_;
};

}  // namespace cairn::test
