"""The configuration: every setting with its meaning, and loading of flags, environment and file."""
