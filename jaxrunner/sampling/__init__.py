"""Ops of the sampler, one file each, in the order in which `sampler.sample_tokens` applies them (vLLM's):

1. `min_tokens`: ids that would end a request too early become -inf
2. `temperature`: logits / temperature, the maximum at 0 (greedy rows take their argmax before it)
3. `min_p`: probabilities below min_p * the largest become -inf
4. `top_k`: all but the k best become -inf
5. `top_p`: all but the best with a mass of p become -inf; the mass is that of what top_k left
6. draw: argmax of what is left + Gumbel noise (`random`)

`logprobs` reads the logits before any of it. One rule orders equal values everywhere: the lowest id is the better one.
Each filter of a row that does not ask for it leaves its logits bit for bit, so its draw is that of a cheaper tier.
"""
