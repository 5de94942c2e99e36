// oneDNN primitives, created once per shape, dtype, layout and attributes and kept in a bounded
// cache that all threads share.
//
//   const auto op = onednn::cached(onednn::Key("matmul", threads).add(m).add(n), [&] { return
//   make(); }); onednn::execute("matmul", *op, device, {{DNNL_ARG_SRC, x}, {DNNL_ARG_DST, y}});
//
// An Operation is immutable: several threads may execute one at a time, each with a scratchpad of
// its own from the device's allocator.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cairn/core/tensor_view.h"
#include "cpu/dnnl_version.h"
#include "temporary.h"

namespace cairn::kernels::onednn {

inline constexpr std::size_t kMaxOperations = 1024;  // least recently used ones are dropped beyond

const dnnl::engine& engine();
/// Attributes every operation starts from: the caller brings the scratchpad.
dnnl::primitive_attr attributes();
/// Throws Unsupported for a dtype that it does not read.
dnnl::memory::data_type data_type(core::DType dtype);
/// f32 and bf16; f16 from oneDNN 3 on.
bool reads(core::DType dtype);
/// oneDNN uses this instruction set on this processor.
bool has_isa(dnnl::cpu_isa isa);
/// "isa 3e7", the bits of what oneDNN uses here; "oneDNN 2.6.3".
std::string isa_name();
std::string version();
/// The dtype products of `dtype` are computed in on this processor, where no other is asked for:
/// its own where there are instructions for it, else f32.
core::DType compute_dtype(core::DType dtype);
/// The same of a matrix product that sums so many values, where oneDNN may fail at it.
core::DType compute_dtype_of_product(core::DType dtype, std::int64_t inner);
Desc desc(const core::TensorView& view);
/// Threads for an operation of that many multiplications (or moved elements): one where waking
/// others costs more than they save.
int threads_for(std::int64_t multiplications);

struct Operation {
  dnnl::primitive primitive;
  std::vector<std::pair<int, Desc>> arguments;  // DNNL_ARG_..., layout
  Desc scratchpad;
  bool reference = false;  // oneDNN has nothing but a plain loop for it: a hundred times slower
  int threads = 1;         // set by cached()

  const Desc& argument(int id) const;
};
using OperationPtr = std::shared_ptr<const Operation>;

/// What an operation is: everything that its creation depends on.
class Key {
 public:
  Key(std::string_view kind, int threads);  // it is made for, and run with, that many threads
  Key& add(std::int64_t value);
  Key& add(double value);
  Key& add(const core::Shape& values);
  Key& add(const core::TensorView& view);  // dtype, shape, strides; undefined views count as absent
  Key& add(const Desc& desc);

  int threads() const { return static_cast<int>(words_[1]); }
  std::size_t hash() const;
  bool operator==(const Key&) const = default;

 private:
  std::vector<std::int64_t> words_;
};

struct KeyHash {
  std::size_t operator()(const Key& key) const { return key.hash(); }
};

template <class PrimitiveDesc>
bool is_reference(const PrimitiveDesc& pd) {
  return std::string_view(pd.impl_info_str()).starts_with("ref");
}

/// While it lives, cached() throws Unsupported in this thread for an operation that is a reference:
/// it would take too long to be timed.
class ReferenceRefusal {
 public:
  ReferenceRefusal();
  ~ReferenceRefusal();
  ReferenceRefusal(const ReferenceRefusal&) = delete;
  ReferenceRefusal& operator=(const ReferenceRefusal&) = delete;
};

/// The operation of that key, made by `make` where there is none. Throws DeviceError where oneDNN
/// refuses.
OperationPtr cached(const Key& key, const std::function<Operation()>& make);

/// Runs in the calling thread (and oneDNN's workers) and returns when done. Null buffers are left
/// out. Inside a parallel_for: one thread, for an operation made for one.
void execute(std::string_view where, const Operation& operation, core::Device device,
             std::initializer_list<std::pair<int, void*>> buffers);

/// Copies memory from one layout to another, converting dtypes; accumulate adds to what is there.
void reorder(std::string_view where, const Desc& from, void* source, const Desc& to, void* target,
             core::Device device, bool accumulate = false);
/// `given`, which lies as `from` says, in another layout: itself where that is the same.
Temporary reordered(std::string_view where, const Temporary& given, const Desc& from,
                    const Desc& to);
/// Workspace for that layout, as bytes.
Temporary workspace(const Desc& desc, core::Device device);

/// Throws DeviceError "[where] oneDNN ..." for an error of oneDNN.
[[noreturn]] void fail(std::string_view where, const dnnl::error& error);

}  // namespace cairn::kernels::onednn
