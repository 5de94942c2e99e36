// Meshes of threads of one process: one that counts messages, and shared memory without processes.
#pragma once

#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <queue>
#include <thread>
#include <tuple>
#include <vector>

#include "cairn/core/error.h"
#include "transports/mesh.h"

namespace cairn::test {

/// Delivers copies, and counts each rank's messages, bytes and transfers.
class Post {
 public:
  struct Count {
    int messages = 0;
    std::size_t bytes = 0;
    int transfers = 0;
  };
  explicit Post(int size) : boxes_(static_cast<std::size_t>(size)), counts_(boxes_.size()) {}
  int size() const { return static_cast<int>(boxes_.size()); }
  void send(int from, std::uint64_t tag, const parallel::Mesh::Send& send) {
    Box& box = boxes_[static_cast<std::size_t>(send.to)];
    const auto* data = static_cast<const char*>(send.data);
    {
      const std::lock_guard lock(box.mutex);
      box.letters[{from, tag}].emplace(data, data + send.bytes);
    }
    box.came.notify_one();
    Count& count = counts_[static_cast<std::size_t>(from)];
    ++count.messages;
    count.bytes += send.bytes;
  }
  void receive(int rank, std::uint64_t tag, const parallel::Mesh::Receive& receive) {
    Box& box = boxes_[static_cast<std::size_t>(rank)];
    std::unique_lock lock(box.mutex);
    const std::pair<int, std::uint64_t> key{receive.from, tag};
    if (!box.came.wait_for(lock, std::chrono::seconds(30),
                           [&] { return !box.letters[key].empty(); }))
      core::fail<core::CommunicationError>("post", "nothing came");
    const std::string letter = std::move(box.letters[key].front());
    box.letters[key].pop();
    if (box.letters[key].empty()) box.letters.erase(key);
    if (letter.size() != receive.bytes)
      core::fail<core::CommunicationError>("post", "got another size");
    std::memcpy(receive.data, letter.data(), letter.size());
  }
  Count& count(int rank) { return counts_[static_cast<std::size_t>(rank)]; }

 private:
  struct Box {
    std::mutex mutex;
    std::condition_variable came;
    std::map<std::pair<int, std::uint64_t>, std::queue<std::string>> letters;
  };
  std::vector<Box> boxes_;
  std::vector<Count> counts_;  // each written by its rank alone
};

class CountingMesh : public parallel::Mesh {
 public:
  CountingMesh(Post& post, int rank) : Mesh(rank, post.size()), post_(post) {}
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override {
    ++post_.count(rank()).transfers;
    for (const Send& send : sends) post_.send(rank(), tag(round), send);
    return std::make_unique<Arrival>(*this, tag(round), receives);
  }
  void abort() noexcept override {}

 private:
  class Arrival : public Transfer {
   public:
    Arrival(CountingMesh& mesh, std::uint64_t tag, std::vector<Receive> receives)
        : mesh_(mesh), tag_(tag), receives_(std::move(receives)) {}
    void wait(std::chrono::milliseconds /*timeout*/) override {
      for (const Receive& receive : receives_) mesh_.post_.receive(mesh_.rank(), tag_, receive);
    }

   private:
    CountingMesh& mesh_;
    std::uint64_t tag_;
    std::vector<Receive> receives_;
  };
  Post& post_;
};

/// Messages arrive as soon as both sides have started them, in segments as small as there are.
class EagerMesh : public CountingMesh {
 public:
  using CountingMesh::CountingMesh;
  std::size_t segment_bytes() const override { return 1; }
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override {
    CountingMesh::start(round, sends, receives)->wait();
    return CountingMesh::start(round, {}, {});
  }
};

/// body(rank) in a thread for each rank; the first error is thrown when all have ended.
inline void in_threads(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace cairn::test
