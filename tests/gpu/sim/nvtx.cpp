// NVTX asks at its first range whether a tool is linked in: this one keeps each thread's ranges, so
// that reports say in which operation something was done, and checks that each ends.
#define NVTX_NO_IMPL  // declarations only
#include <nvtx3/nvToolsExt.h>

#include <string>
#include <vector>

#include "gpu/sim/machine.h"
#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {
namespace {

thread_local std::vector<std::string> ranges;

int push(const char* name) {
  ranges.push_back(name);
  return static_cast<int>(ranges.size()) - 1;
}

int pop() {
  if (ranges.empty()) report("nvtx", "nvtxRangePop without a range");
  ranges.pop_back();
  return static_cast<int>(ranges.size());
}

int attach(NvtxGetExportTableFunc_t get_export_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) {
    return 0;
  }
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

}  // namespace

const std::string& current_operation() {
  static const std::string none;
  return ranges.empty() ? none : ranges.back();
}

}  // namespace cairn::gpusim

extern "C" {
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = cairn::gpusim::attach;
}
