"""The job `compact`: merges small files of a lake."""
