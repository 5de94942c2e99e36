#include "place.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "cairn/core/error.h"

namespace cairn::test {
namespace {

void check(bool well, const std::string& what) {
  if (!well) throw std::runtime_error(what + ": " + std::strerror(errno));
}

void run(const std::string& command) {
  check(std::system(command.c_str()) == 0, command);
}

void write_file(const char* path, const std::string& text) {
  std::ofstream(path) << text;
}

int own_network() {
  const int fd = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
  check(fd >= 0, "the network namespace");
  return fd;
}

void new_network() {
  check(unshare(CLONE_NEWNET) == 0, "a network namespace");
  run("ip link set lo up");
}

struct Listeners {
  std::set<int> ports;
  std::set<std::string> sockets;  // local ones; '@' for the abstract namespace's
};

/// In the calling thread's network.
Listeners listeners() {
  Listeners all;
  std::string line, skip, local, state, flags, type, path;
  for (const char* table : {"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"}) {
    std::ifstream file(table);
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream(line) >> skip >> local >> skip >> state;
      if (state == "0A")
        all.ports.insert(std::stoi(local.substr(local.rfind(':') + 1), nullptr, 16));
    }
  }
  std::ifstream file("/proc/thread-self/net/unix");
  std::getline(file, line);
  while (std::getline(file, line)) {
    path.clear();
    std::istringstream(line) >> skip >> skip >> skip >> flags >> type >> state >> skip >> path;
    if (flags == "00010000") all.sockets.insert(path);
  }
  return all;
}

int say_to(int family, const sockaddr* address, socklen_t length, const std::string& words) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, address, length) == 0) {
    send(fd, words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  return fd;
}

int knock_at(int port, const std::string& words) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return say_to(AF_INET, reinterpret_cast<sockaddr*>(&address), sizeof address, words);
}

int knock_at(std::string path, const std::string& words) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.starts_with('@')) path[0] = '\0';
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof address.sun_path));
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  return say_to(AF_UNIX, reinterpret_cast<sockaddr*>(&address), length, words);
}

}  // namespace

bool may_have_namespaces() {
  const auto uid = geteuid(), gid = getegid();
  if (uid != 0) {
    if (unshare(CLONE_NEWUSER) != 0) return false;
    write_file("/proc/self/setgroups", "deny");
    write_file("/proc/self/uid_map", core::str("0 ", uid, " 1"));
    write_file("/proc/self/gid_map", core::str("0 ", gid, " 1"));
  }
  return std::system(
             "unshare -nm sh -c 'ip link set lo up && ip link add v0 type veth peer name "
             "v1 && mount -t tmpfs none /dev/shm' 2> /dev/null") == 0;
}

bool may_have_netem() {
  return std::system(
             "unshare -nm sh -c 'ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root "
             "netem delay 1ms' > /dev/null 2>&1") == 0;
}

Place::Place(bool namespaces, bool two_machines) : namespaces_(namespaces) {
  if (namespaces) {
    check(unshare(CLONE_NEWNS) == 0, "a mount namespace");
    check(mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "private mounts");
    for (const char* path : {"/dev/shm", "/tmp"}) {
      check(mount("tmpfs", path, "tmpfs", 0, nullptr) == 0, path);
    }
    if (two_machines) {
      new_network();
      other_ = own_network();
    }
    new_network();
    own_ = own_network();
  }
  char path[] = "/tmp/cairn_faults_XXXXXX";
  check(mkdtemp(path) != nullptr, "a folder");
  folder_ = path;
  if (other_ < 0) return;
  run(core::str("ip link add v0 type veth peer name v1 netns /proc/", getpid(), "/fd/", other_));
  run("ip addr add 10.77.0.1/24 dev v0 && ip link set v0 up");
  enter_second();
  run("ip addr add 10.77.0.2/24 dev v1 && ip link set v1 up");
  check(setns(own_, CLONE_NEWNET) == 0, "back to the first machine");
}

Place::~Place() {
  umount2((folder_ + "/checkpoints").c_str(), MNT_DETACH);
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
  for (const int fd : {own_, other_}) {
    if (fd >= 0) close(fd);
  }
}

void Place::on_each_machine(const std::function<void()>& f) const {
  f();
  if (other_ < 0) return;
  enter_second();
  f();
  check(setns(own_, CLONE_NEWNET) == 0, "back to the first machine");
}

void Place::enter_second() const {
  check(setns(other_, CLONE_NEWNET) == 0, "the second machine");
}

void Place::add_small_disk(const std::string& name) const {
  const std::string path = folder_ + "/" + name;
  check(mkdir(path.c_str(), 0700) == 0, path);
  check(mount("tmpfs", path.c_str(), "tmpfs", 0, "size=64k") == 0, path);
}

void Place::set_link(bool up) const {
  run(core::str("ip link set v0 ", up ? "up" : "down"));
}

void Place::make_link_slow() const {
  run("tc qdisc add dev v0 root netem delay 20ms 10ms loss 2%");
}

std::vector<int> Place::knock(const std::string& words) const {
  std::vector<int> connections;
  on_each_machine([&] {
    const Listeners here = listeners();
    for (const int port : here.ports) connections.push_back(knock_at(port, words));
    for (const auto& path : here.sockets) connections.push_back(knock_at(path, words));
  });
  return connections;
}

std::string Place::leftovers() const {
  std::string all;
  if (!namespaces_) return all;
  on_each_machine([&] {
    const Listeners here = listeners();
    for (const int port : here.ports) all += core::str("port ", port, "; ");
    for (const auto& path : here.sockets) all += core::str("socket ", path, "; ");
  });
  for (const char* path : {"/dev/shm", "/tmp"}) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      const bool simulated = entry.path().filename().string().starts_with("cairn-gpusim");
      if (entry.path() != folder_ && !simulated) all += entry.path().string() + "; ";
    }
  }
  return all;
}

}  // namespace cairn::test
