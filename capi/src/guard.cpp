#include "guard.h"

#include <array>
#include <cstddef>
#include <exception>
#include <new>
#include <string>

#include "cairn/core/error.h"
#include "cairn/core/version.h"
#include "cairn/optim/collapse.h"

namespace cairn::capi {

namespace {

thread_local std::string last_error;

cairn_status keep(cairn_status status, const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error = "out of memory";  // fits where it lies
  }
  return status;
}

constexpr std::array<const char*, 11> kStatusNames = {
    "OK",        "Error",       "InvalidArgument",    "Unsupported",      "OutOfMemory", "IoError",
    "DataError", "DeviceError", "CommunicationError", "GradientCollapse", "unexpected"};

}  // namespace

cairn_status keep_exception() noexcept {
  try {
    throw;
  } catch (const core::InvalidArgument& e) {
    return keep(CAIRN_INVALID_ARGUMENT, e.what());
  } catch (const core::Unsupported& e) {
    return keep(CAIRN_UNSUPPORTED, e.what());
  } catch (const core::OutOfMemory& e) {
    return keep(CAIRN_OUT_OF_MEMORY, e.what());
  } catch (const core::IoError& e) {
    return keep(CAIRN_IO_ERROR, e.what());
  } catch (const core::DataError& e) {
    return keep(CAIRN_DATA_ERROR, e.what());
  } catch (const core::DeviceError& e) {
    return keep(CAIRN_DEVICE_ERROR, e.what());
  } catch (const core::CommunicationError& e) {
    return keep(CAIRN_COMMUNICATION_ERROR, e.what());
  } catch (const optim::GradientCollapse& e) {
    return keep(CAIRN_GRADIENT_COLLAPSE, e.what());
  } catch (const core::Error& e) {
    return keep(CAIRN_ERROR, e.what());
  } catch (const std::bad_alloc&) {
    return keep(CAIRN_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return keep(CAIRN_UNEXPECTED, e.what());
  } catch (...) {
    return keep(CAIRN_UNEXPECTED, "an exception that is no std::exception");
  }
}

void check_given(const void* argument, const char* function, const char* name) {
  CAIRN_CHECK(argument != nullptr, function, "expected ", name, ", got NULL");
}

extern "C" {

const char* cairn_version(void) {
  return core::version();
}

const char* cairn_last_error(void) {
  return last_error.c_str();
}

const char* cairn_status_name(int32_t status) {
  const auto place = static_cast<std::size_t>(status);
  return place < kStatusNames.size() ? kStatusNames[place] : "unknown";
}

}  // extern "C"

}  // namespace cairn::capi
