// What the programs' command lines have in common: numbers that are checked in words, and errors
// that say what was meant.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

namespace cairn::command_line {

namespace detail {

inline CLI::Validator number(const std::string& what, bool (*fits)(double)) {
  return {[what, fits](const std::string& text) {
            double value = 0.0;
            const bool good =
                CLI::detail::lexical_cast(text, value) && std::isfinite(value) && fits(value);
            return good ? std::string() : "expected " + what + ", got '" + text + "'";
          },
          ""};
}

/// Letters to change, insert or leave out (Levenshtein 1966).
inline std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t before = row[0]++;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = before + (a[i - 1] == b[j - 1] ? 0 : 1);
      before = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace detail

inline CLI::Validator above_zero() {
  return detail::number("a number above 0", [](double x) { return x > 0; });
}
inline CLI::Validator not_below_zero() {
  return detail::number("0 or a number above it", [](double x) { return x >= 0; });
}

/// ": did you mean --steps?"; "" where none of the names is like it.
inline std::string did_you_mean(const std::string& given, const std::vector<std::string>& names) {
  const auto nearest =
      std::min_element(names.begin(), names.end(), [&](const auto& a, const auto& b) {
        return detail::distance(given, a) < detail::distance(given, b);
      });
  const bool like = nearest != names.end() &&
                    detail::distance(given, *nearest) <= std::max<std::size_t>(2, given.size() / 3);
  return like ? ": did you mean " + *nearest + "?" : "";
}

/// "--steps" and the like, of the program and of the command that was given.
inline std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> names;
  std::vector<const CLI::App*> apps{&app};
  for (const CLI::App* command : app.get_subcommands()) apps.push_back(command);
  for (const CLI::App* one : apps) {
    for (const CLI::Option* option : one->get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  }
  return names;
}

/// What is wrong with the command line.
inline std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  const auto flag = std::find_if(rest.begin(), rest.end(),
                                 [](const std::string& text) { return text.starts_with('-'); });
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && flag != rest.end()) {
    const std::string name = flag->substr(0, flag->find('='));
    return "unknown flag '" + name + "'" + did_you_mean(name, flags_of(app));
  }
  const bool lacks = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  if (lacks && flag == rest.end() && !rest.empty()) {
    std::vector<std::string> commands;
    for (const CLI::App* command : app.get_subcommands({})) commands.push_back(command->get_name());
    return "unknown command '" + rest.front() + "'" + did_you_mean(rest.front(), commands);
  }
  return error.what();
}

}  // namespace cairn::command_line
