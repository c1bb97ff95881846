"""The benchmark: the real server and its peers under one raw load. Imports nothing of headrace."""
