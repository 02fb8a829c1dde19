"""Where the time of a step goes: named ranges for profilers, and a record of each step."""
