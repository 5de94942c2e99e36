// Kernels that work on rows want their memory in order; these give other layouts a copy in
// workspace.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/cuda_backend.h"
#include "cuda/queue.h"

namespace cairn::kernels::cuda {

enum class StorageOrder {
  row_major,
  channels_last
};  // channels-last: images only; other shapes stay row-major

inline bool is_stored(const TensorView& view, StorageOrder storage) {
  const bool image = storage == StorageOrder::channels_last && view.dims() == 4;
  return image ? view.is_channels_last() : view.is_contiguous();
}

inline bool is_aligned(const TensorView& view, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(view.data) % bytes == 0;
}

/// A view of the same shape and dtype over fresh workspace.
class Fresh {
 public:
  Fresh(const Queue& queue, const TensorView& like, StorageOrder storage)
      : memory_(queue.workspace(like.nbytes())) {
    const bool image = storage == StorageOrder::channels_last && like.dims() == 4;
    view_ = TensorView(
        memory_->data(), like.shape,
        image ? core::channels_last_strides(like.shape) : core::contiguous_strides(like.shape),
        like.dtype, like.device);
  }
  const TensorView& view() const { return view_; }

 private:
  std::shared_ptr<core::Storage> memory_;
  TensorView view_;
};

/// An input in the wanted storage and alignment: itself or a copy. Undefined views stay so.
class Input {
 public:
  explicit Input(const TensorView& x) : view_(x) {}  // as it is
  Input(const CudaBackend& backend, const Queue& queue, const TensorView& x,
        StorageOrder storage = StorageOrder::row_major, std::size_t alignment = 1)
      : view_(x) {
    if (!x.defined() || x.numel() == 0) return;
    if (is_stored(x, storage) && is_aligned(x, alignment)) return;
    fresh_ = std::make_unique<Fresh>(queue, x, storage);
    view_ = fresh_->view();
    backend.copy(x, view_);
  }
  const TensorView& view() const { return view_; }
  template <class T>
  const T* as() const {
    return view_.as<T>();
  }

 private:
  std::unique_ptr<Fresh> fresh_;
  TensorView view_;
};

/// An output in the wanted storage and alignment: itself, or memory whose contents finish() copies
/// to it.
class Output {
 public:
  Output(const CudaBackend& backend, const Queue& queue, const TensorView& y,
         StorageOrder storage = StorageOrder::row_major, std::size_t alignment = 1)
      : backend_(backend), target_(y), view_(y) {
    if (!y.defined() || y.numel() == 0) return;
    if (is_stored(y, storage) && is_aligned(y, alignment)) return;
    fresh_ = std::make_unique<Fresh>(queue, y, storage);
    view_ = fresh_->view();
  }
  const TensorView& view() const { return view_; }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }
  void finish() const {
    if (fresh_) backend_.copy(view_, target_);
  }

 private:
  const CudaBackend& backend_;
  TensorView target_;
  std::unique_ptr<Fresh> fresh_;
  TensorView view_;
};

}  // namespace cairn::kernels::cuda
