// A world whose other ranks say what a test wants, and that notes what it was asked for.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/world.h"

namespace cairn::test {

struct FakeLink final : core::WorldLink {
  std::function<std::vector<std::string>(const std::string&)> all = [](const std::string& value) {
    return std::vector<std::string>{value};
  };
  std::optional<std::vector<core::NonFinite>> nonfinite;
  bool reduces = true;
  int exchanges = 0;
  std::vector<bool> synchronized;

  std::vector<std::string> exchange(const std::string& value, std::string_view) override {
    ++exchanges;
    return all(value);
  }
  bool reduces_gradients() const override { return reduces; }
  void synchronize(bool on) override { synchronized.push_back(on); }
  std::optional<std::vector<core::NonFinite>> take_local_nonfinite() override { return nonfinite; }
};

/// `size` ranks that all say what this one does.
inline std::shared_ptr<FakeLink> alike(int size) {
  auto link = std::make_shared<FakeLink>();
  link->all = [size](const std::string& value) {
    return std::vector<std::string>(static_cast<std::size_t>(size), value);
  };
  return link;
}

}  // namespace cairn::test
