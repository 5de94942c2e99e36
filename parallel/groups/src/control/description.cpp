#include "control/description.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

/// Every bit of the word reaches all of the hash.
std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

/// Eight bytes at a time, and the length.
std::uint64_t mixed(std::uint64_t hash, std::string_view text) {
  for (std::size_t at = 0; at < text.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
    hash = mixed(hash, word);
  }
  return mixed(hash, text.size());
}

}  // namespace

Description::Description(std::string text) : name_(std::move(text)), hash_(mixed(1, name_)) {}

Description::Description(const char* operation, std::string_view detail, int root,
                         const TensorView& x, std::string_view name)
    : operation_(operation),
      detail_(detail),
      root_(root),
      dtype_(x.dtype),
      shape_(x.shape),
      name_(name),
      hash_(mixed(mixed(mixed(2, operation), detail), name_)) {
  hash_ = mixed(hash_, static_cast<std::uint64_t>(root));
  hash_ = mixed(hash_, static_cast<std::uint64_t>(x.dtype));
  for (const std::int64_t size : x.shape) hash_ = mixed(hash_, static_cast<std::uint64_t>(size));
}

std::string Description::text() const {
  if (operation_ == nullptr) return name_;
  const std::string root = root_ < 0 ? "" : core::str(" ", root_);
  return core::str(operation_, detail_.empty() ? "" : " ", detail_, root, " ", dtype_, shape_,
                   name_.empty() ? "" : core::str(" '", name_, "'"));
}

std::uint64_t fingerprint(const Description& description, std::uint64_t sequence) {
  return mixed(description.hash(), sequence);
}

}  // namespace cairn::parallel
