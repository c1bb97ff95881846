"""The job `replay`: records of a lake back into a topic."""
