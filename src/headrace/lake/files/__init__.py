"""Parquet files of a lake: write, read and check them."""
