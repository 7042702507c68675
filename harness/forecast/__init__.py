"""mode=plan: what fits, what it costs and what to choose, without a GPU or weights."""
