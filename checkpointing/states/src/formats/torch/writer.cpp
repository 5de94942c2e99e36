#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <tuple>

#include "cairn/checkpointing/torch_file.h"
#include "cairn/core/error.h"
#include "formats/flat_state.h"
#include "formats/torch/pickle_writer.h"
#include "formats/zip/writer.h"
#include "io/host_copy.h"

namespace cairn::checkpointing {

namespace {

constexpr const char* kGroups = "param_groups";

bool holds_tensors(const StateDict& state) {
  return std::any_of(state.begin(), state.end(), [](const StateDict::Entry& entry) {
    const auto* inner = std::get_if<StateDict>(&entry.second);
    return inner != nullptr ? holds_tensors(*inner) : std::holds_alternative<Tensor>(entry.second);
  });
}

// Turns a state into Python's values, and collects the tensors that they refer to.
class Exporter {
 public:
  void value(const StateDict::Value& value) {
    if (const auto* tensor = std::get_if<Tensor>(&value)) {
      this->tensor(*tensor);
    } else if (const auto* number = std::get_if<double>(&value)) {
      pickle_.number(*number);
    } else if (const auto* integer = std::get_if<std::int64_t>(&value)) {
      pickle_.integer(*integer);
    } else if (const auto* text = std::get_if<std::string>(&value)) {
      pickle_.text(*text);
    } else if (const auto* state = std::get_if<StateDict>(&value)) {
      nested(*state);
    } else {
      core::fail("torch", "expected whole tensors, got a rank's shard of one");
    }
  }

  void part(const StateDict::Value& part) {
    const auto* state = std::get_if<StateDict>(&part);
    if (state == nullptr) return value(part);
    if (state->contains(kGroups)) return optimizer(*state);
    if (holds_tensors(*state)) return with_dots(*state);
    nested(*state);
  }

  void parts(const TorchParts& parts) {
    pickle_.begin_dictionary();
    for (const auto& [name, value] : parts) {
      pickle_.text(name);
      part(value);
    }
    pickle_.end_dictionary();
  }

  void write(const std::string& path) {
    const std::string folder = std::filesystem::path(path).stem().string() + "/";
    ZipWriter zip(path);
    zip.add(folder + "data.pkl", pickle_.finish());
    zip.add(folder + "byteorder", "little");
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor host = on_host(tensors_[i]);
      const auto* data = static_cast<const char*>(host.raw_data());
      zip.add(folder + "data/" + std::to_string(i), {data, host.nbytes()});
    }
    zip.add(folder + "version", "3\n");
    zip.close();
  }

 private:
  void nested(const StateDict& state) {
    pickle_.begin_dictionary();
    for (const auto& [key, inner] : state) {
      pickle_.text(key);
      value(inner);
    }
    pickle_.end_dictionary();
  }

  void with_dots(const StateDict& state) {
    pickle_.begin_dictionary();
    for (const auto& [name, inner] : flatten(state)) {
      pickle_.text(name);
      value(inner);
    }
    pickle_.end_dictionary();
  }

  // {"state": {0: {...}}, "param_groups": [{..., "betas": (..., ...), "params": [0, ...]}]}
  void optimizer(const StateDict& state) {
    pickle_.begin_dictionary();
    for (const auto& [key, inner] : state) {
      pickle_.text(key);
      const auto* dictionary = std::get_if<StateDict>(&inner);
      if (key == "state" && dictionary != nullptr) {
        by_index(*dictionary);
      } else if (key == kGroups && dictionary != nullptr) {
        groups(*dictionary);
      } else {
        value(inner);
      }
    }
    pickle_.end_dictionary();
  }

  void by_index(const StateDict& state) {
    pickle_.begin_dictionary();
    for (const auto& [key, inner] : state) {
      std::int64_t index = 0;
      const char* end = key.data() + key.size();
      const auto parsed = std::from_chars(key.data(), end, index);
      const bool is_index = parsed.ec == std::errc{} && parsed.ptr == end;
      CAIRN_CHECK(is_index, "torch",
                  "expected indices of parameters in an optimizer's state, got '", key,
                  "' (torch_state_dict() has them)");
      pickle_.integer(index);
      value(inner);
    }
    pickle_.end_dictionary();
  }

  void groups(const StateDict& groups) {
    pickle_.begin_list();
    for (const auto& [index, group] : groups) {
      const auto* options = std::get_if<StateDict>(&group);
      CAIRN_CHECK(options != nullptr, "torch", "expected a dictionary as group ", index,
                  ", got a value");
      pickle_.begin_dictionary();
      for (const auto& [key, option] : *options) {
        pickle_.text(key);
        const auto* several = std::get_if<StateDict>(&option);
        if (several == nullptr) {
          value(option);
        } else if (key == "betas") {
          pickle_.begin_tuple();
          for (const auto& item : *several) value(item.second);
          pickle_.end_tuple();
        } else {
          pickle_.begin_list();
          for (const auto& item : *several) value(item.second);
          pickle_.end_list();
        }
      }
      pickle_.end_dictionary();
    }
    pickle_.end_list();
  }

  void tensor(const Tensor& tensor) {
    CAIRN_CHECK(tensor.defined(), "torch", "expected a tensor, got an undefined one");
    const auto id = std::tuple(tensor.raw_data(), tensor.dtype(),
                               core::str(tensor.device(), tensor.shape(), tensor.strides()));
    const auto [place, is_new] = keys_.emplace(id, tensors_.size());
    const bool stored = !is_new && tensor.nbytes() > 0;
    const std::size_t key = stored ? place->second : tensors_.size();
    if (!stored) tensors_.push_back(tensor);
    pickle_.tensor(std::to_string(key), tensor.dtype(), tensor.shape());
  }

  TorchPickleWriter pickle_;
  std::vector<Tensor> tensors_;  // by key
  std::map<std::tuple<const void*, DType, std::string>, std::size_t> keys_;
};

}  // namespace

void write_torch(const std::string& path, const TorchParts& parts) {
  Exporter exporter;
  exporter.parts(parts);
  exporter.write(path);
}

void write_torch(const std::string& path, const StateDict& state) {
  Exporter exporter;
  exporter.part(state);
  exporter.write(path);
}

}  // namespace cairn::checkpointing
