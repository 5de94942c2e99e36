// A mesh: every rank can send bytes to every other. The CPU's collectives are written on it once,
// for processes and for threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives.h"

namespace cairn::parallel {

class Mesh {
 public:
  struct Send {
    int to = 0;
    const void* data = nullptr;
    std::size_t bytes = 0;
  };
  struct Receive {
    int from = 0;
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  Mesh(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Mesh() = default;
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Messages meet only where both sides have set the same tag.
  void set_tag(std::uint64_t tag) { tag_ = tag; }
  std::uint64_t tag() const { return tag_; }
  /// Sends and receives at once; returns when all is done. At most one of each with every peer,
  /// none of zero bytes; peers call it with the matching counterparts. Throws CommunicationError
  /// where a peer is gone or after abort().
  virtual void exchange(const std::vector<Send>& sends, const std::vector<Receive>& receives) = 0;
  virtual void abort() noexcept = 0;

 private:
  int rank_;
  int size_;
  std::uint64_t tag_ = 0;
};

std::unique_ptr<Collectives> make_mesh_collectives(std::unique_ptr<Mesh> mesh);

}  // namespace cairn::parallel
