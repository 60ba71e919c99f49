"""The commands of ``leanq``: one file for each, named as it; shared parts in options and common."""
