// Checks what an error says.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cairn::test {

/// The call must throw E with all of these texts in its message.
template <class E, class F>
void expect_error(F&& call, const std::vector<std::string>& texts) {
  try {
    call();
  } catch (const E& error) {
    for (const std::string& text : texts) EXPECT_THAT(error.what(), testing::HasSubstr(text));
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw another error: " << error.what();
    return;
  }
  ADD_FAILURE() << "threw nothing; expected an error with '" << (texts.empty() ? "" : texts.front())
                << "'";
}

}  // namespace cairn::test
