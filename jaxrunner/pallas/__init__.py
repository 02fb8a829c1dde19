"""The ops of a step: one public function each, an XLA implementation that is its specification, kernels beside it."""
