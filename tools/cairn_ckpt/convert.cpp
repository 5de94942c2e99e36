#include <filesystem>
#include <iostream>
#include <list>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/safetensors.h"
#include "cairn/checkpointing/state_file.h"
#include "cairn/checkpointing/torch_file.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "commands.h"
#include "contents.h"
#include "optimizer_states.h"
#include "write_state.h"

namespace cairn::tools {

namespace {

namespace fs = std::filesystem;

constexpr const char* kModel = "model";

StateDict part_of(const StateDict& state, const std::string& part) {
  return part.empty() ? state : state.dict(part);
}

// What a rank keeps for itself (its generator, its routes) means nothing to anybody else.
StateDict without_ranks(const StateDict& state) {
  StateDict rest;
  for (const auto& [name, value] : state) {
    if (!name.starts_with("rank-")) rest.set(name, value);
  }
  return rest;
}

// The state of the model that an optimizer belongs to: the part of that name, or the only other
// one.
const StateDict& model_beside(const StateDict& state, const std::string& optimizer) {
  if (state.contains(kModel)) return state.dict(kModel);
  const StateDict* found = nullptr;
  for (const auto& [name, value] : state) {
    const auto* part = std::get_if<StateDict>(&value);
    if (part == nullptr || name == optimizer || is_own_optimizer(*part) ||
        is_torch_optimizer(*part)) {
      continue;
    }
    if (found != nullptr) found = nullptr;
    found = part;
  }
  if (found == nullptr) {
    core::fail<core::DataError>("convert", "expected the model of '", optimizer,
                                "' beside it as 'model', got none");
  }
  return *found;
}

bool has_parts(const StateDict& state) {
  if (state.contains(kModel) || state.contains("state_dict")) return true;
  for (const auto& [name, value] : state) {
    const auto* part = std::get_if<StateDict>(&value);
    if (part != nullptr && (is_own_optimizer(*part) || is_torch_optimizer(*part))) return true;
  }
  return false;
}

void write_as_torch(const StateDict& state, const std::string& out) {
  if (!has_parts(state)) return checkpointing::write_torch(out, state);
  checkpointing::TorchParts parts;
  for (const auto& [name, value] : state) {
    const auto* part = std::get_if<StateDict>(&value);
    const bool maps = part != nullptr && is_own_optimizer(*part);
    parts.emplace_back(name, maps ? torch_from_own(*part, model_beside(state, name)) : value);
  }
  checkpointing::write_torch(out, parts);
}

void write_as_safetensors(const StateDict& state, const std::string& out) {
  NamedTensors tensors;
  checkpointing::SafetensorsMetadata metadata = {{"format", "pt"}};
  for (const auto& [name, value] : checkpointing::flatten(state)) {
    if (const auto* tensor = std::get_if<Tensor>(&value)) {
      tensors.push_back({name, *tensor});
    } else if (const auto* number = std::get_if<double>(&value)) {
      tensors.push_back({name, Tensor::full({}, *number, DType::f64, Device{})});
    } else if (const auto* integer = std::get_if<std::int64_t>(&value)) {
      tensors.push_back({name, Tensor::from<std::int64_t>({*integer}, {}, DType::i64, Device{})});
    } else if (const auto* text = std::get_if<std::string>(&value)) {
      metadata.emplace_back(name, *text);
    }
  }
  checkpointing::write_safetensors(out, tensors, metadata);
}

struct Part : core::Stateful {
  explicit Part(StateDict state) : state_(std::move(state)) {}
  StateDict state_dict() const override { return state_; }
  void load_state_dict(const StateDict&) override {}
  StateDict state_;
};

// PyTorch counts batches where Cairn's batch norms do not.
StateDict without_counts(const StateDict& state) {
  StateDict rest;
  for (const auto& [name, value] : state) {
    if (name == "num_batches_tracked") continue;
    const auto* inner = std::get_if<StateDict>(&value);
    rest.set(name, inner == nullptr ? value : StateDict::Value(without_counts(*inner)));
  }
  return rest;
}

void write_as_checkpoint(const StateDict& given, const fs::path& out, std::int64_t step) {
  StateDict state = given;
  if (!has_parts(given)) {
    state = StateDict();
    state.set(kModel, given);
  }
  std::list<Part> parts;
  std::vector<checkpointing::TrainingState::Part> named;
  StateDict values;  // those that stand alone
  const auto add = [&](const std::string& name, StateDict part) {
    named.emplace_back(name, parts.emplace_back(std::move(part)));
  };
  for (const auto& [name, value] : state) {
    const auto* part = std::get_if<StateDict>(&value);
    if (part == nullptr) {
      values.set(name, value);
    } else if (is_torch_optimizer(*part)) {
      add(name, own_from_torch(*part, model_beside(state, name)));
    } else {
      add(name, without_counts(*part));
    }
  }
  if (!values.empty()) add("values", values);
  checkpointing::TrainingState(named, {}, {.keep = 1'000'000})
      .save(out.parent_path().string(), step);
}

// n of "step-<n>", or -1.
std::int64_t step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  const bool digits = name.size() == 13 && name.starts_with("step-") &&
                      name.find_first_not_of("0123456789", 5) == std::string::npos;
  return digits ? std::stoll(name.substr(5)) : -1;
}

}  // namespace

void write_state(const StateDict& state, const std::string& out) {
  const fs::path path = fs::path(out).has_filename() ? fs::path(out) : fs::path(out).parent_path();
  const std::string ending = path.extension().string();
  if (fs::exists(path)) {
    core::fail<core::IoError>("cairn-ckpt", "expected a new file or folder to write, got '", out,
                              "', which exists");
  }
  if (ending == ".pt" || ending == ".pth" || ending == ".bin") return write_as_torch(state, out);
  if (ending == ".safetensors") return write_as_safetensors(state, out);
  if (const std::int64_t step = step_of(path); step >= 0) {
    return write_as_checkpoint(state, fs::absolute(path), step);
  }
  checkpointing::write_safetensors_model(path.string(), state);
}

int convert(const std::string& in, const std::string& out, const std::string& part) {
  const std::string store = stores_of(in).front();
  StateDict state = checkpointing::read_state(store);
  if (is_checkpoint(store)) state = without_ranks(state);
  write_state(part_of(state, part), out);
  std::cout << store << " -> " << out << '\n';
  return 0;
}

int repair(const std::string& in, const std::string& out) {
  const std::string store = stores_of(in).front();
  const checkpointing::SalvagedCheckpoint salvaged = checkpointing::salvage_checkpoint(store);
  std::cout << store << ": " << (salvaged.damage.empty() ? "good" : "damaged") << '\n';
  for (const std::string& line : salvaged.damage)
    std::cout << "  lost: " << printable(line) << '\n';
  const StateDict rest = without_ranks(salvaged.contents);
  if (rest.empty())
    core::fail<core::DataError>("repair", "expected anything that can be read in '", store,
                                "', got nothing");
  write_state(rest, out);
  std::cout << checkpointing::flatten(rest).size() << " good entries -> " << out << '\n';
  return salvaged.damage.empty() ? 0 : 1;
}

}  // namespace cairn::tools
