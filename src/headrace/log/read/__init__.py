"""The read path: segments, indexes, and the tail that is still in the journal."""
