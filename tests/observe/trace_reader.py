"""trace_reader.py FILE: what Perfetto's own definitions read in a trace, as JSON. Fails where it breaks their rules."""
import json
import sys

from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent


def check_known(message):
    assert len(UnknownFieldSet(message)) == 0, message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                check_known(part)


def arguments(event):
    return {each.name: each.string_value if each.HasField("string_value") else each.int_value for each in event.debug_annotations}


def read(trace):
    packets = trace.packet
    assert packets[0].sequence_flags == TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    assert {packet.trusted_packet_sequence_id for packet in packets} == {1}
    tracks, processes, slices, counters, open_slices = {}, [], [], [], {}
    for packet in packets:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in tracks and (track.parent_uuid == 0 or track.parent_uuid in tracks), track
            tracks[track.uuid] = track
            open_slices[track.uuid] = []
            if track.HasField("process"):
                assert track.process.pid > 0
                processes.append({"name": track.process.process_name, "labels": list(track.process.process_labels), "tracks": []})
                tracks[track.uuid].name = track.process.process_name
            else:
                names = next(p for p in processes if p["name"] == tracks[track.parent_uuid].name)["tracks"]
                assert track.name not in names, track.name  # a viewer would take them for one
                names.append(track.name)
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        track = tracks[event.track_uuid]
        place = {"process": tracks[track.parent_uuid].name, "track": track.name}
        if event.type == TrackEvent.TYPE_COUNTER:
            assert track.HasField("counter")
            value = event.counter_value if event.HasField("counter_value") else event.double_counter_value
            counters.append({**place, "time": packet.timestamp, "value": value, "unit": track.counter.unit})
            continue
        stack = open_slices[event.track_uuid]
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            assert not stack or packet.timestamp >= stack[-1]["begin"]
            [kind] = event.categories
            stack.append({**place, "name": event.name, "kind": kind, "begin": packet.timestamp, "flows": [str(f) for f in event.flow_ids], "args": arguments(event)})
            slices.append(stack[-1])
        else:
            assert event.type == TrackEvent.TYPE_SLICE_END
            stack.pop()["end"] = packet.timestamp
    assert not any(open_slices.values())
    return {"processes": processes, "slices": slices, "counters": counters}


trace = Trace()
trace.ParseFromString(open(sys.argv[1], "rb").read())
check_known(trace)
print(json.dumps(read(trace)))
