#include "digit_pen.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "digit_random.h"
#include "digit_styles.h"

namespace cairn::data::detail {

namespace {

constexpr double kBox = 20.0;            // MNIST's digits fill a box of 20 x 20 pixels,
constexpr int kCentre = kDigitSide / 2;  // and their centre of mass lies at pixel (14, 14)
constexpr int kSpanSteps = 5;            // straight pieces between two knots

struct Point {
  double x = 0.0, y = 0.0;
};
Point operator+(Point a, Point b) {
  return {a.x + b.x, a.y + b.y};
}
Point operator-(Point a, Point b) {
  return {a.x - b.x, a.y - b.y};
}
Point operator*(double s, Point a) {
  return {s * a.x, s * a.y};
}
double dot(Point a, Point b) {
  return a.x * b.x + a.y * b.y;
}

using Path = std::vector<Point>;

// ---- the hand: how this writer's digit differs from the style

struct Wave {  // one smooth sideways push of the whole plane
  Point direction, frequency;
  double phase = 0.0;
};

struct Hand {
  // Maps (x, y) to (a x + b y, c x + d y): stretch, slant and rotation.
  double a = 1.0, b = 0.0, c = 0.0, d = 1.0;
  std::array<Wave, 2> waves;
  double radius = 1.2;  // of the pen, pixels
  double soft = 1.0;    // width of the pen's soft edge, pixels
  double ink = 1.0;     // darkness at the stroke's middle
};

Hand draw_hand(DigitRandom& random) {
  const double stretch_x = std::max(0.7, random.bell(1.0, 0.16)),
               stretch_y = random.bell(1.0, 0.05);
  const double slant = random.bell(0.1, 0.2);
  const double turn = random.bell(0.0, 0.016);
  const double sine = sine_of_turns(turn), cosine = sine_of_turns(turn + 0.25);
  Hand hand;
  // The y axis points down, so a positive slant leans the top to the right.
  const double shear = -slant * stretch_y;
  hand.a = cosine * stretch_x;
  hand.b = cosine * shear - sine * stretch_y;
  hand.c = sine * stretch_x;
  hand.d = sine * shear + cosine * stretch_y;
  for (Wave& wave : hand.waves) {
    wave.direction = {random.bell(0.0, 0.022), random.bell(0.0, 0.022)};
    wave.frequency = {random.bell(0.0, 0.7), random.bell(0.0, 0.7)};
    wave.phase = random.uniform(0.0, 1.0);
  }
  hand.radius = std::max(0.65, random.bell(1.35, 0.36));
  hand.soft = random.uniform(0.9, 1.7);
  hand.ink = random.uniform(0.95, 1.1);
  return hand;
}

Point apply(const Hand& hand, Point p) {
  Point moved = p;
  for (const Wave& wave : hand.waves) {
    moved = moved + sine_of_turns(dot(wave.frequency, p) + wave.phase) * wave.direction;
  }
  return {hand.a * moved.x + hand.b * moved.y, hand.c * moved.x + hand.d * moved.y};
}

// ---- the strokes: knots with wobble, joined by straight pieces

const DigitStyle& pick_style(DigitRandom& random, int digit) {
  const std::vector<DigitStyle>& styles = digit_styles();
  int total = 0;
  for (const DigitStyle& style : styles) total += style.digit == digit ? style.weight : 0;
  int left = random.below(total);
  for (const DigitStyle& style : styles) {
    if (style.digit != digit) continue;
    if (left < style.weight) return style;
    left -= style.weight;
  }
  return styles.front();  // not reached: the weights add up
}

Stroke wobble(DigitRandom& random, const Stroke& stroke, double amount, bool round_corners) {
  Stroke moved = stroke;
  for (std::size_t i = 0; i < moved.size(); ++i) {
    const bool end = i == 0 || i + 1 == moved.size();
    const double deviation = end ? 1.4 * amount : amount;
    moved[i].x += random.bell(0.0, deviation);
    moved[i].y += random.bell(0.0, deviation);
    moved[i].corner = moved[i].corner && !round_corners;
  }
  return moved;
}

// The tangent at knot i, zero-length neighbours mirrored: ends and corners start straight.
Point span_start_tangent(const Stroke& s, std::size_t i) {
  const Point here{s[i].x, s[i].y}, next{s[i + 1].x, s[i + 1].y};
  if (i == 0 || s[i].corner) return next - here;
  return 0.5 * (next - Point{s[i - 1].x, s[i - 1].y});
}
Point span_end_tangent(const Stroke& s, std::size_t i) {
  const Point here{s[i].x, s[i].y}, next{s[i + 1].x, s[i + 1].y};
  if (i + 2 >= s.size() || s[i + 1].corner) return next - here;
  return 0.5 * (Point{s[i + 2].x, s[i + 2].y} - here);
}

// Cubic Hermite spans through the knots (Catmull-Rom inside, straight at ends and corners).
Path flatten(const Stroke& stroke, const Hand& hand) {
  Path path;
  path.push_back(apply(hand, {stroke[0].x, stroke[0].y}));
  for (std::size_t i = 0; i + 1 < stroke.size(); ++i) {
    const Point p0{stroke[i].x, stroke[i].y}, p1{stroke[i + 1].x, stroke[i + 1].y};
    const Point t0 = span_start_tangent(stroke, i), t1 = span_end_tangent(stroke, i);
    for (int step = 1; step <= kSpanSteps; ++step) {
      const double t = static_cast<double>(step) / kSpanSteps, u = 1.0 - t;
      const Point p = (u * u * (1.0 + 2.0 * t)) * p0 + (t * t * (3.0 - 2.0 * t)) * p1 +
                      (u * u * t) * t0 - (t * t * u) * t1;
      path.push_back(apply(hand, p));
    }
  }
  return path;
}

// ---- the paper

// Scales and moves the paths so that the inked digit fills the 20 x 20 box in the middle of the
// image.
void fit_to_box(std::vector<Path>& paths, double radius) {
  Point low = paths[0][0], high = low;
  for (const Path& path : paths) {
    for (Point p : path) {
      low = {std::min(low.x, p.x), std::min(low.y, p.y)};
      high = {std::max(high.x, p.x), std::max(high.y, p.y)};
    }
  }
  const double scale = (kBox - 2.0 * radius) / std::max(high.x - low.x, high.y - low.y);
  const Point middle = 0.5 * (low + high);
  const Point centre{0.5 * kDigitSide, 0.5 * kDigitSide};
  for (Path& path : paths) {
    for (Point& p : path) p = scale * (p - middle) + centre;
  }
}

double distance_squared(Point p, Point a, Point b) {
  const Point along = b - a, to = p - a;
  const double length = dot(along, along);
  const double t = length > 0.0 ? std::clamp(dot(to, along) / length, 0.0, 1.0) : 0.0;
  const Point off = to - t * along;
  return dot(off, off);
}

// Where pixel (x, y) lies in an image.
std::size_t pixel(int x, int y) {
  return static_cast<std::size_t>(y) * kDigitSide + static_cast<std::size_t>(x);
}

using Distances = std::array<double, kDigitSide * kDigitSide>;

// Lowers each pixel's squared distance to the ink by one straight piece; pixels further than
// `reach` do not matter.
void lay_piece(Distances& nearest, Point a, Point b, double reach) {
  const auto first = [&](double v) {
    return std::max(0, static_cast<int>(std::floor(v - reach - 0.5)));
  };
  const auto last = [&](double v) {
    return std::min(kDigitSide - 1, static_cast<int>(std::floor(v + reach + 0.5)));
  };
  for (int y = first(std::min(a.y, b.y)); y <= last(std::max(a.y, b.y)); ++y) {
    for (int x = first(std::min(a.x, b.x)); x <= last(std::max(a.x, b.x)); ++x) {
      double& d = nearest[pixel(x, y)];
      d = std::min(d, distance_squared({x + 0.5, y + 0.5}, a, b));
    }
  }
}

std::array<std::uint8_t, kDigitSide * kDigitSide> ink_paths(const std::vector<Path>& paths,
                                                            const Hand& hand) {
  const double reach = hand.radius + hand.soft;
  Distances nearest;
  nearest.fill(reach * reach);
  for (const Path& path : paths) {
    for (std::size_t i = 0; i + 1 < path.size(); ++i)
      lay_piece(nearest, path[i], path[i + 1], reach);
  }
  std::array<std::uint8_t, kDigitSide * kDigitSide> image{};
  for (std::size_t i = 0; i < nearest.size(); ++i) {
    const double edge = 0.5 + (hand.radius - std::sqrt(nearest[i])) / hand.soft;
    const double ink = std::clamp(hand.ink * edge, 0.0, 1.0);
    image[i] = static_cast<std::uint8_t>(std::floor(ink * 255.0 + 0.5));
  }
  return image;
}

// Moves the image by whole pixels so that its centre of mass lies at pixel (14, 14), as MNIST's
// does.
void place_by_mass(const std::array<std::uint8_t, kDigitSide * kDigitSide>& image,
                   std::uint8_t* pixels) {
  std::int64_t mass = 0, mass_x = 0, mass_y = 0;
  for (int y = 0; y < kDigitSide; ++y) {
    for (int x = 0; x < kDigitSide; ++x) {
      const std::int64_t v = image[pixel(x, y)];
      mass += v, mass_x += v * x, mass_y += v * y;
    }
  }
  mass = std::max<std::int64_t>(mass, 1);
  const int shift_x = kCentre - static_cast<int>((2 * mass_x + mass) / (2 * mass));
  const int shift_y = kCentre - static_cast<int>((2 * mass_y + mass) / (2 * mass));
  for (int y = 0; y < kDigitSide; ++y) {
    for (int x = 0; x < kDigitSide; ++x) {
      const int from_x = x - shift_x, from_y = y - shift_y;
      const bool inside = from_x >= 0 && from_x < kDigitSide && from_y >= 0 && from_y < kDigitSide;
      pixels[pixel(x, y)] = inside ? image[pixel(from_x, from_y)] : 0;
    }
  }
}

}  // namespace

double sine_of_turns(double turns) {
  double x = turns - std::floor(turns);  // [0, 1)
  const double sign = x < 0.5 ? 1.0 : -1.0;
  x = x < 0.5 ? x : x - 0.5;   // [0, 1/2), half a period
  x = x < 0.25 ? x : 0.5 - x;  // [0, 1/4]
  const double a = 6.283185307179586 * x, s = a * a;
  return sign * a *
         (1.0 -
          s / 6.0 * (1.0 - s / 20.0 * (1.0 - s / 42.0 * (1.0 - s / 72.0 * (1.0 - s / 110.0)))));
}

int digit_of(std::uint64_t seed, std::uint64_t image) {
  return DigitRandom(~seed, image).below(10);
}

void draw_digit(std::uint64_t seed, std::uint64_t image, int digit, std::uint8_t* pixels) {
  DigitRandom random(seed, image);
  const DigitStyle& style = pick_style(random, digit);
  const Hand hand = draw_hand(random);
  const double amount = random.uniform(0.008, 0.036);
  const bool round_corners = random.chance(0.25);
  std::vector<Path> paths;
  for (const Stroke& stroke : style.strokes) {
    paths.push_back(flatten(wobble(random, stroke, amount, round_corners), hand));
  }
  fit_to_box(paths, hand.radius);
  place_by_mass(ink_paths(paths, hand), pixels);
}

}  // namespace cairn::data::detail
