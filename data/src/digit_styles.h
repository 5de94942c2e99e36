// The shapes of hand-drawn digits: for each digit several styles, each a few pen strokes through
// knots.
#pragma once

#include <vector>

namespace cairn::data::detail {

/// A point the pen passes. x goes right, y goes down; a digit is about 0.6 wide and 1 high.
struct Knot {
  double x, y;
  bool corner = false;  // the stroke turns sharply here; elsewhere it bends smoothly
};
using Stroke = std::vector<Knot>;

struct DigitStyle {
  int digit;
  int weight;  // how often it is drawn, relative to the digit's other styles
  std::vector<Stroke> strokes;
};

/// Every style, ordered by digit.
const std::vector<DigitStyle>& digit_styles();

}  // namespace cairn::data::detail
