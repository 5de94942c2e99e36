#include "cairn/checkpointing/offload.h"

#include <algorithm>
#include <any>
#include <atomic>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

#include "cairn/autograd/saved_tensor.h"
#include "cairn/core/error.h"
#include "cairn/core/file_memory.h"
#include "cairn/core/log.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"

namespace cairn::checkpointing {

namespace {

using autograd::SavedTensor;
using core::Event;
using core::Storage;
using core::Stream;
using core::StreamGuard;

constexpr std::size_t kMostOnTheWayOut = 2;  // tensors on their way out
constexpr int kFetchedAhead = 2;             // tensors
// A GPU's backward is queued long before it runs, and a fetched tensor's memory serves again once
// it has run: so many fetches at most are ahead of it.
constexpr std::size_t kMostFetchesQueued = 3;

TensorView as_bytes(const Storage& storage) {
  const auto bytes = static_cast<std::int64_t>(storage.bytes());
  return {storage.data(), {bytes}, DType::u8, storage.device()};
}

// A part at a time: of a mapped file, the process then holds no more than that.
constexpr std::int64_t kPart = 4 << 20;

void copy_by_parts(const TensorView& from, const TensorView& to, const TensorView& mapped) {
  const std::int64_t bytes = mapped.numel();
  for (std::int64_t begin = 0; begin < bytes; begin += kPart) {
    const std::int64_t end = std::min(begin + kPart, bytes);
    core::copy_bytes(from.slice(0, begin, end), to.slice(0, begin, end));
    core::leave_to_file(mapped.slice(0, begin, end));
  }
}

void copy_out(const TensorView& from, const Storage& to) {
  if (from.device.is_cuda()) return core::copy_bytes(from, as_bytes(to));
  copy_by_parts(from, as_bytes(to), as_bytes(to));
}

void copy_in(const Storage& from, const TensorView& to) {
  if (to.device.is_cuda()) return core::copy_bytes(as_bytes(from), to);
  copy_by_parts(as_bytes(from), to, as_bytes(from));
}

std::int64_t signed_size(std::size_t bytes) {
  return static_cast<std::int64_t>(bytes);
}

// The streams of one device, one each way.
struct Streams {
  explicit Streams(Device device)
      : out(Stream::create(device, "offload out")), in(Stream::create(device, "offload in")) {}
  Stream out, in;
  std::deque<Event> asked;  // of a GPU's last fetches: where the backward stood
};

// Bytes that lie elsewhere, counted while they do.
class Stored {
 public:
  Stored(std::shared_ptr<Storage> storage, std::shared_ptr<std::atomic<std::size_t>> total)
      : storage_(std::move(storage)), total_(std::move(total)) {
    *total_ += storage_->bytes();
  }
  ~Stored() { *total_ -= storage_->bytes(); }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;
  const Storage& storage() const { return *storage_; }
  /// A GPU's copy is queued there, and may run when nobody has these bytes any more.
  void record_use(const Stream& stream) { storage_->record_use(stream); }

 private:
  std::shared_ptr<Storage> storage_;
  std::shared_ptr<std::atomic<std::size_t>> total_;
};

// One offloaded storage.
struct OffloadedStorage {
  std::size_t bytes = 0;
  Device device;
  std::weak_ptr<Storage> origin;
  std::uint64_t version = 0;  // of the origin
  Tensor source;              // the origin's bytes, until they are copied
  std::shared_ptr<Stored> stored;
  std::shared_ptr<Event> out;
  Tensor fetched;  // bytes; undefined: not asked for yet
  std::shared_ptr<Event> in;
  std::weak_ptr<OffloadedStorage> before;  // the one that was offloaded before it
  bool changed = false;                    // written while it was copied
};

// What the node has.
struct StorageView {
  std::shared_ptr<OffloadedStorage> record;
  std::ptrdiff_t offset = 0;  // bytes
  Shape shape;
  Strides strides;
  DType dtype = DType::f32;
};
using PackedView = std::variant<std::shared_ptr<SavedTensor>, StorageView>;

}  // namespace

class Offload::Impl {
 public:
  explicit Impl(OffloadOptions options) : options_(std::move(options)) {
    if (options_.folder.empty()) options_.folder = std::filesystem::temp_directory_path().string();
  }

  // A stream whose last handle its own work has does not wait for it.
  ~Impl() {
    for (auto& [device, streams] : streams_) {
      finish(streams.out);
      finish(streams.in);
    }
  }

  std::any pack(const Tensor& x) {
    const std::shared_ptr<Storage>& storage = x.storage();
    const bool stays =
        autograd::is_parameter(x) || storage->pinned() || storage->bytes() < options_.min_bytes;
    if (stays) return PackedView(std::make_shared<SavedTensor>(x));
    const std::lock_guard lock(mutex_);
    StorageView view;
    view.record = record_of(x);
    view.offset =
        static_cast<const char*>(x.raw_data()) - static_cast<const char*>(storage->data());
    view.shape = x.shape();
    view.strides = x.strides();
    view.dtype = x.dtype();
    return PackedView(std::move(view));
  }

  Tensor unpack(const std::any& value) {
    const auto& packed = std::any_cast<const PackedView&>(value);
    if (const auto* kept = std::get_if<std::shared_ptr<SavedTensor>>(&packed)) {
      return (*kept)->unpack("offload");
    }
    const StorageView& view = std::get<StorageView>(packed);
    const std::lock_guard lock(mutex_);
    const Tensor bytes = arrived(*view.record);
    if (options_.fetch_ahead) fetch_ahead(*view.record);
    void* data = static_cast<char*>(bytes.raw_data()) + view.offset;
    return bytes.alias({data, view.shape, view.strides, view.dtype, bytes.device()});
  }

  void synchronize() {
    const std::lock_guard lock(mutex_);
    while (!leaving_.empty()) finish_oldest();
    for (auto& [device, streams] : streams_) streams.in.synchronize();
  }

  Stats stats() const {
    const std::lock_guard lock(mutex_);
    return {stored_bytes_->load(), copied_bytes_, fetched_bytes_};
  }

 private:
  Streams& streams_of(Device device) {
    for (auto& [known, streams] : streams_) {
      if (known == device) return streams;
    }
    return streams_.emplace_back(device, Streams(device)).second;
  }

  static void finish(const Stream& stream) noexcept try {
    stream.synchronize();
  } catch (const std::exception& e) {
    log::error("[offload] a copy that nobody waited for failed: {}", e.what());
  }

  std::shared_ptr<OffloadedStorage> record_of(const Tensor& x) {
    const Storage& storage = *x.storage();
    if (std::shared_ptr<OffloadedStorage> known = known_[&storage].lock()) {
      const bool same = known->origin.lock().get() == &storage;
      if (same && known->version == storage.version()) return known;
    }
    std::shared_ptr<OffloadedStorage> record = send(x.alias(as_bytes(storage)));
    known_[&storage] = record;
    return record;
  }

  std::shared_ptr<OffloadedStorage> send(const Tensor& source) {
    const std::shared_ptr<Storage>& storage = source.storage();
    forget_the_dead();
    while (leaving_.size() >= kMostOnTheWayOut) finish_oldest();
    auto record = std::make_shared<OffloadedStorage>();
    record->bytes = storage->bytes();
    record->device = storage->device();
    record->origin = storage;
    record->version = storage->version();
    record->source = source;
    record->stored = std::make_shared<Stored>(room_for(*storage), stored_bytes_);
    record->before = last_;
    const Stream& out = streams_of(record->device).out;
    const Stream current = Stream::current(record->device);
    if (!current.is_inline()) {
      Event ready(record->device);
      ready.record(current);
      out.wait(ready);
    }
    record->stored->record_use(out);
    out.submit([source, stored = record->stored] { copy_out(source, stored->storage()); });
    record->out = std::make_shared<Event>(record->device);
    record->out->record(out);
    copied_bytes_ += record->bytes;
    leaving_.push_back(record);
    last_ = record;
    return record;
  }

  std::shared_ptr<Storage> room_for(const Storage& storage) const {
    if (storage.device().is_cuda()) return Storage::allocate_pinned(storage.bytes());
    std::shared_ptr<void> memory = core::allocate_in_file(options_.folder, storage.bytes());
    return Storage::wrap(memory.get(), storage.bytes(), Device{}, memory);
  }

  void finish_oldest() {
    const std::shared_ptr<OffloadedStorage> record = std::move(leaving_.front());
    leaving_.pop_front();
    record->out->synchronize();
    record->changed = record->source.storage()->version() != record->version;
    record->source = Tensor();
  }

  // What the operation gets: the origin where it has not left yet.
  Tensor arrived(OffloadedStorage& record) {
    if (record.changed ||
        (record.source.defined() && record.source.storage()->version() != record.version)) {
      core::fail<core::Error>("offload", "expected the saved tensor of ", record.bytes,
                              " bytes unchanged since the forward, got one written in place ",
                              "(run backward first, or write to a copy)");
    }
    if (record.source.defined() && !record.fetched.defined()) return record.source;
    fetch(record);
    if (record.in) {
      Stream::current(record.device).wait(*record.in);
      record.in = nullptr;
    }
    return record.fetched;
  }

  void fetch_ahead(const OffloadedStorage& record) {
    std::shared_ptr<OffloadedStorage> next = record.before.lock();
    for (int i = 0; next && i < kFetchedAhead; ++i, next = next->before.lock()) fetch(*next);
  }

  void fetch(OffloadedStorage& record) {
    if (record.fetched.defined() || record.source.defined()) return;
    const core::MemoryCategoryGuard category(core::MemoryCategory::activations);
    const Stream current = Stream::current(record.device);
    wait_for_earlier(current);
    const Stream& in = streams_of(record.device).in;
    {
      const StreamGuard guard(in);
      record.fetched = Tensor::empty({signed_size(record.bytes)}, DType::u8, record.device);
    }
    record.fetched.storage()->record_use(current);
    in.wait(*record.out);
    record.stored->record_use(in);
    in.submit([stored = record.stored, fetched = record.fetched] {
      copy_in(stored->storage(), fetched);
    });
    record.in = std::make_shared<Event>(record.device);
    record.in->record(in);
    fetched_bytes_ += record.bytes;
  }

  void wait_for_earlier(const Stream& backward) {
    if (!backward.device().is_cuda()) return;
    std::deque<Event>& asked = streams_of(backward.device()).asked;
    asked.emplace_back(backward.device()).record(backward);
    if (asked.size() <= kMostFetchesQueued) return;
    asked.front().synchronize();
    asked.pop_front();
  }

  void forget_the_dead() {
    std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
  }

  OffloadOptions options_;
  mutable std::mutex mutex_;
  std::vector<std::pair<Device, Streams>> streams_;
  std::map<const Storage*, std::weak_ptr<OffloadedStorage>> known_;
  std::deque<std::shared_ptr<OffloadedStorage>> leaving_;  // oldest first
  std::weak_ptr<OffloadedStorage> last_;
  std::shared_ptr<std::atomic<std::size_t>> stored_bytes_ =
      std::make_shared<std::atomic<std::size_t>>(0);
  std::size_t copied_bytes_ = 0, fetched_bytes_ = 0;
};

Offload::Offload(OffloadOptions options) : impl_(std::make_shared<Impl>(std::move(options))) {}

autograd::SavedTensorHooks Offload::hooks() {
  return {[impl = impl_](const Tensor& x) -> std::any { return impl->pack(x); },
          [impl = impl_](const std::any& value) { return impl->unpack(value); }};
}

void Offload::synchronize() {
  impl_->synchronize();
}

Offload::Stats Offload::stats() const {
  return impl_->stats();
}

}  // namespace cairn::checkpointing
