"""Ops of the sampler, one file each, in the order in which `sampler.sample_tokens` applies them (vLLM V2's):

1. `grammar`: ids that a structured output does not allow become -inf, before everything else
2. `constraints`, in tiers that have them:
   `allowed_ids`: all but the allowed ids become -inf
   `logit_bias`: numbers are added
   `min_tokens`: ids that would end a request too early become -inf
   `penalties`: ids that were seen before lose
   `bad_words`: ids that would complete a word become -inf
   `custom`: the user's logits processors, those that serve every request in all tiers
   `thinking`: when the budget is spent, the next id of the end of thinking is certain
3. `temperature`: logits / temperature, the maximum at 0 (greedy rows take their argmax before it)
4. `min_p`: probabilities below min_p * the largest become -inf
5. `top_k`: all but the k best become -inf
6. `top_p`: all but the best with a mass of p become -inf; the mass is that of what top_k left
7. draw: argmax of what is left + Gumbel noise (`random`), or the user's sampler (`custom`)
8. `replay`: tokens that were given take the place of those drawn

`logprobs` reads the logits before 2 or what the draw is made from (`Reports`), `nans` those before 2. One rule orders
equal values everywhere: the lowest id is the better one. Each op of a row that does not ask for it leaves its logits
bit for bit, so its draw is that of a cheaper tier.
"""
