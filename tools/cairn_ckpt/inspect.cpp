#include <iomanip>
#include <iostream>
#include <map>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "commands.h"
#include "contents.h"

namespace cairn::tools {

namespace {

struct Row {
  std::string name, type, shape;
  std::uint64_t bytes = 0;
  std::string value;  // of scalars and text
};

std::string type_of(const StateDict::Value& value) {
  if (const auto* tensor = std::get_if<Tensor>(&value)) {
    return std::string(core::name(tensor->dtype()));
  }
  static constexpr const char* kKinds[] = {"", "number", "integer", "text", "empty"};
  return kKinds[value.index()];
}

Row row_of(const std::string& name, const StateDict::Value& value) {
  Row row{printable(name), type_of(value), "", 0, ""};
  if (const auto* tensor = std::get_if<Tensor>(&value)) {
    row.shape = core::str(tensor->shape());
    row.bytes = tensor->nbytes();
  } else if (const auto* number = std::get_if<double>(&value)) {
    std::ostringstream text;
    text << std::setprecision(17) << *number;
    row.value = text.str();
  } else if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    row.value = std::to_string(*integer);
  } else if (const auto* text = std::get_if<std::string>(&value)) {
    row.value = '"' + printable(*text) + '"';
  }
  return row;
}

void print_rows(const std::vector<Row>& rows) {
  std::size_t name = 4, type = 4, shape = 5;
  for (const Row& row : rows) {
    name = std::max(name, row.name.size());
    type = std::max(type, row.type.size());
    shape = std::max(shape, row.shape.size());
  }
  const auto width = [](std::size_t n) { return std::setw(static_cast<int>(n) + 2); };
  for (const Row& row : rows) {
    std::cout << "  " << std::left << width(name) << row.name << width(type) << row.type
              << width(shape) << row.shape << std::right;
    if (row.value.empty()) std::cout << std::setw(14) << row.bytes << " bytes";
    std::cout << row.value << '\n';
  }
}

void print_totals(const std::vector<Row>& rows) {
  std::vector<std::string> order;
  std::map<std::string, std::pair<std::size_t, std::uint64_t>> parts;  // entries, bytes
  for (const Row& row : rows) {
    const std::string part = row.name.substr(0, row.name.find('.'));
    if (!parts.contains(part)) order.push_back(part);
    ++parts[part].first;
    parts[part].second += row.bytes;
  }
  for (const std::string& part : order) {
    std::cout << "  " << part << ": " << parts[part].first << " entries, " << parts[part].second
              << " bytes of tensors\n";
  }
}

}  // namespace

int inspect(const std::string& path) {
  const std::string store = stores_of(path).front();
  std::cout << store;
  if (is_checkpoint(store)) {
    const auto summary = checkpointing::summarize_checkpoint(store);
    std::cout << ": step " << summary.step << ", saved by " << summary.world_size << " rank(s)";
  }
  std::cout << '\n';
  std::vector<Row> rows;
  for (const auto& [name, value] : read_contents(store)) {
    if (name != "(step)") rows.push_back(row_of(name, value));
  }
  print_rows(rows);
  print_totals(rows);
  return 0;
}

}  // namespace cairn::tools
