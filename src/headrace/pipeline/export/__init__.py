"""The job `export`: topics into a lake, exactly once."""
