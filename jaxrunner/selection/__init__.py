"""Which runner is built, and why: policies as lists of rules, walked and shown."""
