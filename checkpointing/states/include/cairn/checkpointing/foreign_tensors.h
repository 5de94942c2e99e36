// ForeignTensors: tensors that another library reads and writes, as a part of a training state.
//
//   std::vector<checkpointing::ForeignTensor> tensors;
//   tensors.push_back({"blk.0.lora", DType::f32, {64, 8},
//       [](void* to, std::size_t at, std::size_t n) { engine_get(0, to, at, n); },
//       [](const void* from, std::size_t at, std::size_t n) { engine_set(0, from, at, n); }});
//   checkpointing::ForeignTensors lora(std::move(tensors));
//   checkpointing::TrainingState state({{"model", lora}});
//
// ggml's, for example, by ggml_backend_tensor_get(t, to, at, n) and ggml_backend_tensor_set(t,
// from, at, n), with the sizes {t->ne[3], t->ne[2], t->ne[1], t->ne[0]}. Types that Cairn has not
// (quantised blocks) are u8 of so many bytes.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cairn/core/state_dict.h"

namespace cairn::checkpointing {

struct ForeignTensor {
  std::string name;  // may nest: "blk.0.attn_q.weight"
  DType dtype = DType::f32;
  Shape shape;  // of row-major elements: the last dimension is that of neighbours
  /// Copies `bytes` bytes of its elements, from byte `at` on, into or from host memory, and returns
  /// when that is done. May throw; what a callback throws comes out of the save or the load.
  std::function<void(void* to, std::size_t at, std::size_t bytes)> read;
  std::function<void(const void* from, std::size_t at, std::size_t bytes)> write;
};

class ForeignTensors : public core::Stateful {
 public:
  /// Throws core::InvalidArgument for names that are empty, equal or end within another, and for
  /// callbacks that are missing.
  explicit ForeignTensors(std::vector<ForeignTensor> tensors);

  /// Reads every tensor, in their order, into host memory.
  StateDict state_dict() const override;
  /// Writes every tensor, between floating dtypes by conversion. Throws core::DataError, before
  /// anything is written, that names every missing, surplus and mis-shaped one.
  void load_state_dict(const StateDict& state) override;

 private:
  std::vector<ForeignTensor> tensors_;
};

}  // namespace cairn::checkpointing
