"""The V1 design: request state in dense NumPy rows on the host, inputs prepared there, one packed upload a step."""
