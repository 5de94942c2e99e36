// The table of a model.
#include <iomanip>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "cairn/autograd/thread_state.h"
#include "cairn/nn/module.h"
#include "running_forward.h"

namespace cairn::nn {

namespace {

struct Row {
  std::string name, output, parameters, bytes;
};

std::string with_separators(std::int64_t n) {
  const std::string digits = std::to_string(n);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string table(const std::vector<Row>& rows) {
  std::size_t name = 0, output = 0, parameters = 0, bytes = 0;
  for (const Row& row : rows) {
    name = std::max(name, row.name.size());
    output = std::max(output, row.output.size());
    parameters = std::max(parameters, row.parameters.size());
    bytes = std::max(bytes, row.bytes.size());
  }
  const auto width = [](std::size_t n) { return std::setw(static_cast<int>(n)); };
  std::ostringstream out;
  for (const Row& row : rows) {
    out << std::left << width(name) << row.name << "  " << width(output) << row.output << "  "
        << std::right << width(parameters) << row.parameters << "  " << width(bytes) << row.bytes
        << '\n';
  }
  return out.str();
}

// Parameters of one module alone, each counted where it is first seen.
Row own_row(const std::string& name, const NamedTensors& tensors, const std::string& output,
            std::unordered_set<const void*>& seen, std::int64_t& total, std::int64_t& total_bytes) {
  std::int64_t count = 0, bytes = 0;
  for (const NamedTensor& entry : tensors) {
    if (!seen.insert(entry.tensor.id()).second) continue;
    count += entry.tensor.numel();
    bytes += static_cast<std::int64_t>(entry.tensor.nbytes());
  }
  total += count;
  total_bytes += bytes;
  return {name, output, with_separators(count), with_separators(bytes)};
}

}  // namespace

std::string summary(Module& module, const Shape& input_shape, DType dtype) {
  const char* const kWrapper = "summary";
  auto all = module.modules();
  std::unordered_map<const Module*, std::string> outputs;
  std::vector<bool> training;
  for (auto& [name, part] : all) {
    training.push_back(part->training_);
    part->training_ = false;
    part->add_forward_wrapper(
        [&outputs, part = part](const Tensor& x, const Module::Forward& next) {
          Tensor y = next(x);
          outputs[part] = core::str(y.shape());
          return y;
        },
        kWrapper);
  }
  const auto restore = [&] {
    running_forward().all_are_shown = false;
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].second->training_ = training[i];
      all[i].second->remove_forward_wrappers(kWrapper);
    }
  };
  try {
    const autograd::NoGradGuard no_grad;
    const NamedTensors parameters = module.parameters();
    const Device device = parameters.empty() ? Device{} : parameters[0].tensor.device();
    running_forward().all_are_shown = true;
    module(Tensor::zeros(input_shape, dtype, device));
  } catch (...) {
    restore();
    throw;
  }
  restore();

  std::vector<Row> rows{{"module", "output", "parameters", "bytes"}};
  std::unordered_set<const void*> seen;
  std::int64_t total = 0, bytes = 0;
  for (auto& [name, part] : all) {
    std::string label = core::str(name, name.empty() ? "" : ": ", part->kind());
    if (!part->extra().empty()) label = core::str(label, "(", part->extra(), ")");
    rows.push_back(own_row(label, part->parameters_, outputs[part], seen, total, bytes));
  }
  rows.push_back({"total", "", with_separators(total), with_separators(bytes)});
  return table(rows);
}

}  // namespace cairn::nn
