// The explain report as text and as JSON.
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cairn/amp/explain.h"
#include "cairn/core/text_table.h"

namespace cairn::amp {

namespace {

std::string with_digits(int digits, double value, const char* unit = "") {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value << unit;
  return out.str();
}

// A sum per step: "4", or "4.5" where the steps differed.
std::string per_step(std::int64_t sum, std::int64_t steps) {
  if (sum % steps == 0) return std::to_string(sum / steps);
  return with_digits(1, static_cast<double>(sum) / static_cast<double>(steps));
}

std::string bytes(std::int64_t sum, std::int64_t steps) {
  const double value = static_cast<double>(sum) / static_cast<double>(steps);
  if (value < 1e4) return with_digits(0, value, " B");
  return value < 1e7 ? with_digits(1, value / 1e3, " kB") : with_digits(1, value / 1e6, " MB");
}

// Zeros make a table hard to read.
std::string or_dash(std::int64_t sum, const std::string& text) {
  return sum == 0 ? "-" : text;
}

}  // namespace

std::string ExplainReport::table() const {
  std::ostringstream out;
  out << "per step, over " << steps << (steps == 1 ? " step" : " steps") << ": "
      << per_step(casts, steps) << " casts (" << bytes(bytes_cast, steps) << " written), "
      << per_step(cache_hits, steps) << " inputs from the cast cache, "
      << per_step(tensor_core, steps) << " of " << per_step(products, steps)
      << " products fit tensor cores\n\n";
  core::TextTable table({"operation", "phase", "count", "in", "casts", "cast", "cached", "why"},
                        {2, 4, 5, 6});
  for (const ExplainRow& row : rows) {
    table.add({row.op, name(row.phase), per_step(row.count, steps),
               std::string(core::name(row.dtype)), or_dash(row.casts, per_step(row.casts, steps)),
               or_dash(row.bytes_cast, bytes(row.bytes_cast, steps)),
               or_dash(row.cache_hits, per_step(row.cache_hits, steps)), row.why});
  }
  out << table.str();
  if (misfits.empty()) return out.str();
  out << "\nproducts that do not fit tensor cores:\n";
  core::TextTable list({"operation", "parameter", "count", "why"}, {2});
  for (const ExplainMisfit& misfit : misfits) {
    list.add({misfit.op, misfit.where.empty() ? "-" : misfit.where, per_step(misfit.count, steps),
              misfit.reason});
  }
  out << list.str();
  return out.str();
}

std::string ExplainReport::json() const {
  nlohmann::ordered_json all;
  all["steps"] = steps;
  all["casts"] = casts;
  all["bytes_cast"] = bytes_cast;
  all["cache_hits"] = cache_hits;
  all["products"] = products;
  all["tensor_core"] = tensor_core;
  all["rows"] = nlohmann::ordered_json::array();
  for (const ExplainRow& row : rows) {
    all["rows"].push_back({{"op", row.op},
                           {"phase", name(row.phase)},
                           {"dtype", core::name(row.dtype)},
                           {"why", row.why},
                           {"count", row.count},
                           {"casts", row.casts},
                           {"bytes_cast", row.bytes_cast},
                           {"cache_hits", row.cache_hits},
                           {"products", row.products},
                           {"tensor_core", row.tensor_core}});
  }
  all["misfits"] = nlohmann::ordered_json::array();
  for (const ExplainMisfit& misfit : misfits) {
    all["misfits"].push_back({{"op", misfit.op},
                              {"parameter", misfit.where},
                              {"reason", misfit.reason},
                              {"count", misfit.count}});
  }
  return all.dump(2);
}

}  // namespace cairn::amp
