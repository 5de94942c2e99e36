#include "cuda/cudnn/descriptor.h"

namespace cairn::kernels::cuda {

Descriptor::Descriptor(const char* op, cudnnBackendDescriptorType_t type) : op_(op) {
  cudnnBackendDescriptor_t made = nullptr;
  check_cudnn(cudnnBackendCreateDescriptor(type, &made), op_, "cudnnBackendCreateDescriptor");
  raw_.reset(made);
}

void Descriptor::finalize() {
  check_cudnn(try_finalize(), op_, "cudnnBackendFinalize");
}

bool Descriptor::finalize_if_supported() {
  const cudnnStatus_t status = try_finalize();
  if (is_unsupported(status)) return false;
  check_cudnn(status, op_, "cudnnBackendFinalize");
  return true;
}

void Descriptor::set(Name name, const Descriptor& other) {
  const cudnnBackendDescriptor_t raw = other.raw();
  set_raw(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &raw);
}

void Descriptor::set(Name name, const std::vector<Descriptor>& others) {
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const Descriptor& other : others) raw.push_back(other.raw());
  set_raw(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.size(), raw.data());
}

std::vector<Descriptor> Descriptor::get_all(Name name, cudnnBackendDescriptorType_t type,
                                            std::optional<std::size_t> most) const {
  std::int64_t count = 0;
  if (most)
    count = static_cast<std::int64_t>(*most);
  else
    get_raw(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr);
  std::vector<Descriptor> found;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < count; ++i) raw.push_back(found.emplace_back(op_, type).raw());
  if (count > 0) get_raw(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, raw.data());
  // It may give fewer than it has counted.
  while (found.size() > static_cast<std::size_t>(count)) found.pop_back();
  return found;
}

void Descriptor::set_raw(Name name, cudnnBackendAttributeType_t type, std::size_t count,
                         const void* values) {
  check_cudnn(cudnnBackendSetAttribute(raw(), name, type, static_cast<std::int64_t>(count), values),
              op_, "cudnnBackendSetAttribute");
}

void Descriptor::get_raw(Name name, cudnnBackendAttributeType_t type, std::int64_t most,
                         std::int64_t* count, void* values) const {
  check_cudnn(cudnnBackendGetAttribute(raw(), name, type, most, count, values), op_,
              "cudnnBackendGetAttribute");
}

}  // namespace cairn::kernels::cuda
