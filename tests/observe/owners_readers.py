"""owners_readers.py FOLDER: what TensorBoard and Prometheus' client read in a run's folder, as JSON. NaN is null, infinities are texts."""
import dataclasses
import io
import json
import math
import pathlib
import sys

import PIL.Image
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util


def number(value):
    return None if math.isnan(value) else str(value) if math.isinf(value) else value


def tensorboard(folder):
    events = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0, "histograms": 0, "images": 0})
    events.Reload()
    scalars = {tag: [[event.step, number(event.value)] for event in events.Scalars(tag)]
               for tag in events.Tags()["scalars"]}
    texts = {}
    for tag in events.Tags()["tensors"]:
        if tag == hparams.SESSION_START_INFO_TAG:
            continue
        assert events.SummaryMetadata(tag).plugin_data.plugin_name == "text", tag
        texts[tag] = [[event.step, tensor_util.make_ndarray(event.tensor_proto)[0].decode()]
                      for event in events.Tensors(tag)]
    histograms = {tag: [[event.step, dataclasses.asdict(event.histogram_value)] for event in events.Histograms(tag)]
                  for tag in events.Tags()["histograms"]}
    images = {tag: [[event.step, list(PIL.Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB").tobytes()),
                     event.height, event.width] for event in events.Images(tag)] for tag in events.Tags()["images"]}
    return {"scalars": scalars, "texts": texts, "histograms": histograms, "images": images,
            "hyperparameters": hyperparameters(events)}


def hyperparameters(events):
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    values = hparams.parse_session_start_info_plugin_data(content).hparams
    return {name: value.number_value if value.HasField("number_value") else value.string_value
            for name, value in values.items()}


def openmetrics(folder):
    text = (pathlib.Path(folder) / "metrics.prom").read_text()
    return [[sample.name, sample.labels, number(sample.value)] for family in text_string_to_metric_families(text)
            for sample in family.samples]


print(json.dumps({"tensorboard": tensorboard(sys.argv[1]), "openmetrics": openmetrics(sys.argv[1])}))
