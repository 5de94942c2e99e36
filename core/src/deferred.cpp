#include "cairn/core/deferred.h"

#include <memory>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/memory.h"
#include "cairn/core/sharding.h"

namespace cairn::core {

bool can_defer(const Tensor& x) {
  const auto& storage = x.storage();
  const TensorAttachments* attached = x.attachments_or_null();
  if (attached != nullptr && (attached->master || attached->parts)) return false;
  return x.is_contiguous() && x.numel() >= kPartBlock && storage->bytes() == x.nbytes() &&
         storage->can_return();
}

void defer(const Tensor& x, DeferredValues values) {
  CAIRN_CHECK(can_defer(x), "defer", "expected a contiguous tensor of at least ", kPartBlock,
              " elements with memory of its own, got one with shape ", x.shape(), " and strides ",
              x.strides(), " in ", x.storage()->bytes(), " bytes");
  const std::shared_ptr<Storage>& storage = x.storage();
  const auto fill = std::make_shared<std::function<void(const Tensor&)>>(std::move(values.fill));
  const auto bring = [fill, storage = std::weak_ptr<Storage>(storage), shape = x.shape(),
                      dtype = x.dtype(), device = x.device()] {
    const std::shared_ptr<Storage> own = storage.lock();
    const MemoryCategoryGuard category(own->category());
    const Tensor whole = Tensor::empty(shape, dtype, device);
    (*fill)(whole);
    *fill = nullptr;  // with what it keeps
    own->set_memory(whole.storage());
  };
  storage->make_returnable(bring, std::move(values.what));
  storage->bump_version();
}

const std::string& deferred(const Tensor& x) {
  return x.storage()->deferred();
}

}  // namespace cairn::core
