// A choice as ranks tell it each other: all but the functions that it runs.
#pragma once

#include <string>
#include <string_view>

#include "cairn/checkpointing/training_plan.h"

namespace cairn::checkpointing {

std::string pack(const TrainingChoice& choice);
/// Throws CommunicationError for anything else.
TrainingChoice unpack(std::string_view bytes);

}  // namespace cairn::checkpointing
