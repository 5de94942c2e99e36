#include "ptx/machine.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string_view>

#include "ptx/halves.h"

namespace cairn::ptx {
namespace {

constexpr std::uint64_t kSharedBegin = 1024;               // of addresses in shared memory
constexpr std::uint64_t kSharedWindow = 0x7f12'3400'0000;  // what a generic address adds to those

std::string joined(const std::vector<std::string>& name) {
  std::string text = name[0];
  for (std::size_t i = 1; i < name.size(); ++i) text += "." + name[i];
  return text;
}

void require(bool holds, const std::string& what) {
  if (!holds) throw Error(what);
}

/// u32: 32.
int bits_of_type(const std::string& type) {
  require(type.size() > 1 && std::string_view("bufs").find(type[0]) != std::string::npos,
          "no type: " + type);
  return std::stoi(type.substr(1));
}

std::uint64_t lowest(std::uint64_t value, int bits) {
  return bits == 64 ? value : value & ((std::uint64_t{1} << bits) - 1);
}
/// As an operand of this type.
std::uint64_t extended(std::uint64_t value, const std::string& type) {
  const int bits = bits_of_type(type);
  if (type[0] != 's' || bits == 64) return lowest(value, bits);
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(value << (64 - bits)) >> (64 - bits));
}

/// {a, b}: a and b; a: a.
std::vector<std::string> elements(const std::string& operand) {
  return operand.front() == '{' ? split(operand.substr(1, operand.size() - 2), ',')
                                : std::vector{operand};
}

float as_float(std::uint64_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
}
std::uint64_t bits_of_float(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
std::uint16_t half_of(std::uint64_t word, unsigned i) {
  return static_cast<std::uint16_t>(word >> 16 * i);
}

template <class F>
Lanes each_lane(F f) {
  Lanes result;
  for (unsigned lane = 0; lane < kLanes; ++lane) result[lane] = f(lane);
  return result;
}

HalfFormat format_of(const std::string& type) {
  return type.starts_with("bf16") ? kBf16 : kF16;
}

}  // namespace

Warp::Warp(const Kernel& kernel, std::vector<std::uint64_t> parameters, std::vector<Region> global,
           std::size_t dynamic_shared_bytes)
    : kernel_(kernel), parameters_(std::move(parameters)), global_(std::move(global)) {
  std::uint64_t end = kSharedBegin;
  for (const bool dynamic : {false, true}) {  // which lies behind all others
    for (const SharedArray& array : kernel.shared) {
      if ((array.bytes == 0) != dynamic) continue;
      symbols_[array.name] = end = (end + 15) / 16 * 16;
      end += dynamic ? dynamic_shared_bytes : array.bytes;
    }
  }
  shared_.assign(end - kSharedBegin, std::byte{0xff});
}

void Warp::run() {
  for (const Instruction& instruction : kernel_.code) {
    try {
      execute(instruction);
    } catch (const std::exception& error) {
      throw Error(instruction.text + ": " + error.what());
    }
  }
  require(copies_.empty(), "the kernel ends before its copies do");
}

void Warp::execute(const Instruction& i) {
  const std::string name = joined(i.name), &kind = i.name[0];
  if (kind == "ld") return load(i);
  if (kind == "st") return store(i);
  if (kind == "mov") return move(i);
  if (kind == "cvta") return convert_address(i);
  if (kind == "cvt" || kind == "ex2") return convert(i);
  if (kind == "ldmatrix") return load_matrices(i);
  if (kind == "mma") return multiply_matrices(i);
  if (name == "cp.async.cg.shared.global") return start_copy(i);
  if (name == "cp.async.wait_all") {
    for (const Copy& copy : copies_) std::memcpy(copy.to, copy.value.data(), copy.value.size());
    copies_.clear();
  } else if (name == "bar.warp.sync") {
    require(i.operands == std::vector<std::string>{"-1"}, "not of the whole warp");
  } else if (name != "ret") {
    compute(i);
  }
}

int Warp::bits_of(const std::string& register_name) const {
  const auto found =
      kernel_.registers.find(register_name.substr(0, register_name.find_first_of("0123456789")));
  require(found != kernel_.registers.end(), "no register " + register_name);
  return found->second;
}

Lanes Warp::read(const std::string& operand, int bits) const {
  if (operand == "%tid.x") return each_lane([](unsigned lane) { return lane; });
  if (operand.front() == '%') {
    require(bits_of(operand) == bits, operand + " has another width");
    const auto found = registers_.find(operand);
    require(found != registers_.end(), "nothing has written " + operand);
    return found->second;
  }
  std::uint64_t value = 0;
  if (const auto symbol = symbols_.find(operand); symbol != symbols_.end()) {
    value = symbol->second;
  } else if (operand.starts_with("0f")) {
    value = std::stoull(operand.substr(2), nullptr, 16);
  } else {
    value = static_cast<std::uint64_t>(std::stoll(operand, nullptr, 0));
  }
  return each_lane([&](unsigned) { return lowest(value, bits); });
}

void Warp::write(const std::string& register_name, int bits, const Lanes& values) {
  require(bits_of(register_name) == bits, register_name + " has another width");
  registers_[register_name] = each_lane([&](unsigned lane) { return lowest(values[lane], bits); });
}

/// [%rd1+8]
Lanes Warp::addresses(const std::string& operand) const {
  require(operand.front() == '[', operand + " is no address");
  const std::string inside = operand.substr(1, operand.size() - 2);
  const auto plus = inside.find('+');
  const std::string base = inside.substr(0, plus);
  const std::int64_t offset = plus == std::string::npos ? 0 : std::stoll(inside.substr(plus + 1));
  const Lanes from = read(base, base.front() == '%' ? bits_of(base) : 32);
  return each_lane([&](unsigned lane) { return from[lane] + static_cast<std::uint64_t>(offset); });
}

std::byte* Warp::memory(const std::string& space, std::uint64_t address, std::size_t bytes,
                        bool write) {
  require(address % bytes == 0, "an address that is no multiple of " + std::to_string(bytes));
  if (space == "shared") {
    require(address >= kSharedBegin && address + bytes <= kSharedBegin + shared_.size(),
            "an address outside of shared memory");
    return shared_.data() + (address - kSharedBegin);
  }
  require(space == "global", "no memory: " + space);
  accesses_.push_back(bytes);
  for (const Region& region : global_) {
    if (address < region.begin || address + bytes > region.begin + region.bytes) continue;
    require(region.writable || !write, "it writes to its input");
    return reinterpret_cast<std::byte*>(address);  // NOLINT: the host's memory
  }
  throw Error("an address outside of global memory");
}

/// ld.param.u64; ld.SPACE.TYPE, ld.SPACE.v4.TYPE
void Warp::load(const Instruction& i) {
  const std::string& space = i.name[1];
  const int bits = bits_of_type(i.name.back());
  if (space == "param") {
    for (std::size_t k = 0; k < parameters_.size(); ++k) {
      if (i.operands[1] != "[" + kernel_.parameters.at(k) + "]") continue;
      return write(i.operands[0], bits, each_lane([&](unsigned) { return parameters_[k]; }));
    }
    throw Error("no such parameter");
  }
  const auto to = elements(i.operands[0]);
  require(i.name.size() == (to.size() == 1 ? 3 : 4) &&
              (to.size() == 1 || i.name[2] == "v" + std::to_string(to.size())),
          "unknown");
  const Lanes from = addresses(i.operands[1]);
  const std::size_t each = static_cast<std::size_t>(bits) / 8, bytes = each * to.size();
  std::vector<Lanes> values(to.size(), Lanes{});
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const std::byte* const source = memory(space, from[lane], bytes, false);
    for (std::size_t k = 0; k < to.size(); ++k) {
      std::memcpy(&values[k][lane], source + k * each, each);
    }
  }
  for (std::size_t k = 0; k < to.size(); ++k) write(to[k], bits, values[k]);
}

/// st.SPACE.TYPE, st.SPACE.v4.TYPE, st.global.wb.v4.TYPE
void Warp::store(const Instruction& i) {
  const auto from = elements(i.operands[1]);
  auto name = i.name;
  if (name[1] == "global" && name[2] == "wb") name.erase(name.begin() + 2);
  require(name.size() == (from.size() == 1 ? 3 : 4) &&
              (from.size() == 1 || name[2] == "v" + std::to_string(from.size())),
          "unknown");
  const int bits = bits_of_type(name.back());
  const Lanes to = addresses(i.operands[0]);
  const std::size_t each = static_cast<std::size_t>(bits) / 8, bytes = each * from.size();
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    std::byte* const target = memory(name[1], to[lane], bytes, true);
    for (std::size_t k = 0; k < from.size(); ++k) {
      const std::uint64_t value = read(from[k], bits)[lane];
      std::memcpy(target + k * each, &value, each);
    }
  }
}

/// mov.TYPE; mov.b32 between a word and {two halves}
void Warp::move(const Instruction& i) {
  require(i.name.size() == 2, "unknown");
  const int bits = bits_of_type(i.name[1]);
  const auto to = elements(i.operands[0]), from = elements(i.operands[1]);
  const int to_bits = bits / static_cast<int>(to.size());
  const int from_bits = bits / static_cast<int>(from.size());
  Lanes whole{};
  for (std::size_t k = 0; k < from.size(); ++k) {
    const Lanes part = read(from[k], from_bits);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      whole[lane] |= part[lane] << static_cast<int>(k) * from_bits;
    }
  }
  for (std::size_t k = 0; k < to.size(); ++k) {
    write(to[k], to_bits,
          each_lane([&](unsigned lane) { return whole[lane] >> static_cast<int>(k) * to_bits; }));
  }
}

/// cvta.to.SPACE.u64 of a generic address, cvta.shared.u64 to one. Those of global memory are.
void Warp::convert_address(const Instruction& i) {
  const std::string name = joined(i.name);
  require(name == "cvta.to.global.u64" || name == "cvta.global.u64" ||
              name == "cvta.to.shared.u64" || name == "cvta.shared.u64",
          "unknown");
  const Lanes from = read(i.operands[1], 64);
  const std::uint64_t shift = name == "cvta.shared.u64"      ? kSharedWindow
                              : name == "cvta.to.shared.u64" ? -kSharedWindow
                                                             : 0;
  write(i.operands[0], 64, each_lane([&](unsigned lane) { return from[lane] + shift; }));
}

/// cvt.TO.FROM of integers, of floats to halves and back; ex2.
void Warp::convert(const Instruction& i) {
  const std::string name = joined(i.name);
  if (name == "ex2.approx.ftz.f32") {
    const Lanes x = read(i.operands[1], 32);
    write(i.operands[0], 32, each_lane([&](unsigned lane) {
            const float y = std::exp2(as_float(x[lane]));
            return bits_of_float(std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : y);
          }));
  } else if (name == "cvt.rn.f16.f32" || name == "cvt.rn.bf16.f32") {
    const Lanes x = read(i.operands[1], 32);
    write(i.operands[0], 16, each_lane([&](unsigned lane) {
            return narrowed(as_float(x[lane]), format_of(i.name[2]));
          }));
  } else if (name == "cvt.rn.f16x2.f32" || name == "cvt.rn.bf16x2.f32") {  // the first lies above
    const Lanes above = read(i.operands[1], 32), below = read(i.operands[2], 32);
    write(i.operands[0], 32, each_lane([&](unsigned lane) {
            const HalfFormat format = format_of(i.name[2]);
            return std::uint64_t{narrowed(as_float(above[lane]), format)} << 16 |
                   narrowed(as_float(below[lane]), format);
          }));
  } else if (name == "cvt.f32.f16") {
    const Lanes x = read(i.operands[1], 16);
    write(i.operands[0], 32, each_lane([&](unsigned lane) {
            return bits_of_float(widened(half_of(x[lane], 0), kF16));
          }));
  } else {
    require(i.name.size() == 3 && (i.name[1][0] == 'u' || i.name[1][0] == 's'), "unknown");
    const Lanes x = read(i.operands[1], bits_of_type(i.name[2]));
    write(i.operands[0], bits_of_type(i.name[1]),
          each_lane([&](unsigned lane) { return extended(x[lane], i.name[2]); }));
  }
}

/// Integers.
void Warp::compute(const Instruction& i) {
  const std::string name = joined(i.name), &type = i.name.back();
  const std::string operation = name.substr(0, name.rfind('.'));
  const int bits = bits_of_type(type);
  std::vector<Lanes> x;
  for (std::size_t k = 1; k < i.operands.size(); ++k) {
    const bool number_of_bits = (operation == "shl" || operation == "shr" || operation == "bfi") &&
                                k > (operation == "bfi" ? 2 : 1);
    x.push_back(read(i.operands[k], number_of_bits ? 32 : bits));
  }
  const auto result = [&](unsigned lane) -> std::uint64_t {
    const std::uint64_t a = extended(x[0][lane], type);
    const std::uint64_t b = operation == "shl" || operation == "shr" || operation == "bfi"
                                ? x[1][lane]
                                : extended(x[1][lane], type);
    if (operation == "add") return a + b;
    if (operation == "sub") return a - b;
    if (operation == "and") return a & b;
    if (operation == "or") return a | b;
    if (operation == "xor") return a ^ b;
    if (operation == "mul.lo" || operation == "mul.wide") return a * b;
    if (operation == "mad.lo") return a * b + x[2][lane];
    require(operation != "shl" || b < 32, "shifted by more than 31");
    if (operation == "shl") return a << b;
    if (operation == "shr" && type[0] != 's') return b < 64 ? a >> b : 0;
    require(operation == "bfi", "unknown");  // a goes into b: from bit c on, d bits
    const std::uint64_t mask = lowest(~std::uint64_t{0}, static_cast<int>(x[3][lane]))
                               << x[2][lane];
    return (b & ~mask) | (a << x[2][lane] & mask);
  };
  write(i.operands[0], operation == "mul.wide" ? 2 * bits : bits, each_lane(result));
}

/// cp.async.cg.shared.global [to], [from], 16
void Warp::start_copy(const Instruction& i) {
  require(i.operands.size() == 3 && i.operands[2] == "16", "not of 16 bytes");
  const Lanes to = addresses(i.operands[0]), from = addresses(i.operands[1]);
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    Copy copy{memory("shared", to[lane], 16, true), {}};
    std::memcpy(copy.value.data(), memory("global", from[lane], 16, false), 16);
    std::memset(copy.to, 0xff, 16);  // until somebody has waited, as in the emulator
    copies_.push_back(copy);
  }
}

// PTX ISA, "Warp-level matrix instructions".

/// Lane l has the address of row l % 8 of matrix l / 8, and gets of each matrix elements 2 (l % 4)
/// and the next of row l / 4; of column l / 4 with .trans.
void Warp::load_matrices(const Instruction& i) {
  const std::string name = joined(i.name);
  const bool transposed = name == "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16";
  require(transposed || name == "ldmatrix.sync.aligned.m8n8.x4.shared.b16", "unknown");
  const auto to = elements(i.operands[0]);
  require(to.size() == 4, "it loads four matrices");
  const Lanes rows = addresses(i.operands[1]);
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    std::uint16_t element[8][8];
    for (unsigned row = 0; row < 8; ++row) {
      std::memcpy(element[row], memory("shared", rows[8 * matrix + row], 16, false), 16);
    }
    write(to[matrix], 32, each_lane([&](unsigned lane) {
            const unsigned group = lane / 4, pair = lane % 4 * 2;
            const std::uint64_t low = transposed ? element[pair][group] : element[group][pair];
            const std::uint64_t high =
                transposed ? element[pair + 1][group] : element[group][pair + 1];
            return high << 16 | low;
          }));
  }
}

/// d = a b + c, 16 x 16 by 16 x 8. Element i of a lane's part, with g = l / 4 and t = 2 (l % 4):
/// - of a at row g, or g + 8 where i is 2, 3, 6 or 7, and column t + i % 2, 8 more for i >= 4;
/// - of b at row t + i % 2, 8 more for i >= 2, and column g;
/// - of c and d at row g, or g + 8 for i >= 2, and column t + i % 2.
void Warp::multiply_matrices(const Instruction& i) {
  const std::string name = joined(i.name), shape = "mma.sync.aligned.m16n8k16.row.col.";
  const bool f16 = name == shape + "f32.f16.f16.f32";
  require(f16 || name == shape + "f32.bf16.bf16.f32", "unknown");
  std::vector<Lanes> of[4];  // operands d, a, b, c
  for (const std::size_t operand : {1, 2, 3}) {
    for (const std::string& one : elements(i.operands[operand]))
      of[operand].push_back(read(one, 32));
  }
  const auto sums = elements(i.operands[0]);
  require(sums.size() == 4 && of[1].size() == 4 && of[2].size() == 2 && of[3].size() == 4,
          "wrong numbers of registers");
  float a[16][16], b[16][8], d[16][8];
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const unsigned g = lane / 4, t = lane % 4 * 2;
    const auto value = [&](std::size_t operand, unsigned element) {
      return widened(half_of(of[operand][element / 2][lane], element % 2), f16 ? kF16 : kBf16);
    };
    for (unsigned e = 0; e < 8; ++e) {
      const bool lower = e == 2 || e == 3 || e == 6 || e == 7;
      a[lower ? g + 8 : g][t + e % 2 + (e < 4 ? 0 : 8)] = value(1, e);
    }
    for (unsigned e = 0; e < 4; ++e) b[t + e % 2 + (e < 2 ? 0 : 8)][g] = value(2, e);
    for (unsigned e = 0; e < 4; ++e) d[e < 2 ? g : g + 8][t + e % 2] = as_float(of[3][e][lane]);
  }
  for (unsigned row = 0; row < 16; ++row) {
    for (unsigned column = 0; column < 8; ++column) {
      double sum = d[row][column];
      for (unsigned k = 0; k < 16; ++k) sum += double{a[row][k]} * double{b[k][column]};
      d[row][column] = static_cast<float>(sum);
    }
  }
  for (unsigned e = 0; e < 4; ++e) {
    write(sums[e], 32, each_lane([&](unsigned lane) {
            return bits_of_float(d[lane / 4 + (e < 2 ? 0 : 8)][lane % 4 * 2 + e % 2]);
          }));
  }
}

}  // namespace cairn::ptx
