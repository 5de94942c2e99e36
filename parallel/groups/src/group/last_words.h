// What the other ranks hear of an exception that ends this one outside of its collectives.
#pragma once

#include <memory>
#include <string>

namespace cairn::parallel {

struct JobConnection;

/// Of the exception that is being handled: " (pid 77 on host) threw: [conv2d] expected ...".
std::string words_on_exception();

/// Where the process ends in std::terminate while the job lives, its other ranks hear the text of
/// the exception that nobody caught. The handler that was there before is called then.
void tell_of_terminate(const std::shared_ptr<JobConnection>& job);

}  // namespace cairn::parallel
