// A mesh of several hosts: ranks of this host by one mesh, all others by another.
#pragma once

#include <memory>
#include <vector>

#include "transports/mesh.h"

namespace cairn::parallel {

class RoutedMesh : public Mesh {
 public:
  /// places: each rank's number in the local mesh, or -1. The network's mesh has all ranks.
  RoutedMesh(std::unique_ptr<Mesh> local, std::vector<int> places, std::unique_ptr<Mesh> network);
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override;
  void abort() noexcept override;

 private:
  std::unique_ptr<Mesh> local_;
  std::vector<int> places_;
  std::unique_ptr<Mesh> network_;
};

}  // namespace cairn::parallel
