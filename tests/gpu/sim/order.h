// What happened before what: vector clocks over streams.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace cairn::gpusim {

/// The nth work of a stream.
struct Point {
  std::uint32_t stream = 0, number = 0;
  bool operator==(const Point&) const = default;
};

/// Of each stream, the work that is known to be done.
class Clock {
 public:
  std::uint32_t of(std::uint32_t stream) const {
    const auto found = find(stream);
    return found != points_.end() && found->stream == stream ? found->number : 0;
  }
  bool knows(const Point& point) const { return of(point.stream) >= point.number; }
  void learn(const Point& point) {
    const auto found = points_.begin() + (find(point.stream) - points_.begin());
    if (found == points_.end() || found->stream != point.stream) {
      points_.insert(found, point);
    } else {
      found->number = std::max(found->number, point.number);
    }
  }
  void learn(const Clock& other) {
    for (const Point& point : other.points_) learn(point);
  }

 private:
  std::vector<Point>::const_iterator find(std::uint32_t stream) const {
    return std::lower_bound(points_.begin(), points_.end(), stream,
                            [](const Point& p, std::uint32_t s) { return p.stream < s; });
  }
  std::vector<Point> points_;  // by stream
};

}  // namespace cairn::gpusim
