"""The benchmark: the real server and its peers under the same raw load.

`bench.load` imports nothing of headrace.
"""
