// Where all ranks stand where a message between two of them does not come: who waits for whom, and
// whether they ever can go on. A sum, as a census is.
#pragma once

#include <string>
#include <vector>

#include "control/history.h"
#include "store/wire.h"

namespace cairn::parallel {

class MessageStatus {
 public:
  /// What sends may end without the other rank, where buffers take it: not within this.
  static constexpr auto kPatience = Milliseconds(3000);

  void add(const MessageProgress& meeting);
  void add(const MessageStatus& other);

  /// Why ranks that wait can never go on: they wait for each other, for one that left, or longer
  /// than the limit. Empty: they may.
  std::string judge(const Stuck& stuck) const;
  /// For whom the rank waits, for people to read.
  std::string describe(const Stuck& stuck) const;

  void pack(wire::Packer& to) const;
  static MessageStatus unpack(wire::Unpacker& from);

 private:
  using Path = std::vector<const MessageProgress*>;

  const MessageProgress* find(int rank) const;
  Path path_from(const MessageProgress& first) const;
  std::string judge(const Path& path) const;
  std::string name(int rank) const;  // "rank 1 is in recv from 2 ..."

  std::vector<MessageProgress> all_;  // by rank
};

}  // namespace cairn::parallel
