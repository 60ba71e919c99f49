"""leanq: Lean 4 on fleets of cheap, preemptible machines."""

__version__ = "0.1.0"
