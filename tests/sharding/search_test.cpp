// Random trainings divided at a random stage, and the same calls under DistributedDataParallel: the
// bits of weights, states, norms, skips, scales and outputs agree after each call. Half of them are
// saved in the middle, and go on at another stage and number of ranks.
//
//   RC_PARAMS="seed=7" CAIRN_STATEFUL_SEQUENCES=1 test_sharding --gtest_filter=ShardingSearch.*
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "cairn/checkpointing/state_file.h"
#include "checkpointing/temporary_folder.h"
#include "parallel/ranks.h"
#include "sharding/training.h"
#include "support/search.h"

namespace cairn {
namespace {

using amp::OptLevel;
using parallel::ZeroStage;
using test::Draw;
using test::make;
using test::Recipe;
using test::Training;

struct Drawn {
  Recipe recipe;
  parallel::ShardedOptions options;
  int ranks = 2;
  bool in_files = false;  // masters and moments of the divided one

  Recipe divided_recipe() const {
    Recipe own = recipe;
    if (in_files) own.states.folder = std::filesystem::temp_directory_path().string();
    return own;
  }
};

Recipe draw_recipe(Draw& draw) {
  const double decay = draw.one_in(2) ? 0.01 : 0.0;
  const std::vector<std::pair<const char*, test::Make>> rules{
      {"adam", make<optim::FusedAdam>(optim::AdamOptions{.lr = 1e-2, .weight_decay = decay})},
      {"sgd", make<optim::FusedSGD>(
                  optim::SgdOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = decay})},
      {"adagrad", make<optim::FusedAdagrad>(optim::AdagradOptions{.lr = 0.05})},
      {"novograd", make<optim::FusedNovoGrad>(optim::NovoGradOptions{.lr = 0.01})},
      {"lamb", make<optim::FusedLAMB>(
                   optim::LambOptions{.lr = 0.01, .weight_decay = decay, .use_nvlamb = true})}};
  const auto [name, optimizer] = draw.of(rules);
  Recipe recipe{.name = name, .optimizer = optimizer};
  recipe.level = draw.of<OptLevel>({OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3});
  recipe.half = draw.of<DType>({DType::bf16, DType::f16});
  if ((recipe.name == "adam" || recipe.name == "lamb") && recipe.half == DType::bf16 &&
      recipe.level == OptLevel::O2 && draw.one_in(2)) {
    recipe.states = {.moments = DType::bf16, .masters = optim::MasterStorage::remainder};
    recipe.name += ", compact states";
  }
  if (recipe.name == "sgd" && draw.one_in(2)) {
    recipe.larc = true;
    recipe.name += " with LARC";
  }
  recipe.max_norm = draw.one_in(2) ? 0.05 : 0.0;
  return recipe;
}

Drawn draw_form(Draw& draw, const Recipe& recipe) {
  Drawn drawn{.recipe = recipe};
  drawn.options.stage = draw.of<ZeroStage>({ZeroStage::optimizer_states, ZeroStage::gradients,
                                            ZeroStage::parameters, ZeroStage::parameters});
  const bool on_gpus = core::default_device().is_cuda();
  drawn.in_files = draw.one_in(4) && !on_gpus;  // there the host updates what lies in files
  drawn.ranks = 2 + draw.below(test::ranks_in_order() - 1);
  if (draw.one_in(3)) {
    using Forms = std::vector<std::pair<int, int>>;
    const Forms forms =
        on_gpus ? Forms{{4, 2}, {2, 1}} : Forms{{4, 2}, {4, 2}, {2, 1}, {6, 3}, {6, 2}};
    std::tie(drawn.ranks, drawn.options.shard_within) = draw.of(forms);
    drawn.recipe.in_turn = on_gpus && drawn.ranks > test::ranks_in_order();
  }
  parallel::DistributedOptions& distributed = drawn.options.distributed;
  if (draw.one_in(2)) distributed.first_bucket_bytes = distributed.bucket_bytes = 3000;
  distributed.average = !draw.one_in(4);
  distributed.allreduce_always_fp32 = draw.one_in(4);
  distributed.gradient_predivide_factor = distributed.average && draw.one_in(4) ? 2.0 : 1.0;
  distributed.delay_allreduce = draw.one_in(4);
  distributed.num_allreduce_streams = !distributed.delay_allreduce && draw.one_in(4) ? 2 : 1;
  distributed.check_local_gradients = !draw.one_in(4);
  distributed.broadcast_buffers = draw.one_in(4);
  distributed.find_unused_parameters = draw.one_in(4);
  if (drawn.options.stage == ZeroStage::parameters) {
    if (draw.one_in(3)) drawn.options.units = {"tied"};
    drawn.options.reshard_after_forward = !draw.one_in(3);
    const int divide = drawn.options.shard_within == 0 ? drawn.ranks : drawn.options.shard_within;
    if (drawn.options.reshard_after_forward && divide % 2 == 0 && draw.one_in(2))
      drawn.options.reshard_within = divide / 2;
    if (!distributed.find_unused_parameters) {
      drawn.options.prefetch = draw.below(4);
      if (draw.one_in(3)) drawn.options.most_gathered = 20'000;
    }
    if (draw.one_in(3)) drawn.options.keep_whole = draw.one_in(2) ? 139 : 1000;
  }
  const bool several = drawn.options.shard_within > 1 || drawn.options.reshard_within > 1;
  if (on_gpus && several) distributed.num_allreduce_streams = 1;
  return drawn;
}

std::ostream& operator<<(std::ostream& out, const Drawn& drawn) {
  const parallel::ShardedOptions& options = drawn.options;
  out << drawn.ranks << " ranks by " << options.shard_within << ", stage "
      << static_cast<int>(options.stage) << ", " << drawn.recipe.name << ", O"
      << static_cast<int>(drawn.recipe.level) << ' ' << core::name(drawn.recipe.half);
  if (drawn.recipe.max_norm > 0) out << ", clipped";
  if (drawn.in_files) out << ", states in files";
  const parallel::DistributedOptions& distributed = options.distributed;
  if (distributed.bucket_bytes == 3000) out << ", small buckets";
  if (!distributed.average) out << ", sums";
  if (distributed.allreduce_always_fp32) out << ", f32 on the way";
  if (distributed.gradient_predivide_factor != 1.0) out << ", divided before";
  if (distributed.delay_allreduce) out << ", late";
  if (distributed.num_allreduce_streams > 1) out << ", two streams";
  if (!distributed.check_local_gradients) out << ", unchecked";
  if (distributed.broadcast_buffers) out << ", rank 0's buffers";
  if (distributed.find_unused_parameters) out << ", unused parameters";
  if (!options.units.empty()) out << ", one unit";
  if (!options.reshard_after_forward) out << ", whole after forwards";
  if (options.reshard_within > 0) out << ", in " << options.reshard_within << " after forwards";
  if (options.prefetch != 1) out << ", " << options.prefetch << " ahead";
  if (options.most_gathered > 0) out << ", at most " << options.most_gathered;
  if (options.keep_whole > 0) out << ", small ones whole to " << options.keep_whole;
  return out;
}

/// How far a training has come, whoever goes on with it.
struct Progress {
  std::int64_t batch = 0, saves = 0;
  bool updated = false;
  std::string calls;
};

/// One rank's two trainings. Every rank draws the same calls.
class Pair {
 public:
  Pair(const Drawn& drawn, const parallel::ProcessGroup& group, std::string folder,
       const Progress& before)
      : plain_(drawn.recipe, group, test::kPlain, drawn.options),
        divided_(drawn.divided_recipe(), group, drawn.options.stage, drawn.options),
        divides_gradients_(drawn.options.stage >= ZeroStage::gradients &&
                           drawn.options.shard_within != 1),
        knows_culprits_(drawn.options.distributed.check_local_gradients),
        one_reduction_(!drawn.options.distributed.average),
        in_turn_(drawn.recipe.in_turn),
        ranks_(drawn.ranks),
        folder_(std::move(folder)),
        batch_(before.batch),
        saves_(before.saves),
        updated_(before.updated) {}

  /// Both, for another pair.
  Progress save() {
    (void)clear();
    ++saves_;
    plain_.state->save(folder_ + "/plain", saves_);
    divided_.state->save(folder_ + "/divided", saves_);
    return {batch_, saves_, updated_, ""};
  }

  /// From what another pair has saved: each from its own, or from the other's.
  void resume(bool from_own) {
    EXPECT_TRUE(plain_.state->resume_latest(folder_ + (from_own ? "/plain" : "/divided")));
    EXPECT_TRUE(divided_.state->resume_latest(folder_ + (from_own ? "/divided" : "/plain")));
  }

  /// Returns what it did.
  std::string call(Draw& draw) {
    switch (draw.below(15)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return backward(draw);
      case 4:
      case 5:
      case 6:
        return step();
      case 7:
        return clear();
      case 8:
        return evaluate();
      case 9:
        return forward_alone();
      case 10:
        return forward_that_throws();
      case 11:
        return draw.one_in(2) ? write_weights(draw) : change_rate(draw);
      case 12:
        return draw.one_in(2) ? freeze(draw) : alone(draw);
      case 13:
        return export_model(draw);
      default:
        return draw.one_in(2) ? exchange_states() : states_and_back();
    }
  }

  void compare() {
    EXPECT_EQ(divided_.precision->loss_scale(), plain_.precision->loss_scale());
    std::int64_t elements = 0;
    if (updated_) {  // before, one of them may have zeros where the other has nothing
      EXPECT_EQ(test::difference_in_parts(divided_.optimizer->state_dict(),
                                          plain_.optimizer->state_dict(), elements),
                "");
    }
    EXPECT_EQ(
        test::difference_in_parts(divided_.net.state_dict(), plain_.net.state_dict(), elements),
        "");
    EXPECT_EQ(test::difference_of_weights(divided_, plain_), "");
  }

 private:
  template <class F>
  void both(F&& f) {
    f(plain_);
    f(divided_);
  }

  std::string backward(Draw& draw) {
    if (pending_ > 0 && one_reduction_ && !local_) return "";
    const int overflows_on = draw.one_in(8) ? draw.below(ranks_) : -1;
    const bool again = pending_ > 0 && !local_;
    both([&](Training& one) {
      // Divided gradients of several backwards are summed in f32, as a stash is.
      const bool sums = divides_gradients_ && &one == &divided_;
      if (again && !sums) (void)one.optimizer->stash();
      one.backward(batch_, overflows_on);
    });
    ++batch_, ++pending_;
    local_ = false;
    return overflows_on < 0 ? "backward" : core::str("backward, inf on rank ", overflows_on);
  }

  /// Under no_sync(), before a backward that reduces what this one leaves, or a step that does.
  std::string alone(Draw& draw) {
    if ((pending_ > 0 && !local_) || in_turn_) return "";
    const int overflows_on = draw.one_in(8) ? draw.below(ranks_) : -1;
    both([&](Training& one) {
      const auto no_sync = one.ddp().no_sync();
      one.backward(batch_, overflows_on);
    });
    ++batch_, ++pending_;
    local_ = true;
    return overflows_on < 0 ? "backward under no_sync"
                            : core::str("backward under no_sync, inf on rank ", overflows_on);
  }

  /// Or thaws.
  std::string freeze(Draw& draw) {
    if (pending_ > 0 || !updated_) return "";  // all have states
    const auto which = static_cast<std::size_t>(draw.below(9));
    both([&](Training& one) {
      Tensor weight = one.net.parameters()[which].tensor;
      weight.set_requires_grad(!weight.requires_grad());
    });
    return "freezes or thaws " + plain_.net.parameters()[which].name;
  }

  std::string step() {
    if (pending_ == 0) return "";
    const optim::StepResult expected = plain_.precision->step(), got = divided_.precision->step();
    pending_ = 0;
    const bool looked = !std::exchange(local_, false);  // ahead of a reduction: who was it?
    updated_ = updated_ || expected.applied;
    EXPECT_EQ(got.applied, expected.applied) << got.reason;
    if (knows_culprits_ && looked) {
      EXPECT_EQ(got.reason, expected.reason);
    }
    EXPECT_EQ(got.clip_coefficient, expected.clip_coefficient);
    if (expected.applied) {
      EXPECT_EQ(got.gradient_norm, expected.gradient_norm);
    }
    return expected.applied ? "step" : "step, skipped";
  }

  std::string clear() {
    both([](Training& one) { one.optimizer->clear_grad(); });
    pending_ = 0;
    local_ = false;
    return "clear_grad";
  }

  std::string evaluate() {
    std::vector<std::vector<double>> outputs;
    both([&](Training& one) {
      const autograd::NoGradGuard no_grad;
      one.net.train(false);
      outputs.push_back(one.forward(batch_).to_vector<double>());
      one.net.train();
    });
    EXPECT_EQ(outputs[0], outputs[1]);
    return "forward in eval mode";
  }

  std::string forward_alone() {
    both([&](Training& one) { (void)one.forward(batch_); });
    return "forward without backward";
  }

  std::string forward_that_throws() {
    const Tensor wrong = Tensor::zeros({4, test::kInputs + 1});
    both([&](Training& one) { EXPECT_THROW((void)one.ddp()(wrong), core::Error); });
    return "forward that throws";
  }

  std::string write_weights(Draw& draw) {
    if (pending_ > 0) return "";
    const double factor = draw.of<double>({0.5, 0.75});
    both([&](Training& one) {
      const auto whole = one.gather();
      for (const auto& [name, tensor] : one.net.parameters())
        kernels::affine(tensor, factor, 0.0, tensor);
    });
    return core::str("weights times ", factor);
  }

  std::string change_rate(Draw& draw) {
    const double lr = draw.of<double>({1e-3, 1e-2, 3e-2});
    both([&](Training& one) { one.optimizer->set_lr(lr); });
    return core::str("lr ", lr);
  }

  /// Each goes on from the other's checkpoint.
  std::string exchange_states() {
    (void)save();
    resume(false);
    return "each resumes from the other's checkpoint";
  }

  /// By all ranks, in one file or several: both have the same bytes.
  std::string export_model(Draw& draw) {
    const std::uint64_t file_bytes = draw.of<std::uint64_t>({1'000'000'000, 50'000, 5'000});
    std::vector<std::string> folders;
    both([&](Training& one) {
      folders.push_back(core::str(folder_, "/export", saves_, "-", exports_++));
      checkpointing::write_safetensors_model(
          folders.back(), one.net.state_dict(),
          {.file_bytes = file_bytes, .world = one.ddp().world()});
    });
    std::size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folders[0])) {
      const std::string name = entry.path().filename().string();
      EXPECT_EQ(checkpointing::read_bytes(folders[1] + "/" + name),
                checkpointing::read_bytes(entry.path().string()))
          << name;
      ++files;
    }
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folders[1]), {}), files);
    return core::str("exported in ", files, " files");
  }

  std::string states_and_back() {
    both([](Training& one) {
      one.optimizer->load_state_dict(one.optimizer->state_dict());
      one.net.load_state_dict(one.net.state_dict());
    });
    return "states handed out and loaded";
  }

  Training plain_, divided_;
  bool divides_gradients_, knows_culprits_, one_reduction_;
  bool in_turn_;  // whole gradients of several batches would be summed in an order
  int ranks_;
  std::string folder_;
  std::int64_t batch_, saves_, exports_ = 0;
  bool updated_;
  int pending_ = 0;     // backwards since the last step
  bool local_ = false;  // none of which has reduced
};

/// As many calls; what has come before is resumed, and what comes of it is saved where that is
/// wanted.
Progress train(const Drawn& drawn, std::uint64_t seed, int calls, const std::string& folder,
               const Progress& before, bool saves) {
  Progress after;
  test::run_threads(drawn.ranks, [&](parallel::ProcessGroup& group) {
    Draw draw(seed + 1'000'003 + static_cast<std::uint64_t>(before.saves));
    Pair pair(drawn, group, folder, before);
    std::string all = before.calls + core::str("\n ", drawn);
    if (before.saves > 0) {
      SCOPED_TRACE(core::str("seed ", seed, ":", all, "\n  and then resumes"));
      pair.resume(draw.one_in(2));
      pair.compare();
    }
    for (int i = 0; i < calls; ++i) {
      SCOPED_TRACE(core::str("seed ", seed, ":", all, "\n  and then"));
      const std::string what = pair.call(draw);
      if (!what.empty()) all += "\n  " + what;
      if (draw.one_in(2)) pair.compare();
    }
    SCOPED_TRACE(core::str("seed ", seed, ":", all));
    pair.compare();
    if (!saves) return;
    Progress own = pair.save();
    own.calls = all;
    if (group.rank() == 0) after = own;
  });
  return after;
}

void search(std::uint64_t seed) {
  Draw draw(seed);
  const Recipe recipe = draw_recipe(draw);
  const auto folder = std::filesystem::temp_directory_path() /
                      core::str("cairn-sharding-search-", getuid(), "-", getpid());
  const bool goes_on = draw.one_in(2);
  const Progress progress =
      train(draw_form(draw, recipe), seed, goes_on ? 8 : 14, folder.string(), {}, goes_on);
  if (goes_on && !testing::Test::HasFailure())
    (void)train(draw_form(draw, recipe), seed, 6, folder.string(), progress, false);
  std::filesystem::remove_all(folder);
}

TEST(ShardingSearch, AnyCallsHaveTheBitsOfDistributedDataParallel) {
  for (const std::uint64_t seed : test::search_seeds(80)) {
    search(seed);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace cairn
