#include "cairn/core/world.h"

#include <exception>

#include "cairn/core/packer.h"

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

World::Answers World::answers(std::string_view what,
                              const std::function<std::string()>& work) const {
  std::string own;
  std::exception_ptr error;
  try {
    own = Packer().number(0).text(work()).bytes();
  } catch (const std::exception& e) {
    error = std::current_exception();
    own = Packer().number(1).text(e.what()).bytes();
  }
  std::vector<std::string> told;
  try {
    told = exchange(own, what);
  } catch (const CommunicationError&) {
    if (!error) throw;  // else this rank's own error says more
  }
  if (error) std::rethrow_exception(error);
  Answers all;
  for (const std::string& bytes : told) {
    Unpacker message(bytes);
    if (message.number() != 0 && !all.failed) all.failed = all.of_rank.size();
    all.of_rank.push_back(message.text());
  }
  return all;
}

double World::sum(double value, std::string_view name) const {
  double total = 0.0;
  for (const std::string& told : exchange(Packer().real(value).bytes(), name))
    total += Unpacker(told).real();
  return total;
}

}  // namespace cairn::core
