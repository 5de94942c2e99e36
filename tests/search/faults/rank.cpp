#include "rank.h"

#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>

#include "cairn/checkpointing/training_state.h"
#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/parallel/process_group.h"
#include "sharded_job.h"
#include "support/rank_device.h"

namespace cairn::test {
namespace {

using parallel::ProcessGroup;
using parallel::ReduceOp;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Values = std::vector<double>;

constexpr auto kGoOn = milliseconds(3500);  // after the fault: longer than a heartbeat's timeout
constexpr auto kSleep = seconds(8);         // longer than a collective's timeout
constexpr auto kLate = seconds(11);         // longer than the store takes to answer

struct WrongResult : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// One write a line: signals interrupt, and output of a killed rank is wanted too.
void say(const std::string& word, const std::string& text = "") {
  std::string line = core::str(word, ' ', nanoseconds_now(), ' ', text);
  for (char& c : line) c = c == '\n' ? ' ' : c;
  line += '\n';
  while (write(STDERR_FILENO, line.data(), line.size()) < 0 && errno == EINTR) {
  }
}

/// This process's sockets that have a peer: inode -> descriptor.
std::map<std::string, int> connections() {
  std::map<std::string, int> found;
  DIR* folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder)) {
    char target[64] = {};
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    const int fd = std::atoi(entry->d_name);
    if (readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1) <= 0) continue;
    if (!std::string(target).starts_with("socket:")) continue;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0) found[target] = fd;
  }
  closedir(folder);
  return found;
}

/// Ends the connection as a router does that forgot it (a reset), or as the peer's kernel does.
void end_connection(int fd, bool reset) {
  sockaddr none{};
  none.sa_family = AF_UNSPEC;
  if (!reset || connect(fd, &none, sizeof none) != 0) shutdown(fd, SHUT_RDWR);
}

void count_signal(int /*number*/) {}

void start_signals() {
  struct sigaction action {};
  action.sa_handler = count_signal;  // without SA_RESTART: every call may be interrupted
  sigaction(SIGALRM, &action, nullptr);
  sigaction(SIGPROF, &action, nullptr);
  const itimerval timer{{0, 1000}, {0, 1000}};
  setitimer(ITIMER_REAL, &timer, nullptr);
  setitimer(ITIMER_PROF, &timer, nullptr);
}

/// What a process has open beside its standard streams.
std::set<std::string> opened_by(pid_t pid) {
  std::set<std::string> names;
  DIR* folder = opendir(core::str("/proc/", pid, "/fd").c_str());
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) {
    char target[256] = {};
    if (readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1) <= 0) continue;
    if (std::atoi(entry->d_name) > STDERR_FILENO) names.insert(target);
  }
  closedir(folder);
  return names;
}

/// A program that outlives the collectives around it and must not hold any of the job's files open.
class Child {
 public:
  Child() {
    char program[] = "sleep", argument[] = "60";
    char* const arguments[] = {program, argument, nullptr};
    if (posix_spawnp(&pid_, program, nullptr, nullptr, arguments, environ) != 0) pid_ = -1;
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  /// What it has open of this process's, which has it open still.
  std::string inherited() const {
    const std::set<std::string> own = opened_by(getpid());
    std::string all = pid_ > 0 ? "" : "no child";
    for (const std::string& name : opened_by(pid_)) {
      if (own.contains(name)) all += name + " ";
    }
    return all;
  }

 private:
  pid_t pid_ = -1;
};

/// A value to save.
struct Weights : Stateful {
  explicit Weights(std::int64_t n = 50'000) : values(Tensor::zeros({n})) {}
  Tensor values;
  StateDict state_dict() const override {
    StateDict state;
    state.set("values", values);
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    values = Tensor::from(state.tensor("values").to_vector(), values.shape());
  }
};

constexpr std::int64_t kMeeting = 20'000;  // elements
constexpr std::int64_t kTrained = 500;

class Loop {
 public:
  Loop(const Fault& fault, ProcessGroup group)
      : fault_(fault), group_(std::move(group)), rank_(group_.rank()), world_(group_.world_size()) {
    control_ = inodes();
  }

  /// Returns when all ranks have gone on for long enough.
  void run() {
    group_.barrier("start");
    if (fault_.has_launchers()) return train();
    // Connects them; and no host waits in what has been called before.
    if (fault_.engine == Engine::nccl)
      group_.all_reduce(Tensor::zeros({kMeeting}), ReduceOp::sum,
                        draw(0, 7) % 2 == 0 ? "meeting" : "connect");
    for (const auto& inode : inodes()) {
      if (!control_.contains(inode)) data_.insert(inode);
    }
    if (fault_.stage > 0) training_ = make_sharded_job(fault_.stage, group_);
    Weights weights;
    std::optional<checkpointing::TrainingState> state;
    if (fault_.kind == FaultKind::asked_to_save) {
      state.emplace(std::vector<checkpointing::TrainingState::Part>{{"weights", weights}},
                    group_.world());
      state->save_on_signal(SIGUSR1, "checkpoints");
    }
    for (int k = 1;; ++k) {
      if (k == fault_.at && !meet()) return;
      step(k);
      if (state) state->end_on_signal(k);
      if (fault_.kind == FaultKind::reset_control && is_victim() && k > fault_.at &&
          k < fault_.at + 40) {
        reset();  // what was just made anew
      }
      if (k > fault_.at && k % 8 == 0 && group_.all_reduce_max(is_over() ? 1 : 0) > 0) return;
    }
  }

 private:
  static std::set<std::string> inodes() {
    std::set<std::string> all;
    for (const auto& [inode, fd] : connections()) all.insert(inode);
    return all;
  }
  bool is_victim() const { return rank_ == fault_.victim; }
  bool is_over() const { return std::chrono::steady_clock::now() - met_ > kGoOn; }
  /// The same number on every rank.
  std::uint64_t draw(int k, std::uint64_t salt) const {
    std::uint64_t z = fault_.seed + static_cast<std::uint64_t>(k) * 0x9e3779b97f4a7c15u + salt;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  static double value(int rank, std::int64_t i, int k) {
    return static_cast<double>((rank * 7 + i * 3 + k) % 5) - 2.0;
  }
  static Tensor pattern(int rank, std::int64_t n, int k, DType dtype) {
    Values values(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) values[static_cast<std::size_t>(i)] = value(rank, i, k);
    return Tensor::from(values, {n}, dtype);
  }
  double sum(std::int64_t i, int k) const {
    double total = 0.0;
    for (int r = 0; r < world_; ++r) total += value(r, i, k);
    return total;
  }
  template <class F>
  void expect(const char* operation, const Tensor& x, F f) const {
    group_.wait();
    const Values values = x.to_vector();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double wanted = f(static_cast<std::int64_t>(i));
      if (values[i] == wanted) continue;
      throw WrongResult(core::str(operation, ": expected ", wanted, " at ", i, " of ",
                                  values.size(), ", got ", values[i]));
    }
  }

  void step(int k) {
    if (fault_.kind == FaultKind::slow_rank && is_victim() && k >= fault_.at)
      std::this_thread::sleep_for(milliseconds(draw(k, 7) % 30));
    if (!training_) return call(k);
    if (const std::string wrong = training_->step(); !wrong.empty()) throw WrongResult(wrong);
  }

  void call(int k) {
    constexpr std::int64_t kSizes[] = {1, 300, 5000, 40'000, 120'000};
    constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::i64};
    // Small ones leave the workspace small: a large collective has to allocate.
    const bool small = fault_.kind == FaultKind::out_of_memory;
    const std::int64_t n = kSizes[draw(k, 1) % (small ? 2 : 5)];
    const DType dtype = small ? DType::f32 : kDTypes[draw(k, 2) % 3];
    const int root = static_cast<int>(draw(k, 3) % static_cast<unsigned>(world_));
    const auto part = [&](std::int64_t i) { return static_cast<int>(i / n); };
    const auto whole = [&] { return Tensor::zeros({n * world_}, dtype); };
    const Tensor x = pattern(rank_, n, k, dtype), all = pattern(rank_, n * world_, k, dtype);
    const auto summed = [&](std::int64_t i) { return sum(i, k); };
    const auto gathered = [&](std::int64_t i) { return value(part(i), i % n, k); };
    switch (draw(k, 4) % 10) {
      case 0:
        group_.all_reduce(x, ReduceOp::sum, "x");
        return expect("all_reduce", x, summed);
      case 1:
        group_.broadcast(x, root, "x");
        return expect("broadcast", x, [&](std::int64_t i) { return value(root, i, k); });
      case 2: {
        const Tensor y = whole();
        group_.all_gather(x, y, "x");
        return expect("all_gather", y, gathered);
      }
      case 3:
        group_.reduce_scatter(all, x, ReduceOp::sum, "x");
        return expect("reduce_scatter", x, [&](std::int64_t i) { return sum(rank_ * n + i, k); });
      case 4: {
        const Tensor y = whole();
        group_.all_to_all(all, y, "x");
        return expect("all_to_all", y,
                      [&](std::int64_t i) { return value(part(i), rank_ * n + i % n, k); });
      }
      case 5: {
        group_.reduce(x, x, root, ReduceOp::sum, "x");
        if (rank_ == root) expect("reduce", x, summed);
        return;
      }
      case 6: {
        const Tensor y = whole();
        group_.gather(x, y, root, "x");
        if (rank_ == root) expect("gather", y, gathered);
        return;
      }
      case 7:
        return exchange(k);
      case 8:
        group_.async(x.device(), [&] { group_.all_reduce(x, ReduceOp::sum, "x"); }).wait();
        return expect("async", x, summed);
      default:
        return pass_on(x, n, k);
    }
  }

  /// Steps whose weights depend on all before, saved and resumed: those of a job that nobody
  /// disturbs, bit for bit.
  void train() {
    constexpr int kSaveEvery = 4, kGoOnFor = 20;
    const bool again = started_before(), awaited = fault_.kind == FaultKind::restarted_launcher;
    Weights weights(kTrained);
    Values undisturbed(kTrained);
    checkpointing::TrainingState state({{"weights", weights}}, group_.world());
    if (!state.resume_latest("checkpoints") && again) throw WrongResult("nothing was resumed");
    const std::int64_t begin = state.step();
    bool over = false;
    for (int k = 1; !over; ++k) {
      advance(undisturbed, k, [&](std::int64_t i) { return sum(i, k); });
      if (k <= begin) continue;
      if (k == fault_.at && is_victim()) say("at");
      const Tensor x = pattern(rank_, kTrained, k, DType::f32);
      group_.all_reduce(x, ReduceOp::sum, "x");
      Values own = weights.values.to_vector(), total = x.to_vector();
      advance(own, k, [&](std::int64_t i) { return total[static_cast<std::size_t>(i)]; });
      weights.values = Tensor::from(own, {kTrained}, DType::f32);
      std::printf("step %d\n", k);
      std::fflush(stdout);
      if (k % kSaveEvery != 0) continue;
      state.save("checkpoints", k);
      const bool ready = k >= fault_.at + kGoOnFor && (again || !awaited || !is_victim());
      over = group_.all_reduce_max(ready ? 0 : 1) == 0;
    }
    Weights saved(kTrained);
    checkpointing::TrainingState({{"weights", saved}}, group_.world(), {.read_only = true})
        .resume_latest("checkpoints");
    if (weights.values.to_vector() != undisturbed) throw WrongResult("other weights");
    if (saved.values.to_vector() != undisturbed) throw WrongResult("other weights are saved");
    group_.barrier("end");
  }

  template <class F>
  static void advance(Values& weights, int k, F gradient) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double next = 0.7 * weights[i] + gradient(static_cast<std::int64_t>(i)) / (k + 2);
      weights[i] = static_cast<double>(static_cast<float>(next));
    }
  }

  /// Whether this rank had another process before.
  bool started_before() const {
    const std::string name = core::str("started_", rank_);
    const bool before = std::filesystem::exists(name);
    std::ofstream(name) << "x";
    return before;
  }

  void exchange(int k) const {
    const auto texts = group_.exchange(core::str(rank_, ' ', k), "texts");
    for (int r = 0; r < world_; ++r) {
      if (texts[static_cast<std::size_t>(r)] != core::str(r, ' ', k)) {
        throw WrongResult("exchange: got " + texts[static_cast<std::size_t>(r)]);
      }
    }
  }

  /// To the next rank, from the one before. A message that is lost is never sent.
  void pass_on(const Tensor& x, std::int64_t n, int k) const {
    const int to = (rank_ + 1) % world_, from = (rank_ + world_ - 1) % world_;
    const Tensor y = Tensor::zeros({n}, x.dtype());
    const auto tag = static_cast<std::uint64_t>(k % 3);  // hosts of GPUs compare only new ones
    const bool lost = fault_.kind == FaultKind::lost_message && is_victim() && k == fault_.at;
    if (rank_ % 2 == 0 && !lost) group_.send(x, to, tag, "x");
    group_.recv(y, from, tag, "y");
    if (rank_ % 2 == 1 && !lost) group_.send(x, to, tag, "x");
    expect("recv", y, [&](std::int64_t i) { return value(from, i, k); });
  }

  /// The iteration with the fault. False: this rank goes.
  bool meet() {
    met_ = std::chrono::steady_clock::now();
    say("at");
    if (fault_.kind == FaultKind::full_disk) return save();
    if (fault_.kind == FaultKind::on_threads) work_on_threads();
    if (is_victim() && !befall()) return false;
    if (!training_) call_meeting();
    return true;
  }

  /// Two groups of all ranks, connected and used by two threads at the same time.
  void work_on_threads() const {
    const ProcessGroup groups[] = {group_.split(0, 0, "a"), group_.split(0, 0, "b")};
    std::string wrong[2];
    std::vector<std::thread> threads;
    for (const std::size_t i : {0U, 1U}) {
      threads.emplace_back([&, i] {
        if ((rank_ + static_cast<int>(i)) % 2 == 0) std::this_thread::sleep_for(milliseconds(30));
        for (int k = 0; k < 20 && wrong[i].empty(); ++k) {
          const Tensor x = pattern(rank_, k % 2 == 0 ? 7 : 9000, k, DType::f32);
          groups[i].all_reduce(x, ReduceOp::sum, "x");
          const Values values = x.to_vector();
          for (std::size_t e = 0; e < values.size(); ++e) {
            if (values[e] != sum(static_cast<std::int64_t>(e), k)) wrong[i] = "a sum in a thread";
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& text : wrong) {
      if (!text.empty()) throw WrongResult(text);
    }
  }

  void call_meeting() const {
    if (fault_.kind == FaultKind::lost_message)
      pass_on(pattern(rank_, 9, fault_.at, DType::f32), 9, fault_.at);
    const FaultKind own = is_victim() ? fault_.kind : FaultKind::kill;
    const std::int64_t n = fault_.kind == FaultKind::out_of_memory ? 300'000 : kMeeting;
    const Tensor x = Tensor::zeros({own == FaultKind::other_shape ? n + 1 : n},
                                   own == FaultKind::other_dtype ? DType::i32 : DType::f32);
    if (own == FaultKind::out_of_memory) {
      core::set_memory_capacity(Device{}, core::memory_stats(Device{}).current_total + 1000);
    }
    if (fault_.kind == FaultKind::other_root) {
      return group_.broadcast(x, is_victim() ? 1 : 0, "meeting");
    }
    if (own == FaultKind::other_collective) return group_.broadcast(x, 0, "meeting");
    group_.all_reduce(x, ReduceOp::sum, own == FaultKind::other_name ? "parting" : "meeting");
    group_.wait();
  }

  bool befall() {
    switch (fault_.kind) {
      case FaultKind::kill:
      case FaultKind::stop:
      case FaultKind::doze:
        strike_soon(fault_.kind == FaultKind::kill ? SIGKILL : SIGSTOP);
        return true;
      case FaultKind::leave:
        return false;
      case FaultKind::give_up:
        group_.abort("the loss is NaN");
        return false;
      case FaultKind::throws:
        try {
          group_.run([] { throw std::runtime_error("the batch is empty"); });
        } catch (const std::runtime_error&) {
        }
        return false;
      case FaultKind::sleep:
        std::this_thread::sleep_for(kSleep);
        return true;
      case FaultKind::reset_control:
      case FaultKind::reset_data:
        if (reset() == 0) throw WrongResult("nothing to reset");
        return true;
      case FaultKind::child:
        child_.emplace();
        if (const std::string all = child_->inherited(); !all.empty()) {
          throw WrongResult("the child has " + all);
        }
        return true;
      default:
        return true;
    }
  }

  /// Within three milliseconds, in the midst of anything.
  void strike_soon(int signal) const {
    std::thread([signal, wait = std::chrono::microseconds(draw(fault_.at, 5) % 3000)] {
      std::this_thread::sleep_for(wait);
      kill(getpid(), signal);
    }).detach();
  }

  /// The connections that carry data, or the others. Returns how many.
  int reset() const {
    const bool data = fault_.kind == FaultKind::reset_data;
    int count = 0;
    for (const auto& [inode, fd] : connections()) {
      if (data_.contains(inode) != data) continue;
      end_connection(fd, draw(fault_.at, 6) % 2 == 0);
      ++count;
    }
    return count;
  }

  /// The disk is full, or the victim may not write its file; all go on afterwards.
  bool save() {
    Weights weights;
    checkpointing::TrainingState state({{"weights", weights}}, group_.world());
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const bool full = std::filesystem::exists("checkpoints");  // a small disk
    group_.barrier("before anybody makes the folder");
    if (is_victim() && !full) {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit tight{100, before.rlim_max};
      setrlimit(RLIMIT_FSIZE, &tight);
    }
    std::string said;
    try {
      state.save("checkpoints", 1);
    } catch (const core::IoError& error) {
      said = error.what();
    }
    setrlimit(RLIMIT_FSIZE, &before);
    if (!said.empty()) say("error", "IoError " + said);
    group_.barrier("saved");
    std::size_t left = 0;
    for (const auto& file : std::filesystem::directory_iterator("checkpoints")) {
      left += file.path().filename() == ".lock" ? 0 : 1;
    }
    if (left > 0) throw WrongResult("a part of the save is left");
    return true;
  }

  Fault fault_;
  ProcessGroup group_;
  int rank_, world_;
  std::set<std::string> control_, data_;  // inodes: made before, and by, the first collective
  std::chrono::steady_clock::time_point met_;
  std::optional<Child> child_;
  std::unique_ptr<ShardedJob> training_;
};

/// Says it before the group ends, which may wait for others. Returns whether all is well.
bool say_what_happens(const std::function<void()>& calls) {
  try {
    calls();
    say("ok");
    return true;
  } catch (const core::CommunicationError& error) {
    say("error", core::str("CommunicationError ", error.what()));
  } catch (const core::OutOfMemory& error) {
    say("error", core::str("OutOfMemory ", error.what()));
  } catch (const std::exception& error) {
    say("wrong", error.what());
  }
  return false;
}

}  // namespace

std::int64_t nanoseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void run_rank(const Fault& fault, int rank) {
  if (fault.kind == FaultKind::signals && rank == fault.victim) start_signals();
  const core::DefaultDeviceGuard device(device_of_rank(rank));
  std::unique_ptr<Loop> loop;
  if (fault.kind == FaultKind::late_root && rank == 0) std::this_thread::sleep_for(kLate);
  const parallel::GroupOptions options{
      .timeout = seconds(6), .heartbeat_timeout = seconds(3), .rendezvous_timeout = seconds(20)};
  const bool well = say_what_happens([&] {
    for (int i = 0; fault.kind == FaultKind::in_a_row && i < 5; ++i) {
      const ProcessGroup group = ProcessGroup::from_environment(options);
      group.barrier("one of a row");
      if (rank == fault.victim) std::this_thread::sleep_for(milliseconds(100));
    }
    loop = std::make_unique<Loop>(fault, ProcessGroup::from_environment(options));
    loop->run();
  });
  loop.reset();
  if (fault.has_launchers() && !well) std::exit(1);  // to be started again
}

}  // namespace cairn::test
