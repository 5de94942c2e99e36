// Tensors that the ranks of a job hold between them: how their shards in a checkpoint make up the
// whole, and how other shards are cut from it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cairn/core/sharding.h"
#include "checkpoint/manifest.h"
#include "formats/flat_state.h"

namespace cairn::checkpointing {

/// In a rank's file a shard of "model.weight" is called "shards.model.weight".
inline constexpr const char* kShardPrefix = "shards.";

/// Which shards of each part a rank's state holds, for leave_out_copies().
std::string describe_shards(const FlatState& own);
/// Takes the shards of a part out of a rank's state where a rank before it holds the same ones
/// (ranks that keep copies of each other's). told: what each rank describes, in rank order.
void leave_out_copies(FlatState& own, const std::vector<std::string>& told, int rank);

using core::ElementRange;  // here in row-major order
/// Those of a shard of this shape; none where it does not lie within the whole.
std::optional<ElementRange> elements_of(const Shape& shape, const ShardPlace& place);

/// A stored shard.
struct ShardPiece {
  const CheckpointEntry* entry;
  ElementRange elements;
};

struct ShardedTensor {
  std::string name;  // "model.weight"
  DType dtype = DType::f32;
  Shape whole;
  std::vector<ShardPiece> pieces;  // in the order of their elements, none empty
};

/// Of all files; refers to their entries. Everything that does not fit together is added to
/// `problems`, a line each.
std::vector<ShardedTensor> sharded_tensors(const std::vector<ManifestFile>& files,
                                           std::string& problems);
/// Those of a manifest that was parsed, and so checked.
std::vector<ShardedTensor> sharded_tensors(const Manifest& manifest);

/// The values of a stored shard, verified, on the host.
using PieceReader = std::function<Tensor(const CheckpointEntry& piece)>;

/// A tensor of one dimension: these elements of it, gathered from the pieces.
Tensor read_elements(const ShardedTensor& tensor, ElementRange elements, const PieceReader& read);
Tensor read_whole(const ShardedTensor& tensor, const PieceReader& read);

/// The values of a stored state as a rank wants them: a shard where `wanted` has one, whole
/// elsewhere and where the shard is `rounded`, whichever of them is stored. What `wanted` lacks
/// comes whole: an optimizer that has taken no step does not say what its state will hold.
FlatState in_wanted_form(FlatState stored, const std::vector<ShardedTensor>& sharded,
                         const FlatState& wanted, const PieceReader& read);

/// Shard `rank` of an even cut over `world_size`: of rows where the stored pieces are rows, else of
/// elements.
Shard even_shard(const ShardedTensor& tensor, int rank, int world_size, const PieceReader& read);

/// Reads pieces from the files of a checkpoint.
PieceReader piece_reader(const std::string& folder);

}  // namespace cairn::checkpointing
