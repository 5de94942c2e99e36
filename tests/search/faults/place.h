// Where a job runs: network and mount namespaces of its own, of the calling thread, so that what it
// leaves behind is seen exactly; a second network for a second machine.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace cairn::test {

/// Whether threads of this process may make namespaces; makes a user namespace for that where it is
/// not root. To be called once, before there are threads.
bool may_have_namespaces();

/// Whether their links may be made slow and lossy: the kernel may lack netem, the machine tc.
bool may_have_netem();

class Place {
 public:
  /// Without namespaces: this machine as it is, and what is left behind can be seen in part only.
  Place(bool namespaces, bool two_machines);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  const std::string& folder() const { return folder_; }  // for the job's files
  const char* master_addr() const { return other_ < 0 ? "127.0.0.1" : "10.77.0.1"; }
  /// In a child process: moves it to the second machine.
  void enter_second() const;
  /// Of 64 KiB, as a folder of the job's.
  void add_small_disk(const std::string& name) const;
  void set_link(bool up) const;
  void make_link_slow() const;
  /// Connects to whatever listens here and says `words`; returns the connections.
  std::vector<int> knock(const std::string& words) const;
  /// Ports, sockets and shared memory that are still there, in words; empty: none.
  std::string leftovers() const;

 private:
  void on_each_machine(const std::function<void()>& f) const;

  bool namespaces_;
  int own_ = -1, other_ = -1;
  std::string folder_;
};

}  // namespace cairn::test
