"""The layer below the worker: it claims requests, runs them in slots, and settles them."""
