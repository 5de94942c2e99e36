// What every function of cairn.h runs in: no exception leaves it.
#pragma once

#include "cairn.h"

namespace cairn::capi {

/// The status of the exception that is being handled; its text becomes cairn_last_error().
cairn_status keep_exception() noexcept;

/// Calls work(function), which is the caller's name for its messages.
template <class F>
cairn_status guard(const char* function, F&& work) noexcept {
  try {
    work(function);
    return CAIRN_OK;
  } catch (...) {
    return keep_exception();
  }
}

/// Throws InvalidArgument for NULL, naming function and argument.
void check_given(const void* argument, const char* function, const char* name);

}  // namespace cairn::capi
