// PyTorch's files: what torch.save wrote is read, and what is written here torch.load reads, with
// weights_only=True.
//
//   StateDict state = checkpointing::read_torch("run.pt");     // {"model", "optimizer", "epoch"}
//   model.load_state_dict(state.dict("model"));
//   optimizer.load_torch_state_dict(state.dict("optimizer"));
//
//   checkpointing::write_torch("run.pt", {{"model", model.state_dict()},
//                                         {"optimizer", optimizer.torch_state_dict()}});
//
// A file is a zip archive of a pickle and the tensors' bytes. The pickle is read by a machine that
// executes nothing: it knows the opcodes and names that tensors, numbers, text, lists and
// dictionaries need, and any other is an error that names it. Tensors are mapped, not copied: the
// file must stay as it is while they live. What is written to them stays in memory.
//
// What torch.distributed.checkpoint (DCP) saved, a folder with a piece of each tensor from every
// rank, is read whole, whatever cut it: FSDP, DDP, tensor parallelism.
//
//   StateDict state = checkpointing::read_torch_distributed("step-1000/");
//   optimizer.load_torch_state_dict(state.dict("optimizer"));
//
// Of what DeepSpeed's ZeRO saved, its own program (python -m deepspeed.checkpoint.ds_to_universal
// --input_folder run/step --output_folder run/step_universal) makes a universal checkpoint, which
// is read too.
//
//   checkpointing::load(model, "run/", {.part = "model"});
//   StateDict state = checkpointing::read_deepspeed_universal("run/");
//   optimizer.load_torch_state_dict(state.dict("optimizer"));
//   precision.load_state_dict(state.dict("amp"));             // there for a dynamic loss scale
//
// In a StateDict, lists and tuples are dictionaries with the keys "0", "1" ..., booleans are 0 and
// 1, None is absent, dtypes and devices are text, names with dots ("0.weight") are nested.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cairn/core/state_dict.h"

namespace cairn::checkpointing {

struct TorchReadOptions {
  /// Compares the checksum of every entry, which reads the file once. False: for files that
  /// torch.serialization.set_crc32_options(False) left without.
  bool verify = true;
};

/// The tensors lie on cpu:0 with the file's strides; those that share a storage share memory. A
/// file of one tensor is {"tensor"}. Throws core::IoError where the file cannot be read;
/// core::DataError, naming the byte, where it is damaged, holds anything but state, a dtype that
/// Cairn lacks or a number that does not fit 64 bits, or stands for much more memory than it has
/// bytes.
StateDict read_torch(const std::string& path, const TorchReadOptions& options = {});

/// A folder with .metadata and the files that it names. A tensor in several pieces is put together
/// in memory, any other is mapped, or copied where its bytes are not aligned. Throws as read_torch;
/// core::DataError, naming the tensor, where pieces are missing, overlap or lie outside of it, and
/// for files outside of the folder or compressed ones.
StateDict read_torch_distributed(const std::string& folder, const TorchReadOptions& options = {});

/// A universal checkpoint of DeepSpeed's (of ZeRO, any stage, number of ranks and dtype), or a
/// folder whose latest_universal names one: {"model": the f32 values of its parameters, frozen ones
/// and buffers as they were; "optimizer": Adam's states by names and its groups, as
/// load_torch_state_dict takes them; "amp": {"loss_scaler0"} of a dynamic loss scale;
/// "global_steps", "global_samples", "skipped_steps", "lr_scheduler", and what was given to
/// save_checkpoint as client_state}. Throws as read_torch; core::IoError for a missing file;
/// core::DataError, naming the file, for a newer version, a tensor of another shape than the
/// model's, frozen parameters of stage 3, which the conversion leaves out, a training with tensor
/// or pipeline parallelism or round_robin_gradients, of which the conversion mixes values up.
StateDict read_deepspeed_universal(const std::string& folder, const TorchReadOptions& options = {});

using TorchParts = std::vector<std::pair<std::string, StateDict::Value>>;

/// Writes {"model": ..., ...} and flushes it to the disk; replaces the file. What Python finds of a
/// dictionary: an optimizer's where it has "param_groups" (state by index, lists of groups and
/// indices); names with dots where it holds tensors, as Module.load_state_dict takes them; else it
/// is nested as it is here. The same tensor twice (tied weights) is stored once and shared by
/// torch.load. Throws core::InvalidArgument for undefined tensors and core::IoError where writing
/// fails.
void write_torch(const std::string& path, const TorchParts& parts);
/// Writes one dictionary, by the same rules.
void write_torch(const std::string& path, const StateDict& state);

}  // namespace cairn::checkpointing
