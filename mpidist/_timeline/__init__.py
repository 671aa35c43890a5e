"""What each rank did: the trace, and the timeline of a job.

`observer.Calls` tells the observers of a strategy of each call: `trace.Lines` writes a
line, `recorder.Recorder` an event in the *part* of its process, a file beside the
timeline. At the end rank 0 reads the parts and puts them on one clock (`parts`), works
out who waited for whom (`spans`), and writes one file in the Trace Event Format, which
Perfetto and Chrome show (`trace_events`). A job that was killed leaves its parts;
`mpidist timeline` reads these too (`merging`), prints a summary (`summary`), and draws
it (`plot`).
"""
