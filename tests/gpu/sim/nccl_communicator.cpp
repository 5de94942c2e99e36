#include "gpu/sim/nccl_communicator.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "gpu/sim/nccl_math.h"
#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {
namespace {

const char* name(Kind kind) {
  constexpr const char* kNames[] = {"all_reduce",     "broadcast", "reduce", "all_gather",
                                    "reduce_scatter", "send",      "recv"};
  return kNames[static_cast<int>(kind)];
}

bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

bool has_root(Kind kind) {
  return kind == Kind::broadcast || kind == Kind::reduce;
}

std::string bytes_of(const Signature& signature) {
  return {reinterpret_cast<const char*>(&signature), sizeof signature};
}

Signature signature_of(const std::string& message) {
  Signature signature;
  std::memcpy(&signature, message.data(), std::min(message.size(), sizeof signature));
  return signature;
}

std::string key_of(const char* kind, std::uint64_t number) {
  return std::string(kind) + std::to_string(number);
}

std::string key_of(const char* kind, int from, int to, std::uint64_t number) {
  return std::string(kind) + std::to_string(from) + "to" + std::to_string(to) + "n" +
         std::to_string(number);
}

std::uint64_t seed_from_environment() {
  const char* text = std::getenv("CAIRN_SIM_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const char* const x = static_cast<const char*>(a);
  const char* const y = static_cast<const char*>(b);
  return a_bytes > 0 && b_bytes > 0 && x < y + b_bytes && y < x + a_bytes;
}

/// The operations of a group run at the same time.
void check_independent(const Part& a, const Part& b) {
  if (!overlap(a.send, a.send_bytes, b.recv, b.recv_bytes) &&
      !overlap(a.recv, a.recv_bytes, b.send, b.send_bytes) &&
      !overlap(a.recv, a.recv_bytes, b.recv, b.recv_bytes)) {
    return;
  }
  report("nccl group", describe(a.what) + " and " + describe(b.what) +
                           " of one group use the same memory, and nothing orders the two");
}

/// Of the calling thread.
bool lies_on_stack(const void* data) {
  pthread_attr_t attributes;
  void* stack = nullptr;
  std::size_t bytes = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &bytes);
  pthread_attr_destroy(&attributes);
  return data >= stack && data < static_cast<char*>(stack) + bytes;
}

// What an aborted operation leaves: the first half as it was, the second half numbers that look
// like results (f32 0.748, f16 1.8), so that only who knows of the abort keeps from using them.
constexpr int kGarbage = 0x3f;

}  // namespace

bool is_collective(Kind kind) {
  return kind != Kind::send && kind != Kind::recv;
}

std::string name_of(const Group& group) {
  return "nccl " + (group.parts.size() == 1 ? describe(group.parts[0].what)
                                            : "group of " + std::to_string(group.parts.size()));
}

std::string describe(const Signature& signature) {
  std::ostringstream text;
  text << name(signature.kind);
  if (reduces(signature.kind)) text << " " << nccl_name(static_cast<ncclRedOp_t>(signature.op));
  text << " of " << signature.count << " "
       << nccl_name(static_cast<ncclDataType_t>(signature.type));
  if (has_root(signature.kind)) text << " root " << signature.root;
  return text.str();
}

Communicator::Communicator(const std::string& name, int ranks, int rank, int device, bool blocking,
                           std::uint64_t ids)
    : board_(name, ranks, rank, ids),
      device_(device),
      blocking_(blocking),
      random_(seed_from_environment() * 1000 + static_cast<std::uint64_t>(rank)),
      sends_(static_cast<std::size_t>(ranks)),
      recvs_(static_cast<std::size_t>(ranks)) {}

ncclResult_t Communicator::join() {
  if (const std::string wrong = board_.join(device_); !wrong.empty()) {
    set_last_error(wrong);
    stage_ = Stage::ended;
    return ncclInvalidUsage;
  }
  polls_ = 3;
  return ncclInProgress;
}

int Communicator::draw_polls(int most) {
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  return static_cast<int>((random_ >> 33) % static_cast<std::uint64_t>(most + 1));
}

bool Communicator::in_progress() const {
  return stage_ == Stage::connecting || stage_ == Stage::finalizing || !deferred_.empty() ||
         split_.under_way;
}

void Communicator::check_usable(const char* call) const {
  if (in_progress()) {
    report("nccl in progress", std::string(call) + " before ncclCommGetAsyncError has answered " +
                                   "ncclSuccess for what was asked before");
  }
  if (stage_ != Stage::open) {
    report("nccl handle", std::string(call) + " of a communicator that is finalized");
  }
}

void Communicator::add(Part part, Stream* stream) {
  if (added_.empty()) added_.push_back(std::make_shared<Group>());
  Group& group = *added_.back();
  if (group.stream != nullptr && group.stream != stream) {
    report("nccl", "groups over several streams of one communicator are not simulated");
  }
  group.stream = stream;
  for (const Part& other : group.parts) check_independent(part, other);
  group.parts.push_back(std::move(part));
}

ncclResult_t Communicator::start_added() {
  std::vector<std::shared_ptr<Group>> added = std::exchange(added_, {});
  polls_ = blocking_ ? 0 : issued_ == 0 ? 2 : draw_polls(3);
  if (polls_ > 0) {
    deferred_ = std::move(added);
    return ncclInProgress;
  }
  for (const auto& group : added) issue(group);
  return ncclSuccess;
}

// In a capture it gets its numbers, and may begin, at each launch of the graph.
void Communicator::issue(const std::shared_ptr<Group>& group) {
  count_kernel();
  Stream& stream = *group->stream;
  if (!stream.capture) return enqueue(stream, work_of(group));
  const auto self = shared_from_this();
  Work captured{name_of(*group), {}};
  captured.again = [self, group] { return self->work_of(std::make_shared<Group>(*group)); };
  enqueue(stream, std::move(captured));
}

void Communicator::number(Group& group) {
  group.number = issued_++;
  for (Part& part : group.parts) {
    const auto peer = static_cast<std::size_t>(std::max(part.peer, 0));
    part.number = part.what.kind == Kind::send   ? sends_[peer]++
                  : part.what.kind == Kind::recv ? recvs_[peer]++
                                                 : collectives_++;
    if (is_collective(part.what.kind)) say_place(part.number);
  }
}

Work Communicator::work_of(const std::shared_ptr<Group>& group) {
  if (stage_ == Stage::ended && !aborted_) {
    report("nccl graph", "a graph is launched that holds operations of a destroyed communicator");
  }
  number(*group);
  const auto self = shared_from_this();
  return {name_of(*group), [self, group] { self->run(*group); },
          [self, group] { return self->is_ready(*group); }};
}

ncclResult_t Communicator::connected() {
  if (!board_.all_joined()) return ncclInProgress;
  if (const std::string wrong = board_.conflict(); !wrong.empty()) {
    set_last_error(wrong);
    error_ = ncclInvalidUsage;
    return error_;
  }
  stage_ = Stage::open;
  return ncclSuccess;
}

ncclResult_t Communicator::poll() {
  if (error_ != ncclSuccess) return error_;
  if (polls_ > 0) --polls_;
  if (polls_ > 0) return ncclInProgress;
  if (stage_ == Stage::connecting) return connected();
  for (const auto& group : std::exchange(deferred_, {})) issue(group);
  if (split_.under_way) return finish_split();
  if (stage_ != Stage::finalizing) return ncclSuccess;
  if (pending() > 0) return ncclInProgress;
  if (!board_.posted("finalized", rank())) board_.post("finalized", "");
  if (!board_.posted_by_all("finalized")) return ncclInProgress;
  stage_ = Stage::finalized;
  return ncclSuccess;
}

ncclResult_t Communicator::wait() {
  for (;;) {
    const ncclResult_t result = poll();
    if (result != ncclInProgress) return result;
    wait_a_little();
    if (aborted_) return ncclInternalError;
  }
}

ncclResult_t Communicator::finalize() {
  stage_ = Stage::finalizing;
  polls_ = blocking_ ? 0 : 2;
  return blocking_ ? wait() : ncclInProgress;
}

void Communicator::abort() {
  if (split_.under_way && split_.is_local) {
    report("nccl split",
           "a split that is aborted under way may still write the new communicator, which is a "
           "local variable of its caller");
  }
  aborted_ = true;
  deferred_.clear();
  end();
}

void Communicator::end() {
  stage_ = Stage::ended;
  board_.leave();
}

// ---- Splitting

ncclResult_t Communicator::split(int color, int key, ncclComm_t* child, bool blocking) {
  split_ = {splits_++, color, key, child, blocking, true, lies_on_stack(child)};
  *child = nullptr;
  std::ostringstream text;
  text << color << " " << key;
  board_.post(key_of("split", split_.number), text.str());
  polls_ = blocking_ ? 0 : 2;
  return blocking_ ? wait() : ncclInProgress;
}

ncclResult_t Communicator::finish_split() {
  const auto messages = board_.messages(key_of("split", split_.number));
  if (!messages) return ncclInProgress;
  split_.under_way = false;
  if (split_.color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, int>> members;  // key and rank
  for (int rank = 0; rank < ranks(); ++rank) {
    int color = 0, key = 0;
    std::istringstream((*messages)[static_cast<std::size_t>(rank)]) >> color >> key;
    if (color == split_.color) members.emplace_back(key, rank);
  }
  std::sort(members.begin(), members.end());
  const auto mine = std::find(members.begin(), members.end(), std::pair(split_.key, rank()));
  std::ostringstream name;
  name << board_.name() << "-s" << split_.number << "c" << split_.color;
  auto child = std::make_shared<Communicator>(name.str(), static_cast<int>(members.size()),
                                              static_cast<int>(mine - members.begin()), device_,
                                              split_.blocking);
  ncclResult_t result = child->join();
  if (split_.blocking && result == ncclInProgress) result = child->wait();
  *split_.child = make_handle(std::move(child));
  return result == ncclInProgress ? ncclSuccess : result;
}

// ---- The device's part

bool Communicator::is_ready(Group& group) {
  if (aborted_) return true;
  if (!std::exchange(group.reached, true)) check_beside(group);
  if (error_ != ncclSuccess || completed_ != group.number) return false;
  group.inputs.resize(group.parts.size());
  bool all = true;
  for (std::size_t i = 0; i < group.parts.size(); ++i) {
    if (is_ready(group.parts[i], group.inputs[i])) continue;
    all = false;
    // Who posts to a collective has read the one before.
    if (is_collective(group.parts[i].what.kind)) break;
  }
  return all;
}

bool Communicator::is_ready(Part& part, std::vector<std::string>& inputs) {
  if (part.what.kind == Kind::send) return send_is_ready(part);
  if (part.what.kind == Kind::recv) return recv_is_ready(part, inputs);
  return collective_is_ready(part, inputs);
}

void Communicator::post(Part& part, const std::string& key) {
  if (std::exchange(part.posted, true)) return;
  std::string message = bytes_of(part.what);
  if (part.send_bytes > 0) {
    message.append(static_cast<const char*>(read(part.send, part.send_bytes)), part.send_bytes);
  }
  board_.post(key, message);
}

/// Ranks that differ wait for each other without end, as hardware does; a line says why.
bool Communicator::agrees(const Signature& mine, int other_rank, const Signature& other) {
  if (mine == other) return true;
  if (!board_.first("order")) return false;
  std::fprintf(stderr, "gpusim: nccl order: rank %d has %s, rank %d %s\n", rank(),
               describe(mine).c_str(), other_rank, describe(other).c_str());
  return false;
}

bool Communicator::collective_is_ready(Part& part, std::vector<std::string>& inputs) {
  if (!inputs.empty()) return true;
  const std::string key = key_of("collective", part.number);
  post(part, key);
  const auto messages = board_.messages(key);
  if (!messages) return false;
  for (int rank = 0; rank < ranks(); ++rank) {
    const Signature other = signature_of((*messages)[static_cast<std::size_t>(rank)]);
    if (!agrees(part.what, rank, other)) return false;
  }
  inputs = *messages;
  board_.remove(key_of_place(part.number));  // every rank has queued it, and read its place
  // Who has come to this one has read the one before.
  if (part.number > 0) board_.remove(key_of("collective", part.number - 1));
  return true;
}

bool Communicator::send_is_ready(Part& part) {
  post(part, key_of("send", rank(), part.peer, part.number));
  return board_.posted(key_of("recv", rank(), part.peer, part.number), part.peer);
}

bool Communicator::recv_is_ready(Part& part, std::vector<std::string>& inputs) {
  if (!inputs.empty()) return true;
  post(part, key_of("recv", part.peer, rank(), part.number));
  const auto message = board_.message(key_of("send", part.peer, rank(), part.number), part.peer);
  if (!message) return false;
  Signature sent = signature_of(*message);
  sent.kind = Kind::recv;
  if (!agrees(part.what, part.peer, sent)) return false;
  inputs = {*message};
  return true;
}

void Communicator::run(Group& group) {
  for (std::size_t i = 0; i < group.parts.size(); ++i) run(group.parts[i], group.inputs[i]);
  group.inputs.clear();
  ++completed_;
}

void Communicator::run(const Part& part, const std::vector<std::string>& messages) {
  void* const out = part.recv_bytes > 0 ? write(part.recv, part.recv_bytes) : nullptr;
  if (aborted_) {
    const std::size_t half = part.recv_bytes / 2;
    if (out != nullptr)
      std::memset(static_cast<char*>(out) + half, kGarbage, part.recv_bytes - half);
    return;
  }
  const auto me = static_cast<std::size_t>(rank());
  const auto type = static_cast<ncclDataType_t>(part.what.type);
  const auto op = static_cast<ncclRedOp_t>(part.what.op);
  const std::size_t count = part.what.count;
  std::vector<const void*> inputs;
  for (const std::string& message : messages) inputs.push_back(message.data() + sizeof(Signature));
  switch (part.what.kind) {
    case Kind::all_reduce:
      return nccl_ring(inputs, out, count, type, op);
    case Kind::reduce:
      if (out != nullptr) nccl_combine(inputs, out, 0, count, part.what.root + 1, type, op);
      return;
    case Kind::reduce_scatter: {
      std::string whole(part.send_bytes, '\0');
      nccl_combine(inputs, whole.data(), me * count, (me + 1) * count, rank() + 1, type, op);
      std::memcpy(out, whole.data() + me * part.recv_bytes, part.recv_bytes);
      return;
    }
    case Kind::broadcast:
      std::memcpy(out, inputs[static_cast<std::size_t>(part.what.root)], part.recv_bytes);
      return;
    case Kind::all_gather:
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        std::memcpy(static_cast<char*>(out) + i * part.send_bytes, inputs[i], part.send_bytes);
      }
      return;
    case Kind::recv:
      board_.take(key_of("send", part.peer, rank(), part.number), part.peer);
      std::memcpy(out, inputs[0], part.recv_bytes);
      return;
    case Kind::send:
      board_.take(key_of("recv", rank(), part.peer, part.number), part.peer);
      return;
  }
}

// ---- Handles

namespace {

struct Handles {
  std::mutex mutex;
  std::map<ncclComm_t, std::unique_ptr<ncclComm>>
      all;  // gone ones too: their addresses stay theirs
  std::string error;
};

Handles& handles() {
  static Handles& all = *new Handles;
  return all;
}

/// A process that ends without destroying its communicators leaves no folder behind.
void leave_all() {
  const std::lock_guard lock(handles().mutex);
  for (auto& [handle, comm] : handles().all) comm->communicator->end();
}

}  // namespace

std::shared_ptr<Communicator> communicator_of(ncclComm_t handle, const char* call) {
  const std::lock_guard lock(handles().mutex);
  const auto found = handles().all.find(handle);
  if (found == handles().all.end()) {
    report("nccl handle", std::string(call) + " of what is no communicator");
  }
  const auto& communicator = found->second->communicator;
  if (communicator->stage() == Communicator::Stage::ended) {
    report("nccl handle", std::string(call) + " of a communicator that has been destroyed");
  }
  return communicator;
}

ncclComm_t make_handle(std::shared_ptr<Communicator> communicator) {
  static const int at_exit = std::atexit(leave_all);
  (void)at_exit;
  const std::lock_guard lock(handles().mutex);
  auto comm = std::make_unique<ncclComm>(ncclComm{std::move(communicator)});
  const ncclComm_t handle = comm.get();
  handles().all[handle] = std::move(comm);
  return handle;
}

std::vector<std::shared_ptr<Communicator>> all_communicators() {
  const std::lock_guard lock(handles().mutex);
  std::vector<std::shared_ptr<Communicator>> all;
  for (const auto& [handle, comm] : handles().all) all.push_back(comm->communicator);
  return all;
}

void set_last_error(const std::string& text) {
  const std::lock_guard lock(handles().mutex);
  handles().error = text;
}

const char* last_error() {
  const std::lock_guard lock(handles().mutex);
  return handles().error.c_str();
}

}  // namespace cairn::gpusim
