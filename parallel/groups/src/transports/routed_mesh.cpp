#include "transports/routed_mesh.h"

#include <utility>

namespace cairn::parallel {
namespace {

class RoutedTransfer : public Mesh::Transfer {
 public:
  RoutedTransfer(std::unique_ptr<Mesh::Transfer> network, std::unique_ptr<Mesh::Transfer> local)
      : network_(std::move(network)), local_(std::move(local)) {}
  /// Local messages first: they need this thread, the network's have threads of their own. Ranks
  /// wait for their transfers in one order, so nobody waits for a rank that waits for the network.
  void wait(std::chrono::milliseconds timeout) override {
    local_->wait(timeout);
    network_->wait(timeout);
  }

 private:
  std::unique_ptr<Mesh::Transfer> network_, local_;
};

}  // namespace

RoutedMesh::RoutedMesh(std::unique_ptr<Mesh> local, std::vector<int> places,
                       std::unique_ptr<Mesh> network)
    : Mesh(network->rank(), network->size()),
      local_(std::move(local)),
      places_(std::move(places)),
      network_(std::move(network)) {}

std::unique_ptr<Mesh::Transfer> RoutedMesh::start(int round, const std::vector<Send>& sends,
                                                  const std::vector<Receive>& receives) {
  std::vector<Send> near_sends, far_sends;
  std::vector<Receive> near_receives, far_receives;
  for (const Send& send : sends) {
    const int place = places_[static_cast<std::size_t>(send.to)];
    if (place < 0) far_sends.push_back(send);
    if (place >= 0) near_sends.push_back({place, send.data, send.bytes});
  }
  for (const Receive& receive : receives) {
    const int place = places_[static_cast<std::size_t>(receive.from)];
    if (place < 0) far_receives.push_back(receive);
    if (place >= 0) near_receives.push_back({place, receive.data, receive.bytes});
  }
  local_->set_tag(tag(0));
  network_->set_tag(tag(0));
  auto far = network_->start(round, far_sends, far_receives);
  return std::make_unique<RoutedTransfer>(std::move(far),
                                          local_->start(round, near_sends, near_receives));
}

void RoutedMesh::abort() noexcept {
  local_->abort();
  network_->abort();
}

}  // namespace cairn::parallel
