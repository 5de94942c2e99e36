#include "cairn/core/world.h"

#include <cstring>

#include "cairn/core/error.h"

namespace cairn::core {

namespace {

class ExchangeLink final : public WorldLink {
 public:
  explicit ExchangeLink(World::Exchange exchange) : exchange_(std::move(exchange)) {}
  std::vector<std::string> exchange(const std::string& value, std::string_view name) override {
    return exchange_(value, name);
  }

 private:
  World::Exchange exchange_;
};

}  // namespace

World::World(int rank_, int size_, Exchange exchange)
    : rank(rank_), size(size_), link_(std::make_shared<ExchangeLink>(std::move(exchange))) {}

double World::sum(double value, std::string_view name) const {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  double total = 0.0;
  for (const std::string& other : exchange(bytes, name)) {
    if (other.size() != sizeof value) {
      fail<CommunicationError>("world", "expected a number from every rank for '", name, "', got ",
                               other.size(), " bytes");
    }
    std::memcpy(&value, other.data(), sizeof value);
    total += value;
  }
  return total;
}

}  // namespace cairn::core
