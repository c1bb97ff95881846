"""The job `aggregate`: one state per topic, as a table."""
