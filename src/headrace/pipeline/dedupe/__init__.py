"""The job `dedupe`: the lake's rows with duplicates removed."""
