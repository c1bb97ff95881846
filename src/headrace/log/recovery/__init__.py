"""The start of a store: replay of the journal, and repair of damage."""
