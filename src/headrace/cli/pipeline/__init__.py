"""The commands `headrace pipeline …`, made from the options of the jobs."""
