#include "system.h"

#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "cairn/core/error.h"

namespace cairn::stateful {

namespace fs = std::filesystem;

Values initial_weight(int parameter, bool fresh) {
  Values values;
  for (int i = 0; i < kSizes[static_cast<std::size_t>(parameter)]; ++i) {
    values.push_back(static_cast<float>((fresh ? 2.1 : 1.1) + parameter / 3.0 - i / 7.0));
  }
  return values;
}

/// Small integers times a power of two: exact in every half type, and so is their mean over two or four
/// ranks.
Values Loss::coefficients(int parameter, int rank) const {
  Values values;
  for (int i = 0; i < kSizes[static_cast<std::size_t>(parameter)]; ++i) {
    values.push_back(size * (1 + (parameter + i) % 3) * (rank % 2 == 0 ? 1 : 3));
  }
  const bool overflows = overflow_rank == 2 || overflow_rank == rank;
  if (overflows && parameter == first()) values[0] = std::numeric_limits<double>::infinity();
  return values;
}

<<<<<<< HEAD
// ---- One rank

namespace {

std::unique_ptr<optim::Optimizer> make_optimizer(NamedTensors parameters, const Rule& rule) {
  if (rule.adam) {
    return std::make_unique<optim::FusedAdam>(
        std::move(parameters), optim::AdamOptions{.lr = rule.lr, .weight_decay = 0.0});
  }
  return std::make_unique<optim::FusedSGD>(
      std::move(parameters), optim::SgdOptions{.lr = rule.lr, .momentum = rule.momentum});
}

const StateDict* find_path(const StateDict& root, const std::string& path) {
  const StateDict* at = &root;
  for (std::size_t begin = 0; at != nullptr && begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    const StateDict::Value* value = at->find(path.substr(begin, end - begin));
    at = value == nullptr ? nullptr : std::get_if<StateDict>(value);
    begin = end + 1;
  }
  return at;
}

/// A part of the training state that this training does not have.
class Nothing : public core::Stateful {
 public:
  StateDict state_dict() const override { return {}; }
  void load_state_dict(const StateDict& /*state*/) override {}
};

}  // namespace

Rank::Rank(const Setup& setup, std::optional<parallel::ProcessGroup> group, int rank, bool fresh)
    : setup_(setup), group_(std::move(group)), rank_(rank), net_(std::make_unique<Net>()) {
  for (int p = 0; p < kParameters; ++p) {
    // Another object starts elsewhere, and so does another rank: DDP takes rank 0's values.
    Values initial = initial_weight(p, fresh);
    if (setup_.ddp && rank_ > 0) initial.assign(initial.size(), 9.0);
    const Tensor tensor = parameter(p);
    kernels::copy(Tensor::from(initial, tensor.shape(), DType::f32), tensor);
    tensor.storage()->bump_version();
    if ((setup_.frozen >> p & 1U) != 0) set_trainable(p, false);
  }
  if (setup_.order == Order::ddp_optimizer_amp) build_ddp();
  build_optimizers();
  if (setup_.order == Order::optimizer_ddp_amp) build_ddp();
  if (setup_.precision) initialize(*setup_.precision);
  if (setup_.order == Order::optimizer_amp_ddp) build_ddp();
}

Rank::~Rank() = default;

void Rank::build_optimizers() {
  for (int o = 0; o < static_cast<int>(setup_.rules.size()); ++o) {
    NamedTensors own;
    for (int p = 0; p < kParameters; ++p) {
      if (setup_.optimizer_of[static_cast<std::size_t>(p)] != o) continue;
      own.push_back({kNames[static_cast<std::size_t>(p)], parameter(p)});
    }
    optimizers_.push_back(make_optimizer(own, setup_.rules[static_cast<std::size_t>(o)]));
    schedules_.push_back(
        std::make_unique<optim::Schedule>(*optimizers_.back(), optim::step_decay(2, 0.5)));
  }
}

namespace {

parallel::DistributedOptions options_of(const Setup& setup) {
  const Wiring& wiring = setup.wiring;
  parallel::DistributedOptions options;  // buckets of one or two parameters each
  options.first_bucket_bytes = 16;
  options.bucket_bytes = 128;
  options.find_unused_parameters = setup.find_unused;
  options.static_graph = wiring.static_graph;
  options.delay_allreduce = wiring.delay;
  options.num_allreduce_streams = wiring.streams ? 3 : 1;
  options.gradient_predivide_factor = wiring.predivide ? 2.0 : 1.0;
  options.allreduce_always_fp32 = wiring.fp32;
  options.retain_allreduce_buffers = wiring.retain;
  options.average = !wiring.sum;
  options.check_local_gradients = !wiring.unchecked;
  if (wiring.hook == Hook::f16) options.hook = parallel::compress_to(DType::f16);
  if (wiring.hook == Hook::power_sgd) {
    options.hook = parallel::power_sgd({.rank = 9, .start_step = 1, .min_compression_rate = 0.0});
  }
  if (wiring.hook == Hook::function) {
    options.hook = parallel::communication_hook(
        [](const parallel::GradientBucket& bucket, const parallel::ProcessGroup& group) {
          group.all_reduce(bucket.data, parallel::ReduceOp::mean, bucket.name);
        });
  }
  return options;
}

}  // namespace

void Rank::build_ddp() {
  if (!setup_.ddp) return;
  const parallel::ProcessGroup group = group_ ? *group_ : parallel::ProcessGroup::single();
  const auto add = [&](nn::Module& module) {
    ddps_.push_back(
        std::make_unique<parallel::DistributedDataParallel>(module, group, options_of(setup_)));
  };
  if (!setup_.wiring.two_ddps) return add(*net_);
  add(net_->a());
  add(net_->b());
}

/// What amp is given: that of the one DDP, or the group's, which knows of no model.
World Rank::world() const {
  if (ddps_.size() == 1) return ddps_[0]->world();
  return group_ ? group_->world() : World{};
}

void Rank::add_group(int p, int optimizer) {
  Tensor tensor = parameter(p);
  tensor.clear_grad();
  const auto o = static_cast<std::size_t>(optimizer);
  optimizers_[o]->add_group(
      {.parameters = {{kNames[static_cast<std::size_t>(p)], tensor}}, .lr = setup_.rules[o].lr});
}

void Rank::set_trainable(int p, bool trainable) {
  parameter(p).set_requires_grad(trainable);
}

void Rank::to(DType dtype) {
  net_->to(dtype);
}

void Rank::initialize(const Precision& precision) {
  amp::Options options;
  options.opt_level = precision.level;
  options.half_dtype = precision.half;
  options.num_losses = kLosses;
  options.collapse_after = 0;
  options.fallback_after = precision.fallback ? 1000 : 0;
  options.scaler.init_scale = precision.scale;
  options.scaler.growth_interval = Scale::kInterval;
  options.scaler.max_scale = Scale::kMax;
  if (precision.dynamic) {
    options.dynamic_loss_scale = true;
  } else {
    options.loss_scale = precision.scale;
  }
  if (group_) options.world = world();
  std::vector<optim::Optimizer*> optimizers;
  for (const auto& optimizer : optimizers_) optimizers.push_back(optimizer.get());
  amp_ = amp::initialize({net_.get()}, optimizers, options);
}

void Rank::release() {
  amp_->release();
  amp_.reset();
}

Tensor Rank::loss_of(const Loss& loss) {
  Values x;
  for (int p = 0; p < kParameters; ++p) {
    const Values own = loss.coefficients(p, rank_);
    x.insert(x.end(), own.begin(), own.end());
  }
  Loss own = loss;
  own.reach = loss.reach_of(rank_);
  if (own.throwing_rank >= 0 && own.throwing_rank != rank_) own.thrower = -1;
  net_->set_loss(&own);
  const DType dtype = amp_ ? DType::f32 : parameter(0).dtype();
  const Tensor input = Tensor::from(x, {kCoefficients}, dtype);
  const amp::Explain explain;
  const auto forward = [&] {
    if (ddps_.empty() || !loss.by_ddp) return (*net_)(input);
    if (ddps_.size() == 1) return (*ddps_[0])(input);
    // amp casts what enters and leaves the model, which nobody calls here.
    const auto half = [&](const Tensor& x) { return autograd::to(x, parameter(0).dtype()); };
    const auto a = [&](const Tensor& x) { return (*ddps_[0])(half(x)); };
    const auto b = [&](const Tensor& x) { return (*ddps_[1])(half(x)); };
    return autograd::to(net_->through(a, b, input), dtype);
  };
  const Tensor value = forward();
  named_.clear();
  for (const amp::ExplainMisfit& misfit : explain.report().misfits) {
    const bool same_on_all = loss.odd_reach == 0 && loss.throwing_rank < 0;
    if (same_on_all && !misfit.where.empty()) named_.push_back(misfit.where);
  }
  return value;
}

void Rank::backward(const Loss& loss, bool synchronise, unsigned optimizers) {
  std::vector<parallel::DistributedDataParallel::NoSync> alone;
  for (const auto& ddp : ddps_) alone.push_back(ddp->no_sync(!synchronise));
  backward_of(loss, 1.0, optimizers);
}

void Rank::accumulate(const Loss& loss, bool last, unsigned optimizers) {
  if (!accumulation_) {
    accumulation_.emplace(
        optim::AccumulationOptions{.steps = 1000, .world = ddps_.empty() ? World{} : world()});
  }
  const optim::MicroBatch micro = accumulation_->begin(samples_of(rank_), {.last = last});
  backward_of(loss, micro.weight(), optimizers);
}

Numbers Rank::epoch(const Epoch& epoch) {
  Numbers applied;
  const auto take_step = [&] {
    if (epoch.by_amp) {
      last_ = amp_->step();
      return applied.push_back(last_.applied ? 1.0 : 0.0);
    }
    for (const auto& optimizer : optimizers_) {
      last_ = optimizer->step();
      applied.push_back(last_.applied ? 1.0 : 0.0);
    }
  };
  auto join = ddps_[0]->join(epoch.divide_by);
  for (int k = 0; k < epoch.batches[static_cast<std::size_t>(rank_)]; ++k) {
    join.samples(samples_of(rank_));
    backward_of(epoch.loss, 1.0, 0);
    take_step();
  }
  while (join.others_go_on()) {
    if (epoch.by_amp) {
      amp_->backward(join.zero(), {.loss_id = epoch.loss.id});
    } else {
      autograd::backward(join.zero());
    }
    take_step();
  }
  named_.clear();  // of a forward that some ranks did not make
  return applied;
}

=======
>>>>>>> torch
Values Rank::view_values(std::uint64_t seed, int rank) {
  Values values;
  for (std::uint64_t i = 0; i < 10; ++i) {
    values.push_back(
        static_cast<double>((seed * 7 + i * 5 + static_cast<std::uint64_t>(rank) * 3) % 16));
  }
  return values;
}

// ---- The ranks together

/// A thread that does what it is handed.
class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() {
    start(nullptr);
    thread_.join();
  }
  /// nullptr: ends.
  void start(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_ = std::move(work);
    busy_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !busy_; });
  }

 private:
  void run() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return busy_; });
      const std::function<void()> work = std::move(work_);
      lock.unlock();
      if (work) work();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
      if (!work) return;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> work_;
  bool busy_ = false;
  std::thread thread_;  // last: it uses the others
};

namespace {

std::string temporary_folder() {
  // Checkpoints are flushed to the disk: one in memory is faster.
  const std::string parent =
      fs::exists("/dev/shm") ? "/dev/shm" : fs::temp_directory_path().string();
  std::string pattern = parent + "/cairn-stateful-XXXXXX";
  return mkdtemp(pattern.data()) != nullptr ? pattern : parent;
}

std::string listed(const Numbers& numbers) {
  std::string text;
  for (const double number : numbers) text += core::str(text.empty() ? "" : ", ", number);
  return text;
}

bool same_bits(const Numbers& a, const Numbers& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

}  // namespace

System::System(const Setup& setup) : setup_(setup), folder_(temporary_folder()) {
  resize(setup.ranks);
}

void System::resize(int ranks) {
  ranks_.resize(static_cast<std::size_t>(ranks));
  workers_.clear();
  groups_.clear();
  if (ranks == 1) return;
  for (int rank = 1; rank < ranks; ++rank) workers_.push_back(std::make_unique<Worker>());
  // Longer than a busy machine keeps a thread waiting; OneRankThrows waits it out.
  constexpr std::chrono::seconds kTimeout{5};
  groups_ = parallel::ProcessGroup::in_process(
      ranks, {.timeout = kTimeout, .heartbeat_timeout = kTimeout});
}

System::~System() {
  try {
    together([&](std::size_t index) {
      ranks_[index].reset();
      return Numbers();
    });
  } catch (const std::exception&) {  // ranks that differ have been told of
  }
  workers_.clear();
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

System::Outcome System::rebuild(const Setup& setup, bool fresh) {
  if (setup.ranks != setup_.ranks) {
    together([&](std::size_t index) {
      ranks_[index].reset();
      return Numbers();
    });
    resize(setup.ranks);
  }
  setup_ = setup;
  return together([&](std::size_t index) {
    ranks_[index].reset();
    std::optional<parallel::ProcessGroup> group;
    if (!groups_.empty()) group = groups_[index];
    ranks_[index] = make_rank(setup, group, static_cast<int>(index), fresh);
    return Numbers();
  });
}

namespace {

std::string difference(const Rank::Seen& a, const Rank::Seen& b) {
  std::string text;
  const auto compare = [&](const std::string& what, const Values& x, const Values& y) {
    for (std::size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (x[i] != y[i]) text += core::str("\n  ", what, "[", i, "]: ", x[i], " and ", y[i]);
    }
  };
  for (std::size_t p = 0; p < a.parameters.size(); ++p) {
    const std::string name = kNames[p];
    compare(name, a.parameters[p].weight, b.parameters[p].weight);
    compare(name + " as forward sees it", a.parameters[p].raw, b.parameters[p].raw);
    for (std::size_t m = 0; m < a.parameters[p].moments.size(); ++m) {
      if (m >= b.parameters[p].moments.size()) continue;
      compare("a moment of " + name, a.parameters[p].moments[m], b.parameters[p].moments[m]);
    }
  }
  compare("loss scale", a.loss_scales, b.loss_scales);
  compare("learning rate", a.lrs, b.lrs);
  return text.empty() ? " in dtype, steps or culprit" : text;
}

}  // namespace

Rank::Seen System::look() {
  std::vector<Rank::Seen> seen(ranks_.size());
  const Outcome outcome = together([&](std::size_t index) {
    seen[index] = ranks_[index]->look();
    return Numbers();
  });
  if (outcome.threw()) throw Mismatch("looking threw: " + outcome.error);
  for (const Rank::Seen& own : seen) {
    if (!(own == seen[0])) throw Mismatch("ranks differ" + difference(seen[0], own));
  }
  return seen[0];
}

std::vector<System::Outcome> System::on_each(const std::function<Numbers(std::size_t)>& work) {
  std::vector<Outcome> outcomes(ranks_.size());
  const auto run = [&](std::size_t index) {
    try {
      outcomes[index].numbers = work(index);
    } catch (const std::exception& error) {
      outcomes[index].error = *error.what() == '\0' ? "an error without words" : error.what();
    }
  };
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    workers_[i]->start([&run, i] { run(i + 1); });
  }
  run(0);
  for (const auto& worker : workers_) worker->wait();
  return outcomes;
}

std::vector<System::Outcome> System::apart(const std::function<void(Rank&)>& work) {
  return on_each([&](std::size_t index) {
    work(*ranks_[index]);
    return Numbers();
  });
}

System::Outcome System::together(const std::function<Numbers(std::size_t)>& work) {
  std::vector<Outcome> outcomes = on_each(work);
  for (const Outcome& outcome : outcomes) {
    if (outcome.threw() != outcomes[0].threw()) {
      throw Mismatch("one rank throws and another does not: " + outcomes[0].error + outcome.error);
    }
    if (!same_bits(outcome.numbers, outcomes[0].numbers)) {
      throw Mismatch("ranks answer differently: " + listed(outcomes[0].numbers) + " and " +
                     listed(outcome.numbers));
    }
  }
  return outcomes[0];
}

}  // namespace cairn::stateful
