"""The timeline of a job: what each rank did, and which rank the others waited for.

Each process writes its *part*, a file beside the timeline (`recorder`). At the end rank
0 reads the parts (`parts`), puts them on one clock (`clock`), works out who waited for
whom (`waits`), and writes one file in the Trace Event Format, which Perfetto and
Chrome show (`trace_events`). A job that was killed leaves its parts; `mpidist timeline`
reads these too, prints a summary (`summary`), and draws it (`plot`).
"""
