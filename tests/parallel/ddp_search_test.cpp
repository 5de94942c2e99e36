// Random options, models and events against a reference that averages every rank's own gradients in
// double precision and knows nothing of buckets.
#include <rapidcheck.h>

#include <mutex>
#include <optional>
#include <sstream>
#include <thread>

#include "cairn/core/error.h"
#include "cairn/optim/sgd.h"
#include "ddp_support.h"
#include "ranks.h"
#include "support/step.h"

namespace cairn::parallel {
namespace {

using test::add;
using test::Gradients;
using test::gradients_of;
using test::loss_of;
using test::Tower;

enum class Hook : std::uint8_t { none, f16, bf16, power_sgd };

struct Event {
  enum class Kind : std::uint8_t { step, freeze, grow, reload, uneven } kind = Kind::step;
  int micro_batches = 1;
  std::vector<unsigned> reach;  // by rank: which layers its loss uses
  std::vector<int> batches;     // by rank, of an uneven epoch
  DivideBy divide_by = DivideBy::participants;
  unsigned layer = 0;
  std::uint64_t seed = 0;
};

struct Scenario {
  int world = 1;
  int layers = 2;
  bool twice = false;
  bool half = false;
  DistributedOptions options;
  Hook hook = Hook::none;
  std::vector<Event> events;
};

/// What the documentation says about options that do not go together.
bool makes_sense(const Scenario& scenario) {
  const DistributedOptions& o = scenario.options;
  if (o.delay_allreduce && (o.num_allreduce_streams > 1 || !o.trigger_parameters.empty()))
    return false;
  if (!o.average && o.gradient_predivide_factor != 1.0) return false;
  if (scenario.hook == Hook::none) return true;
  return o.average && o.gradient_predivide_factor == 1.0 && !o.allreduce_always_fp32;
}

std::shared_ptr<CommunicationHook> make(Hook hook) {
  switch (hook) {
    case Hook::none:
      return nullptr;
    case Hook::f16:
      return compress_to(DType::f16);
    case Hook::bf16:
      return compress_to(DType::bf16);
    case Hook::power_sgd:
      return power_sgd({.rank = 99, .start_step = 0, .min_compression_rate = 0.0});
  }
  return nullptr;
}

double tolerance(const Scenario& scenario) {
  if (scenario.half || scenario.hook == Hook::bf16) return 4e-2;
  if (scenario.hook == Hook::f16) return 2e-3;
  return scenario.hook == Hook::power_sgd ? 1e-3 : 1e-5;
}

/// One rank's life.
class Rank {
 public:
  Rank(const Scenario& scenario, const ProcessGroup& group)
      : scenario_(scenario),
        group_(group),
        dtype_(scenario.half ? DType::bf16 : DType::f32),
        model_(scenario.layers),
        plain_(scenario.layers) {
    model_.twice = plain_.twice = scenario.twice;
    model_.to(dtype_);
    plain_.to(dtype_);
    DistributedOptions options = scenario.options;
    options.hook = make(scenario.hook);
    ddp_.emplace(model_, group_, options);
  }

  void live() {
    for (const Event& event : scenario_.events) {
      switch (event.kind) {
        case Event::Kind::step:
          step(event);
          break;
        case Event::Kind::freeze:
          freeze(event.layer);
          break;
        case Event::Kind::grow:
          grow(event.seed);
          break;
        case Event::Kind::reload:
          ddp_->load_state_dict(ddp_->state_dict());
          break;
        case Event::Kind::uneven:
          uneven(event);
          break;
      }
    }
  }

 private:
  static std::uint64_t seed_of(const Event& event, int rank, int micro) {
    return event.seed * 100 + static_cast<std::uint64_t>(10 * rank + micro);
  }

  unsigned reach_of(const Event& event, int rank) const {
    const bool may_differ =
        scenario_.options.find_unused_parameters && !scenario_.options.static_graph;
    unsigned all = 0;
    for (unsigned i = 0; i < model_.size(); ++i) all |= 1u << i;
    const unsigned drawn = event.reach[static_cast<std::size_t>(rank)] & all;
    return may_differ && drawn != 0 ? drawn : all;
  }

  /// Whether a backward reaches something that trains on every rank.
  bool trains(const Event& event) {
    for (int rank = 0; rank < scenario_.world; ++rank) {
      bool any = false;
      for (std::size_t i = 0; i < plain_.size(); ++i) {
        any = any || ((reach_of(event, rank) & (1u << i)) != 0 &&
                      plain_.layer(i).parameters()[0].tensor.requires_grad());
      }
      if (!any) return false;
    }
    return true;
  }

  Gradients own(const Event& event, int rank, int micro, std::int64_t rows = test::kRows) {
    plain_.reach = reach_of(event, rank);
    autograd::backward(loss_of(plain_, seed_of(event, rank, micro), dtype_, rows));
    Gradients gradients = gradients_of(plain_);
    plain_.clear_grad();
    return gradients;
  }

  void compare(const Gradients& expected, const char* what) {
    const Gradients got = gradients_of(model_);
    const std::string mismatch = test::difference(got, expected, tolerance(scenario_));
    if (!mismatch.empty()) throw std::runtime_error(core::str(what, ": ", mismatch));
    for (const std::string& other : group_.exchange(test::bytes_of(got), "bits")) {
      if (other != test::bytes_of(got)) throw std::runtime_error("ranks have other bits");
    }
    model_.clear_grad();
  }

  void step(const Event& event) {
    if (!trains(event)) return;
    Gradients expected;
    for (int rank = 0; rank < scenario_.world; ++rank) {
      for (int micro = 0; micro < event.micro_batches; ++micro)
        add(expected, own(event, rank, micro),
            scenario_.options.average ? 1.0 / scenario_.world : 1.0);
    }
    for (int micro = 0; micro < event.micro_batches; ++micro) {
      const auto guard = ddp_->no_sync(micro + 1 < event.micro_batches);
      model_.reach = reach_of(event, group_.rank());
      autograd::backward(loss_of(*ddp_, seed_of(event, group_.rank(), micro), dtype_));
    }
    compare(expected, "step");
  }

  void freeze(unsigned layer) {
    for (Tower* tower : {&model_, &plain_}) {
      auto& chosen = tower->layer(layer % tower->size());
      for (const auto& [name, tensor] : chosen.parameters())
        Tensor(tensor).set_requires_grad(!tensor.requires_grad());
    }
  }

  /// Every rank draws weights of its own; rank 0's count.
  void grow(std::uint64_t seed) {
    manual_seed(seed + static_cast<std::uint64_t>(group_.rank()));
    model_.add_layer();
    model_.layer(model_.size() - 1).to(dtype_);
    manual_seed(seed);
    plain_.add_layer();
    plain_.layer(plain_.size() - 1).to(dtype_);
    (*ddp_)(test::normal({1, test::kWidth}, 1, dtype_));
  }

  void uneven(const Event& event) {
    if (!trains(event) || !scenario_.options.average) return;
    const auto batches = [&](int rank) { return event.batches[static_cast<std::size_t>(rank)]; };
    const auto rows = [](int rank, int k) { return std::int64_t{1 + (rank + 2 * k) % 4}; };
    auto join = ddp_->join(event.divide_by);
    const auto check = [&](int k) {
      Gradients expected;
      double divisor = 0;
      for (int rank = 0; rank < scenario_.world; ++rank) {
        if (k >= batches(rank)) continue;
        const bool by_samples = event.divide_by == DivideBy::samples;
        const double weight = by_samples ? static_cast<double>(rows(rank, k)) : 1.0;
        divisor += weight;
        add(expected, own(event, rank, k, rows(rank, k)), weight);
      }
      if (event.divide_by == DivideBy::world) divisor = scenario_.world;
      Gradients mean;
      add(mean, expected, 1.0 / divisor);
      compare(mean, "uneven");
    };
    int k = 0;
    for (; k < batches(group_.rank()); ++k) {
      model_.reach = reach_of(event, group_.rank());
      join.samples(rows(group_.rank(), k));
      autograd::backward(
          loss_of(*ddp_, seed_of(event, group_.rank(), k), dtype_, rows(group_.rank(), k)));
      check(k);
    }
    for (; join.other_ranks_have_batches(); ++k) {
      autograd::backward(join.zero());
      check(k);
    }
  }

  const Scenario& scenario_;
  ProcessGroup group_;
  DType dtype_;
  Tower model_, plain_;
  std::optional<DistributedDataParallel> ddp_;
};

std::string run(const Scenario& scenario) {
  auto groups = ProcessGroup::in_process(scenario.world, test::fast_options());
  std::mutex mutex;
  std::string errors;
  int refused = 0;
  std::vector<std::thread> threads;
  for (const ProcessGroup& group : groups) {
    threads.emplace_back([&, group] {
      const auto say = [&](const std::string& text) {
        const std::lock_guard lock(mutex);
        errors += core::str("rank ", group.rank(), ": ", text, "\n");
      };
      std::optional<Rank> rank;
      try {
        rank.emplace(scenario, group);
      } catch (const core::InvalidArgument& error) {
        if (makes_sense(scenario)) say(error.what());
        const std::lock_guard lock(mutex);
        ++refused;
        return;
      }
      try {
        rank->live();
      } catch (const std::exception& error) {
        say(error.what());
        group.abort(error.what());
      }
    });
  }
  groups.clear();
  for (std::thread& thread : threads) thread.join();
  if (refused != (makes_sense(scenario) ? 0 : scenario.world))
    errors += core::str(refused, " of ", scenario.world, " ranks refused the options\n");
  return errors;
}

template <class T>
T among(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}

Event draw_event(int world) {
  using Kind = Event::Kind;
  Event event;
  event.kind = among(
      {Kind::step, Kind::step, Kind::step, Kind::freeze, Kind::grow, Kind::reload, Kind::uneven});
  event.micro_batches = among({1, 1, 2, 3});
  for (int rank = 0; rank < world; ++rank) {
    event.reach.push_back(*rc::gen::inRange(1u, 16u));
    event.batches.push_back(*rc::gen::inRange(0, 4));
  }
  event.divide_by = among({DivideBy::participants, DivideBy::world, DivideBy::samples});
  event.layer = *rc::gen::inRange(0u, 4u);
  event.seed = *rc::gen::inRange<std::uint64_t>(1, 50);
  return event;
}

Scenario draw() {
  Scenario scenario;
  scenario.world = among({1, 2, 2, 3, 4});
  scenario.layers = *rc::gen::inRange(1, 4);
  scenario.twice = *rc::gen::arbitrary<bool>();
  scenario.half = among({false, false, true});
  scenario.hook =
      among({Hook::none, Hook::none, Hook::none, Hook::f16, Hook::bf16, Hook::power_sgd});
  DistributedOptions& o = scenario.options;
  o.first_bucket_bytes = among({1, 100, 1 << 20});
  o.bucket_bytes = among({1, 200, 25 << 20});
  o.delay_allreduce = among({false, false, false, true});
  o.allreduce_always_fp32 = among({false, false, true});
  o.average = among({true, true, true, false});
  o.gradient_predivide_factor = among({1.0, 1.0, 2.0, 3.0});
  if (*rc::gen::arbitrary<bool>()) o.trigger_parameters = {"l0.weight"};
  o.num_allreduce_streams = among({1, 1, 3});
  o.retain_allreduce_buffers = *rc::gen::arbitrary<bool>();
  o.find_unused_parameters = *rc::gen::arbitrary<bool>();
  o.static_graph = among({false, false, true});
  o.broadcast_buffers = *rc::gen::arbitrary<bool>();
  o.check_local_gradients = *rc::gen::arbitrary<bool>();
  const int events = *rc::gen::inRange(1, 7);
  for (int k = 0; k < events; ++k) scenario.events.push_back(draw_event(scenario.world));
  return scenario;
}

std::string describe(const Scenario& scenario) {
  std::ostringstream out;
  const DistributedOptions& o = scenario.options;
  out << scenario.world << " ranks, " << scenario.layers << " layers"
      << (scenario.twice ? ", twice" : "") << (scenario.half ? ", bf16" : "") << ", hook "
      << static_cast<int>(scenario.hook) << ", buckets " << o.first_bucket_bytes << " "
      << o.bucket_bytes << ", delay " << o.delay_allreduce << ", fp32 " << o.allreduce_always_fp32
      << ", average " << o.average << ", predivide " << o.gradient_predivide_factor << ", triggers "
      << o.trigger_parameters.size() << ", streams " << o.num_allreduce_streams << ", find "
      << o.find_unused_parameters << ", static " << o.static_graph << "; events";
  for (const Event& event : scenario.events) {
    out << " " << static_cast<int>(event.kind) << "(" << event.micro_batches << ", layer "
        << event.layer << ", seed " << event.seed << ", divide "
        << static_cast<int>(event.divide_by) << ", reach";
    for (const unsigned reach : event.reach) out << " " << reach;
    out << ", batches";
    for (const int batches : event.batches) out << " " << batches;
    out << ")";
  }
  return out.str();
}

TEST(DdpSearch, OptionsModelsAndEventsGiveTheMeanOfAllRanks) {
  EXPECT_TRUE(rc::check([] {
    const Scenario scenario = draw();
    const std::string errors = run(scenario);
    if (!errors.empty()) RC_FAIL(describe(scenario) + "\n" + errors);
  }));
}

// Between processes: every hook with every way to divide, and what else may happen to a model.
TEST(DdpSearch, JoinsAndHooksOnProcesses) {
  test::run_ranks(3, [](const ProcessGroup& group) {
    using Kind = Event::Kind;
    for (const Hook hook : {Hook::none, Hook::f16, Hook::bf16, Hook::power_sgd}) {
      Scenario scenario{.world = 3, .layers = 3, .hook = hook};
      scenario.options.first_bucket_bytes = 100;
      scenario.options.bucket_bytes = 200;
      scenario.options.find_unused_parameters = true;
      std::uint64_t seed = 1;
      const auto add_event = [&](Kind kind, DivideBy divide_by, std::vector<int> batches) {
        scenario.events.push_back({.kind = kind,
                                   .micro_batches = 2,
                                   .reach = {7, 3, 5},
                                   .batches = std::move(batches),
                                   .divide_by = divide_by,
                                   .layer = 1,
                                   .seed = seed++});
      };
      for (const DivideBy by : {DivideBy::participants, DivideBy::world, DivideBy::samples}) {
        add_event(Kind::uneven, by, {2, 0, 3});
        add_event(Kind::step, by, {});
        add_event(Kind::freeze, by, {});
        add_event(Kind::uneven, by, {1, 3, 2});
        add_event(Kind::reload, by, {});
      }
      add_event(Kind::grow, DivideBy::world, {});
      add_event(Kind::step, DivideBy::world, {});
      Rank(scenario, group).live();
    }
  });
}

/// Weights after steps of a rank whose inputs run out after rank + 1 batches, with approximated
/// gradients whose errors are fed back.
test::Gradients train_approximately(const ProcessGroup& group) {
  Tower model(3);
  DistributedOptions options{.first_bucket_bytes = 100, .bucket_bytes = 300};
  options.hook = power_sgd({.rank = 1, .start_step = 1, .min_compression_rate = 0.0});
  DistributedDataParallel ddp(model, group, options);
  optim::FusedSGD sgd(model.parameters(), {.lr = 0.1, .momentum = 0.9});
  const auto seed = static_cast<std::uint64_t>(10 * group.rank());
  for (std::uint64_t step = 0; step < 4; ++step) {
    autograd::backward(loss_of(ddp, seed + step));
    test::expect_applied(sgd.step());
  }
  auto join = ddp.join();
  for (int k = 0; k <= group.rank(); ++k) {
    autograd::backward(loss_of(ddp, 100 + seed + static_cast<std::uint64_t>(k)));
    test::expect_applied(sgd.step());
  }
  while (join.other_ranks_have_batches()) {
    autograd::backward(join.zero());
    test::expect_applied(sgd.step());
  }
  test::Gradients weights;
  for (const auto& [name, tensor] : model.parameters()) weights[name] = tensor.to_vector<double>();
  return weights;
}

TEST(DdpSearch, PowerSgdHasTheBitsOfThreadsOnProcesses) {
  test::run_ranks(3, [](const ProcessGroup& group) {
    const test::Gradients own = train_approximately(group);
    test::run_threads(3, [&](const ProcessGroup& threads) {
      EXPECT_EQ(train_approximately(threads), own) << "thread " << threads.rank();
    });
    Tower untrained(3);  // it has moved at all
    EXPECT_NE(untrained.parameters()[0].tensor.to_vector<double>(), own.at("l0.weight"));
  });
}

}  // namespace
}  // namespace cairn::parallel
