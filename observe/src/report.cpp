#include "report.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string_view>

#include "advice.h"
#include "number.h"
#include "report_comparison.h"
#include "report_layers.h"
#include "report_page.h"
#include "report_ranks.h"

namespace cairn::observe {

namespace {

using nlohmann::json;

// JSON has no NaN.
std::string json_number(double value) {
  return std::isfinite(value) ? short_number(value) : "null";
}

json event_json(const EventRecord& event) {
  return {event.time, event.step, name(event.kind), event.text, event.culprit};
}

json values_json(const NamedValues& values) {
  json all = json::array();
  for (const auto& [name, value] : values) all.push_back({name, value});
  return all;
}

/// [exponent of the first, counts by octave]
json octaves_json(const Histogram& found) {
  if (found.octaves.empty()) return {0, json::array()};
  const int first = found.octaves.begin()->first, last = found.octaves.rbegin()->first;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(last - first + 1));
  for (const auto& [exponent, count] : found.octaves)
    counts[static_cast<std::size_t>(exponent - first)] = count;
  return {first, counts};
}

/// A value that is not finite is null.
json layer_json(const Layer& layer) {
  const LayerRecord& last = layer.last;
  const auto largest = [](const Histogram& of) {
    return of.count == 0 ? 0 : std::max(-of.low, of.high);
  };
  return {{"name", last.name},
          {"step", last.step},
          {"dtype", core::name(last.dtype)},
          {"weights", octaves_json(last.weights)},
          {"gradients", octaves_json(last.gradients)},
          {"seen", last.gradients.count + last.gradients.not_finite > 0},
          {"largest", largest(last.gradients)},
          {"not_finite", last.gradients.not_finite},
          {"bits", last.bits_left},
          {"least_bits", layer.least_bits},
          {"least_step", layer.least_step}};
}

json image_json(const ImageRecord& image) {
  return {{"name", image.name},
          {"step", image.step},
          {"height", image.height},
          {"width", image.width},
          {"png", base64(image.png)}};
}

json head_json(const History& history, const RunFacts& facts) {
  json events = json::array(), about = json::array(), counts = json::object();
  json side_by_side = json::array();
  for (const RankState& state : facts.side_by_side) side_by_side.push_back(to_json(state));
  const RankState* slow = slowest(facts.side_by_side);
  json layers = json::array();
  for (const Layer& layer : history.layers()) layers.push_back(layer_json(layer));
  json images = json::array(), texts = json::array();
  for (const TextRecord& text : history.texts())
    texts.push_back({{"name", text.name}, {"step", text.step}, {"text", text.text}});
  for (const ImageRecord& image : history.images()) images.push_back(image_json(image));
  for (const EventRecord& event : history.events()) events.push_back(event_json(event));
  for (const auto& [what, text] : facts.about) about.push_back({what, text});
  for (int i = 0; i < kEventKinds; ++i) {
    const auto kind = static_cast<EventKind>(i);
    counts[std::string(name(kind))] = history.events(kind);
  }
  return {{"name", facts.name},
          {"rank", facts.rank},
          {"ranks", facts.ranks},
          {"running", facts.running},
          {"started", facts.started},
          {"renewed", facts.renewed},
          {"every", facts.renew_seconds},
          {"step", history.last_step()},
          {"dropped", facts.dropped},
          {"failures", facts.failures},
          {"too_many_names", history.too_many_names()},
          {"events", events},
          {"counts", counts},
          {"about", about},
          {"layers", layers},
          {"images", images},
          {"texts", texts},
          {"side_by_side", side_by_side},
          {"slowest", slow == nullptr ? -1 : slow->rank},
          {"advice", advice(history, facts)},
          {"summary", values_json(history.summary())},
          {"most_memory",
           {{"step", history.most_memory().step},
            {"values", values_json(history.most_memory().values)}}}};
}

/// [step, value], or of several steps [last step, mean, low, high, count, how many not finite].
std::string point(const Bucket& bucket, std::int64_t step) {
  const std::string head = "[" + std::to_string(step) + "," + json_number(bucket.mean());
  if (bucket.count == 1) return head + "]";
  return head + "," + json_number(bucket.low) + "," + json_number(bucket.high) + "," +
         std::to_string(bucket.count) + "," + std::to_string(bucket.not_finite) + "]";
}

// Curves are most of the page: written as they are, without a tree of values.
std::string curves_json(const History& history) {
  std::string text = "[";
  for (const Curve& curve : history.curves()) {
    if (text.size() > 1) text += ",";
    text += "{\"name\":" + json(curve.name).dump() + ",\"points\":[";
    for (const Bucket& bucket : curve.buckets) {
      const std::int64_t last = (bucket.key + 1) * history.width() - 1;
      if (text.back() == ']') text += ",";
      text += point(bucket, std::min(last, history.last_step()));
    }
    text += "]}";
  }
  return text + "]";
}

void replace(std::string& text, std::string_view place, const std::string& with) {
  text.replace(text.find(place), place.size(), with);
}

// A name must not end the script.
std::string embedded(std::string text) {
  for (std::size_t at = 0; (at = text.find('<', at)) != std::string::npos;)
    text.replace(at, 1, "\\u003c");
  return text;
}

std::string page_of(const std::string& data, std::initializer_list<const char*> parts) {
  std::string page;
  for (const char* part : parts) page += part;
  replace(page, "DATA", embedded(data));
  return page;
}

}  // namespace

std::string report(const History& history, const RunFacts& facts) {
  std::string head = head_json(history, facts).dump();
  head.pop_back();  // its }
  return page_of(head + ",\"curves\":" + curves_json(history) + "}",
                 {kPageHead, kRanksScript, kLayersScript, kRunScript, kPageEnd});
}

std::string comparison_page(const std::string& runs) {
  return page_of("{\"curves\":[],\"runs\":" + runs + "}", {kPageHead, kComparisonScript, kPageEnd});
}

}  // namespace cairn::observe
