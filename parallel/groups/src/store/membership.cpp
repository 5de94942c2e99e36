#include "store/membership.h"

#include "cairn/core/error.h"
#include "store/wire.h"

namespace cairn::parallel {
/// Rank 0 collects: two requests a rank instead of one for each pair.
std::vector<std::string> share(const Membership& membership, const std::string& what,
                               const std::string& value) {
  Store& store = *membership.store;
  std::vector<std::string> all;
  const auto key_of = [&](const std::string& who) {
    return core::str(membership.prefix, "engines/", what, "/", who);
  };
  if (membership.rank != 0) {
    store.set(key_of(std::to_string(membership.rank)), value);
    const std::string bytes = store.get(key_of("all"), membership.timeout);
    wire::Unpacker unpacker(bytes);
    for (int rank = 0; rank < membership.world_size; ++rank) all.push_back(unpacker.text());
    return all;
  }
  all.push_back(value);
  for (int rank = 1; rank < membership.world_size; ++rank)
    all.push_back(store.get(key_of(std::to_string(rank)), membership.timeout));
  wire::Packer packer;
  for (const std::string& text : all) packer.text(text);
  store.set(key_of("all"), packer.bytes());
  return all;
}

}  // namespace cairn::parallel
