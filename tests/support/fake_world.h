// A world whose other ranks say what a test wants, and that notes what it was asked for.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/packer.h"
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

  std::vector<std::string> exchange(const std::string& value, std::string_view name) override {
    if (name == "amp's options") return {value};
    ++exchanges;
    return all(value);
  }
  bool reduces_gradients() const override { return reduces; }
  void synchronize(bool on) override { synchronized.push_back(on); }
  std::optional<std::vector<core::NonFinite>> take_local_nonfinite() override { return nonfinite; }
};

/// What another rank tells in amp's step (amp/scaling/src/overflow_agreement.h, in what
/// World::all_or_throw sends) that ends the losses of this rank's message `own`: loss 0 overflowed
/// in these gradients of its own, or in the sum of all ranks'; neither: it found nothing.
inline std::string step_report(const std::string& own, const std::vector<core::NonFinite>& its_own,
                               const std::vector<core::NonFinite>& sum = {}) {
  core::Unpacker message(own);
  message.number();
  const std::string found = message.text();
  core::Packer out;
  out.text(core::Unpacker(found).text()).text("");
  const auto sent = [&out] { return core::Packer().number(0).text(out.bytes()).bytes(); };
  if (its_own.empty() && sum.empty()) {
    out.bits({}).bits({}).number(0).bits({false}).number(0);
    return sent();
  }
  const auto list = [&out](const std::vector<core::NonFinite>& all) {
    out.number(all.size());
    for (const core::NonFinite& n : all) {
      out.text(n.parameter);
      out.number(static_cast<std::uint64_t>(n.inf)).number(static_cast<std::uint64_t>(n.nan));
    }
  };
  out.bits({true});         // the first of these losses
  out.bits({true});         // optimizer 0
  out.number(1).number(0);  // loss 0
  list(sum.empty() ? its_own : sum);
  out.bits({!sum.empty()});  // it looked before the sum
  list(sum.empty() ? sum : its_own);
  return sent();
}

/// `size` ranks that all say what this one does.
inline std::shared_ptr<FakeLink> alike(int size) {
  auto link = std::make_shared<FakeLink>();
  link->all = [size](const std::string& value) {
    return std::vector<std::string>(static_cast<std::size_t>(size), value);
  };
  return link;
}

}  // namespace cairn::test
