#include "formats/torch/pickle_reader.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include "cairn/core/error.h"
#include "formats/torch/pickle_format.h"
#include "io/printable.h"

namespace cairn::checkpointing {

const char* name(Pickle::Kind kind) {
  static constexpr const char* kNames[] = {
      "None",    "a bool",       "an integer", "a number",  "text",          "bytes",  "a list",
      "a tuple", "a dictionary", "a tensor",   "a storage", "a numpy dtype", "a name", "an object"};
  return kNames[static_cast<std::size_t>(kind)];
}

class PickleMachine {
 public:
  PickleMachine(Pickle& pickle, std::string_view bytes, std::uint64_t base, const std::string& path)
      : pickle_(pickle), bytes_(bytes), base_(base), path_(path) {}

  void run() {
    if (bytes_.size() > kLargestPickle) {
      fail("expected a pickle of at most ", kLargestPickle, " bytes, got ", bytes_.size());
    }
    while (step()) {
    }
    if (stack_.size() != 1 || !marks_.empty()) {
      fail("expected one value at the end of the pickle, got ", stack_.size());
    }
    pickle_.root_ = stack_.back();
  }

 private:
  using Kind = Pickle::Kind;
  using Ref = Pickle::Ref;
  using Value = Pickle::Value;
  using Refs = std::vector<Ref>;

  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    core::fail<core::DataError>("pickle", args..., " at byte ", base_ + op_at_, " in '", path_,
                                "'");
  }

  // ---- bytes

  std::string_view take(std::uint64_t count) {
    if (count > bytes_.size() - at_) {
      fail("expected ", count, " more bytes, got ", bytes_.size() - at_,
           " up to the end of the pickle,");
    }
    const std::string_view taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const std::size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) fail("expected a name that ends in a new line, got none");
    const std::string_view text = take(end - at_);
    take(1);
    return text;
  }
  double big_endian_double() {
    const auto bits = number<std::uint64_t>();
    return std::bit_cast<double>(__builtin_bswap64(bits));
  }
  std::int64_t long_integer() {
    const std::string_view digits = take(number<std::uint8_t>());
    if (digits.size() > 8)
      fail("expected an integer of 64 bits, got one of ", digits.size(), " bytes");
    const bool negative = !digits.empty() && (digits.back() & 0x80) != 0;
    std::uint64_t value = negative ? ~std::uint64_t{0} : 0;
    std::memcpy(&value, digits.data(), digits.size());
    return static_cast<std::int64_t>(value);
  }

  // ---- values and the stack

  Ref make(Kind kind, decltype(Value::data) data = std::int64_t{0}) {
    pickle_.values_.push_back({kind, base_ + op_at_, std::move(data)});
    return static_cast<Ref>(pickle_.values_.size() - 1);
  }
  void push(Kind kind, decltype(Value::data) data = std::int64_t{0}) {
    stack_.push_back(make(kind, std::move(data)));
  }
  void push_text(std::string text) {
    push(Kind::text, std::string_view(pickle_.made_.emplace_back(std::move(text))));
  }
  // A mark hides what is below it.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Ref pop() {
    if (stack_.size() <= floor()) fail("expected a value on the stack, got none");
    const Ref top = stack_.back();
    stack_.pop_back();
    return top;
  }
  Ref top() const {
    if (stack_.size() <= floor()) fail("expected a value on the stack, got none");
    return stack_.back();
  }
  Refs pop_to_mark() {
    if (marks_.empty()) fail("expected a mark on the stack, got none");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    Refs items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }
  void push_tuple(std::size_t count) {
    Refs items(count);
    for (std::size_t i = count; i > 0; --i) items[i - 1] = pop();
    push(Kind::tuple, std::move(items));
  }
  Value& value(Ref ref) { return pickle_.values_[ref]; }
  Value& expect(Ref ref, Kind kind, const char* what) {
    if (value(ref).kind != kind) {
      fail("expected ", name(kind), " as ", what, ", got ", name(value(ref).kind));
    }
    return value(ref);
  }
  Refs& items(Ref ref, Kind kind, const char* what) {
    return std::get<Refs>(expect(ref, kind, what).data);
  }
  std::int64_t integer(Ref ref, const char* what) {
    return std::get<std::int64_t>(expect(ref, Kind::integer, what).data);
  }
  std::string_view text(Ref ref, const char* what) {
    return std::get<std::string_view>(expect(ref, Kind::text, what).data);
  }
  void append(Ref list, const Refs& more) {
    Refs& all = items(list, Kind::list, "target of append");
    all.insert(all.end(), more.begin(), more.end());
  }
  void set_items(Ref dictionary, const Refs& more) {
    if (more.size() % 2 != 0)
      fail("expected pairs of keys and values, got ", more.size(), " values");
    Refs& all = items(dictionary, Kind::dictionary, "target of items");
    all.insert(all.end(), more.begin(), more.end());
  }
  void put(std::uint64_t index) { memo_[index] = top(); }
  void get(std::uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end())
      fail("expected a value that the pickle has kept, got none of number ", index);
    stack_.push_back(found->second);
  }

  // ---- names and what is made with them

  void push_name(std::string_view module, std::string_view name) {
    for (std::size_t i = 0; i < std::size(kPickleNames); ++i) {
      const PickleName& known = kPickleNames[i];
      if (known.module != module || known.name != name) continue;
      if (known.meaning == NameMeaning::dtype) return push_text("torch." + std::string(name));
      return push(Kind::name, static_cast<std::int64_t>(i));
    }
    fail("expected a name that states of PyTorch are made of, got '", printable(module), ".",
         printable(name), "' (nothing is executed: save tensors, numbers and text alone)");
  }
  const PickleName& name_of(Ref ref, const char* what) {
    return kPickleNames[static_cast<std::size_t>(
        std::get<std::int64_t>(expect(ref, Kind::name, what).data))];
  }

  void reduce() {
    const Ref arguments = pop();
    const Ref callee = pop();
    const Refs given = items(arguments, Kind::tuple, "arguments");
    const PickleName& known = name_of(callee, "what is called");
    if (given.size() < known.least || given.size() > known.most) {
      fail("expected ", known.least, " to ", known.most, " arguments of ", known.module, ".",
           known.name, ", got ", given.size());
    }
    switch (known.meaning) {
      case NameMeaning::tensor:
        return push_tensor(given);
      case NameMeaning::parameter:
        expect(given[0], Kind::tensor, "a parameter's data");
        return stack_.push_back(given[0]);
      case NameMeaning::dictionary:
        return push(Kind::dictionary, Refs{});
      case NameMeaning::size:
        expect(given[0], Kind::tuple, "sizes");
        return stack_.push_back(given[0]);
      case NameMeaning::device:
        return push_device(given);
      case NameMeaning::numpy_scalar:
        return push_numpy_scalar(given);
      case NameMeaning::numpy_dtype:
        return push(Kind::numpy_dtype, text(given[0], "a numpy dtype"));
      case NameMeaning::encode:
        return push_bytes(given);
      case NameMeaning::rebuild:
        return rebuild(given);
      case NameMeaning::first_argument:
        return stack_.push_back(given[0]);
      case NameMeaning::path:
        return stack_.push_back(arguments);
      case NameMeaning::dtype:
      case NameMeaning::storage:
      case NameMeaning::object:
      case NameMeaning::type:
        break;
    }
    fail("expected a function, got ", known.module, ".", known.name);
  }

  // Of what is copied: many copies of a long text would need more memory than the pickle has bytes.
  std::string_view short_text(Ref ref, const char* what) {
    const std::string_view all = text(ref, what);
    if (all.size() > 64) fail("expected at most 64 bytes of ", what, ", got ", all.size());
    return all;
  }

  void push_device(const Refs& given) {
    std::string device(short_text(given[0], "a device"));
    if (given.size() == 2) device += core::str(":", integer(given[1], "a device's index"));
    push_text(std::move(device));
  }

  // Text in UTF-8 whose characters are bytes: how protocol 2 writes bytes.
  void push_bytes(const Refs& given) {
    const std::string_view from = short_text(given[0], "bytes");
    if (text(given[1], "an encoding") != "latin1")
      fail("expected bytes as latin1, got another encoding");
    std::string& bytes = pickle_.made_.emplace_back();
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto lead = static_cast<unsigned char>(from[i]);
      const bool two = (lead == 0xc2 || lead == 0xc3) && i + 1 < from.size();
      if (lead >= 0x80 && !two) fail("expected bytes as latin1, got other characters");
      const unsigned char low = two ? static_cast<unsigned char>(from[++i]) & 0x3f : lead;
      bytes += static_cast<char>(two ? ((lead & 3) << 6) | low : low);
    }
    push(Kind::bytes, std::string_view(bytes));
  }

  void push_numpy_scalar(const Refs& given) {
    const auto dtype =
        std::get<std::string_view>(expect(given[0], Kind::numpy_dtype, "a scalar's dtype").data);
    const auto bytes = std::get<std::string_view>(expect(given[1], Kind::bytes, "a scalar").data);
    if (dtype == "f8") return push(Kind::number, scalar<double>(bytes));
    if (dtype == "f4") return push(Kind::number, static_cast<double>(scalar<float>(bytes)));
    if (dtype == "i8") return push(Kind::integer, scalar<std::int64_t>(bytes));
    if (dtype == "i4") return push(Kind::integer, std::int64_t{scalar<std::int32_t>(bytes)});
    if (dtype == "b1") return push(Kind::boolean, std::int64_t{scalar<std::uint8_t>(bytes) != 0});
    fail("expected a numpy scalar of f8, f4, i8, i4 or b1, got '", printable(dtype), "'");
  }
  template <class T>
  T scalar(std::string_view bytes) const {
    T value;
    if (bytes.size() != sizeof value)
      fail("expected ", sizeof value, " bytes of a scalar, got ", bytes.size());
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }

  // ('storage', torch.FloatStorage, '0', 'cpu', 6)
  void push_storage() {
    const Refs parts = items(pop(), Kind::tuple, "a persistent id");
    if (parts.size() != 5 || text(parts[0], "a persistent id's kind") != "storage") {
      fail("expected a persistent id ('storage', type, key, location, size), got another");
    }
    const PickleName& type = name_of(parts[1], "a storage's type");
    if (type.meaning != NameMeaning::storage) {
      fail("expected a type of storage, got ", type.module, ".", type.name);
    }
    const Pickle::Storage storage{text(parts[2], "a storage's key"), type.storage,
                                  integer(parts[4], "a storage's size")};
    if (storage.numel < 0) fail("expected a size of 0 or more, got ", storage.numel);
    pickle_.storages_.push_back(storage);
    push(Kind::storage, static_cast<std::int64_t>(pickle_.storages_.size() - 1));
  }

  Shape sizes(Ref ref, const char* what) {
    const Refs& all = items(ref, Kind::tuple, what);
    if (all.size() > static_cast<std::size_t>(core::kMaxDims)) {
      fail("expected at most ", core::kMaxDims, " dimensions, got ", all.size());
    }
    Shape result;
    for (const Ref size : all) {
      result.push_back(integer(size, what));
      if (result.back() < 0) fail("expected ", what, " of 0 or more, got ", result.back());
    }
    return result;
  }

  void push_tensor(const Refs& given) {
    const Value& storage = expect(given[0], Kind::storage, "a tensor's storage");
    Pickle::TensorOf tensor;
    tensor.storage =
        pickle_.storages_[static_cast<std::size_t>(std::get<std::int64_t>(storage.data))];
    tensor.offset = integer(given[1], "a tensor's offset");
    tensor.shape = sizes(given[2], "sizes");
    tensor.strides = sizes(given[3], "strides");
    check_inside(tensor);
    pickle_.tensors_.push_back(tensor);
    push(Kind::tensor, static_cast<std::int64_t>(pickle_.tensors_.size() - 1));
  }

  // (function, type, arguments, attributes): a tensor that carries attributes, which nobody needs.
  void rebuild(const Refs& given) {
    const PickleName& function = name_of(given[0], "what rebuilds");
    const Refs arguments = items(given[2], Kind::tuple, "arguments");
    if (function.meaning != NameMeaning::tensor || arguments.size() < function.least ||
        arguments.size() > function.most)
      fail("expected a tensor to rebuild, got ", function.module, ".", function.name, " of ",
           arguments.size(), " arguments");
    push_tensor(arguments);
  }

  // Every element lies in the storage, and their number fits 64 bits.
  void check_inside(const Pickle::TensorOf& tensor) const {
    const bool strided = tensor.strides.dims() == tensor.shape.dims();
    std::int64_t last = tensor.offset;
    std::int64_t count = 1;
    bool fits = strided && tensor.offset >= 0;
    const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
    for (int d = 0; d < tensor.shape.dims() && fits; ++d) {
      std::int64_t step = 0;
      fits = !__builtin_mul_overflow(count, tensor.shape[d], &count) &&
             (empty || (!__builtin_mul_overflow(tensor.shape[d] - 1, tensor.strides[d], &step) &&
                        !__builtin_add_overflow(last, step, &last)));
    }
    const std::int64_t end = tensor.storage.numel;
    if (!fits || (empty ? last > end : last >= end) || count > INT64_MAX / 8) {
      fail("expected a tensor inside of its storage of ", end, " elements, got ", tensor.shape,
           " with strides ", tensor.strides, " from ", tensor.offset);
    }
  }

  void push_object() {
    const Refs& arguments = items(pop(), Kind::tuple, "arguments");
    const PickleName& known = name_of(pop(), "a class");
    if (known.meaning != NameMeaning::object || !arguments.empty())
      fail("expected a class whose attributes are state, got ", known.module, ".", known.name);
    push(Kind::object, Refs{});
  }

  // What a value carries besides: an object's attributes. Nothing of a dictionary's is needed, and
  // nothing of objects that give theirs without names.
  void build() {
    const Ref state = pop();
    Value& target = value(top());
    if (target.kind == Kind::dictionary) return;
    if (target.kind == Kind::object) {
      if (value(state).kind == Kind::dictionary) target.data = Refs{state};
      return;
    }
    if (target.kind != Kind::numpy_dtype)
      fail("expected a dictionary that gets attributes, got ", name(target.kind));
    const Refs& parts = items(state, Kind::tuple, "a numpy dtype's state");
    if (parts.size() < 2 || text(parts[1], "a byte order") == ">") {
      fail("expected numbers with the low byte first, got others");
    }
  }

  // ---- opcodes

  // Runs the next one; false after the last.
  bool step() {
    op_at_ = at_;
    const auto code = number<std::uint8_t>();
    switch (static_cast<PickleOp>(code)) {
      case PickleOp::proto:
        check_protocol(number<std::uint8_t>());
        break;
      case PickleOp::frame:
        check_frame(number<std::uint64_t>());
        break;
      case PickleOp::stop:
        return false;
      case PickleOp::mark:
        marks_.push_back(stack_.size());
        break;
      case PickleOp::pop:
        pop();
        break;
      case PickleOp::pop_mark:
        pop_to_mark();
        break;
      case PickleOp::none:
        push(Kind::none);
        break;
      case PickleOp::new_true:
        push(Kind::boolean, std::int64_t{1});
        break;
      case PickleOp::new_false:
        push(Kind::boolean, std::int64_t{0});
        break;
      case PickleOp::bin_int:
        push(Kind::integer, std::int64_t{number<std::int32_t>()});
        break;
      case PickleOp::bin_int1:
        push(Kind::integer, std::int64_t{number<std::uint8_t>()});
        break;
      case PickleOp::bin_int2:
        push(Kind::integer, std::int64_t{number<std::uint16_t>()});
        break;
      case PickleOp::long1:
        push(Kind::integer, long_integer());
        break;
      case PickleOp::bin_float:
        push(Kind::number, big_endian_double());
        break;
      case PickleOp::short_bin_unicode:
        push(Kind::text, take(number<std::uint8_t>()));
        break;
      case PickleOp::bin_unicode:
        push(Kind::text, take(number<std::uint32_t>()));
        break;
      case PickleOp::bin_unicode8:
        push(Kind::text, take(number<std::uint64_t>()));
        break;
      case PickleOp::short_bin_bytes:
        push(Kind::bytes, take(number<std::uint8_t>()));
        break;
      case PickleOp::bin_bytes:
        push(Kind::bytes, take(number<std::uint32_t>()));
        break;
      case PickleOp::empty_list:
        push(Kind::list, Refs{});
        break;
      case PickleOp::append: {
        const Ref item = pop();
        append(top(), {item});
        break;
      }
      case PickleOp::appends: {
        const Refs more = pop_to_mark();
        append(top(), more);
        break;
      }
      case PickleOp::empty_tuple:
        push(Kind::tuple, Refs{});
        break;
      case PickleOp::tuple:
        push(Kind::tuple, pop_to_mark());
        break;
      case PickleOp::tuple1:
        push_tuple(1);
        break;
      case PickleOp::tuple2:
        push_tuple(2);
        break;
      case PickleOp::tuple3:
        push_tuple(3);
        break;
      case PickleOp::empty_dict:
        push(Kind::dictionary, Refs{});
        break;
      case PickleOp::set_item: {
        const Ref item = pop();
        const Ref key = pop();
        set_items(top(), {key, item});
        break;
      }
      case PickleOp::set_items: {
        const Refs more = pop_to_mark();
        set_items(top(), more);
        break;
      }
      case PickleOp::global: {
        const std::string_view module = line();
        push_name(module, line());
        break;
      }
      case PickleOp::stack_global: {
        const std::string_view last = text(pop(), "a name");
        push_name(text(pop(), "a module"), last);
        break;
      }
      case PickleOp::reduce:
        reduce();
        break;
      case PickleOp::new_object:
        push_object();
        break;
      case PickleOp::build:
        build();
        break;
      case PickleOp::persistent_id:
        push_storage();
        break;
      case PickleOp::put:
        put(number<std::uint8_t>());
        break;
      case PickleOp::long_put:
        put(number<std::uint32_t>());
        break;
      case PickleOp::memoize:
        put(memo_.size());
        break;
      case PickleOp::get:
        get(number<std::uint8_t>());
        break;
      case PickleOp::long_get:
        get(number<std::uint32_t>());
        break;
      default:
        fail("expected an opcode of torch.save's, got ", static_cast<int>(code));
    }
    return true;
  }

  void check_frame(std::uint64_t size) const {
    if (size > bytes_.size() - at_) fail("expected a frame inside of the pickle, got a longer one");
  }

  void check_protocol(int version) const {
    if (version < 2 || version > 5) fail("expected protocol 2 to 5, got ", version);
  }

  Pickle& pickle_;
  std::string_view bytes_;
  std::uint64_t base_;
  const std::string& path_;
  std::uint64_t at_ = 0, op_at_ = 0;
  Refs stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Ref> memo_;
};

Pickle::Pickle(std::string_view bytes, std::uint64_t base, const std::string& path) {
  PickleMachine(*this, bytes, base, path).run();
}

}  // namespace cairn::checkpointing
