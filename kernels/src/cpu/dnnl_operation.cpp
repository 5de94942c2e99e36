#include "cpu/dnnl_operation.h"

#include <array>
#include <bit>
#include <chrono>
#include <list>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>

#include "cairn/core/memory.h"
#include "cairn/core/parallel_for.h"
#include "product_setting.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace cairn::kernels::onednn {

namespace {

// oneDNN asks OpenMP, which keeps a thread count for each calling thread. Set for one call and put
// back: it is the caller's.
class ThreadCount {
 public:
#if defined(_OPENMP)
  explicit ThreadCount(int threads) : before_(omp_get_max_threads()) {
    if (!omp_in_parallel()) omp_set_num_threads(threads);
  }
  ~ThreadCount() {
    if (!omp_in_parallel()) omp_set_num_threads(before_);
  }
#else
  explicit ThreadCount(int threads) : before_(threads) {}
#endif
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  [[maybe_unused]] int before_;
};

class Cache {
 public:
  OperationPtr find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return found->second->second;
  }

  OperationPtr insert(const Key& key, OperationPtr operation) {
    const std::lock_guard lock(mutex_);
    if (const auto found = index_.find(key); found != index_.end()) return found->second->second;
    entries_.emplace_front(key, std::move(operation));
    index_.emplace(key, entries_.begin());
    if (entries_.size() > kMaxOperations) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return entries_.front().second;
  }

 private:
  using Entries = std::list<std::pair<Key, OperationPtr>>;
  std::mutex mutex_;
  Entries entries_;  // most recently used first
  std::unordered_map<Key, Entries::iterator, KeyHash> index_;
};

Cache& cache() {
  static Cache* const instance = new Cache;  // never destroyed: streams may outlive statics
  return *instance;
}

dnnl::stream& thread_stream() {
  thread_local dnnl::stream stream(engine());
  return stream;
}

thread_local bool refuses_references = false;

OperationPtr made(const Key& key, const std::function<Operation()>& make) {
  const ThreadCount count(key.threads());
  const auto start = std::chrono::steady_clock::now();
  try {
    Operation operation = make();
    operation.threads = key.threads();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    count_primitive(spent.count());
    return std::make_shared<const Operation>(std::move(operation));
  } catch (const dnnl::error& error) {
    fail("onednn", error);
  }
}

}  // namespace

const dnnl::engine& engine() {
  static const dnnl::engine instance(dnnl::engine::kind::cpu, 0);
  return instance;
}

dnnl::primitive_attr attributes() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

bool reads(core::DType dtype) {
  return dtype == core::DType::f32 || dtype == core::DType::bf16 ||
         (dtype == core::DType::f16 && DNNL_VERSION_MAJOR >= 3);
}

dnnl::memory::data_type data_type(core::DType dtype) {
  if (!reads(dtype)) {
    core::fail<core::Unsupported>("onednn", "expected a dtype that oneDNN reads, got ",
                                  core::name(dtype));
  }
  if (dtype == core::DType::f16) return dnnl::memory::data_type::f16;
  return dtype == core::DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

bool has_isa(dnnl::cpu_isa isa) {
  static const auto effective = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto wanted = static_cast<unsigned>(isa);
  return (effective & wanted) == wanted;
}

std::string isa_name() {
  std::ostringstream bits;
  bits << "isa " << std::hex << static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  return bits.str();
}

std::string version() {
  const dnnl_version_t* v = dnnl::version();
  return core::str("oneDNN ", v->major, ".", v->minor, ".", v->patch);
}

core::DType compute_dtype(core::DType dtype) {
  const bool native = (dtype == core::DType::bf16 && has_isa(dnnl::cpu_isa::avx512_core_bf16)) ||
                      (dtype == core::DType::f16 && has_f16_products());
  return native ? dtype : core::DType::f32;
}

// The tiles' last pass over 63 of 64 values: oneDNN 2.6 and 2.7 end the process by SIGILL for many
// sizes of the matrices (uxlfoundation/oneDNN, issue 1661).
core::DType compute_dtype_of_product(core::DType dtype, std::int64_t inner) {
  static const bool tiles = has_isa(dnnl::cpu_isa::avx512_core_amx);
  const bool fails = tiles && dtype == core::DType::bf16 && inner % 64 == 63;
  return fails ? core::DType::f32 : compute_dtype(dtype);
}

Desc desc(const core::TensorView& view) {
  return Desc(Dims(view.shape.begin(), view.shape.end()), data_type(view.dtype),
              Dims(view.strides.begin(), view.strides.end()));
}

int threads_for(std::int64_t multiplications) {
  constexpr std::int64_t kWorthWaking = std::int64_t{1} << 19;  // a few microseconds of one core
  const int threads = core::num_threads();
  return multiplications < kWorthWaking ? 1 : threads;
}

const Desc& Operation::argument(int id) const {
  for (const auto& [argument, layout] : arguments) {
    if (argument == id) return layout;
  }
  core::fail<core::DeviceError>("onednn", "expected a bound argument, got ", id);
}

Key::Key(std::string_view kind, int threads) {
  words_.reserve(48);
  add(static_cast<std::int64_t>(std::hash<std::string_view>{}(kind)));
  add(std::int64_t{threads});
}

Key& Key::add(std::int64_t value) {
  words_.push_back(value);
  return *this;
}

Key& Key::add(double value) {
  return add(std::bit_cast<std::int64_t>(value));
}

Key& Key::add(const core::Shape& values) {
  add(std::int64_t{values.dims()});
  words_.insert(words_.end(), values.begin(), values.end());
  return *this;
}

Key& Key::add(const core::TensorView& view) {
  if (!view.defined()) return add(std::int64_t{-1});
  return add(static_cast<std::int64_t>(view.dtype)).add(view.shape).add(view.strides);
}

Key& Key::add(const Desc& desc) {
  for_each_word(desc, [&](std::int64_t word) { add(word); });
  return *this;
}

std::size_t Key::hash() const {
  std::uint64_t h = 0x9E3779B97F4A7C15u;
  for (const std::int64_t word : words_) {
    h = (h ^ static_cast<std::uint64_t>(word)) * 0xFF51AFD7ED558CCDu;
    h ^= h >> 32;
  }
  return h;
}

ReferenceRefusal::ReferenceRefusal() {
  refuses_references = true;
}
ReferenceRefusal::~ReferenceRefusal() {
  refuses_references = false;
}

OperationPtr cached(const Key& key, const std::function<Operation()>& make) {
  OperationPtr operation = cache().find(key);
  if (!operation) operation = cache().insert(key, made(key, make));
  if (operation->reference && refuses_references) {
    core::fail<core::Unsupported>("onednn", "expected an optimised primitive, got a reference");
  }
  return operation;
}

void execute(std::string_view where, const Operation& operation, core::Device device,
             std::initializer_list<std::pair<int, void*>> buffers) {
  const ThreadCount count(operation.threads);
  std::shared_ptr<core::Storage> scratch;
  if (const std::size_t bytes = operation.scratchpad.get_size(); bytes > 0) {
    const core::MemoryCategoryGuard guard(core::MemoryCategory::workspace);
    scratch = core::Storage::allocate(bytes, device);
  }
  try {
    std::unordered_map<int, dnnl::memory> arguments;
    for (const auto& [id, data] : buffers) {
      if (data == nullptr) continue;
      arguments.emplace(id, dnnl::memory(operation.argument(id), engine(), data));
    }
    if (scratch) {
      arguments.emplace(DNNL_ARG_SCRATCHPAD,
                        dnnl::memory(operation.scratchpad, engine(), scratch->data()));
    }
    operation.primitive.execute(thread_stream(), arguments);
    thread_stream().wait();
  } catch (const dnnl::error& error) {
    fail(where, error);
  }
}

void reorder(std::string_view where, const Desc& from, void* source, const Desc& to, void* target,
             core::Device device, bool accumulate) {
  const std::int64_t elements = static_cast<std::int64_t>(to.get_size());
  const Key key =
      Key("reorder", threads_for(elements)).add(from).add(to).add(std::int64_t{accumulate});
  const auto operation = cached(key, [&] {
    dnnl::primitive_attr attr = attributes();
    if (accumulate) {
      dnnl::post_ops ops;
      ops.append_sum(1.0f);
      attr.set_post_ops(ops);
    }
    const dnnl::reorder::primitive_desc pd(engine(), from, engine(), to, attr);
    return Operation{
        dnnl::reorder(pd), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}, pd.scratchpad_desc()};
  });
  execute(where, *operation, device, {{DNNL_ARG_FROM, source}, {DNNL_ARG_TO, target}});
}

Temporary workspace(const Desc& desc, core::Device device) {
  return temporary({static_cast<std::int64_t>(desc.get_size())}, core::DType::u8, device);
}

Temporary reordered(std::string_view where, const Temporary& given, const Desc& from,
                    const Desc& to) {
  if (from == to) return given;
  Temporary made = workspace(to, given.view.device);
  reorder(where, from, given.view.data, to, made.view.data, given.view.device);
  return made;
}

void fail(std::string_view where, const dnnl::error& error) {
  core::fail<core::DeviceError>(where, "oneDNN ", DNNL_VERSION_MAJOR, ".", DNNL_VERSION_MINOR,
                                " failed: ", error.what(), " (status ",
                                static_cast<int>(error.status),
                                "; ONEDNN_VERBOSE=2 in the environment shows its calls)");
}

}  // namespace cairn::kernels::onednn
