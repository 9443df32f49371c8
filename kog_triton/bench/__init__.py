"""`kog bench`: tokens/s beside the floor that memory sets, beside peers, text checked before time.

    cli ─ measure ─ subjects (our backends), peers/          what is timed
                  ├ check          is the text right, against the fp32 reference
                  ├ timing         rounds, medians, percentiles
                  ├ machine, bandwidth, trace                 where it ran, and what that can do
                  └ record ─ show, table                      JSON; a table for people; the README's
        ├ concurrency   several requests at a time, over one
        ├ stages        each stage of one step alone, through run_stage
        └ startup       from nothing to a token

`result.schema.json` describes what `--json` writes.
"""

from kog_triton.bench.cli import main

__all__ = ["main"]
