"""trace_hta.py TRACE...: what HolisticTraceAnalysis reads in the ranks' trace.json files, as JSON: of each rank its operations
[name, category, step]. Steps are those of ProfilerStep#N that they lie in, or -1."""
import json
import logging
import sys

from hta.common.trace import Trace

logging.disable(logging.CRITICAL)
trace = Trace(trace_files=dict(enumerate(sys.argv[1:])))
trace.parse_traces(use_multiprocessing=False)
trace.decode_symbol_ids()
ranks = {}
for rank, rows in trace.get_all_traces().items():
    ranks[rank] = [[name, kind, int(step)] for name, kind, step in zip(rows.s_name, rows.s_cat, rows.iteration)]
json.dump(ranks, sys.stdout)
