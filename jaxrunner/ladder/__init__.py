"""Studies of ladders: a load of requests replayed through any choice of padded sizes, XLA buckets or CUDA graphs.

The ladder that an engine compiles is `jaxrunner.compile.ladder.Ladder`; nothing here changes it. What is studied is a
`placement.Scheme`: such a ladder (`Buckets`) or vLLM's (`dispatch.CudaGraphs`), with the rule by which a step finds its
place. The way through the package:

    trace (traces, trace_csv) -- serving --> steps (or recording) -- replay, fitting, study --> tables, pictures, html
                                    ^                                  ^
                     costs: measured time and start-up of buckets -----+

Pure NumPy: neither JAX nor a device is needed.
"""
