"""The commands `headrace pipeline …`, one file per job."""
