#include "ptx/program.h"

#include <regex>

namespace cairn::ptx {
namespace {

std::string trimmed(const std::string& text, const char* what = " \t\n") {
  const auto begin = text.find_first_not_of(what);
  return begin == std::string::npos
             ? std::string()
             : text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

/// Of each match the whole and its groups.
std::vector<std::vector<std::string>> matches(const std::string& text, const char* pattern) {
  const std::regex regex(pattern);
  std::vector<std::vector<std::string>> result;
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
    result.emplace_back(match->begin(), match->end());
  }
  return result;
}

std::string without_comments(const std::string& text) {
  return std::regex_replace(text, std::regex("//[^\n]*"), "");
}

int number_or(const std::string& text, int other) {
  return text.empty() ? other : std::stoi(text);
}

void add_shared(Kernel& kernel, const std::string& text) {
  for (const auto& array : matches(text, R"(\.shared \.align \d+ \.b8 (\S+)\[(\d*)\])")) {
    kernel.shared.push_back({array[1], static_cast<std::size_t>(number_or(array[2], 0))});
  }
}

void add_statement(Kernel& kernel, const std::string& statement) {
  if (statement.starts_with(".reg")) {
    for (const auto& set : matches(statement, R"(\.[a-z]+(\d*)\s+(%[a-z]+)<)")) {
      kernel.registers[set[2]] = number_or(set[1], 1);
    }
  } else if (statement.starts_with(".shared")) {
    add_shared(kernel, statement);
  } else {
    const auto end = statement.find_first_of(" \t");
    Instruction instruction{statement, split(statement.substr(0, end), '.'), {}};
    if (end != std::string::npos) instruction.operands = split(statement.substr(end), ',');
    kernel.code.push_back(std::move(instruction));
  }
}

}  // namespace

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (c == separator && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  for (std::string& part : parts) part = trimmed(part);
  return parts;
}

std::map<std::string, Kernel> parse(const std::string& text) {
  const std::string plain = without_comments(text);
  const std::string before = plain.substr(0, plain.find(".visible .entry"));
  std::map<std::string, Kernel> kernels;
  for (const auto& entry :
       matches(plain, R"(\.visible \.entry (\w+)\(([^)]*)\)\s*\n\{([^]*?)\n\})")) {
    Kernel& kernel = kernels[entry[1]];
    for (const auto& name : matches(entry[2], R"(\w+_param_\d+)")) {
      kernel.parameters.push_back(name[0]);
    }
    add_shared(kernel, before);
    std::string statement;
    for (const char c : entry[3]) {
      if (c != ';') {
        statement += c;
        continue;
      }
      add_statement(kernel, trimmed(statement, " \t\n{}"));  // inline PTX has scopes of its own
      statement.clear();
    }
  }
  return kernels;
}

}  // namespace cairn::ptx
