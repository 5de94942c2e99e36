#include "exchange_parts.h"

#include <string>

#include "cairn/core/packer.h"

namespace cairn::optim {
namespace {

using Pieces = std::vector<kernels::CheckedPiece>;  // of one list and parameter

std::vector<Pieces*> divided_of(const std::vector<FoundInParts>& lists,
                                const std::vector<std::size_t>& parameters) {
  std::vector<Pieces*> all;
  for (const FoundInParts& list : lists) {
    for (const std::size_t p : parameters) {
      if (list.divided[p]) all.push_back(&list.found[p]);
    }
  }
  return all;
}

std::string pack(const std::vector<Pieces*>& all) {
  core::Packer packer;
  for (const Pieces* pieces : all) {
    packer.number(pieces->size());
    for (const auto& [elements, check] : *pieces) {
      packer.number(static_cast<std::uint64_t>(elements.begin));
      packer.number(static_cast<std::uint64_t>(elements.end));
      packer.real(check.power_sum).number(static_cast<std::uint64_t>(check.nonfinite));
      packer.number(static_cast<std::uint64_t>(check.nan));
    }
  }
  return packer.bytes();
}

void append(const std::string& told, const std::vector<Pieces*>& all) {
  core::Unpacker unpacker(told);
  const auto number = [&] { return static_cast<std::int64_t>(unpacker.number()); };
  for (Pieces* pieces : all) {
    for (std::uint64_t left = unpacker.count(40); left > 0; --left) {
      kernels::CheckedPiece piece;
      piece.elements.begin = number();
      piece.elements.end = number();
      piece.check.power_sum = unpacker.real();
      piece.check.nonfinite = number();
      piece.check.nan = number();
      pieces->push_back(piece);
    }
  }
}

}  // namespace

void exchange_parts(const Partition& partition, const std::vector<FoundInParts>& lists,
                    std::string_view what) {
  for (const auto& reducer : partition.reducers()) {
    const std::vector<Pieces*> all = divided_of(lists, partition.cut_by(*reducer));
    if (all.empty()) continue;
    const std::string own = pack(all);
    for (Pieces* pieces : all) pieces->clear();
    for (const std::string& told : reducer->exchange(own, what)) append(told, all);
  }
}

}  // namespace cairn::optim
