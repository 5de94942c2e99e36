#include "sharding/weight_units.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cairn/autograd/engine.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/status.h"
#include "cairn/kernels/copy.h"
#include "cairn/kernels/master_weight.h"
#include "reducer/names.h"
#include "sharding/gather_weights.h"

namespace cairn::parallel {
namespace {

constexpr const char* kWrapper = "sharded";

using core::Event;
using core::Stream;
using core::WeightInParts;

TensorView quiet(const Tensor& x) {
  TensorView view = x;
  view.version = nullptr;
  return view;
}

Tensor copied_part(const Tensor& whole, core::ElementRange range) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
  Tensor part = Tensor::empty({range.size()}, whole.dtype(), whole.device());
  kernels::copy(core::part_of(quiet(whole), range), part);
  return part;
}

/// Blocks of a list are layers of their own.
bool is_list(const nn::Module& module) {
  return module.kind() == "Sequential" || module.kind() == "ModuleList";
}

/// Each layer of the model, with its full name.
std::vector<std::string> layers_of(nn::Module& model) {
  std::vector<std::string> layers;
  std::vector<std::string> lists = {""};
  for (const auto& [name, module] : model.modules()) {
    const std::size_t dot = name.rfind('.');
    const std::string around = dot == std::string::npos ? "" : name.substr(0, dot);
    const bool is_member =
        !name.empty() && std::find(lists.begin(), lists.end(), around) != lists.end();
    if (!is_member) continue;
    (is_list(*module) ? lists : layers).push_back(name);
  }
  return layers;
}

}  // namespace

struct WeightUnits::Unit {
  std::string name;
  nn::Module* module = nullptr;
  NamedTensors weights;
  bool whole = false;
  std::int64_t gradients = 0;      // ready, in this backward
  std::vector<Tensor> near_parts;  // of each weight; empty: a gather is of this rank's own parts
  std::uint64_t near_version = 0;  // version() that they are of

  // On their way.
  std::vector<Tensor> arriving;  // of each weight
  std::optional<Event> arrived;

  Device device() const { return weights.front().tensor.device(); }
  bool has(const Tensor& weight) const {
    return std::any_of(weights.begin(), weights.end(),
                       [&](const NamedTensor& one) { return one.tensor.same(weight); });
  }
  std::int64_t elements() const {
    std::int64_t sum = 0;
    for (const NamedTensor& weight : weights) sum += weight.tensor.numel();
    return sum;
  }
  /// Grows where a weight or its part is written, as all ranks do.
  std::uint64_t version() const {
    std::uint64_t sum = 0;
    for (const NamedTensor& weight : weights) sum += weight.tensor.storage()->version();
    return sum;
  }
  bool has_near_parts() const { return !near_parts.empty() && near_version == version(); }
};

/// Of one weight. Outlives the units: optimizers and states go on with the parts.
class WeightUnits::Part final : public WeightInParts {
 public:
  Part(Tensor part, core::ElementRange range, std::weak_ptr<WeightUnits> units, Unit& unit)
      : WeightInParts(std::move(part), range), units_(std::move(units)), unit_(&unit) {}

  void let_go() override {
    const auto units = units_.lock();
    if (!units) return;
    CAIRN_CHECK(!units->gathered_, "sharding", "expected weights in parts, got them while ",
                "gather_parameters() keeps them whole (end it first)");
    units->let_go_of_whole(*unit_);
  }

  /// Whose elements somebody asks for.
  void bring(const std::string& name) const {
    const auto units = units_.lock();
    const bool at_work = units && (units->forwards_ > 0 || autograd::in_backward());
    CAIRN_CHECK(at_work, "sharding", "expected the weight '", name, "' in a forward or a backward ",
                "of the model, got a use of it elsewhere, where this rank has elements ",
                range().begin, " to ", range().end,
                units ? " (gather_parameters(), on every rank, makes weights whole while it lives)"
                      : " (its ShardedDataParallel has ended: a checkpoint has all of them)");
    units->bring(*unit_);
  }

 private:
  std::weak_ptr<WeightUnits> units_;
  Unit* unit_;
};

WeightUnits::WeightUnits(nn::Module& model, ProcessGroup all, ProcessGroup group, ProcessGroup near,
                         const ShardedOptions& options)
    : model_(&model),
      all_(std::move(all)),
      group_(std::move(group)),
      near_(std::move(near)),
      all_at_once_(options.distributed.find_unused_parameters || options.distributed.static_graph),
      reshard_after_forward_(options.reshard_after_forward && options.reshard_within != 1),
      prefetch_(all_at_once_ ? 0 : options.prefetch),
      most_gathered_(options.most_gathered),
      keep_whole_(options.keep_whole) {
  plan_units(options.units.empty() ? layers_of(model) : options.units);
}

WeightUnits::~WeightUnits() {
  let_go_of_all();
  for (const auto& unit : units_) unit->module->remove_forward_wrappers(kWrapper);
}

void WeightUnits::plan_units(const std::vector<std::string>& names) {
  units_.push_back(std::make_unique<Unit>(Unit{.name = "", .module = model_}));
  std::vector<std::string> known;
  for (const auto& [name, module] : model_->modules()) {
    known.push_back(name);
    if (name.empty() || std::find(names.begin(), names.end(), name) == names.end()) continue;
    units_.push_back(std::make_unique<Unit>(Unit{.name = name, .module = module}));
    Unit& unit = *units_.back();
    for (const NamedTensor& weight : module->parameters()) {
      Unit*& owner = unit_of_[weight.tensor.id()];
      if (owner == nullptr || name.starts_with(owner->name + ".")) owner = &unit;
    }
  }
  for (const std::string& name : names) {
    CAIRN_CHECK(std::find(known.begin(), known.end(), name) != known.end(), "sharding",
                "expected units that are modules of the model, got '", name, "' (it has ",
                join_names(known), ")");
  }
}

void WeightUnits::connect() {
  for (const auto& unit : units_) {
    unit->module->add_forward_wrapper(
        [units = weak_from_this(), own = unit.get()](const Tensor& x,
                                                     const nn::Module::Forward& next) {
          const auto alive = units.lock();
          return alive ? alive->forward(*own, x, next) : next(x);
        },
        kWrapper);
  }
}

/// Weights that are whole: at first all, later those that the model was given or has cast.
void WeightUnits::divide() {
  for (const NamedTensor& weight : model_->parameters()) {
    if (WeightInParts::of(weight.tensor) == nullptr) divide(weight, unit_of(weight.tensor));
  }
}

void WeightUnits::divide(const Tensor& weight) {
  for (const NamedTensor& one : model_->parameters()) {
    if (one.tensor.same(weight)) return divide(one, unit_of(weight));
  }
}

WeightUnits::Unit& WeightUnits::unit_of(const Tensor& weight) {
  Unit*& unit = unit_of_[weight.id()];
  if (unit == nullptr) unit = units_.front().get();
  return *unit;
}

void WeightUnits::divide(const NamedTensor& weight, Unit& unit) {
  const Tensor& tensor = weight.tensor;
  const std::shared_ptr<core::Storage>& storage = tensor.storage();
  if (tensor.numel() <= keep_whole_) return;
  if (!tensor.is_contiguous() || storage->bytes() != tensor.nbytes()) {
    core::fail<core::Unsupported>("sharding", "expected row-major parameters with memory of their ",
                                  "own, got '", weight.name, "' with shape ", tensor.shape(),
                                  " and strides ", tensor.strides(), " in ", storage->bytes(),
                                  " bytes");
  }
  CAIRN_CHECK(unit.weights.empty() || unit.weights.front().tensor.device() == tensor.device(),
              "sharding", "expected the weights of a unit on one device, got '", weight.name,
              "' on ", tensor.device(), " beside others on ", unit.weights.front().tensor.device());
  kernels::MasterWeight::of(tensor);  // follow what was written
  const auto range = core::even_part(tensor.numel(), group_.rank(), group_.world_size());
  const auto part =
      std::make_shared<Part>(copied_part(tensor, range), range, weak_from_this(), unit);
  storage->make_returnable([part = std::weak_ptr<Part>(part), name = weight.name] {
    if (const auto alive = part.lock()) alive->bring(name);
  });
  tensor.attachments().parts = part;
  kernels::MasterWeight::keep_part(tensor, range);
  kernels::MasterWeight::moved(tensor);
  if (!unit.has(tensor)) unit.weights.push_back(weight);
  unit.near_parts.clear();
}

// ---- A forward

/// A unit's forward, until it returns or throws.
class WeightUnits::Forward {
 public:
  Forward(WeightUnits& units, Unit& unit) : units_(units), unit_(unit) { ++units_.forwards_; }
  ~Forward() {
    --units_.forwards_;
    const bool stays = units_.gathered_ || autograd::in_backward() ||
                       (!units_.reshard_after_forward_ && autograd::grad_enabled());
    if (stays) return;
    if (units_.forwards_ == 0) {
      for (const auto& unit : units_.units_) units_.let_go_of_whole(*unit);
    } else if (!units_.all_at_once_) {
      units_.let_go_of_whole(unit_);
    }
  }
  Forward(const Forward&) = delete;
  Forward& operator=(const Forward&) = delete;

 private:
  WeightUnits& units_;
  Unit& unit_;
};

Tensor WeightUnits::forward(Unit& unit, const Tensor& x, const nn::Module::Forward& next) {
  core::refuse_in_capture("sharding", "weights that are gathered while they are used");
  const bool is_model = &unit == units_.front().get();
  const bool is_first = is_model && forwards_ == 0 && !autograd::in_backward();
  if (is_first && !gathered_) divide();
  const Forward running(*this, unit);
  all_at_once_ ? bring_all() : bring(unit);
  if (!order_known_ && !autograd::in_backward()) learn(unit);
  Tensor y = next(x);
  order_known_ = order_known_ || is_first;
  const bool has_backward = autograd::grad_enabled() && !autograd::in_backward();
  if (near_.world_size() == group_.world_size() || !has_backward || gathered_) return y;
  if (forwards_ > 1 && !all_at_once_) keep_near_parts(unit);
  if (forwards_ > 1) return y;
  for (const auto& each : units_) keep_near_parts(*each);
  return y;
}

/// What remains when the unit is let go of.
void WeightUnits::keep_near_parts(Unit& unit) {
  if (!unit.whole || unit.has_near_parts()) return;
  unit.near_parts.clear();
  unit.near_version = unit.version();
  try {
    for (const NamedTensor& weight : unit.weights) {
      const Tensor& whole = weight.tensor;
      const auto range = core::even_part(whole.numel(), near_.rank(), near_.world_size());
      const bool in_parts = WeightInParts::of(whole) != nullptr;
      unit.near_parts.push_back(in_parts ? copied_part(whole, range) : Tensor());
    }
  } catch (const std::exception& error) {
    unit.near_parts.clear();
    group_.abort(core::str("the weights of '", unit.name, "': ", error.what()));
    throw;
  }
}

void WeightUnits::learn(Unit& unit) {
  const bool is_new = std::find(order_.begin(), order_.end(), &unit) == order_.end();
  if (is_new && !unit.weights.empty()) order_.push_back(&unit);
}

/// Whole, as far as the current stream can tell.
void WeightUnits::bring(Unit& unit) {
  if (autograd::in_backward()) follow_backward();
  if (unit.whole || unit.weights.empty()) return;
  if (!unit.arrived) start(unit);
  fetch_ahead(unit);
  {
    const core::WaitMark mark("waiting for weights to be gathered");
    Stream::current(unit.device()).wait(*unit.arrived);
  }
  group_.check();
  for (std::size_t i = 0; i < unit.weights.size(); ++i) {
    const Tensor& weight = unit.weights[i].tensor;
    if (WeightInParts::of(weight) != nullptr && unit.arriving[i].defined())
      weight.storage()->set_memory(unit.arriving[i].storage());
  }
  unit.arriving.clear();
  unit.arrived.reset();
  unit.whole = true;
}

void WeightUnits::bring_all() {
  for (const auto& unit : units_) bring(*unit);
}

/// Its gather follows those that this rank has called before, and the reductions.
void WeightUnits::start(Unit& unit) {
  const Stream stream = all_.stream(unit.device());
  const bool near = unit.has_near_parts();
  if (!near) unit.near_parts.clear();
  const ProcessGroup& group = near ? near_ : group_;
  try {
    const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
    std::vector<PartAndWhole> gathers;
    for (std::size_t i = 0; i < unit.weights.size(); ++i) {
      const auto& [name, tensor] = unit.weights[i];
      const WeightInParts* parts = WeightInParts::of(tensor);
      unit.arriving.push_back(parts == nullptr
                                  ? Tensor()
                                  : Tensor::empty(tensor.shape(), tensor.dtype(), tensor.device()));
      if (parts == nullptr) continue;
      const Tensor& part = near ? unit.near_parts[i] : parts->part();
      unit.arriving.back().storage()->record_use(stream);
      part.storage()->record_use(stream);
      PartAndWhole& one = gathers.emplace_back();
      one.name = name;
      one.part = quiet(part);
      one.whole = quiet(unit.arriving.back());
      for (int rank = 0; rank < group.world_size(); ++rank)
        one.counts.push_back(core::even_part(tensor.numel(), rank, group.world_size()).size());
    }
    Event ready(unit.device());
    ready.record(Stream::current(unit.device()));
    stream.wait(ready);
    const core::StreamGuard guard(stream);
    gather_parts(gathers, group);
    unit.arrived.emplace(unit.device());
    unit.arrived->record(stream);
  } catch (const std::exception& error) {
    unit.arriving.clear();
    group_.abort(core::str("the weights of '", unit.name, "': ", error.what()));
    throw;
  }
}

std::int64_t WeightUnits::gathered_elements() const {
  std::int64_t elements = 0;
  for (const auto& unit : units_) {
    if (unit->whole || unit->arrived) elements += unit->elements();
  }
  return elements;
}

/// The units that come next: in a backward those before it.
void WeightUnits::fetch_ahead(const Unit& unit) {
  if (prefetch_ == 0 || !order_known_) return;
  const auto found = std::find(order_.begin(), order_.end(), &unit);
  if (found == order_.end()) return;
  const auto at = found - order_.begin();
  const auto count = static_cast<std::ptrdiff_t>(order_.size());
  for (std::ptrdiff_t ahead = 1; ahead <= prefetch_; ++ahead) {
    const std::ptrdiff_t place = autograd::in_backward() ? at - ahead : at + ahead;
    if (place < 0 || place >= count) return;
    Unit& next = *order_[static_cast<std::size_t>(place)];
    if (next.whole || next.arrived || next.weights.empty()) continue;
    const bool fits =
        most_gathered_ == 0 || gathered_elements() + next.elements() <= most_gathered_;
    if (!fits) return;
    start(next);
  }
}

void WeightUnits::let_go(Unit& unit) {
  unit.near_parts.clear();
  let_go_of_whole(unit);
}

void WeightUnits::let_go_of_whole(Unit& unit) {
  if (unit.arrived && unit.device().is_cuda())
    Stream::current(unit.device()).wait(*unit.arrived);  // other groups' collectives come after it
  unit.arriving.clear();
  unit.arrived.reset();
  if (!std::exchange(unit.whole, false)) return;
  for (const NamedTensor& weight : unit.weights) {
    if (WeightInParts::of(weight.tensor) != nullptr) weight.tensor.storage()->set_memory(nullptr);
  }
}

void WeightUnits::let_go_of_all() {
  for (const auto& unit : units_) let_go(*unit);
}

void WeightUnits::part_updated(const Tensor& weight) {
  unit_of(weight).near_parts.clear();
}

// ---- A backward

void WeightUnits::follow_backward() {
  if (run_ == autograd::current_run()) return;
  run_ = autograd::current_run();
  const auto end = [units = weak_from_this()] {
    const auto alive = units.lock();
    if (!alive) return;
    alive->run_ = 0;
    for (const auto& unit : alive->units_) unit->gradients = 0;
    if (!alive->gathered_) alive->let_go_of_all();
  };
  autograd::on_backward_end(end, [end](const std::string& /*error*/) { end(); });
  if (all_at_once_) bring_all();
}

void WeightUnits::gradient_ready(const Tensor& weight) {
  const auto found = unit_of_.find(weight.id());
  if (found == unit_of_.end()) return;
  follow_backward();
  Unit& unit = *found->second;
  if (!unit.has(weight)) return;  // it is small, and whole
  const auto trained = std::count_if(unit.weights.begin(), unit.weights.end(),
                                     [](const auto& one) { return one.tensor.requires_grad(); });
  if (++unit.gradients == trained && !gathered_ && !all_at_once_) let_go(unit);
}

// ---- Between steps

void WeightUnits::gather_all() {
  CAIRN_CHECK(forwards_ == 0 && !autograd::in_backward(), "sharding",
              "expected gather_parameters() between steps, got it inside of one");
  CAIRN_CHECK(!gathered_, "sharding",
              "expected one gather_parameters() at a time, got another one");
  bring_all();
  gathered_ = true;
}

void WeightUnits::give_back() {
  try {
    take_over();
  } catch (const std::exception& error) {
    group_.abort(core::str("the parts of gathered weights: ", error.what()));
    throw;
  }
  gathered_ = false;
  let_go_of_all();
}

/// Each rank's part, from the whole.
void WeightUnits::take_over() {
  for (const auto& unit : units_) {
    for (const auto& [name, tensor] : unit->weights) {
      const WeightInParts* parts = WeightInParts::of(tensor);
      if (parts == nullptr) continue;  // was given other data
      kernels::copy(core::part_of(quiet(tensor), parts->range()), quiet(parts->part()));
    }
  }
}

}  // namespace cairn::parallel
