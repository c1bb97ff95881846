"""The job `audit`: compares log and lake, and reports what is lost."""
