#include "allocator.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "capture.h"
#include "cuda_interface.h"
#include "poison.h"

namespace cairn::core {

namespace {

using Action = MemoryEvent::Action;

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kCut = 512;  // segments are cut at its multiples: all libraries' alignments
constexpr std::size_t kSegment = std::size_t{2} << 20;  // a segment is a multiple
constexpr std::size_t kMiB = std::size_t{1} << 20;

// How much may be reserved when no cached block fits: beyond the most that was ever live, a quarter
// where pages move, and an eighth where blocks lie in pieces then and go back.
std::size_t most_reserved(std::size_t most_live, bool cuts) {
  return cuts ? most_live + most_live / 8 + 64 * kMiB : most_live + most_live / 4 + 256 * kMiB;
}

constexpr std::size_t round_up(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

[[noreturn]] void fail_capture(std::size_t bytes) {
  fail<Unsupported>("capture", "expected memory that a warm-up has left, got a request for ",
                    readable_bytes(bytes),
                    " that no free block of the graph fits (warm up once more before the capture; "
                    "what is made once, make before)");
}

void check_size(std::size_t bytes) {
  CAIRN_CHECK(bytes <= SIZE_MAX / 4, "allocate", "expected a size that fits in memory, got ", bytes,
              " bytes");
}

std::size_t cut_size(std::size_t bytes) {
  check_size(bytes);
  return round_up(std::max(bytes, kCut), kCut);
}

}  // namespace

std::size_t block_size(std::size_t bytes) {
  check_size(bytes);
  const std::size_t padded = std::max(bytes, kAlignment) + kPoisonedTail;
  if (padded >= kHugePage) return round_up(padded, kPage);
  return round_up(padded, std::max(kAlignment, std::bit_floor(padded) / 8));
}

Allocator::Allocator(Device device, bool pinned, SystemMemory* system)
    : device_(device),
      pinned_(pinned),
      system_(system),
      cuts_(system->gives_segments()),
      capacity_(pinned ? SIZE_MAX : capacity_from_environment(device)) {}

/// Holds the mutex. The system is asked, and given back to, without it: that may wait for a device,
/// and the device for another's, whose thread may want pinned memory too.
class Allocator::Lock {
 public:
  explicit Lock(Allocator& allocator) : allocator_(allocator), lock_(allocator.mutex_) {}
  ~Lock() {
    if (lock_.owns_lock()) unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() { lock_.lock(); }
  void unlock() noexcept {
    const std::vector<Block> leaving = std::exchange(allocator_.leaving_, {});
    lock_.unlock();
    for (const Block& block : leaving) allocator_.system_->release(block.data, block.bytes);
  }

 private:
  Allocator& allocator_;
  std::unique_lock<std::mutex> lock_;
};

void Allocator::allocate(Storage& storage, std::size_t bytes, MemoryCategory category,
                         void* stream) {
  const std::size_t block_bytes = cuts_ ? cut_size(bytes) : block_size(bytes);
  Lock lock(*this);
  if (over_capacity(bytes)) fail_out_of_memory(bytes, category);
  const Block block = take_block(lock, block_bytes, stream);
  if (block.data == nullptr && capturing()) fail_capture(bytes);
  const bool others_were_first = block.data != nullptr && over_capacity(bytes);
  if (others_were_first) cache_block({block.bytes, stream}, block.data);
  if (block.data == nullptr || others_were_first) fail_out_of_memory(bytes, category);
  most_live_ = std::max(most_live_, stats_.reserved - cached_);
  if (device_.is_cpu()) unpoison(block.data, bytes);
  storage.data_ = block.data;
  storage.bytes_ = bytes;
  storage.device_ = device_;
  storage.category_ = category;
  storage.pinned_ = pinned_;
  storage.allocator_ = this;
  storage.block_bytes_ = block.bytes;
  storage.stream_ = stream;
  link(storage);
  count(bytes, category);
  ++stats_.allocations;
  note(Action::allocate, {block.data, bytes}, stream, category);
}

Allocator::Block Allocator::take_block(Lock& lock, std::size_t block_bytes, void* stream) {
  if (!pending_.empty() && !capturing()) collect_pending();
  if (const Block block = cached_block(block_bytes, stream); block.data != nullptr) return block;
  if (capturing()) return {};
  if (system_->moves_pages() && block_bytes >= kHugePage) {
    if (const Block block = joined_block(block_bytes, stream); block.data != nullptr) return block;
  }
  const std::size_t least = cuts_ ? round_up(block_bytes, kSegment) : block_bytes;
  trim_for(least);
  const Block made = system_block(lock, cuts_ ? segment_for(block_bytes) : least, least);
  if (made.data == nullptr) return {};
  stats_.reserved += made.bytes;
  ++stats_.system_allocations;
  note(Action::take_segment, made, stream);
  if (device_.is_cpu()) poison(made.data, made.bytes);
  if (!cuts_) return made;
  segments_[static_cast<char*>(made.data)] = {made.bytes, stream};
  cache_block({made.bytes, stream}, made.data);
  return cached_block(block_bytes, stream);
}

// One of this size; where blocks are cut, a part of the smallest that holds it.
Allocator::Block Allocator::cached_block(std::size_t block_bytes, void* stream) {
  auto found = cache_.lower_bound({block_bytes, stream});
  const auto fits = [&] { return found->first.second == stream && !found->second.empty(); };
  while (cuts_ && found != cache_.end() && !fits()) ++found;
  if (found == cache_.end() || !fits()) return {};
  if (!cuts_ && found->first.first != block_bytes) return {};
  return cut(found, block_bytes);
}

// As many bytes as there are; the rest stays cached. Of host memory's pages, too few to make a
// block are not left over.
Allocator::Block Allocator::cut(Cache::iterator from, std::size_t bytes) {
  const CacheKey key = from->first;
  Block taken{from->second.back(), std::min(bytes, key.first)};
  if (!cuts_ && key.first - taken.bytes < kHugePage) taken.bytes = key.first;
  from->second.pop_back();
  if (from->second.empty() && (cuts_ || key.first >= kHugePage)) cache_.erase(from);
  cached_ -= key.first;
  auto* const data = static_cast<char*>(taken.data);
  free_at_.erase(data);
  const std::size_t rest = key.first - taken.bytes;
  if (rest == 0) return taken;
  if (!cuts_) note_cut({data, key.first}, taken.bytes, key.second);
  cache_block({rest, key.second}, data + taken.bytes);
  return taken;
}

// Where blocks are no parts of segments, each is one.
void Allocator::note_cut(const Block& whole, std::size_t at, void* stream) const noexcept {
  note(Action::give_segment, whole, stream);
  note(Action::take_segment, {whole.data, at}, stream);
  note(Action::take_segment, {static_cast<char*>(whole.data) + at, whole.bytes - at}, stream);
}

std::size_t SystemMemory::move_pages(void* /*from*/, void* /*to*/, std::size_t bytes) noexcept {
  return bytes;
}
void SystemMemory::release_pages(void* /*data*/, std::size_t /*bytes*/) noexcept {}

// A block from the pages of cached ones, as far as they go; none where there are none.
Allocator::Block Allocator::joined_block(std::size_t block_bytes, void* stream) {
  std::vector<Block> pieces;
  std::size_t found = 0;
  while (found < block_bytes) {
    const Block piece = take_cached_pages(block_bytes - found, stream);
    if (piece.data == nullptr) break;
    pieces.push_back(piece);
    found += piece.bytes;
  }
  if (pieces.empty()) return {};
  if (pieces.size() == 1 && found >= block_bytes) return pieces[0];
  const std::size_t whole = std::max(found, block_bytes);
  auto* data = static_cast<char*>(system_->allocate(whole));
  if (data == nullptr) {
    put_back(pieces, 0, stream);
    return {};
  }
  std::size_t filled = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Block& piece = pieces[i];
    unpoison(piece.data, piece.bytes);
    const std::size_t moved = system_->move_pages(piece.data, data + filled, piece.bytes);
    filled += piece.bytes;
    note(Action::give_segment, piece, stream);
    if (moved == piece.bytes) continue;
    stats_.reserved -= filled;
    give_up_joining(data, filled - piece.bytes + moved, whole);
    put_back(pieces, i + 1, stream);
    return {};
  }
  stats_.reserved += whole - filled;
  if (filled < whole) ++stats_.system_allocations;
  note(Action::take_segment, {data, whole}, stream);
  poison(data, whole);
  return {data, whole};
}

// What is too little to make a block goes to the system.
void Allocator::put_back(const std::vector<Block>& pieces, std::size_t from,
                         void* stream) noexcept {
  for (; from < pieces.size(); ++from) {
    const auto& [data, bytes] = pieces[from];
    if (bytes >= kHugePage) {
      cache_block({bytes, stream}, data);
      continue;
    }
    unpoison(data, bytes);
    note(Action::give_segment, pieces[from], stream);
    system_->release_pages(data, bytes);
    stats_.reserved -= bytes;
  }
}

// All but the page at `gap`, which is not mapped any more.
void Allocator::give_up_joining(char* data, std::size_t gap, std::size_t block_bytes) noexcept {
  const std::size_t after = gap + kPage;
  if (gap > 0) system_->release_pages(data, gap);
  if (after < block_bytes) system_->release_pages(data + after, block_bytes - after);
}

// From the smallest cached block of at least `bytes`, or else the largest.
Allocator::Block Allocator::take_cached_pages(std::size_t bytes, void* stream) {
  auto best = cache_.end();
  for (auto it = cache_.lower_bound({kHugePage, nullptr}); it != cache_.end(); ++it) {
    if (it->first.second != stream || it->second.empty()) continue;
    best = it;
    if (it->first.first >= bytes) break;
  }
  return best == cache_.end() ? Block{} : cut(best, bytes);
}

// As far as there is room, three sixteenths more than the block, which the next one may need, and a
// seventh of all that is live, since few large segments leave less in pieces.
std::size_t Allocator::segment_for(std::size_t block_bytes) const {
  const std::size_t live = std::max(most_live_, stats_.reserved - cached_ + block_bytes);
  const std::size_t most = std::min({capacity_, cache_bound_, most_reserved(live, cuts_)});
  const std::size_t room = (most - std::min(most, stats_.reserved)) / kSegment * kSegment;
  const std::size_t wanted = std::max(block_bytes + block_bytes / 16 * 3, live / 7);
  return std::clamp(room, round_up(block_bytes, kSegment), round_up(wanted, kSegment));
}

// Where the system refuses, all that can be given back is, and it is asked once more.
Allocator::Block Allocator::system_block(Lock& lock, std::size_t wanted, std::size_t least) {
  if (void* data = ask_system(lock, wanted); data != nullptr) return {data, wanted};
  if (void* data = wanted > least ? ask_system(lock, least) : nullptr; data != nullptr)
    return {data, least};
  wait_for_pending_cuda(lock);
  collect_pending();
  release_cached_locked();
  return {ask_system(lock, least), least};
}

void* Allocator::ask_system(Lock& lock, std::size_t block_bytes) {
  lock.unlock();
  void* data = system_->allocate(block_bytes);
  lock.lock();
  return data;
}

bool Allocator::over_capacity(std::size_t bytes) const {
  return stats_.current_total > capacity_ || bytes > capacity_ - stats_.current_total;
}

void Allocator::trim_for(std::size_t block_bytes) {
  const std::size_t reserved = stats_.reserved + block_bytes;
  const std::size_t most = std::min({capacity_, cache_bound_, most_reserved(most_live_, cuts_)});
  if (reserved > most) release_cached_locked(cuts_ ? SIZE_MAX : reserved - most);
}

// A stream that cannot be asked is asked again when memory is wanted.
void Allocator::mark_uses(Pending& block) noexcept try {
  std::vector<Stream> later;
  for (const Stream& stream : block.streams) {
    if (is_recorded(stream)) {
      later.push_back(stream);
    } else if (!stream.idle()) {
      block.uses.emplace_back(stream.device());
      block.uses.back().record(stream);
    }
  }
  block.streams = std::move(later);
} catch (const std::exception&) {  // block.streams is what it was
}

void Allocator::free(Storage& storage) noexcept {
  forget(storage);
  try {
    keep_block(storage);
  } catch (const std::exception& e) {  // a block is lost, no more
    log::error("memory of {} on {} cannot be reused: {}", readable_bytes(storage.bytes_), device_,
               e.what());
  }
}

void Allocator::forget(Storage& storage) noexcept {
  const std::lock_guard lock(mutex_);
  unlink(storage);
  stats_.current[static_cast<std::size_t>(storage.category_)] -= storage.bytes_;
  stats_.current_total -= storage.bytes_;
}

// What a capture frees, the graph may use at each replay: the block is the graph's, and where more
// of its streams use it, nobody's until the graph ends (release).
void Allocator::keep_block(const Storage& storage) {
  const bool recorded = capturing() && !pinned_ && device_.is_cuda();
  Pending block{{storage.block_bytes_, recorded ? capture_stream() : storage.stream_},
                storage.data_};
  block.until_graph_ends = recorded && storage.uses_ != nullptr;
  block.requested = storage.bytes_;
  if (!recorded && storage.uses_ != nullptr) {
    block.streams = storage.uses_->streams;
    mark_uses(block);
  }
  const bool in_use = block.until_graph_ends || !block.uses.empty() || !block.streams.empty();
  const Lock lock(*this);
  note(Action::request_free, {block.data, block.requested}, block.key.second, storage.category_);
  if (!in_use) return end_use(block);
  pending_.push_back(std::move(block));
}

void Allocator::end_use(const Pending& block) noexcept {
  note(Action::free, {block.data, block.requested}, block.key.second);
  cache_block(block.key, block.data);
}

void Allocator::cache_block(CacheKey key, void* data) noexcept {
  try {
    if (cuts_) data = join_neighbours(key, static_cast<char*>(data));
    cache_[key].push_back(data);
    cached_ += key.first;
    if (device_.is_cpu()) poison(data, key.first);
  } catch (const std::bad_alloc&) {  // no room to note it: give it back instead
    free_at_.erase(static_cast<char*>(data));
    if (is_whole(data, key.first)) give_back(data, key.first);
  }
}

// With the free blocks before and behind it that the system gave in one with it.
char* Allocator::join_neighbours(CacheKey& key, char* data) {
  const auto next = free_at_.find(data + key.first);
  if (next != free_at_.end() && next->second.second == key.second &&
      !segments_.contains(next->first))
    key.first += take_out(next);
  auto previous = free_at_.lower_bound(data);
  if (previous != free_at_.begin() && !segments_.contains(data)) {
    --previous;
    const auto [begin, block] = *previous;
    if (begin + block.first == data && block.second == key.second) {
      key.first += take_out(previous);
      data = begin;
    }
  }
  free_at_.emplace(data, key);
  return data;
}

// A block leaves the cache. Returns its size.
std::size_t Allocator::take_out(std::map<char*, CacheKey>::iterator block) noexcept {
  const auto [data, key] = *block;
  const auto cached = cache_.find(key);
  std::vector<void*>& blocks = cached->second;
  blocks.erase(std::find(blocks.begin(), blocks.end(), data));
  if (blocks.empty()) cache_.erase(cached);
  cached_ -= key.first;
  free_at_.erase(block);
  return key.first;
}

bool Allocator::is_whole(void* data, std::size_t block_bytes) const {
  if (!cuts_) return true;
  const auto segment = segments_.find(static_cast<char*>(data));
  return segment != segments_.end() && segment->second.bytes == block_bytes;
}

void Allocator::give_back(void* data, std::size_t block_bytes) noexcept {
  if (device_.is_cpu()) unpoison(data, block_bytes);
  note(Action::give_segment, {data, block_bytes});
  segments_.erase(static_cast<char*>(data));
  free_at_.erase(static_cast<char*>(data));
  stats_.reserved -= block_bytes;
  try {
    leaving_.push_back({data, block_bytes});
  } catch (const std::bad_alloc&) {
    system_->release(data, block_bytes);
  }
}

// A device that does not answer has not finished.
bool Allocator::all_done(Pending& block) noexcept try {
  mark_uses(block);
  return block.streams.empty() && std::all_of(block.uses.begin(), block.uses.end(),
                                              [](const Event& use) { return use.done(); });
} catch (const std::exception&) {
  return false;
}

void Allocator::collect_pending() noexcept {
  for (auto it = pending_.begin(); it != pending_.end();) {
    const bool done = !it->until_graph_ends && all_done(*it);
    if (done) end_use(*it);
    it = done ? pending_.erase(it) : std::next(it);
  }
}

// CUDA's work ends by itself. A CPU stream's may need memory too, so nobody waits for it here.
void Allocator::wait_for_pending_cuda(Lock& lock) {
  std::vector<Event> uses;
  for (const Pending& block : pending_) {
    for (const Event& event : block.uses) {
      if (event.device().is_cuda()) uses.push_back(event);
    }
  }
  lock.unlock();
  for (const Event& event : uses) event.synchronize();
  lock.lock();
}

// The largest first: they are the fewest, and each release may wait for the device.
void Allocator::release_cached_locked(std::size_t bytes) noexcept {
  std::size_t released = 0;
  for (auto it = cache_.end(); released < bytes && it != cache_.begin();) {
    --it;
    if (retained_.contains(it->first.second)) continue;
    released += release_blocks(it, bytes - released);
    if (it->second.empty()) it = cache_.erase(it);
  }
}

std::size_t Allocator::release_blocks(Cache::iterator cached, std::size_t bytes) noexcept {
  auto& [key, blocks] = *cached;
  std::size_t released = 0;
  for (auto block = blocks.begin(); released < bytes && block != blocks.end();) {
    const bool whole = is_whole(*block, key.first);
    if (whole) {
      give_back(*block, key.first);
      released += key.first;
    }
    block = whole ? blocks.erase(block) : std::next(block);
  }
  cached_ -= released;
  return released;
}

void Allocator::retain(void* stream) {
  const std::lock_guard lock(mutex_);
  retained_.insert(stream);
}

void Allocator::release(void* stream) noexcept {
  const Lock lock(*this);
  retained_.erase(stream);
  collect_pending();
  pending_.remove_if([&](const Pending& block) {  // of several of the graph's streams
    const bool own = block.key.second == stream && block.until_graph_ends;
    if (own) end_use(block);
    return own;
  });
  for (auto it = cache_.begin(); it != cache_.end();) {
    const bool own = it->first.second == stream;
    if (own) release_blocks(it, SIZE_MAX);
    it = own && it->second.empty() ? cache_.erase(it) : std::next(it);
  }
  return_parts(stream);
}

// What a capture on `stream` freed of other streams' segments goes back to those.
void Allocator::return_parts(void* stream) noexcept {
  const auto foreign = [&](const auto& block) {
    return block.second.second == stream &&
           std::prev(segments_.upper_bound(block.first))->second.stream != stream;
  };
  for (;;) {
    const auto block = std::find_if(free_at_.begin(), free_at_.end(), foreign);
    if (block == free_at_.end()) return;
    char* const data = block->first;
    const SystemBlock& segment = std::prev(segments_.upper_bound(data))->second;
    cache_block({take_out(block), segment.stream}, data);
  }
}

void Allocator::count(std::size_t bytes, MemoryCategory category) {
  const auto c = static_cast<std::size_t>(category);
  stats_.current[c] += bytes;
  stats_.current_total += bytes;
  stats_.peak[c] = std::max(stats_.peak[c], stats_.current[c]);
  stats_.peak_total = std::max(stats_.peak_total, stats_.current_total);
}

void Allocator::move_category(Storage& storage, MemoryCategory to) {
  const std::lock_guard lock(mutex_);
  stats_.current[static_cast<std::size_t>(storage.category_)] -= storage.bytes_;
  stats_.current_total -= storage.bytes_;
  const Block block{storage.data_, storage.bytes_};
  note(Action::request_free, block, storage.stream_, storage.category_);
  note(Action::free, block, storage.stream_);
  storage.category_ = to;
  count(storage.bytes_, to);
  note(Action::allocate, block, storage.stream_, to);
}

void Allocator::link(Storage& storage) {
  storage.next_ = live_;
  storage.previous_ = nullptr;
  if (live_ != nullptr) live_->previous_ = &storage;
  live_ = &storage;
}

void Allocator::unlink(Storage& storage) {
  if (storage.previous_ != nullptr) {
    storage.previous_->next_ = storage.next_;
  } else {
    live_ = storage.next_;
  }
  if (storage.next_ != nullptr) storage.next_->previous_ = storage.previous_;
}

MemoryStats Allocator::stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Allocator::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak = stats_.current;
  stats_.peak_total = stats_.current_total;
}

std::size_t Allocator::capacity() {
  const std::lock_guard lock(mutex_);
  return capacity_;
}

void Allocator::set_capacity(std::size_t bytes) {
  const Lock lock(*this);
  capacity_ = bytes;
  if (stats_.reserved > capacity_) release_cached_locked();
}

void Allocator::set_cache_bound(std::size_t bytes) {
  const Lock lock(*this);
  cache_bound_ = bytes;
  trim_for(0);
}

void Allocator::release_cached() {
  const Lock lock(*this);
  collect_pending();
  release_cached_locked();
}

std::string Allocator::report() {
  const std::lock_guard lock(mutex_);
  return table() + largest_tensors();
}

}  // namespace cairn::core
