#include "cairn/kernels/product_choices.h"

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <list>
#include <nlohmann/json.hpp>
#include <set>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "choices.h"
#include "product_setting.h"

namespace cairn::kernels {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kVariable = "CAIRN_PRODUCTS";
constexpr const char* kSetting = "setting";
constexpr const char* kWhere = "product_choices";

/// A setting, and choices by kind.
struct Preference {
  std::string setting = kTimeProducts;
  std::map<std::string, Choices::Ways> ways;
};

struct Shared {
  std::mutex mutex;
  Preference preference;
  std::map<std::pair<std::string, std::string>, Choices> choices;  // by kind and machine
  std::atomic<std::uint64_t> epoch = 0;
  FirstUses first_uses;
};

bool is_path(const std::string& setting) {
  return setting.find('/') != std::string::npos || setting.ends_with(".json");
}

const std::set<std::string>& routes() {
  static const std::set<std::string> names{kTimeProducts, kDefaultProducts, "bf16", "bf16_packed",
                                           "f16",         "f16_packed",     "f32",  "f32_packed"};
  return names;
}

Preference parse(const std::string& text, const std::string& source) {
  try {
    Preference preference;
    const Json json = Json::parse(text);
    preference.setting = json.at(kSetting).get<std::string>();
    if (!routes().contains(preference.setting)) {
      core::fail<core::DataError>(kWhere, "expected a setting in ", source, ", got '",
                                  preference.setting, "'");
    }
    for (const auto& [kind, ways] : json.items()) {
      if (kind != kSetting) preference.ways[kind] = ways.get<Choices::Ways>();
    }
    return preference;
  } catch (const Json::exception& e) {
    core::fail<core::DataError>(kWhere, "expected what product_choices() gave in ", source,
                                ", got other text: ", e.what());
  }
}

Preference read_preference(const std::string& path) {
  std::ifstream file(path);
  if (!file) core::fail<core::IoError>(kVariable, "cannot read the choices in '", path, "'");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return parse(text, core::str("'", path, "'"));
}

Preference preference_of(const std::string& setting) {
  if (is_path(setting)) return read_preference(setting);
  CAIRN_CHECK(routes().contains(setting), kVariable,
              "expected time, default, a route (bf16, bf16_packed, f16, f16_packed, f32, "
              "f32_packed) or the path of a file of choices, got '",
              setting, "'");
  return {.setting = setting, .ways = {}};
}

bool agree(const Preference& a, const Preference& b) {
  for (const auto& [kind, ways] : a.ways) {
    const auto others = b.ways.find(kind);
    if (others == b.ways.end()) continue;
    for (const auto& [work, way] : ways) {
      const auto other = others->second.find(work);
      if (other != others->second.end() && other->second != way) return false;
    }
  }
  return a.setting == b.setting;
}

std::string variable() {
  const char* value = std::getenv(kVariable);
  return value == nullptr ? "" : value;
}

Shared& shared() {
  static Shared* const instance = [] {  // never destroyed: streams may outlive statics
    auto* made = new Shared;
    if (const std::string setting = variable(); !setting.empty()) {
      made->preference = preference_of(setting);
    }
    return made;
  }();
  return *instance;
}

void prefer(Preference preference) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  all.preference = std::move(preference);
  for (auto& [key, choices] : all.choices) choices.prefer(all.preference.ways[key.first]);
  ++all.epoch;
}

}  // namespace

Choices& shared_choices(const std::string& kind, const std::string& machine) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  const auto [place, fresh] = all.choices.try_emplace({kind, machine}, kind, machine);
  if (fresh) place->second.prefer(all.preference.ways[kind]);
  return place->second;
}

std::string product_setting() {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  return all.preference.setting;
}

std::uint64_t product_setting_epoch() {
  return shared().epoch;
}

void count_primitive(double seconds) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  ++all.first_uses.primitives;
  all.first_uses.primitive_seconds += seconds;
}

void count_timing(double seconds) {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  ++all.first_uses.timings;
  all.first_uses.timing_seconds += seconds;
}

FirstUses first_uses() {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  return all.first_uses;
}

std::string product_choices() {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  std::map<std::string, Choices::Ways> ways = all.preference.ways;
  for (const auto& [key, choices] : all.choices) ways[key.first].merge(choices.used());
  Json json{{kSetting, all.preference.setting}};
  for (const auto& [kind, of_kind] : ways) json[kind] = of_kind;
  return json.dump();
}

void use_product_choices(const std::string& json) {
  Preference saved = parse(json, "the saved choices");
  const std::string pinned = variable();
  if (pinned.empty()) {
    prefer(std::move(saved));
    return;
  }
  if (agree(preference_of(pinned), saved)) return;
  log::warn(
      "{}={} stands before the saved choices of products (setting '{}'): where they differ, so "
      "do the bits",
      kVariable, pinned, saved.setting);
}

void set_product_routes(const std::string& setting) {
  prefer(preference_of(setting));
}

}  // namespace cairn::kernels
