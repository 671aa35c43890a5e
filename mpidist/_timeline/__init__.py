"""What each rank did: the trace, and the timeline of a job.

`observer.Observers` tells those of a strategy of each call: `trace.Lines` writes a
line, `recorder.Recorder` an event in the *part* of its process, a file beside the
timeline. At the end rank 0 reads the parts, puts them on one clock, works out who
waited for whom, and writes one file in the Trace Event Format, which Perfetto and
Chrome show (`files`). A job that was killed leaves its parts; `mpidist timeline` reads
these too, prints a summary (`summary`), and draws it (`plot`).
"""
