"""Studies of ladders: traces of requests replayed through any choice of padded sizes, XLA buckets and CUDA graphs alike."""
