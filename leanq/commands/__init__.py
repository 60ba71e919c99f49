"""What the commands of ``leanq`` do; :mod:`leanq.cli` says how they are called."""
