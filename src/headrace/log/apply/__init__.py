"""The applier: moves journal entries into segments, indexes and the catalogue."""
