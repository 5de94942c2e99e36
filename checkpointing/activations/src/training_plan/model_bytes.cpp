#include "training_plan/model_bytes.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/file_memory.h"
#include "cairn/core/memory.h"
#include "cairn/core/sharding.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/empty_with_layout_of.h"
#include "cairn/nn/sequential.h"

namespace cairn::checkpointing {

namespace {

constexpr std::size_t kSlotAlignment = 64;  // of an arena's slots, and of parts in a bucket

// As ranks gather weights: small ones together, in flat buffers.
constexpr std::size_t kLargeWeight = std::size_t{1} << 20, kFlatBuffer = std::size_t{25} << 20;
// Blocks of states in files that are in memory at once.
constexpr std::size_t kBlocksInMemory = 2;

std::unordered_set<const void*> batch_norm_tensors(nn::Module& model) {
  std::unordered_set<const void*> ids;
  for (const auto& [name, module] : model.modules()) {
    if (!module->is_batch_norm()) continue;
    for (const auto& parameter : module->parameters()) ids.insert(parameter.tensor.id());
    for (const auto& buffer : module->buffers()) ids.insert(buffer.tensor.id());
  }
  return ids;
}

// Tables of pointers that a GPU keeps of the lists that a step checks and updates: so much a
// tensor, and a chunk of each.
constexpr std::size_t kListsOfAStep = 3, kTableSlotBytes = 64, kChunkElements = 1 << 14,
                      kChunkBytes = 4;

std::size_t table_bytes(std::size_t elements) {
  const std::size_t chunks = (elements + kChunkElements - 1) / kChunkElements;
  return kListsOfAStep * (kTableSlotBytes + chunks * kChunkBytes);
}

std::size_t aligned(std::size_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

void set_half(const Tensor& tensor, DType half) {
  const core::MemoryCategoryGuard category(core::MemoryCategory::parameters);
  const Tensor former = tensor.detach();
  const Tensor cast =
      Tensor::empty_strided(former.shape(), former.strides(), half, former.device());
  kernels::copy(former, cast);
  Tensor(tensor).set_data(cast);
}

}  // namespace

std::size_t ElementBytes::of_update(bool half, int kept_moments) const {
  const std::size_t values = core::size_of(gradient) + core::size_of(weight);
  return values + (half ? core::size_of(master) : 0) +
         static_cast<std::size_t>(kept_moments) * core::size_of(moments);
}

ElementBytes element_bytes(const StepKind& kind, bool half) {
  ElementBytes bytes{DType::f32, DType::f32, kind.compact ? DType::bf16 : DType::f32, DType::f32};
  if (!half) return bytes;
  // Divided gradients add up in sums beside them.
  const bool sums_in_place = kind.accumulates && !kind.divides(Sharding::gradients);
  bytes.weight = kind.precision.half;
  bytes.gradient = sums_in_place ? DType::f32 : kind.precision.half;
  if (kind.compact && kind.precision.half == DType::bf16) bytes.master = DType::i16;
  return bytes;
}

SentBytes sent_bytes(const StepBytes& bytes, const StepKind& kind, std::int64_t backwards,
                     const TrainingWorld& world) {
  const auto reduced = static_cast<double>(bytes.reduced), times = static_cast<double>(backwards);
  // An all_reduce is a reduce_scatter and an all_gather; of one backward of the step.
  const double gradients = kind.divides(Sharding::gradients) ? times * reduced : 2 * reduced;
  const double weights = kind.divides(Sharding::parameters)
                             ? times * static_cast<double>(bytes.used_weights)
                             : static_cast<double>(bytes.updated_weights);
  const double divided = kind.sharding == Sharding::none ? 0 : weights;
  const double ranks = world.ranks, host = std::max(world.ranks_per_host, 1);
  const double others = (ranks - 1) / ranks, across = (ranks - host) / ranks;
  if (kind.shard_within == 0) {
    const double all = gradients + divided;
    return {all * (others - across), all * across};
  }
  // Ranks with the same part of each copy hand each other the pieces of its gradients.
  const double within = kind.shard_within;
  const double pieces = kind.divides(Sharding::gradients) ? (ranks / within - 1) / ranks : 0;
  return {gradients * (others - across) + divided * (within - 1) / within,
          gradients * (across + pieces)};
}

// ---- The model

ModelBytes::ModelBytes(nn::Sequential& model, Device device, const TrainingWorld& world)
    : world_(world), blocks_(model.size()) {
  const core::MemoryStats stats = core::memory_stats(device);
  std::size_t own =
      stats.of(core::MemoryCategory::gradients) + stats.of(core::MemoryCategory::optimizer_state);
  for (const auto& [name, tensor] : model.parameters()) {
    CAIRN_CHECK(tensor.dtype() == DType::f32 && tensor.device() == device, "plan_training",
                "expected an f32 model on the batch's device, ", device, ", got '", name, "' of ",
                tensor.dtype(), " on ", tensor.device(), " (plan before amp::initialize)");
    own += tensor.nbytes();
  }
  CAIRN_CHECK(!model.has_forward_wrapper("amp"), "plan_training",
              "expected a model before amp::initialize, got one after it");
  list_parameters(model);
  other_ = stats.current_total > own ? stats.current_total - own : 0;
  for (const Parameter& p : parameters_) {
    const auto elements = static_cast<std::size_t>(p.elements);
    if (!p.trained) continue;
    trained_elements_ += elements;
    if (device.is_cuda()) other_ += table_bytes(elements);
  }
}

// In the order of the model: a tied one where it is used first.
void ModelBytes::list_parameters(nn::Sequential& model) {
  const std::unordered_set<const void*> batch_norms = batch_norm_tensors(model);
  std::unordered_map<const void*, std::size_t> places;
  for (std::size_t block = 0; block < model.size(); ++block) {
    for (const auto& [name, tensor] : model.at(block).parameters()) {
      const auto [known, is_new] = places.try_emplace(tensor.id(), parameters_.size());
      if (is_new) {
        parameters_.push_back({tensor.numel(), tensor.requires_grad(),
                               !batch_norms.contains(tensor.id()), block, block});
      }
      parameters_[known->second].last_block = block;
    }
  }
}

std::size_t ModelBytes::largest_gradient(const Precision& precision) const {
  std::size_t largest = 0;
  for (const Parameter& p : parameters_) {
    const DType dtype = is_half(p, precision) ? precision.half : DType::f32;
    if (p.trained)
      largest = std::max(largest, static_cast<std::size_t>(p.elements) * core::size_of(dtype));
  }
  return largest;
}

// ---- A rank

// Of one parameter, on one rank. Bytes.
struct ModelBytes::Sizes {
  std::size_t weight, own_weight;      // whole, and what the rank has of it where ranks divide it
  std::size_t gradient, own_gradient;  // the same; 0 for a frozen one
  std::size_t flat_gradient;           // in a bucket: the parts of all ranks
  DType weight_dtype, gradient_dtype;
  std::size_t own_elements;
  const Parameter* parameter;
};

int ModelBytes::dividing(const StepKind& kind) const {
  if (kind.sharding == Sharding::none) return 1;
  return kind.shard_within > 0 ? kind.shard_within : world_.ranks;
}

std::vector<ModelBytes::Sizes> ModelBytes::sizes_of(const StepKind& kind, int rank) const {
  std::vector<Sizes> all;
  const int ranks = dividing(kind);
  for (const Parameter& p : parameters_) {
    const ElementBytes bytes = element_bytes(kind, is_half(p, kind.precision));
    const auto elements = static_cast<std::size_t>(p.elements);
    const auto part = [&](int of) {
      return static_cast<std::size_t>(core::even_part(p.elements, of, ranks).size());
    };
    Sizes& one = all.emplace_back(Sizes{});
    one.parameter = &p;
    one.weight_dtype = bytes.weight;
    one.gradient_dtype = bytes.gradient;
    one.own_elements = part(rank);
    one.weight = elements * core::size_of(bytes.weight);
    one.own_weight = one.own_elements * core::size_of(bytes.weight);
    if (!p.trained) continue;
    one.gradient = elements * core::size_of(bytes.gradient);
    if (!kind.divides(Sharding::gradients)) continue;
    one.own_gradient = aligned(one.own_elements * core::size_of(bytes.gradient));
    for (int of = 0; of < ranks; ++of)
      one.flat_gradient += aligned(part(of) * core::size_of(bytes.gradient));
  }
  return all;
}

namespace {

// Masters or moments of one tensor: in memory, in a file of their own, or on the host.
void add_state(StepBytes& all, std::size_t bytes, const StepKind& kind) {
  const bool in_file = kind.in_files && bytes >= core::kLeastInFile;
  (kind.on_host ? all.on_host : in_file ? all.in_files : all.optimizer_state) += bytes;
}

}  // namespace

StepBytes ModelBytes::of_rank(const StepKind& kind, int rank) const {
  StepBytes all;
  const std::vector<Sizes> sizes = sizes_of(kind, rank);
  std::size_t largest_in_file = 0;  // bytes an element
  for (const Sizes& one : sizes) {
    const Parameter& p = *one.parameter;
    const bool half = is_half(p, kind.precision);
    const ElementBytes bytes = element_bytes(kind, half);
    all.weights += kind.divides(Sharding::parameters) ? one.own_weight : one.weight;
    if (half) add_state(all, one.own_elements * core::size_of(bytes.master), kind);
    all.used_weights += 2 * one.weight;
    // The first block has let go of a tied one when the last asks.
    if (p.last_block > p.first_block) all.used_weights += one.weight;
    if (!p.trained) continue;
    for (int moment = 0; moment < kind.moments; ++moment)
      add_state(all, one.own_elements * core::size_of(bytes.moments), kind);
    largest_in_file = std::max(
        largest_in_file, (half ? core::size_of(bytes.master) : 0) +
                             static_cast<std::size_t>(kind.moments) * core::size_of(bytes.moments));
    const auto elements = static_cast<std::size_t>(p.elements);
    all.updated += one.own_elements;
    all.checked += kind.divides(Sharding::gradients) ? one.own_elements : elements;
    all.updated_weights += one.weight;
    if (kind.divides(Sharding::gradients)) {
      all.gradients += one.own_gradient;
      all.counted_beside += one.own_gradient;
      all.reduced += one.gradient;
      if (kind.accumulates) all.gradients += one.own_elements * core::size_of(DType::f32);
    } else {
      all.gradients += aligned(one.gradient);
      all.reduced += aligned(one.gradient);
    }
  }
  constexpr std::size_t kWindow = kBlocksInMemory * kernels::kFileBlock;
  all.in_window = std::min(all.in_files, kWindow * largest_in_file);
  if (kind.divides(Sharding::gradients)) {
    all.beside.blocks.resize(blocks_);
    if (kind.accumulates) all.beside.gradients = all.in_sums = all.counted_beside;
    add_gradients(sizes, all.beside);
  }
  if (kind.divides(Sharding::parameters)) {
    add_weights(sizes, dividing(kind), all.beside);
  } else if (kind.sharding != Sharding::none) {
    all.updating = gathering(sizes, blocks_, dividing(kind));
  }
  return all;
}

StepBytes ModelBytes::of(const StepKind& kind) const {
  StepBytes most = of_rank(kind, 0);
  for (int rank = 1; rank < dividing(kind); ++rank) {
    StepBytes other = of_rank(kind, rank);
    if (other.standing() > most.standing()) most = std::move(other);
  }
  return most;
}

// ---- What comes and goes

// Flat buffers of a block's weights, or of all (block: past the last), that are small: of all ranks
// and of this one. Those of one dtype go together.
std::size_t ModelBytes::gathering(const std::vector<Sizes>& sizes, std::size_t block,
                                  int ranks) const {
  std::map<DType, std::size_t> small;
  for (const Sizes& one : sizes) {
    const bool meant =
        block == blocks_ ? one.parameter->trained : one.parameter->first_block == block;
    if (meant && one.weight < kLargeWeight) small[one.weight_dtype] += one.weight + one.own_weight;
  }
  std::size_t most = 0;
  for (const auto& [dtype, bytes] : small) most = std::max(most, bytes);
  return std::min(most, kFlatBuffer + kFlatBuffer / static_cast<std::size_t>(ranks));
}

// As a Reducer fills them: gradients of one dtype, the last parameter's first.
std::vector<std::vector<std::size_t>> ModelBytes::buckets(const std::vector<Sizes>& sizes) const {
  std::vector<std::vector<std::size_t>> all;
  std::map<DType, std::size_t> open, bytes;  // bucket and its bytes, by dtype
  for (std::size_t k = sizes.size(); k-- > 0;) {
    const Sizes& one = sizes[k];
    if (one.gradient == 0) continue;
    const bool is_first = !open.contains(one.gradient_dtype);
    const std::size_t room = bytes[one.gradient_dtype];
    if (is_first || room < one.gradient) {
      open[one.gradient_dtype] = all.size();
      const std::size_t size = is_first ? world_.first_bucket_bytes : world_.bucket_bytes;
      bytes[one.gradient_dtype] = std::max(size, one.gradient);
      all.emplace_back();
    }
    bytes[one.gradient_dtype] -= one.gradient;
    all[open[one.gradient_dtype]].push_back(k);
  }
  return all;
}

// A gradient is whole from the block that makes it until its bucket has been reduced, by the time
// that the next one is full; a bucket is copied into a flat buffer, and leaves this rank's parts.
void ModelBytes::add_gradients(const std::vector<Sizes>& sizes, ChainBeside& beside) const {
  const std::vector<std::vector<std::size_t>> all = buckets(sizes);
  std::vector<std::size_t> bucket_of(sizes.size(), 0), missing;
  for (std::size_t b = 0; b < all.size(); ++b) {
    for (const std::size_t k : all[b]) bucket_of[k] = b;
    missing.push_back(all[b].size());
  }
  std::size_t level = 0, on_its_way = 0;
  for (std::size_t block = blocks_; block-- > 0;) {
    for (const Sizes& one : sizes) {
      if (one.parameter->last_block == block) level += one.gradient;
    }
    std::size_t most = level;
    for (std::size_t k = sizes.size(); k-- > 0;) {
      if (sizes[k].gradient == 0 || sizes[k].parameter->first_block != block) continue;
      const std::size_t b = bucket_of[k];
      if (--missing[b] > 0) continue;
      level -= on_its_way;
      on_its_way = 0;
      for (const std::size_t member : all[b]) {
        on_its_way += sizes[member].gradient + sizes[member].flat_gradient;
        level += sizes[member].flat_gradient + sizes[member].own_gradient;
      }
      most = std::max(most, level);
    }
    beside.blocks[block].gradients = most;
  }
}

void ModelBytes::add_weights(const std::vector<Sizes>& sizes, int ranks,
                             ChainBeside& beside) const {
  for (std::size_t block = 0; block < blocks_; ++block)
    beside.blocks[block].gathering = gathering(sizes, block, ranks);
  for (const Sizes& one : sizes) {
    const Parameter& p = *one.parameter;
    beside.blocks[p.first_block].weights += one.weight;
    if (p.last_block > p.first_block) beside.blocks[p.last_block].ties.push_back(p.first_block);
  }
}

std::shared_ptr<nn::Module> half_clone(const nn::Module& module, DType half) {
  std::shared_ptr<nn::Module> copy = module.clone();
  const std::unordered_set<const void*> batch_norms = batch_norm_tensors(*copy);
  for (const auto& list : {copy->parameters(), copy->buffers()}) {
    for (const auto& [name, tensor] : list) {
      if (tensor.dtype() != DType::f32 || batch_norms.contains(tensor.id())) continue;
      set_half(tensor, half);
    }
  }
  return copy;
}

}  // namespace cairn::checkpointing
