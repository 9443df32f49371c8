"""`kog bench`: tokens/s beside the roofline that memory sets, beside peers, text checked before time.

    cli ─ measure ─ engines (our backends), peers/          what is timed
                  ├ check          is the text right, against the fp32 reference
                  ├ timing         rounds, medians, percentiles
                  ├ machine, bandwidth, trace                 where it ran, and what that can do
                  └ record ─ show, table                      JSON; a table for people; RESULTS.md
        ├ concurrency   several requests at a time, over one
        ├ stages        each stage of one step alone, through run_stage
        └ startup ─ one_start     from nothing to a token

`result.schema.json` describes what `--json` writes.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command. It is imported when it is called: one_start has work to do before torch is imported."""
    from kog_triton.bench.cli import main as command

    return command(argv)
